"""Texts about features: row i of a .npy file belongs to line i of a text file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError, ensure, explained, require_that
from malmoi.text.formats import FoundDocument, FoundDocuments, ReadOptions
from malmoi.text.lines import read_lines
from malmoi.text.sources import FileSource
from malmoi.training.data.encode import assign
from malmoi.training.data.loader import IGNORE_LABEL, ArrayBatch, padded
from malmoi.training.data.permute import permute_epochs
from malmoi.training.data.store import Store

Features = NDArray[np.floating[Any]]


def open_features(path: str | Path) -> Features:
    """An array [N, P, F] of a .npy file, memory-mapped; [N, F] is one vector for each text."""
    file = Path(path).expanduser()
    ensure(file.is_file(), "There is no feature file {file}.", file=file)
    kinds = (ValueError, OSError, EOFError)
    with explained(kinds, "{file} is not a .npy file of numbers: {error}", file=file):
        array: Features = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.ndim == 2:
        array = array[:, None]
    ensure(
        array.ndim == 3 and array.dtype.kind in "fiu" and array.size,
        "{file} holds {found}; features are numbers of the shape [texts, vectors, width] or "
        "[texts, width].",
        file=file,
        found=f"{array.dtype} of the shape {list(array.shape)}",
    )
    ensure(np.isfinite(array).all(), "{file} holds NaN or infinite values.", file=file)
    return array


@dataclass(frozen=True)
class TextPerRow(FileSource):
    """A text file with a line for each row of the features."""

    rows: int

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), self.rows]

    def documents(self, want: ReadOptions) -> FoundDocuments:
        """Every line; an empty or missing one is an error, because the others would shift."""
        number = 0
        for number, text in read_lines(self.path, self._refuse):
            if not text.strip():
                self._refuse(number, "empty")
            yield FoundDocument(text.strip(), number)
        ensure(
            number == self.rows,
            "{path} has {number:,} lines, but there are features for {rows:,} texts.",
            **vars(self),
            number=number,
        )

    def _refuse(self, number: int, why: str) -> None:
        raise MalmoiError(
            "{path}:{number} is {why}; every row of features needs its text.",
            path=self.path,
            number=number,
            why=why,
        )


def feature_rows(store: Store, rows: int, share: float, *, valid: bool) -> NDArray[np.int64]:
    """The row of each document of a store, by the rule that split training and validation."""
    parts = [part for _, part in assign(["text"] * rows, share)]
    found = np.flatnonzero(np.array(parts) == valid)
    store.ensure(
        len(found) == len(store),
        "{folder} holds {texts:,} texts for {here:,} rows of features; remove it to rebuild.",
        texts=len(store),
        here=len(found),
    )
    return found


@dataclass(frozen=True, eq=False)
class CaptionBatches:
    """features [B, P, F], tokens [B, T] that begin with the end token, and the labels."""

    store: Store  # every document ends with the end token
    rows: NDArray[np.int64]  # the row of each document in the features
    features: Features
    room: int  # tokens of a text at most
    pad: int
    seed: int

    def __post_init__(self) -> None:
        self.store.ensure(len(self.store), "{folder} has no text to make samples of.")
        lengths = np.diff(self.store.documents)
        row, longest = int(self.rows[lengths.argmax()]) + 1, int(lengths.max())
        require_that(
            longest <= self.room,
            "Row {row} has {longest} tokens; after the features there is room for {room}: set a "
            "larger model.context.",
            row=row,
            longest=longest,
            room=self.room,
        )

    def at(self, first: int, size: int) -> ArrayBatch:
        chosen = permute_epochs(first + np.arange(size), len(self.store), self.seed, 12)
        edges = self.store.documents
        texts = [self.store.tokens[edges[n] : edges[n + 1]].tolist() for n in chosen]
        tokens = padded([[text[-1], *text[:-1]] for text in texts], self.pad)
        labels = padded(texts, IGNORE_LABEL)
        features = np.asarray(self.features[self.rows[chosen]], np.float32)
        return {"tokens": tokens, "lm_labels": labels, "features": features}
