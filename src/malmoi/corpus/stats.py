"""Statistics of each step: documents and characters in and out, and how often each rule applied."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from malmoi.text.documents import Document

EXAMPLES_PER_RULE = 3
EXAMPLE_CHARACTERS = 80
TEXT = attrgetter("text")


@dataclass
class StepStats:
    """Statistics of one step."""

    documents: list[int] = field(default_factory=lambda: [0, 0])  # in, out
    characters: list[int] = field(default_factory=lambda: [0, 0])
    rules: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def kept(self, documents: Sequence[Document], reasons: Sequence[str]) -> list[Document]:
        """The documents without a reason to drop them; counts all."""
        for document, why in zip(documents, reasons, strict=True):
            if why:
                self.count_rule(why, document)
        left = [one for one, why in zip(documents, reasons, strict=True) if not why]
        return self.count(documents, left)

    def count(self, before: Sequence[Document], after: list[Document]) -> list[Document]:
        """Counts the documents before and after the step, and returns the latter."""
        for side, documents in enumerate((before, after)):
            self.documents[side] += len(documents)
            self.characters[side] += sum(map(len, map(TEXT, documents)))
        return after

    def count_rule(self, rule: str, document: Document) -> None:
        """Records that a rule removed the document, or part of it."""
        self.rules[rule] += 1
        shown = self.examples.setdefault(rule, [])
        if len(shown) < EXAMPLES_PER_RULE:
            shown.append({"place": document.place, "text": document.text[:EXAMPLE_CHARACTERS]})

    def add(self, other: "StepStats") -> None:
        self.documents = [a + b for a, b in zip(self.documents, other.documents, strict=True)]
        self.characters = [a + b for a, b in zip(self.characters, other.characters, strict=True)]
        self.rules.update(other.rules)
        for rule, shown in other.examples.items():
            self.examples[rule] = (self.examples.get(rule, []) + shown)[:EXAMPLES_PER_RULE]

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"rules": dict(self.rules)}


def total_stats(parts: Iterable[dict[str, Any]]) -> StepStats:
    """Adds up several statistics, as in JSON."""
    found = StepStats()
    for part in parts:
        found.add(StepStats(**{**part, "rules": Counter(part["rules"])}))
    return found
