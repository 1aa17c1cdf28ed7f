"""Documents of the in-context study: examples of one hidden rule, half with an instruction."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.evaluation.tasks.generated import frequent_words
from malmoi.studies.in_context.rules import HIDDEN_RULES, HiddenRule
from malmoi.system.files import replace_file
from malmoi.system.machine import this_machine

# one word in this many is held out for questions; so are parameters of some rules
HELD_OUT_EVERY = 8
WORD_LETTERS = range(5, 8)  # letters per word: sixteen examples fit into 512 characters
NUMBER_RANGE = range(100, 900)
MIN_WORDS = 100  # fewer are too few for a study
EXAMPLES_PER_DOCUMENT = range(12, 25)
INSTRUCTION_SHARE = 0.5  # share of the documents that have an instruction
DOCUMENTS_PER_CHUNK = 500  # each with its own seed


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
            "There are only {words} words of {letters} to {letters2} Latin letters in "
            "{sources}; the rules need at least {min_words}: give more text.",
            words=len(words),
            letters=WORD_LETTERS[0],
            letters2=WORD_LETTERS[-1],
            sources=", ".join(sources),
            min_words=MIN_WORDS,
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


# ------------------------------------------------------------------ all of them


def write_rule_documents(
    path: Path,
    items: RuleItems,
    count: int,
    *,
    seed: int = 0,
    rules: Sequence[str] = (),
    processes: int = 0,
) -> None:
    """Writes `count` documents, the same for any number of processes (0: one per core)."""
    names = tuple(rules) or tuple(rule.name for rule in HIDDEN_RULES)
    sizes = [
        min(DOCUMENTS_PER_CHUNK, count - first) for first in range(0, count, DOCUMENTS_PER_CHUNK)
    ]
    make = partial(document_chunk, items, names, seed)
    workers = min(processes or this_machine().cores, len(sizes))

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(_made(make, list(enumerate(sizes)), workers))

    replace_file(path, write)


def _made(make: "partial[str]", jobs: list[tuple[int, int]], workers: int) -> Iterator[str]:
    if workers <= 1:
        yield from map(make, jobs)
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(make, jobs)
