"""Statistics of each step: documents and characters in and out, and how often each rule applied."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from malmoi.text.documents import Document

EXAMPLES_PER_RULE = 3
EXAMPLE_CHARACTERS = 80


@dataclass
class StepStats:
    """Statistics of one step."""

    documents: list[int] = field(default_factory=lambda: [0, 0])  # in, out
    characters: list[int] = field(default_factory=lambda: [0, 0])
    rules: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def kept(
        self, documents: Iterable[Document], reason: Callable[[Document], str | None]
    ) -> Iterator[Document]:
        """Yields the documents without a reason to drop them, and counts all documents."""
        for document in documents:
            self.count_in(document)
            if why := reason(document):
                self.count_rule(why, document)
            else:
                yield self.count_out(document)

    def count_in(self, document: Document) -> None:
        self.documents[0] += 1
        self.characters[0] += len(document.text)

    def count_out(self, document: Document) -> Document:
        self.documents[1] += 1
        self.characters[1] += len(document.text)
        return document

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
