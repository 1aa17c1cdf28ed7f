"""The result of a compression: size and metrics before and after."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from malmoi.compression.cost import Cost
from malmoi.model import Network, count_parameters
from malmoi.system.result import Result


@dataclass(frozen=True, repr=False)
class CompressionResult(Result):
    """A smaller model's folder; its weights, bytes on disk, metrics and cost before and after."""

    out: Path
    weights: tuple[int, int]
    size: tuple[int, int]
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    costs: tuple[Cost, Cost] | None = None  # of using them, if measured

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Rows of a table: what, before, after."""
        yield "weights", *_both(self.weights, ",")
        yield "MB on disk", *_both((self.size[0] / 1e6, self.size[1] / 1e6), ",.1f")
        if self.costs is not None:
            before, after = self.costs
            yield "MB in memory", *_both((before.memory / 1e6, after.memory / 1e6), ",.1f")
            yield before.unit, *_both((before.rate, after.rate), ",.3g")
        for name, values in self.metrics.items():
            yield name, *_both(values, ".4g")

    @classmethod
    def of(
        cls,
        before: tuple[Network, Path],
        after: tuple[Network, Path],
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> "CompressionResult":
        """Counts the weights of two networks and the bytes of their folders."""
        weights = count_parameters(before[0]), count_parameters(after[0])
        sizes = folder_size(before[1]), folder_size(after[1])
        return cls(after[1], weights, sizes, metrics or {})


def _both(values: tuple[float, float], form: str) -> tuple[str, str]:
    return format(values[0], form), format(values[1], form)


def folder_size(folder: Path) -> int:
    """Bytes of the weights in a folder (for a file, its size)."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(
        file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind)
    )
