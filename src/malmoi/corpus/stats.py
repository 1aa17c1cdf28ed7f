"""Statistics of each step: documents and characters in and out, and how often each rule applied."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import Shard, TextColumn
from malmoi.messages import msg, plural
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


# ------------------------------------------------------------------ names of control tokens

# Harmless as text, but suspicious; a corpus is built before its vocabulary, so these are the names
# of common ones.
NAMES = re.compile(
    r"<\|[^\s|<>]{1,40}\|>"  # <|endoftext|>, <|im_start|>, <|eot_id|>, …
    r"|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]"
    r"|</?s>|<(?:pad|unk|cls|sep|mask|bos|eos|start_of_turn|end_of_turn)>"
    r"|\[/?INST\]|<</?SYS>>"
)
SHOWN = 5  # names listed in the sentence


def count_control_names(texts: TextColumn) -> dict[str, Any]:
    """Counts the texts that contain any such name, and each name."""
    # most texts have neither of the signs that such a name begins with
    likely = (text for text in texts.all_encoded() if b"<" in text or b"[" in text)
    found = [set(NAMES.findall(text.decode())) for text in likely]
    return {
        "documents": sum(map(bool, found)),
        "names": Counter(name for names in found for name in names),
    }


def total_control_names(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up several counts, the most frequent name first."""
    documents = 0
    names = Counter[str]()
    for part in parts:
        documents += part["documents"]
        names.update(part["names"])
    return {
        "documents": documents,
        "names": dict(sorted(names.items(), key=lambda item: (-item[1], item[0]))),
    }


def control_sentence(found: Mapping[str, Any]) -> str:
    """Describes the counts in a sentence; empty if there are none."""
    if not found.get("documents"):
        return ""
    names = [f"{name} {count:,}" for name, count in found["names"].items()]
    more = ", …" if len(names) > SHOWN else ""
    return msg(
        "Names of control tokens in {documents} ({names}{more}); they will be encoded as text.",
        documents=plural(found["documents"], "document"),
        names=", ".join(names[:SHOWN]),
        more=more,
    )
