"""Span corruption (T5): an encoder reads text with gaps, and a decoder generates the spans.

Raffel et al. 2020 §3.1.4: 15 % of the tokens in spans of 3 on average. Each span becomes one
sentinel, and the target is every sentinel followed by its span. B windows, L their tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from malmoi.training.data.loader import ArrayBatch, padded
from malmoi.training.data.mask import UNMASKED_LABEL
from malmoi.training.data.mixture import SampleSource
from malmoi.training.data.permute import Draws, permutation_key

SENTINELS = 100  # embeddings after the vocabulary's, as in T5
MEAN_SPAN_TOKENS = 3
SpanInts = NDArray[np.int64]


@dataclass(frozen=True)
class SpanBatches:
    """source [B, S], and tokens [B, T] that begin with the end token, from windows of text."""

    source: SampleSource
    rate: float
    first_sentinel: int
    end: int
    pad: int
    seed: int

    def at(self, first: int, size: int) -> ArrayBatch:
        numbers = first + np.arange(size)
        windows: SpanInts = self.source.batch(numbers)["tokens"][:, :-1]
        draws = Draws(permutation_key(self.seed, 13), numbers).random((size, 2, windows.shape[1]))
        rows = [self.corrupt(window, draw) for window, draw in zip(windows, draws, strict=True)]
        source = padded([[*kept, self.end] for kept, _ in rows], self.pad)
        lengths = np.array([len(kept) + 1 for kept, _ in rows])
        return {
            "source": source,
            "source_keep": np.arange(source.shape[1]) < lengths[:, None],
            "tokens": padded([[self.end, *gaps] for _, gaps in rows], self.pad),
            "lm_labels": padded([[*gaps, self.end] for _, gaps in rows], UNMASKED_LABEL),
        }

    def corrupt(self, window: SpanInts, draws: NDArray[np.float64]) -> tuple[list[int], list[int]]:
        """The text with sentinels for its gaps, and the gaps; `draws` [2, L] place them."""
        hidden = max(1, round(self.rate * len(window)))
        spans = min(max(1, round(hidden / MEAN_SPAN_TOKENS)), len(window) - hidden, SENTINELS)
        kept_runs = pieces(len(window) - hidden, spans, draws[0])
        gap_runs = pieces(hidden, spans, draws[1])
        kept: list[int] = []
        gaps: list[int] = []
        at = 0
        for i, (run, gap) in enumerate(zip(kept_runs, gap_runs, strict=True)):
            kept += [*window[at : at + run].tolist(), self.first_sentinel + i]
            at += run
            gaps += [self.first_sentinel + i, *window[at : at + gap].tolist()]
            at += gap
        return kept, gaps


def pieces(total: int, count: int, draws: NDArray[np.float64]) -> list[int]:
    """`total` cut into `count` parts of at least one, every way equally likely."""
    cuts = np.sort(np.argsort(draws[: total - 1])[: count - 1]) + 1
    parts: list[int] = np.diff([0, *cuts.tolist(), total]).tolist()
    return parts
