"""Small self-contained SVG and HTML figures for reports: bars, token chips, attention."""

import html
from collections.abc import Sequence

from malmoi.report.page import words

Matrix = Sequence[Sequence[float]]  # [queries][keys]


def chips(tokens: Sequence[str]) -> str:
    """Renders tokens as small boxes."""
    return (
        f'<p class="chips">{"".join(f"<span>{html.escape(token)}</span>" for token in tokens)}</p>'
    )


def heat_map(weights: Matrix, tokens: Sequence[str] = (), cell: int = 26) -> str:
    """Renders one head's attention: rows are queries, columns are keys."""
    size = len(weights)
    left, top = (96, 84) if tokens else (0, 0)
    width = left + size * cell
    height = top + size * cell
    parts = [
        f'<rect x="{left + k * cell}" y="{top + q * cell}" width="{cell - 1}" height="{cell - 1}" '
        f'rx="{cell // 8}" '
        f'fill="var(--a)" fill-opacity="{max(0.04, min(1.0, weight)):.2f}"/>'
        for q, row in enumerate(weights)
        for k, weight in enumerate(row)
    ]
    for i, token in enumerate(tokens):
        middle = i * cell + cell / 2
        name = html.escape(token)
        parts.append(
            f'<text x="{left - 8}" y="{top + middle + 4:.0f}" text-anchor="end">{name}</text>'
        )
        at = f"{left + middle + 4:.0f},{top - 8}"
        parts.append(f'<text transform="translate({at}) rotate(-55)">{name}</text>')
    label = "attention of one head" + (f" over: {' '.join(tokens)}" if tokens else "")
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def attention_grid(layers: Sequence[Sequence[Matrix]]) -> str:
    """Renders every head of every layer in small: layers down, heads across."""
    rows = []
    for number, heads in enumerate(layers, start=1):
        cells = "".join(f"<figure>{heat_map(head, cell=6)}</figure>" for head in heads)
        rows.append(f'<div class="heads"><span>{words(f"layer {number}")}</span>{cells}</div>')
    return "".join(rows)


def sharpest(layers: Sequence[Sequence[Matrix]]) -> tuple[int, int]:
    """The (layer, head), from 0, with the most peaked attention over the most varied targets."""

    def score(head: Matrix) -> float:
        decided = sum(max(row) for row in head) / len(head)
        targets = len({max(range(len(row)), key=row.__getitem__) for row in head})
        return decided * targets / len(head)

    places = [(i, j) for i, heads in enumerate(layers) for j in range(len(heads))]
    return max(places, key=lambda place: score(layers[place[0]][place[1]]))
