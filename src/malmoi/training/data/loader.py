"""Batches by number: the samples from number n on are a pure function of n.

B sequences, T tokens of the longest (rounded up), N tokens in all when packed, M predicted slots.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.tokenizer.padding import pad_to_width
from malmoi.training.data.mask import UNMASKED_LABEL, Masking, mask
from malmoi.training.data.mixture import SampleSource
from malmoi.training.data.permute import Draws, permutation_key

ArrayBatch = dict[str, NDArray[Any]]
WIDTH_MULTIPLE = 8  # T is a multiple of this: the tensor cores' tile
PACKED_MULTIPLE = 128  # N is a multiple of this; at most this much padding ends a packed batch


@dataclass(frozen=True)
class LMBatches:
    """tokens [B, context + 1], and documents if the windows provide them."""

    source: SampleSource

    def at(self, first: int, size: int) -> ArrayBatch:
        """Returns the batch of `size` samples starting at `first`."""
        return self.source.batch(first + np.arange(size))


@dataclass(frozen=True)
class BertBatches:
    """Masked samples: padded to the longest, or packed one after another without padding."""

    source: SampleSource
    masking: Masking
    pad: int
    seed: int
    packed: bool = False

    def at(self, first: int, size: int) -> ArrayBatch:
        """Returns the batch of `size` samples starting at `first`."""
        indices = first + np.arange(size)
        samples = self.source.batch(indices)
        keep = np.arange(samples["tokens"].shape[1]) < samples["lengths"][:, None]
        tokens = np.where(keep, samples["tokens"], self.pad)
        maskable = keep & ~self.masking.special[tokens]
        corrupted, labels = mask(
            tokens, maskable, Draws(permutation_key(self.seed, 5), indices), self.masking
        )
        form = self._packed if self.packed else self._padded
        return {**form(corrupted, labels, keep, samples), "nsp_labels": samples["labels"]}

    def _padded(
        self, tokens: NDArray[Any], labels: NDArray[Any], keep: NDArray[Any], samples: ArrayBatch
    ) -> ArrayBatch:
        width = round_up(tokens.shape[1], WIDTH_MULTIPLE)
        labels = _widen(labels, width, UNMASKED_LABEL)
        limit = len(tokens) * self.masking.slots(width - 2)
        # of pairs whose positions restart in the second language
        given = {"positions": samples["positions"]} if "positions" in samples else {}
        return {
            **{name: _widen(rows, width, 0) for name, rows in given.items()},
            "tokens": _widen(tokens, width, self.pad),
            "segments": _widen(samples["segments"], width, 0),
            "keep": _widen(keep, width, 0),
            **_slots(labels.reshape(-1), limit),
        }

    def _packed(
        self, tokens: NDArray[Any], labels: NDArray[Any], keep: NDArray[Any], samples: ArrayBatch
    ) -> ArrayBatch:
        lengths = samples["lengths"]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        size = round_up(int(bounds[-1]), PACKED_MULTIPLE)
        rows = np.broadcast_to(np.arange(len(tokens))[:, None], tokens.shape)
        counted = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        places = samples.get("positions", counted)
        limit = int(self.masking.rate * (size - 2 * len(tokens))) + len(tokens)
        return {
            "tokens": _tail(tokens[keep], size, self.pad),
            "segments": _tail(samples["segments"][keep], size, 0),
            "positions": _tail(places[keep], size, 0),
            "documents": _tail(rows[keep], size, len(tokens)),
            "firsts": bounds[:-1],
            "bounds": np.append(bounds, size).astype(np.int32),
            **_slots(
                _tail(labels[keep], size, UNMASKED_LABEL)[0],
                round_up(max(limit, 1), WIDTH_MULTIPLE),
            ),
        }


@dataclass(frozen=True)
class MaskedWindows:
    """Masked windows, each masked token predicted from the position *before* it.

    tokens [B, context]; a model that reads both ways shares its head with next-token prediction
    (Charpentier & Samuel 2024 §2.1). Each window is cut into `parts` rows.
    """

    source: SampleSource
    masking: Masking
    seed: int
    parts: int = 1

    def at(self, first: int, size: int) -> ArrayBatch:
        windows = {
            name: rows[:, :-1].reshape(size * self.parts, -1)
            for name, rows in self.source.batch(first + np.arange(size)).items()
        }
        tokens = windows["tokens"]
        indices = first * self.parts + np.arange(len(tokens))
        maskable = ~self.masking.special[tokens]
        maskable[:, 0] = False  # no position precedes it
        draws = Draws(permutation_key(self.seed, 7), indices)
        corrupted, labels = mask(tokens, maskable, draws, self.masking)
        before = np.full_like(labels, UNMASKED_LABEL)
        before[:, :-1] = labels[:, 1:]
        limit = len(tokens) * self.masking.slots(tokens.shape[1] - 1)
        return {**windows, "tokens": corrupted, **_slots(before.reshape(-1), limit)}


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _widen(rows: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    """Pads rows [B, T] to [B, width]."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)


def _tail(flat: NDArray[Any], size: int, fill: int) -> NDArray[Any]:
    """Pads a packed array to [1, size]."""
    return np.pad(flat, (0, size - len(flat)), constant_values=fill)[None]


def _slots(labels: NDArray[Any], limit: int) -> ArrayBatch:
    """Positions and labels of predictions, padded to `limit` (slot 0, label -100)."""
    found = np.flatnonzero(labels != UNMASKED_LABEL)
    slots = np.zeros(limit, np.int64)
    wanted = np.full(limit, UNMASKED_LABEL, np.int64)
    slots[: len(found)] = found
    wanted[: len(found)] = labels[found]
    return {"mlm_slots": slots, "mlm_labels": wanted}


def padded(rows: list[list[int]], fill: int) -> NDArray[np.int64]:
    """Rows in one array, as wide as the longest rounded up."""
    return pad_to_width(rows, round_up(max(map(len, rows)), WIDTH_MULTIPLE), fill)
