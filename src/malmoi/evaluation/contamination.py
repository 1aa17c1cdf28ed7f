"""Scores of clean items, and of dirty ones, which share an n-gram with the text (GPT-3 §4)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malmoi.errors import require_that
from malmoi.evaluation.task import Example


@dataclass(frozen=True)
class Overlaps:
    """The n-gram length in words, which items overlap, and which are too short to say."""

    words: int
    dirty: tuple[bool, ...]
    short: tuple[bool, ...]


FindOverlaps = Callable[[Sequence[Sequence[str]]], Overlaps]  # given the texts of each item


def item_texts(example: Example) -> list[str]:
    """The texts of an item that could be in the training text; names of labels are not."""
    contents = [message["content"] for message in example.messages]
    return [text for text in (*example.texts, *example.choices, *contents) if text]


def contamination_report(
    examples: Sequence[Example],
    overlaps: Overlaps,
    scores: Mapping[str, float],
    score: Callable[[Sequence[int]], Mapping[str, float]],
) -> dict[str, Any]:
    """{"dirty": 21, "scores": …}: the scores of all items, and by `score` of the two parts."""
    places: dict[str, list[int]] = {"clean": [], "dirty": []}
    for i, overlap in enumerate(overlaps.dirty):
        places["dirty" if overlap else "clean"].append(i)
    parts = {"all": scores} | {part: score(some) for part, some in places.items() if some}
    table = {
        name: {part: found[name] for part, found in parts.items() if name in found}
        for name in scores
    }
    for row in table.values():
        if "clean" in row:
            row["clean_minus_all"] = row["clean"] - row["all"]
    return {
        "words": overlaps.words,
        "items": len(examples),
        "dirty": len(places["dirty"]),
        "short": sum(overlaps.short),
        "places": [examples[i].place for i in places["dirty"]],
        "scores": table,
    }


def refuse_contamination(find: FindOverlaps | None, what: str) -> None:
    require_that(find is None, "--contamination needs the rows of a task, not {what}.", what=what)
