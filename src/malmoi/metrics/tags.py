"""Entities of tagged words, as conlleval counts them."""

from collections.abc import Sequence
from functools import lru_cache

from malmoi.errors import UsageError
from malmoi.metrics.labels import LabelScore, label_score
from malmoi.metrics.registry import Tags, check_paired, compares, f_score, ratio


def entities(tags: Sequence[str]) -> frozenset[tuple[str, int, int]]:
    """(label, first word, last word) of each entity in IOB1, IOB2 or BIOES tags, as in conlleval.

    An entity begins at B or S, and at I or E if none of its label precedes; it ends before the next
    begins, at O, and after E or S.
    """
    return _entities(tuple(tags))


# cached: three metrics need the same, and golds recur at every evaluation
@lru_cache(maxsize=100_000)
def _entities(tags: tuple[str, ...]) -> frozenset[tuple[str, int, int]]:
    found = set()
    begun = 0
    label = ""
    for i, tag in enumerate([*tags, "O"]):
        mark, name = _parts(tag)
        before = _parts(tags[i - 1])[0] if i else "O"
        goes_on = label and mark in "IE" and name == label and before not in "ES"
        if label and not goes_on:
            found.add((label, begun, i - 1))
            label = ""
        if mark != "O" and not label:
            begun = i
            label = name
    return frozenset(found)


@lru_cache(maxsize=1000)
def _parts(tag: str) -> tuple[str, str]:
    """B-PER or B_PER → ("B", "PER"); a tag without a label gets the label _."""
    mark = {"L": "E", "U": "S"}.get(tag[:1], tag[:1])
    return ("O", "") if tag == "O" or not tag else (mark, tag[2:] or "_")


def _entity_counts(gold: Tags, predicted: Tags) -> tuple[int, int, int]:
    check_paired(gold, predicted)
    for number, (g, p) in enumerate(zip(gold, predicted, strict=True), start=1):
        if len(g) != len(p):
            raise UsageError(
                "Sentence {number} has {g} tags and {p} predicted ones.",
                number=number,
                g=len(g),
                p=len(p),
            )
    golds = [entities(tags) for tags in gold]
    given = [entities(tags) for tags in predicted]
    right = sum(len(a & b) for a, b in zip(golds, given, strict=True))
    return right, sum(map(len, given)), sum(map(len, golds))


def entity_scores(gold: Tags, predicted: Tags) -> dict[str, LabelScore]:
    """Precision, recall, F1 and support of each type of entity."""
    counts: dict[str, list[int]] = {}
    for wanted, said in zip(map(entities, gold), map(entities, predicted), strict=True):
        for column, found in enumerate((wanted & said, said, wanted)):
            for label, _, _ in found:
                counts.setdefault(label, [0, 0, 0])[column] += 1
    return {name: label_score(*counts[name]) for name in sorted(counts)}


@compares("tags")
def entity_precision(gold: Tags, predicted: Tags) -> float:
    right, given, _ = _entity_counts(gold, predicted)
    return ratio(right, given)


@compares("tags")
def entity_recall(gold: Tags, predicted: Tags) -> float:
    right, _, wanted = _entity_counts(gold, predicted)
    return ratio(right, wanted)


@compares("tags")
def entity_f1(gold: Tags, predicted: Tags) -> float:
    """F1 of whole entities: label and both boundaries must match (CoNLL-2003)."""
    return f_score(*_entity_counts(gold, predicted))
