"""Disk cache of a frozen model's hidden states: computed once, half precision, memory-mapped.

Stored in the user's cache directory, in a folder named by a hash of the weights and the rows, one
file per layer.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.model import Activations, Network
from malmoi.model.features import STATE_DTYPE
from malmoi.system.files import scratch_folder
from malmoi.system.limits import format_size
from malmoi.system.progress import Progress, report_progress
from malmoi.tokenizer import TokenRow
from malmoi.tokenizer.padding import length_batches, model_inputs

logger = logging.getLogger(__name__)

STATES_FORMAT = 1
BYTES_PER_NUMBER = 2  # half precision


def row_key(row: Any) -> bytes:
    """A row's key: its tokens, and its segments if the model has them."""
    return np.asarray(row, np.int32).tobytes()


class HiddenStateCache(Mapping[bytes, Tensor]):
    """Hidden states by row, [T, L, D] each, read from disk on access."""

    def __init__(
        self, folder: Path, layers: Sequence[int], places: dict[bytes, tuple[int, int]], width: int
    ) -> None:
        self.shape = (len(layers), width)
        self._places = places
        total = sum(length for _, length in places.values())
        self._layers = [
            np.memmap(_file(folder, layer), np.float16, "r", shape=(total, width))
            for layer in layers
        ]

    def __getitem__(self, row: bytes) -> Tensor:
        start, length = self._places[row]
        return torch.from_numpy(
            np.stack([layer[start : start + length] for layer in self._layers], axis=1)
        )

    def __iter__(self) -> Any:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @classmethod
    def of(cls, network: Network, rows: Sequence[TokenRow]) -> "HiddenStateCache":
        """Opens the cached states of these rows, computing missing layers."""
        segmented = bool(network.config.segments)
        named = {
            row_key([row.tokens, row.segments] if segmented else [row.tokens]): row for row in rows
        }
        ordered = dict(sorted(named.items(), key=lambda item: (-len(item[1].tokens), item[0])))
        places = {}
        total = 0
        for name, row in ordered.items():
            places[name] = (total, len(row.tokens))
            total += len(row.tokens)
        assert network.features is not None
        layers = network.features.layers
        width = network.config.width
        folder = states_folder() / _fingerprint(network, ordered)
        size = total * width * BYTES_PER_NUMBER
        missing = [n for n in dict.fromkeys(layers) if not _is_whole(_file(folder, n), size)]
        if missing:
            _compute(network, list(ordered.values()), missing, folder, size)
        else:
            logger.info(f"The hidden states of {len(places):,} rows are loaded from {folder}.")
        return cls(folder, layers, places, width)


def states_folder() -> Path:
    """The cache directory: XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "malmoi" / "states"


def _file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer}.f16"


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fingerprint(network: Network, rows: Mapping[bytes, TokenRow]) -> str:
    """A hash of the weights, of the settings that affect them, and of every row's tokens."""
    found = hashlib.sha256(f"{STATES_FORMAT} {network.config.to_json()}".encode())
    for name, tensor in network.trunk.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().data)
    for row in rows:
        found.update(len(row).to_bytes(8, "little") + row)
    return found.hexdigest()[:32]


def _compute(
    network: Network, rows: Sequence[TokenRow], layers: Sequence[int], folder: Path, size: int
) -> None:
    """Runs the trunk once over all rows and writes the layers atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(folder, size * len(layers))
    with scratch_folder(folder) as beside, ExitStack() as stack:
        files = [stack.enter_context(_file(beside, layer).open("wb")) for layer in layers]
        _write(network, rows, layers, files)
        for layer, file in zip(layers, files, strict=True):
            file.flush()
            os.fsync(file.fileno())
            _file(beside, layer).replace(_file(folder, layer))
    logger.info(f"{size * len(layers) / 1e6:,.0f} MB of hidden states are kept in {folder}.")


@torch.inference_mode()
def _write(
    network: Network, rows: Sequence[TokenRow], layers: Sequence[int], files: Sequence[IO[bytes]]
) -> None:
    """Writes states in the order of `rows`, which are sorted longest first as the batches are."""
    device = network.device
    done = 0
    network.eval()
    for group in length_batches([len(row.tokens) for row in rows]):
        activations = Activations()
        some = [rows[i] for i in group]
        network.trunk(**model_inputs(some, network.config, device), activations=activations)
        for layer, file in zip(layers, files, strict=True):
            found = activations.hidden[layer].to(STATE_DTYPE).cpu().numpy()
            for row, states in zip(some, found, strict=True):
                file.write(states[: len(row.tokens)].tobytes())
        done += len(group)
        report_progress(Progress("hidden states", done, len(rows), "rows"))


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MalmoiError(
            f"The hidden states need {format_size(needed)} and {folder} has {format_size(free)}: "
            "free some space, choose another place with XDG_CACHE_HOME, or use fewer layers "
            "(features=last)."
        )
