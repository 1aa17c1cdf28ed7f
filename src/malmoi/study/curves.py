"""What was asked and what was right, summed up and drawn: one line over the number of examples for each size."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malmoi.metrics import Mean
from malmoi.study.rules import UNSEEN
from malmoi.train.report import short
from malmoi.tune.ask import STYLE

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 380, 52, 16, 46, 40
COLOURS = ("var(--c)", "var(--b)", "var(--a)")


@dataclass(frozen=True)
class Cell:
    """The questions of one rule and parameter after so many examples: how many there were, and how many were right."""

    rule: str
    instructed: bool
    shots: int
    right: int
    asked: int


@dataclass(frozen=True)
class Found:
    """All that is known of one size."""

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

    def at(self, shots: int, rules: Iterable[str], *, instructed: bool = False) -> Mean:
        """Accuracy over some rules."""
        wanted = set(rules)
        return accuracy([c for c in self.cells if (c.shots, c.instructed) == (shots, instructed) and c.rule in wanted])


def _unseen() -> set[str]:
    return {rule.name for rule in UNSEEN}


def accuracy(cells: Sequence[Cell]) -> Mean:
    """The share that was right; its error is of the questions, the rules being fixed: √Σ n s² / Σ n."""
    asked = sum(cell.asked for cell in cells)
    share = sum(cell.right for cell in cells) / asked
    within = sum(cell.right * (cell.asked - cell.right) / max(1, cell.asked - 1) for cell in cells)
    return Mean(share, math.sqrt(within) / asked, math.sqrt(within / asked))


def summary(found: Found) -> dict[str, Any]:
    """A size as study.json has it: its facts, the curve over all rules, and the curve of each."""
    parts = {"curve": found.rules, "unseen": found.unseen}
    curves = {name: _curves(found, rules) for name, rules in parts.items() if rules}
    return {**found.facts, **curves, "rules": {name: _curves(found, [name]) for name in found.asked}}


def _curves(found: Found, rules: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for shots in found.shots:
        plain, told = (found.at(shots, rules, instructed=instructed) for instructed in (False, True))
        rows.append(
            dict(shots=shots, accuracy=plain.mean, error=plain.error)
            | dict(instructed_accuracy=told.mean, instructed_error=told.error)
        )
    return rows


def rough(number: float) -> str:
    """25,231,872 → 25M."""
    return short(float(f"{number:.2g}"))


# ------------------------------------------------------------------ the picture


def picture(found: Mapping[str, Found]) -> str:
    """curve.svg: accuracy over all rules by the number of examples; dashed with the instruction."""
    shots = sorted({number for one in found.values() for number in one.shots})
    parts = [STYLE, _grid(shots)]
    for name, colour in zip(found, COLOURS, strict=False):
        one = found[name]
        for instructed in (True, False):
            line = [one.at(number, one.rules, instructed=instructed) for number in one.shots]
            parts.append(_line([_x(shots, number) for number in one.shots], line, colour, dashed=instructed))
    label = f"Accuracy by examples in context: {', '.join(found)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}{_legend(found)}</svg>\n'
    )


def _x(shots: Sequence[int], number: int) -> float:
    """Numbers of examples stand side by side, as on a logarithmic axis that has a zero."""
    return LEFT + (WIDTH - LEFT - RIGHT) * shots.index(number) / max(1, len(shots) - 1)


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _grid(shots: Sequence[int]) -> str:
    parts = []
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for number in shots:
        parts.append(f'<text x="{_x(shots, number):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{number}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">examples in context</text>')
    return "".join(parts)


def _line(across: Sequence[float], line: Sequence[Mean], colour: str, *, dashed: bool) -> str:
    path = " ".join(f"{x:.1f},{_y(v.mean):.1f}" for x, v in zip(across, line, strict=True))
    dashes = ' stroke-dasharray="5 5" stroke-opacity=".6"' if dashed else ""
    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    if dashed:
        return drawn
    bars = (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(v.mean - v.error):.1f}" y2="{_y(v.mean + v.error):.1f}" '
        f'stroke="{colour}"/><circle cx="{x:.1f}" cy="{_y(v.mean):.1f}" r="3" fill="{colour}"/>'
        for x, v in zip(across, line, strict=True)
    )
    return drawn + "".join(bars)


def _legend(found: Mapping[str, Found]) -> str:
    said = "exact answers over all rules (dashed: with the instruction)"
    parts, at = [f'<text x="{LEFT}" y="14">{said}</text>'], WIDTH - RIGHT
    for name, colour in reversed(list(zip(found, COLOURS, strict=False))):
        text = f"{name}, {rough(found[name].facts['parameters'])}"
        parts.append(f'<text x="{at}" y="14" text-anchor="end" style="fill:{colour}">{html.escape(text)}</text>')
        at -= 8 * len(text) + 14
    return "".join(parts)
