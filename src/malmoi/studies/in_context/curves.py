"""Accuracy by number of examples, summarised and plotted: one line per model size."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malmoi.metrics import MeanWithError
from malmoi.report.chart import ChartPoints, Line, chart, short_number, standalone_svg
from malmoi.studies.in_context.rules import UNSEEN_RULES


@dataclass(frozen=True)
class Cell:
    """Questions on one rule and parameter with this many examples: asked, and correct."""

    rule: str
    instructed: bool
    shots: int
    right: int
    asked: int


@dataclass(frozen=True)
class SizeResults:
    """The results of one model size."""

    facts: dict[str, Any]  # parameters, tokens, seconds, valid_loss
    cells: Sequence[Cell]

    @property
    def shots(self) -> list[int]:
        return sorted({cell.shots for cell in self.cells})

    @property
    def rules(self) -> list[str]:
        """Rules of the documents, in order."""
        return [name for name in self.asked if name not in _unseen()]

    @property
    def asked(self) -> list[str]:
        return list(dict.fromkeys(cell.rule for cell in self.cells))

    @property
    def unseen(self) -> list[str]:
        return [name for name in self.asked if name in _unseen()]

    def at(self, shots: int, rules: Iterable[str], *, instructed: bool = False) -> MeanWithError:
        """Accuracy over some rules."""
        wanted = set(rules)
        return cell_accuracy(
            [
                c
                for c in self.cells
                if (c.shots, c.instructed) == (shots, instructed) and c.rule in wanted
            ]
        )


def _unseen() -> set[str]:
    return {rule.name for rule in UNSEEN_RULES}


def cell_accuracy(cells: Sequence[Cell]) -> MeanWithError:
    """The share of correct answers; its error, with the rules fixed, is √Σ n s² / Σ n."""
    asked = sum(cell.asked for cell in cells)
    share = sum(cell.right for cell in cells) / asked
    within = sum(cell.right * (cell.asked - cell.right) / max(1, cell.asked - 1) for cell in cells)
    return MeanWithError(share, math.sqrt(within) / asked, math.sqrt(within / asked))


def size_summary(found: SizeResults) -> dict[str, Any]:
    """A size as in study.json: its facts, the curve over all rules, and the curve of each."""
    parts = {"curve": found.rules, "unseen": found.unseen}
    curves = {name: _curves(found, rules) for name, rules in parts.items() if rules}
    return {
        **found.facts,
        **curves,
        "rules": {name: _curves(found, [name]) for name in found.asked},
    }


def _curves(found: SizeResults, rules: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for shots in found.shots:
        plain, told = (
            found.at(shots, rules, instructed=instructed) for instructed in (False, True)
        )
        rows.append(
            dict(shots=shots, accuracy=plain.mean, error=plain.standard_error)
            | dict(instructed_accuracy=told.mean, instructed_error=told.standard_error)
        )
    return rows


def rough(number: float) -> str:
    """Formats a large number roughly: 25,231,872 → 25M."""
    return short_number(float(f"{number:.2g}"))


# ------------------------------------------------------------------ chart


def accuracy_chart(found: Mapping[str, SizeResults]) -> str:
    """curve.svg: accuracy over all rules by number of examples; dashed with the instruction."""
    lines: dict[str, Line] = {}
    for size, one in found.items():
        name = f"{size}, {rough(one.facts['parameters'])}"
        plain, told = (
            [one.at(n, one.rules, instructed=i) for n in one.shots] for i in (False, True)
        )
        lines[f"{name}, instructed"] = Line(_points(one, told), beside=name, dashed=True)
        lines[name] = Line(_points(one, plain), [value.standard_error for value in plain])
    said = "exact answers over all rules (dashed: with the instruction)"
    return standalone_svg(
        chart(lines, "examples in context", said, size=(820, 380), even=True, share=True)
    )


def _points(found: SizeResults, line: Sequence[MeanWithError]) -> ChartPoints:
    return [(number, value.mean) for number, value in zip(found.shots, line, strict=True)]
