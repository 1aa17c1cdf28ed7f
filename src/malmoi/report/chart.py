"""Lines as SVG: axes, a legend, and no more ink than that."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from unicodedata import east_asian_width

from malmoi.report.page import render

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

    @property
    def dots(self) -> Iterator[tuple[float, float, float]]:
        """Points that are marked, with their errors: all that have one, else the last."""
        if self.beside:
            return
        marked = self.points if self.errors else self.points[-1:]
        for (x, y), error in zip(marked, self.errors or [0.0], strict=True):
            yield x, y, error


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
    lines = _lines(series)
    if sum(len(line.points) for line in lines.values()) < 2:
        return ""
    own = [name for name, line in lines.items() if not line.beside]
    colours = {name: LINE_COLOURS[i % len(LINE_COLOURS)] for i, name in enumerate(own)}
    svg = render(
        "report/chart.jinja",
        frame=_Frame(lines.values(), width, height, even=even, share=share),
        lines=[(line, colours[line.beside or name]) for name, line in lines.items()],
        legend=_legend(colours, width) if len(own) > 1 else [],
        about=f"{up} by {across}: {', '.join(own)}",
        across=across,
        up=up,
        short_number=short_number,
    )
    return svg.replace("\n", "")


def page_chart(
    series: Mapping[str, ChartPoints | Line], across: str, up: str, height: int = 300
) -> str:
    """A chart as wide as a page, and another for phones, where the first would be a thin strip."""
    return "".join(
        f'<div class="{screen}">{chart(series, across, up, size)}</div>'
        for screen, size in {"desktop": (820, height), "phone": (360, 240)}.items()
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
        if line.points
    }


class _Frame:
    """Where a value lies on the picture."""

    def __init__(
        self, lines: Collection[Line], width: int, height: int, *, even: bool, share: bool
    ) -> None:
        self.width = width
        self.height = height
        self.left = MARGIN_LEFT
        self.right = width - MARGIN_RIGHT
        self.share = share
        xs = sorted({x for line in lines for x, _ in line.points})
        ys = [y for line in lines for y in line.heights()]
        self.ticks_x = xs if even else [x for x in ticks(xs[0], xs[-1]) if x <= xs[-1]]
        self.ticks_y = [n / 5 for n in range(6)] if share else ticks(min(ys), max(ys))
        self.slots = {x: float(i) for i, x in enumerate(xs)} if even else {}
        self.x = (0.0, len(xs) - 1.0) if even else (self.ticks_x[0], max(xs[-1], self.ticks_x[-1]))
        self.y = self.ticks_y[0], self.ticks_y[-1]

    def place(self, x: float, y: float) -> tuple[float, float]:
        x0, x1 = self.x
        y0, y1 = self.y
        across = (self.slots.get(x, x) - x0) / ((x1 - x0) or 1)
        down = (y1 - y) / ((y1 - y0) or 1)
        tall = self.height - MARGIN_TOP - MARGIN_BOTTOM
        return self.left + across * (self.right - self.left), MARGIN_TOP + down * tall


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * about >= span)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _legend(colours: dict[str, str], width: int) -> Iterator[tuple[str, str, int]]:
    """The names of the lines from the right, with their colours and places."""
    at = width - MARGIN_RIGHT
    for name, colour in reversed(colours.items()):
        yield name, colour, at
        at -= sum(13 if east_asian_width(letter) in "WF" else 8 for letter in name) + 14


def short_number(number: float, digits: int = 4) -> str:
    """1,500,000 → 1.5M."""
    for size, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.{digits}g}{sign}"
    if 0 < abs(number) < 1e-3:
        power = math.floor(math.log10(abs(number)))
        return f"{number / 10.0**power:.3g}e{power}"
    return f"{number:.{digits}g}"


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
