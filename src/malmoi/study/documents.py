"""Documents of the in-context study: one hidden rule each, examples of it, half of the time an instruction."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.study.rules import RULES, Rule
from malmoi.tasks.scramble import frequent_words

HELD_OUT = 8  # one word in so many is never in a document, only asked for; of some rules one parameter in so many too
LETTERS = range(5, 8)  # of a word: sixteen examples of any rule fit into 512 characters
NUMBERS = range(100, 900)
FEWEST = 100  # words that are not worth a study
LINES = range(12, 25)  # examples in a document
INSTRUCTED = 0.5  # share of the documents that have an instruction


def held_out(value: Any) -> bool:
    """Whether something is kept for the questions: by a hash, so it is the same everywhere."""
    return int.from_bytes(blake2b(str(value).encode(), digest_size=8).digest()) % HELD_OUT == 0


@dataclass(frozen=True)
class Items:
    """What rules are applied to: one half of the words and numbers, for training or for the questions."""

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    held: bool

    def of(self, rule: Rule) -> tuple[str, ...]:
        return self.numbers if rule.items == "numbers" else self.words

    def hidden(self, rule: Rule, rng: Random) -> Any:
        """A parameter of the rule; where it holds some out, one of this half."""
        while True:
            hidden = rule.draw(rng)
            if not rule.held or held_out(f"{rule.name}:{hidden}") == self.held:
                return hidden


def halves(sources: Sequence[str]) -> tuple[Items, Items]:
    """Frequent words of some texts, and numbers: those of the documents, and those of the questions."""
    found = dict.fromkeys(word for source in sources for word in frequent_words(source))
    words = [word for word in found if word.isascii() and len(word) in LETTERS]
    if len(words) < FEWEST:
        raise MalmoiError(
            f"There are only {len(words)} words of {LETTERS[0]} to {LETTERS[-1]} Latin letters in "
            f"{', '.join(sources)}; the rules need at least {FEWEST}: name more text."
        )
    numbers = [str(number) for number in NUMBERS]
    return _half(words, numbers, held=False), _half(words, numbers, held=True)


def _half(words: Sequence[str], numbers: Sequence[str], *, held: bool) -> Items:
    def some(all_of_them: Sequence[str]) -> tuple[str, ...]:
        return tuple(one for one in all_of_them if held_out(one) == held)

    return Items(some(words), some(numbers), held)


def document(rule: Rule, items: Items, rng: Random) -> str:
    """One rule with one parameter: perhaps an instruction, then examples; a blank line ends it."""
    hidden, count = items.hidden(rule, rng), rng.choice(LINES)
    lines = [f"{x} = {y}" for x, y in (rule.pair(one, hidden, rng) for one in rng.sample(items.of(rule), count))]
    return "\n".join(([rule.instruction] if rng.random() < INSTRUCTED else []) + lines) + "\n\n"


def chunk(items: Items, rules: Sequence[str], seed: int, job: tuple[int, int]) -> str:
    """Documents as JSON lines; a job is the number of the chunk, which they are drawn from, and how many they are."""
    number, size = job
    rng = Random(f"{seed}:{number}")
    known = [rule for rule in RULES if rule.name in rules]
    return "".join(json.dumps({"text": document(rng.choice(known), items, rng)}) + "\n" for _ in range(size))
