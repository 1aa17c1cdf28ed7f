"""Hidden rules that turn one word into another: the subject of documents and questions.

A rule is a record. Its parameter is drawn for each document and never named, so only the examples
show it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from string import ascii_lowercase
from typing import Any, Literal

from malmoi.evaluation.tasks.generated import random_insertion

VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprstvz"
LETTER_PLACES = (0, 1, 2, 3, -1, -2, -3)  # index of a letter, from the beginning or the end
# most words contain one of these, so a few examples show how it changes
FREQUENT = "aeinorst"

# (word, parameter, random generator) → the two sides of =
Pair = Callable[[str, Any, Random], tuple[str, str]]


@dataclass(frozen=True)
class HiddenRule:
    """A rule that generates lines `x = y`."""

    name: str
    instruction: str  # names the rule, never the parameter
    pair: Pair
    # draws a parameter; a rule without one need only be recognised
    draw: Callable[[Random], Any] = lambda rng: None
    items: Literal["words", "numbers"] = "words"
    held: bool = False  # whether questions use parameters that training never had


def _change(how: Callable[[str, Any], str]) -> Pair:
    return lambda word, hidden, rng: (word, how(word, hidden))


def cycle(word: str, by: int) -> str:
    """Rotates a word: letters → terslet."""
    return word[by:] + word[:by]


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


def _another(letter: str, rng: Random) -> str:
    return rng.choice([other for other in ascii_lowercase if other != letter])


def _two_letters(rng: Random) -> tuple[str, str]:
    first = rng.choice(FREQUENT)
    return first, _another(first, rng)


def _vowels(rng: Random) -> str:
    return "".join(rng.sample(VOWELS, len(VOWELS)))


def change_vowels(word: str, others: str) -> str:
    """Permutes the vowels: it takes several examples to see all five."""
    return word.translate(str.maketrans(VOWELS, others))


def _ending(rng: Random) -> str:
    return rng.choice(ascii_lowercase) + rng.choice(ascii_lowercase)


# ------------------------------------------------------------------ two groups

PROPERTIES: dict[str, Callable[[str], bool]] = {
    "begins with a vowel": lambda word: word[0] in VOWELS,
    "ends with a vowel": lambda word: word[-1] in VOWELS,
    "has more than five letters": lambda word: len(word) > 5,
    "begins with a to l": lambda word: word[0] < "m",
    **{
        f"has an {letter}": partial(lambda letter, word: letter in word, letter)
        for letter in "aeios"
    },
}


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

HIDDEN_RULES = (
    HiddenRule(
        "random-insertion",
        "Take the marks out:",
        lambda word, _, rng: (random_insertion(word, rng), word),
    ),
    HiddenRule("reverse", "Write it backwards:", _change(lambda word, _: word[::-1])),
    HiddenRule("double", "Double the letters:", _change(lambda word, _: double(word))),
    HiddenRule("swap-ends", "Swap the ends:", _change(lambda word, _: swap_ends(word))),
    HiddenRule("drop-vowels", "Drop the vowels:", _change(lambda word, _: drop_vowels(word))),
    HiddenRule("sort", "Sort the letters:", _change(lambda word, _: "".join(sorted(word)))),
    HiddenRule("cycle", "Cycle the letters:", _change(cycle), lambda rng: rng.randrange(1, 5)),
    HiddenRule(
        "caesar", "Move on in the alphabet:", _change(caesar), lambda rng: rng.randrange(1, 26)
    ),
    HiddenRule(
        "letter",
        "Pick a letter:",
        _change(lambda word, at: word[at]),
        lambda rng: rng.choice(LETTER_PLACES),
    ),
    HiddenRule(
        "ending", "Add an ending:", _change(lambda word, end: word + end), _ending, held=True
    ),
    HiddenRule(
        "replace",
        "Replace a letter:",
        _change(lambda word, two: word.replace(*two)),
        _two_letters,
        held=True,
    ),
    HiddenRule("vowels", "Change the vowels:", _change(change_vowels), _vowels, held=True),
    HiddenRule("group", "Name the group:", _change(group_name), _groups),
    HiddenRule(
        "add",
        "Add a number:",
        _change(lambda x, n: str(int(x) + n)),
        lambda rng: rng.randrange(1, 100),
        "numbers",
        held=True,
    ),
)

UNSEEN_RULES = (  # compositions of two rules: never in training
    HiddenRule(
        "reverse+double",
        "Write it backwards: Double the letters:",
        _change(lambda word, _: double(word[::-1])),
    ),
    HiddenRule(
        "swap-ends+drop-vowels",
        "Swap the ends: Drop the vowels:",
        _change(lambda word, _: drop_vowels(swap_ends(word))),
    ),
    HiddenRule(
        "reverse+ending",
        "Write it backwards: Add an ending:",
        _change(lambda word, end: word[::-1] + end),
        _ending,
    ),
)
