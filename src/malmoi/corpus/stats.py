"""Statistics of each step: documents and characters in and out, and how often each rule applied."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import Shard
from malmoi.text.documents import Document

EXAMPLES_PER_RULE = 3
EXAMPLE_CHARACTERS = 80
Reasons = NDArray[np.object_]  # why each document is dropped; "": it is not


@dataclass
class StepStats:
    """Statistics of one step."""

    documents: list[int] = field(default_factory=lambda: [0, 0])  # in, out
    characters: list[int] = field(default_factory=lambda: [0, 0])
    rules: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def kept(self, shard: Shard, reasons: Reasons) -> Shard:
        """The documents without a reason to drop them; counts all."""
        for rule, number in Counter(reasons.tolist()).items():
            if rule:
                self.rules[rule] += number
                for row in np.flatnonzero(reasons == rule)[:EXAMPLES_PER_RULE].tolist():
                    self._show(rule, shard[row])
        return self.count(shard, shard.where(reasons == ""))

    def count(self, before: Shard, after: Shard) -> Shard:
        """Counts the documents before and after the step, and returns the latter."""
        for side, shard in enumerate((before, after)):
            self.documents[side] += len(shard)
            self.characters[side] += int(shard.texts.characters.sum())
        return after

    def count_rule(self, rule: str, document: Document) -> None:
        """Records that a rule removed the document, or part of it."""
        self.rules[rule] += 1
        self._show(rule, document)

    def _show(self, rule: str, document: Document) -> None:
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
