"""Documents of the in-context study: examples of one hidden rule, half with an instruction."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.evaluation.tasks.generated import frequent_words
from malmoi.studies.in_context.rules import HIDDEN_RULES, HiddenRule

# one word in this many is held out for questions; so are parameters of some rules
HELD_OUT_EVERY = 8
WORD_LETTERS = range(5, 8)  # of a word: sixteen examples of any rule fit into 512 characters
NUMBER_RANGE = range(100, 900)
MIN_WORDS = 100  # fewer are too few for a study
EXAMPLES_PER_DOCUMENT = range(12, 25)
INSTRUCTION_SHARE = 0.5  # share of the documents that have an instruction


def held_out(value: Any) -> bool:
    """Whether an item is reserved for questions, by a hash, so the same in every process."""
    return (
        int.from_bytes(blake2b(str(value).encode(), digest_size=8).digest()) % HELD_OUT_EVERY == 0
    )


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
    found = dict.fromkeys(word for source in sources for word in frequent_words(source))
    words = [word for word in found if word.isascii() and len(word) in WORD_LETTERS]
    if len(words) < MIN_WORDS:
        raise MalmoiError(
            f"There are only {len(words)} words of {WORD_LETTERS[0]} to {WORD_LETTERS[-1]} Latin "
            f"letters in {', '.join(sources)}; the rules need at least {MIN_WORDS}: give more "
            "text."
        )
    numbers = [str(number) for number in NUMBER_RANGE]
    return _half(words, numbers, held=False), _half(words, numbers, held=True)


def _half(words: Sequence[str], numbers: Sequence[str], *, held: bool) -> RuleItems:
    def some(all_of_them: Sequence[str]) -> tuple[str, ...]:
        return tuple(one for one in all_of_them if held_out(one) == held)

    return RuleItems(some(words), some(numbers), held)


def rule_document(rule: HiddenRule, items: RuleItems, rng: Random) -> str:
    """One rule with one parameter: perhaps an instruction, then examples, then a blank line."""
    hidden = items.hidden(rule, rng)
    count = rng.choice(EXAMPLES_PER_DOCUMENT)
    lines = [
        f"{x} = {y}"
        for x, y in (rule.pair(one, hidden, rng) for one in rng.sample(items.of(rule), count))
    ]
    return (
        "\n".join(([rule.instruction] if rng.random() < INSTRUCTION_SHARE else []) + lines) + "\n\n"
    )


def document_chunk(items: RuleItems, rules: Sequence[str], seed: int, job: tuple[int, int]) -> str:
    """Documents as JSON lines; a job is the chunk's number, which seeds it, and its size."""
    number, size = job
    rng = Random(f"{seed}:{number}")
    known = [rule for rule in HIDDEN_RULES if rule.name in rules]
    return "".join(
        json.dumps({"text": rule_document(rng.choice(known), items, rng)}) + "\n"
        for _ in range(size)
    )
