"""Lines as SVG: axes, a legend, and no more ink than that."""

import html
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from unicodedata import east_asian_width

LINE_COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--soft)")
# room around a chart
MARGIN_LEFT = 52
MARGIN_RIGHT = 16
MARGIN_TOP = 30
MARGIN_BOTTOM = 34
MAX_POINTS = 400  # points of a line: more cannot be seen
STANDALONE_STYLE = """<style>:root{--ink:#1d2433;--soft:#5f6879;--line:#e0e4ec;--a:#2458c5;--b:#b94a12;--c:#2b7a4b}
text{fill:var(--soft);font:12px system-ui,"Noto Sans KR",sans-serif}</style>"""  # noqa: E501  # for a file of its own, without a page's style
ChartPoints = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """Points, and how they are drawn; one `beside` another shares its colour and legend entry."""

    points: ChartPoints
    errors: Sequence[float] = ()  # of each point, up and down
    beside: str = ""
    dashed: bool = False

    def heights(self) -> Iterator[float]:
        """What the picture must have room for."""
        for (_, y), error in zip(self.points, self.errors or [0.0] * len(self.points), strict=True):
            yield from (y - error, y + error)


def chart(
    series: Mapping[str, ChartPoints | Line],
    across: str,
    up: str,
    size: tuple[int, int] = (820, 300),
    *,
    even: bool = False,
    share: bool = False,
) -> str:
    """An SVG; `even` places the x values at equal distances, `share` shows 0 to 100 %."""
    width, height = size
    lines = {name: line for name, line in _lines(series).items() if line.points}
    if sum(len(line.points) for line in lines.values()) < 2:
        return ""
    frame = _Frame(lines.values(), width, height, even=even, share=share)
    own = [name for name, line in lines.items() if not line.beside]
    colours = {name: LINE_COLOURS[i % len(LINE_COLOURS)] for i, name in enumerate(own)}
    drawn = "".join(
        _drawn(frame, line, colours[line.beside or name]) for name, line in lines.items()
    )
    about = html.escape(f"{up} by {across}: {', '.join(own)}")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{about}">{_grid(frame)}{drawn}'
        f"{_legend(colours, up, width)}"
        f'<text x="{width - MARGIN_RIGHT}" y="{height - 2}" text-anchor="end">{html.escape(across)}</text></svg>'  # noqa: E501
    )


def page_chart(
    series: Mapping[str, ChartPoints | Line], across: str, up: str, height: int = 300
) -> str:
    """A chart as wide as a page, and another for phones, where the first would be a thin strip."""
    sizes = {"desktop": (820, height), "phone": (360, 240)}
    return "".join(
        f'<div class="{screen}">{chart(series, across, up, size)}</div>'
        for screen, size in sizes.items()
    )


def standalone_svg(svg: str) -> str:
    """A chart as a file of its own."""
    return (
        svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
            ">", f">{STANDALONE_STYLE}", 1
        )
        + "\n"
    )


def _lines(series: Mapping[str, ChartPoints | Line]) -> dict[str, Line]:
    made = {name: line if isinstance(line, Line) else Line(line) for name, line in series.items()}
    return {
        name: line if line.errors else replace(line, points=thin_points(line.points))
        for name, line in made.items()
    }


class _Frame:
    """Where a value lies on the picture."""

    def __init__(
        self, lines: Collection[Line], width: int, height: int, *, even: bool, share: bool
    ) -> None:
        self.width = width
        self.height = height
        self.share = share
        xs = sorted({x for line in lines for x, _ in line.points})
        ys = [y for line in lines for y in line.heights()]
        self.ticks_x = xs if even else [x for x in ticks(xs[0], xs[-1]) if x <= xs[-1]]
        self.ticks_y = [n / 5 for n in range(6)] if share else ticks(min(ys), max(ys))
        self.slots = {x: float(i) for i, x in enumerate(xs)} if even else {}
        self.x = (0.0, len(xs) - 1.0) if even else (self.ticks_x[0], max(xs[-1], self.ticks_x[-1]))
        self.y = self.ticks_y[0], self.ticks_y[-1]

    def place(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1), at = self.x, self.y, self.slots.get(x, x)
        inner = self.width - MARGIN_LEFT - MARGIN_RIGHT
        tall = self.height - MARGIN_TOP - MARGIN_BOTTOM
        return MARGIN_LEFT + (at - x0) / ((x1 - x0) or 1) * inner, MARGIN_TOP + (y1 - y) / (
            (y1 - y0) or 1
        ) * tall


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * about >= span)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _grid(frame: _Frame) -> str:
    parts = []
    for value in frame.ticks_y:
        _, y = frame.place(frame.ticks_x[0], value)
        text = f"{value:.0%}" if frame.share else short_number(value)
        parts.append(
            f'<line x1="{MARGIN_LEFT}" x2="{frame.width - MARGIN_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'  # noqa: E501
        )
        parts.append(f'<text x="{MARGIN_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value in frame.ticks_x:
        x, y = frame.place(value, frame.y[0])
        parts.append(
            f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{short_number(value)}</text>'
        )
    return "".join(parts)


def _drawn(frame: _Frame, line: Line, colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (frame.place(*point) for point in line.points))
    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" {_stroke(line)}/>'
    if line.beside:
        return drawn
    dots = line.points if line.errors else line.points[-1:]
    return drawn + "".join(
        _dot(frame, *p, e, colour) for p, e in zip(dots, line.errors or [0.0], strict=True)
    )


def _stroke(line: Line) -> str:
    if line.dashed:
        return 'stroke-width="2" stroke-dasharray="5 5" stroke-opacity=".6"'
    return 'stroke-opacity=".25"' if line.beside else 'stroke-width="2" stroke-linejoin="round"'


def _dot(frame: _Frame, x: float, y: float, error: float, colour: str) -> str:
    (across, at), (_, top), (_, low) = (frame.place(x, v) for v in (y, y + error, y - error))
    bar = f'<path d="M{across:.1f},{low:.1f}V{top:.1f}" stroke="{colour}"/>' if error else ""
    return f'{bar}<circle cx="{across:.1f}" cy="{at:.1f}" r="3" fill="{colour}"/>'


def _legend(colours: Mapping[str, str], up: str, width: int) -> str:
    parts = [f'<text x="0" y="12">{html.escape(up)}</text>']
    at = width - MARGIN_RIGHT
    for name, colour in reversed(list(colours.items()) if len(colours) > 1 else []):
        parts.append(
            f'<text x="{at}" y="12" text-anchor="end" style="fill:{colour}">{html.escape(name)}</text>'  # noqa: E501
        )
        at -= sum(13 if east_asian_width(letter) in "WF" else 8 for letter in name) + 14
    return "".join(parts)


def short_number(number: float) -> str:
    """1,500,000 → 1.5M."""
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{sign}"
    if 0 < abs(number) < 1e-3:
        power = math.floor(math.log10(abs(number)))
        return f"{number / 10.0**power:.3g}e{power}"
    return f"{number:.4g}"


def thin_points(line: ChartPoints) -> ChartPoints:
    """At most this many points, including the last one."""
    every = -(-len(line) // MAX_POINTS)
    return line if every <= 1 else [*line[:-1:every], line[-1]]


def smooth_points(line: ChartPoints, share: float = 0.02) -> ChartPoints:
    """A noisy line as the mean of a few points around each, fewer towards the ends."""
    sums = list(accumulate((y for _, y in line), initial=0.0))
    result = []
    for i, (x, _) in enumerate(line):
        half = min(i, len(line) - 1 - i, int(share * len(line)))
        result.append((x, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return result
