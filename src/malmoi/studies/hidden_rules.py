"""Hidden rules that turn one word into another, and documents that show them.

A rule's parameter is drawn for each document and never named, so only the examples show it. Some
words, numbers and parameters are held out for questions.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Literal

from malmoi.errors import MalmoiError
from malmoi.evaluation.tasks.generated import frequent_words, random_insertion
from malmoi.system.files import replace_file

VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprstvz"
LETTER_PLACES = (0, 1, 2, 3, -1, -2, -3)  # index of a letter, from the beginning or the end
# most words contain one of these, so a few examples show how it changes
FREQUENT = "aeinorst"
PROPERTIES: dict[str, Callable[[str], bool]] = {
    "begins with a vowel": lambda word: word[0] in VOWELS,
    "ends with a vowel": lambda word: word[-1] in VOWELS,
    "has more than five letters": lambda word: len(word) > 5,
    "begins with a to l": lambda word: word[0] < "m",
    **{f"has an {a}": partial(lambda letter, word: letter in word, a) for a in "aeios"},
}
# one word in this many is held out for questions; so are parameters of some rules
HELD_OUT_EVERY = 8
WORD_LETTERS = range(5, 8)  # letters per word: sixteen examples fit into 512 characters
NUMBER_RANGE = range(100, 900)
MIN_WORDS = 100  # fewer are too few for a study
EXAMPLES_PER_DOCUMENT = range(12, 25)
INSTRUCTION_SHARE = 0.5  # share of the documents that have an instruction


@dataclass(frozen=True)
class HiddenRule:
    """A rule that generates lines `x = y`."""

    name: str
    instruction: str  # names the rule, never the parameter
    change: Callable[[str, Any], str]  # (word, parameter) → the right side of =
    # draws a parameter; a rule without one need only be recognised
    draw: Callable[[Random], Any] = lambda rng: None
    items: Literal["words", "numbers"] = "words"
    held: bool = False  # whether questions use parameters that training never had

    def pair(self, word: str, hidden: Any, rng: Random) -> tuple[str, str]:
        """The two sides of =."""
        if self.name == "random-insertion":
            return random_insertion(word, rng), word
        return word, self.change(word, hidden)


# ------------------------------------------------------------------ changes and parameters


def caesar(word: str, by: int) -> str:
    """Shifts every letter: abc → bcd."""
    return "".join(ascii_lowercase[(ascii_lowercase.index(letter) + by) % 26] for letter in word)


def swap_ends(word: str) -> str:
    """Swaps the first and last letter: words → sordw."""
    return word[-1] + word[1:-1] + word[0]


def drop_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter not in VOWELS)


def double(word: str) -> str:
    return "".join(letter * 2 for letter in word)


def _two_letters(rng: Random) -> tuple[str, str]:
    first = rng.choice(FREQUENT)
    return first, rng.choice([other for other in ascii_lowercase if other != first])


def _ending(rng: Random) -> str:
    return rng.choice(ascii_lowercase) + rng.choice(ascii_lowercase)


def _made_up(rng: Random) -> str:
    return rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CONSONANTS)


def _groups(rng: Random) -> tuple[str, str, str]:
    """Draws a property, and made-up names for the words that have it and the others."""
    yes = _made_up(rng)
    no = next(name for name in iter(partial(_made_up, rng), None) if name != yes)
    return rng.choice(list(PROPERTIES)), yes, no


def group_name(word: str, hidden: tuple[str, str, str]) -> str:
    """Names a word's group: apple → the first name, if the property is beginning with a vowel."""
    name, yes, no = hidden
    return yes if PROPERTIES[name](word) else no


# ------------------------------------------------------------------ the rules

