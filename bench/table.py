"""One table for this machine: the hot paths, ours beside the peers', and the machine's own limits.

    malmoi bench [--quick] [--rows decode predict] [--without prefix,screen,cache,int8]

Every row measures ours and the peer in this run, in turn, on the same weights and data; a ratio
above 1 means that we are faster. MFU is the share of this machine's measured matmul rate, MBU the
share of its measured memory bandwidth that reading the weights once a step takes. `--without`
switches something off and measures its rows again. The last line is JSON.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

SECONDS = ("s", "ms")  # units in which less is better


@dataclass
class Row:
    """One line of a table: ours, the peer's, and what limits both."""

    what: str
    unit: str
    ours: float
    peer: str  # the peer's name, or why there is none
    theirs: float | None = None
    bound: str = ""  # MFU, MBU or a tolerance
    without: dict[str, float] = field(default_factory=dict)  # ours with something switched off

    @property
    def ratio(self) -> float | None:
        if self.theirs is None:
            return None
        pair = (self.theirs, self.ours) if self.unit in SECONDS else (self.ours, self.theirs)
        return pair[0] / pair[1]

    def cells(self) -> list[str]:
        theirs = self.peer if self.theirs is None else f"{self.peer} {number(self.theirs)}"
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}×"
        off = [f"without {name}: {number(rate)}" for name, rate in self.without.items()]
        return [
            self.what,
            f"{number(self.ours)} {self.unit}",
            theirs,
            ratio,
            "; ".join(filter(None, [self.bound, *off])),
        ]

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_table(machine: dict[str, Any], rows: list[Row]) -> None:
    """The machine, the table and, last, both as one JSON line."""
    head = ["what", "ours", "peer", "ratio", "share of the limit"]
    lines = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    print(" · ".join(f"{name} {value}" for name, value in machine.items()))
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(json.dumps({"machine": machine, "rows": [row.facts() for row in rows]}))
