"""Step 6, mix: how often each document is written, by the sources' shares (GPT-3 table 2.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError, UsageError, require_known
from malmoi.messages import msg

CopyCounts = NDArray[np.int64]
SAME_SIZE_TOLERANCE = 0.02  # sizes that differ by less count as equal


def parse_weights(text: str, sources: Sequence[str]) -> dict[str, float]:
    """Parses "web=0.6,books=0.4" into shares that add up to 1; every source needs one."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().rpartition("=")
        if not sign or not _is_share(value):
            raise UsageError(
                "The weight {part!r} is not NAME=NUMBER; write for example web=0.6,books=0.4.",
                part=part.strip(),
            )
        require_known(name, sources, "There is no source {name!r} to weight.{hint}")
        found[name] = float(value)
    if missing := [name for name in sources if name not in found]:
        raise UsageError(
            "The weights do not mention {missing}; give 0 to leave a source out.",
            missing=", ".join(missing),
        )
    if not sum(found.values()):
        raise UsageError("All weights are 0: nothing would be left.")
    return {name: found[name] / sum(found.values()) for name in sources}


def _is_share(value: str) -> bool:
    try:
        return 0 <= float(value) < float("inf")
    except ValueError:
        return False


@dataclass(frozen=True)
class SourceShare:
    """One source in the mix: sizes before and after, epochs, and its actual and wanted share."""

    source: str
    documents: tuple[int, int]
    characters: tuple[int, int]
    epochs: float
    has: float
    wanted: float

    def missed(self) -> str:
        """A sentence if the documents are too few and too long to reach the share."""
        wanted = self.epochs * self.characters[0]
        if abs(self.characters[1] - wanted) <= SAME_SIZE_TOLERANCE * wanted:
            return ""
        return msg(
            "{source} has {has:.1%} of the characters, not {wanted:.1%}: its documents "
            "({documents:,}) are too few and too long to be mixed more exactly.",
            source=self.source,
            has=self.has,
            wanted=self.wanted,
            documents=self.documents[0],
        )


def copy_counts(lengths: CopyCounts, draws: NDArray[np.uint64], epochs: float) -> CopyCounts:
    """How often each document is written: ⌊epochs⌋ times, plus once for the smallest draws."""
    whole = int(epochs)
    found = np.full(len(lengths), whole, np.int64)
    wanted = (epochs - whole) * int(lengths.sum())
    order = np.argsort(draws, kind="stable")
    reached = np.cumsum(lengths[order])
    found[order[reached - lengths[order] / 2 <= wanted]] += 1  # one more copy if that comes closer
    return found


def source_epochs(
    characters: dict[str, int], shares: dict[str, float], size: int
) -> dict[str, float]:
    """How often each source is read for an output of `size` characters."""
    for name, share in shares.items():
        if share and not characters.get(name):
            raise MalmoiError(
                "No document of {name} is left, which should make up {share:.0%} of the mix.",
                name=name,
                share=share,
            )
    return {
        name: size * share / characters[name] if share else 0.0 for name, share in shares.items()
    }