# fmt: off
HIDDEN_RULES = (
    HiddenRule("random-insertion", "Take the marks out:", lambda word, _: word),
    HiddenRule("reverse", "Write it backwards:", lambda word, _: word[::-1]),
    HiddenRule("double", "Double the letters:", lambda word, _: double(word)),
    HiddenRule("swap-ends", "Swap the ends:", lambda word, _: swap_ends(word)),
    HiddenRule("drop-vowels", "Drop the vowels:", lambda word, _: drop_vowels(word)),
    HiddenRule("sort", "Sort the letters:", lambda word, _: "".join(sorted(word))),
    HiddenRule("cycle", "Cycle the letters:", lambda word, by: word[by:] + word[:by],
               lambda rng: rng.randrange(1, 5)),
    HiddenRule("caesar", "Move on in the alphabet:", caesar, lambda rng: rng.randrange(1, 26)),
    HiddenRule("letter", "Pick a letter:", lambda word, at: word[at],
               lambda rng: rng.choice(LETTER_PLACES)),
    HiddenRule("ending", "Add an ending:", lambda word, end: word + end, _ending, held=True),
    HiddenRule("replace", "Replace a letter:", lambda word, two: word.replace(*two), _two_letters,
               held=True),
    # a permutation of the vowels: it takes several examples to see all five
    HiddenRule("vowels", "Change the vowels:",
               lambda word, others: word.translate(str.maketrans(VOWELS, others)),
               lambda rng: "".join(rng.sample(VOWELS, len(VOWELS))), held=True),
    HiddenRule("group", "Name the group:", group_name, _groups),
    HiddenRule("add", "Add a number:", lambda x, n: str(int(x) + n),
               lambda rng: rng.randrange(1, 100), "numbers", held=True),
)

UNSEEN_RULES = (  # compositions of two rules: never in training
    HiddenRule("reverse+double", "Write it backwards: Double the letters:",
               lambda word, _: double(word[::-1])),
    HiddenRule("swap-ends+drop-vowels", "Swap the ends: Drop the vowels:",
               lambda word, _: drop_vowels(swap_ends(word))),
    HiddenRule("reverse+ending", "Write it backwards: Add an ending:",
               lambda word, end: word[::-1] + end, _ending),
)
# fmt: on


# ------------------------------------------------------------------ words and documents


def held_out(value: Any) -> bool:
    """Whether an item is reserved for questions, by a hash, so the same in every process."""
    digest = blake2b(str(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HELD_OUT_EVERY == 0


@dataclass(frozen=True)
class RuleItems:
    """Words and numbers that rules are applied to: the half for training or for questions."""

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    held: bool

    def of(self, rule: HiddenRule) -> tuple[str, ...]:
        return self.numbers if rule.items == "numbers" else self.words

    def hidden(self, rule: HiddenRule, rng: Random) -> Any:
        """Draws a parameter of the rule; if the rule holds some out, one of this half."""
        while True:
            hidden = rule.draw(rng)
            if not rule.held or held_out(f"{rule.name}:{hidden}") == self.held:
                return hidden


def halves(sources: Sequence[str]) -> tuple[RuleItems, RuleItems]:
    """Frequent words of some texts, and numbers, split into training and question halves."""
    every = dict.fromkeys(word for source in sources for word in frequent_words(source))
    words = [word for word in every if word.isascii() and len(word) in WORD_LETTERS]
    if len(words) < MIN_WORDS:
        raise MalmoiError(
            "There are only {words} words of {letters} to {letters2} Latin letters in "
            "{sources}; the rules need at least {min_words}: give more text.",
            words=len(words),
            letters=WORD_LETTERS[0],
            letters2=WORD_LETTERS[-1],
            sources=", ".join(sources),
            min_words=MIN_WORDS,
        )
    numbers = [str(number) for number in NUMBER_RANGE]

    def half(*, held: bool) -> RuleItems:
        kept = [tuple(one for one in some if held_out(one) == held) for some in (words, numbers)]
        return RuleItems(kept[0], kept[1], held)

    return half(held=False), half(held=True)


def rule_document(rule: HiddenRule, items: RuleItems, rng: Random) -> str:
    """One rule with one parameter: perhaps an instruction, then examples, then a blank line."""
    hidden = items.hidden(rule, rng)
    chosen = rng.sample(items.of(rule), rng.choice(EXAMPLES_PER_DOCUMENT))
    pairs = [rule.pair(one, hidden, rng) for one in chosen]
    intro = [rule.instruction] if rng.random() < INSTRUCTION_SHARE else []
    return "\n".join([*intro, *(f"{x} = {y}" for x, y in pairs)]) + "\n\n"


def write_rule_documents(
    path: Path, items: RuleItems, count: int, rules: Sequence[str] = (), seed: int = 0
) -> None:
    """Writes `count` documents of some rules [all] as JSON lines."""
    known = [rule for rule in HIDDEN_RULES if not rules or rule.name in rules]
    rng = Random(seed)

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8") as file:
            for _ in range(count):
                text = rule_document(rng.choice(known), items, rng)
                file.write(json.dumps({"text": text}) + "\n")

    replace_file(path, write)
