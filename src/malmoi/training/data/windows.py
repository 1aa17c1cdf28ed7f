"""Language model samples: windows of the token store without replacement, a new grid per epoch."""

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.errors import MalmoiError
from malmoi.training.data.permute import permutation_key, permute_all, permute_grid
from malmoi.training.data.store import Store


@dataclass(eq=False)
class Windows:
    """Windows of context + 1 tokens (inputs, and labels shifted by one); `len` is an epoch.

    `shuffled` reorders the documents of the text every epoch before windows are cut, so that a
    window never joins the same neighbours twice.
    """

    store: Store
    context: int
    seed: int
    _: KW_ONLY
    documents: bool = False
    shuffled: bool = False

    def __post_init__(self) -> None:
        tokens = len(self.store.tokens)
        if tokens < self.context + 1:
            raise MalmoiError(
                "The text in {folder} has {tokens:,} tokens, fewer than one context of "
                "{context:,} and the token after it: give more text or a context of at most "
                "{tokens2:,}.",
                folder=self.store.folder,
                tokens=tokens,
                context=self.context,
                tokens2=max(tokens - 1, 0),
            )
        if self.documents and self.store.end is None:
            raise MalmoiError(
                "{folder} has no end-of-text tokens, so its windows cannot tell documents apart.",
                folder=self.store.folder,
            )
        # One window fewer than fit (if more than one does) leaves room for every shift of the grid.
        self.count = max(1, (tokens - 1) // self.context - 1)
        self._room = min(self.context, tokens - self.count * self.context)
        # a batch lies in one epoch, or in two at their boundary
        self._order = lru_cache(maxsize=2)(self._ordered)

    def __len__(self) -> int:
        return self.count

    def starts(self, indices: ArrayLike) -> NDArray[np.int64]:
        """The first token of each window: permuted per epoch, on a grid that shifts every epoch."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        return permute_grid(numbers, self.count, self.seed, 0, self.context, self._room)

    def batch(self, indices: ArrayLike) -> dict[str, NDArray[np.int64]]:
        """Returns tokens [B, context + 1] and optionally documents, numbered within each window."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        starts = self.starts(numbers)
        tokens = np.empty((len(starts), self.context + 1), np.int64)
        epochs = (numbers // self.count).tolist()
        for row, start, epoch in zip(tokens, starts.tolist(), epochs, strict=True):
            if self.shuffled:
                self._fill(row, start, epoch)
            else:
                row[:] = self.store.tokens[start : start + self.context + 1]
        if not self.documents:
            return {"tokens": tokens}
        ends = tokens == self.store.end
        return {"tokens": tokens, "documents": np.cumsum(ends, axis=1) - ends}

    def _fill(self, row: NDArray[np.int64], start: int, epoch: int) -> None:
        """Fills a row with the tokens from `start` on, in this epoch's order of documents."""
        ends, stops = self._order(epoch)
        document = int(np.searchsorted(stops, start, side="right"))
        done = 0
        while done < len(row):
            left = int(stops[document]) - start - done  # tokens of this document not yet used
            end = int(ends[document])
            piece = self.store.tokens[end - left : end][: len(row) - done]
            row[done : done + len(piece)] = piece
            done += len(piece)
            document += 1

    def _ordered(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each document in this epoch's order: its end in the store and in the epoch."""
        count = len(self.store)
        order = permute_all(np.arange(count), count, permutation_key(self.seed, epoch, 6))
        edges = self.store.documents
        return edges[1:][order], np.cumsum(np.diff(edges)[order])


@dataclass(eq=False)
class Stretches:
    """Windows in reading order: each of `rows` rows reads its own stretch of the text.

    Sample i is segment i // rows of stretch i mod rows, so that a row of one batch continues in the
    same row of the next (Dai et al. 2019 §3.2).
    """

    store: Store
    context: int
    rows: int

    def __post_init__(self) -> None:
        tokens = len(self.store.tokens) - 1
        if tokens < self.rows * self.context:
            raise MalmoiError(
                "The text in {folder} has {tokens:,} tokens, too few for {rows} rows with "
                "segments of {context:,}: set a smaller train.batch.",
                folder=self.store.folder,
                tokens=tokens + 1,
                rows=self.rows,
                context=self.context,
            )
        self.stretch = tokens // self.rows
        self.segments = self.stretch // self.context

    def __len__(self) -> int:
        return self.rows * self.segments

    def at(self, first: int, size: int) -> dict[str, NDArray[np.int64]]:
        """Returns tokens [B, context + 1], the first row, and the number of its segment."""
        segment = first // self.rows % self.segments
        row = first % self.rows
        if row + size > self.rows:
            raise MalmoiError(
                "A batch of {size} rows does not fit into {rows} stretches.",
                size=size,
                rows=self.rows,
            )
        begins = (row + np.arange(size)) * self.stretch + segment * self.context
        tokens = np.stack([self.store.tokens[b : b + self.context + 1] for b in begins.tolist()])
        return {"tokens": tokens.astype(np.int64), "stretch": np.array([row, segment])}
