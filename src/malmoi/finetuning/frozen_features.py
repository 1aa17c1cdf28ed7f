"""Feature-based adaptation (BERT §5.3, table 7): a small model on cached frozen hidden states.

States are computed once and stored in half precision in the cache directory, in a memory-mapped
file named by a hash of the weights, the layers and the rows.
"""

import hashlib
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from malmoi.checkpoint import Checkpoint
from malmoi.errors import ensure, nearest, require_that, required
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.task import Task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.inference.batches import model_inputs
from malmoi.inference.embed import check_layers
from malmoi.messages import logger, plural
from malmoi.model import FeatureConfig, Network
from malmoi.model.heads import LABEL_HEADS, POOLED_HEADS
from malmoi.model.trunks import STATE_DTYPE
from malmoi.system.files import atomic_write
from malmoi.system.native import cache_or_temporary
from malmoi.system.progress import Progress, report_progress
from malmoi.system.untrusted import format_size
from malmoi.tokenizer import TokenRow
from malmoi.tokenizer.padding import length_batches

STATES_FORMAT = 3
BYTES_PER_NUMBER = 2  # half precision
# depth → (layers, whether they are combined by a weighted sum)
LAYER_CHOICES: dict[str, Callable[[int], tuple[tuple[int, ...], bool]]] = {
    "embeddings": lambda depth: ((0,), False),
    "second-to-last": lambda depth: ((depth - 1,), False),
    "last": lambda depth: ((depth,), False),
    "last4": lambda depth: (_last4(depth), False),
    "all": lambda depth: (tuple(range(depth + 1)), False),
    "weighted-last4": lambda depth: (_last4(depth), True),
    "weighted-all": lambda depth: (tuple(range(1, depth + 1)), True),
    # ELMo's: the embedding too (Peters et al. 2018 eq. 1)
    "mix": lambda depth: (tuple(range(depth + 1)), True),
}


def _last4(depth: int) -> tuple[int, ...]:
    return tuple(range(max(1, depth - 3), depth + 1))


def feature_config(start: Checkpoint, task: Task, settings: FinetuneConfig) -> FeatureConfig | None:
    """The feature model of the settings, if any: a BiLSTM for tagging, else a linear layer."""
    if not settings.features:
        return None
    head = head_kind(task).head
    require_that(
        head in LABEL_HEADS,
        "features support labels and numbers; {kind} is learnt by fine-tuning the whole model.",
        kind=task.kind,
    )
    model = start.network.config
    layers, weighted = _chosen(settings.features, model.depth)
    return FeatureConfig(
        layers=layers,
        weighted=weighted,
        recurrent=0 if head in POOLED_HEADS else settings.recurrent,
        frozen=not settings.tune_features,
        normalized=model.norm == "pre",
    )


def _chosen(name: str, depth: int) -> tuple[tuple[int, ...], bool]:
    if name in LAYER_CHOICES:
        return LAYER_CHOICES[name](depth)
    numbers = required(
        re.fullmatch(r"layers=(-?\d+(?:,-?\d+)*)", name),
        "There are no features {name!r}.{hint} Use {choices} or layers=8,9,-1.",
        name=name,
        hint=nearest(name, LAYER_CHOICES),
        choices=", ".join(LAYER_CHOICES),
    )
    given = tuple(map(int, numbers[1].split(",")))
    check_layers(given, depth)
    return tuple(layer % (depth + 1) for layer in given), False


class CachedTrunk(nn.Module):
    """Replaces the trunk, reading the same hidden states from disk."""

    def __init__(self, network: Network, states: "HiddenStateCache") -> None:
        super().__init__()
        self.states = states
        self.embed = network.trunk.embed
        self.blocks = nn.ModuleList()

    def forward(
        self, tokens: Tensor, *, segments: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        weight = self.embed.token.weight
        parts = [tokens] if segments is None else [tokens, segments]
        lengths = [tokens.size(1)] * len(tokens) if keep is None else keep.sum(1).tolist()
        found = torch.zeros(*tokens.shape, *self.states.shape, dtype=weight.dtype)
        rows = torch.stack(parts, 1).cpu().numpy()
        for here, row, n in zip(found, rows, lengths, strict=True):
            here[:n] = self.states[row_key(row[:, :n])]
        return found.to(weight.device)


@contextmanager
def cached_states(network: Network, rows: Callable[[], Sequence[TokenRow]]) -> Iterator[None]:
    """A context in which the frozen trunk's states of these rows are read, not recomputed."""
    if network.features is None or not network.features.frozen:
        yield
        return
    trunk = network.trunk
    network.trunk = CachedTrunk(network, HiddenStateCache(network, rows()))  # type: ignore[assignment]
    try:
        yield
    finally:
        network.trunk = trunk


# ------------------------------------------------------------------ the cache


def row_key(row: Any) -> bytes:
    """A row's key: its tokens, and its segments if the model has them."""
    return np.asarray(row, np.int32).tobytes()


class HiddenStateCache:
    """Hidden states by row, [T, L, D] each, read from disk on access; missing ones are computed."""

    def __init__(self, network: Network, rows: Sequence[TokenRow]) -> None:
        assert network.features is not None
        segmented = bool(network.config.segments)
        named = {
            row_key([row.tokens, row.segments] if segmented else [row.tokens]): row for row in rows
        }
        ordered = dict(sorted(named.items(), key=lambda item: (-len(item[1].tokens), item[0])))
        ends = [0, *accumulate(len(row.tokens) for row in ordered.values())]
        self._places = dict(zip(ordered, pairwise(ends), strict=True))
        self.shape = (len(network.features.layers), network.config.width)
        shape = (ends[-1], *self.shape)
        size = math.prod(shape) * BYTES_PER_NUMBER
        path = cache_or_temporary("states") / f"{_fingerprint(network, ordered)}.f16"
        if path.is_file() and path.stat().st_size == size:
            many = plural(len(ordered), "row")
            logger.info("The hidden states of {rows} are loaded from {path}.", rows=many, path=path)
        else:
            _compute(network, list(ordered.values()), path, size)
        self._states = np.memmap(path, np.float16, "r", shape=shape)

    def __getitem__(self, row: bytes) -> Tensor:
        return torch.from_numpy(self._states[slice(*self._places[row])].copy())


def hash_weights(module: nn.Module) -> "hashlib._Hash":
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return found


def _fingerprint(network: Network, rows: Mapping[bytes, TokenRow]) -> str:
    """A hash of the weights, of what else affects the states, and of every row's tokens."""
    layers = network.features and network.features.layers
    found = hash_weights(network.trunk)
    found.update(f"{STATES_FORMAT} {network.config.to_json()} {layers}".encode())
    for row in rows:
        found.update(len(row).to_bytes(8, "little") + row)
    return found.hexdigest()[:32]


def _compute(network: Network, rows: Sequence[TokenRow], path: Path, size: int) -> None:
    """Runs the trunk once over all rows and writes its layers atomically."""
    _check_room(path.parent, size)
    with atomic_write(path) as file:
        _write(network, rows, file)
    logger.info("{size:,.0f} MB of hidden states are cached in {path}.", size=size / 1e6, path=path)


@torch.inference_mode()
def _write(network: Network, rows: Sequence[TokenRow], file: IO[bytes]) -> None:
    """Writes states in the order of `rows`, which are sorted longest first as the batches are."""
    done = 0
    network.eval()
    for group in length_batches([len(row.tokens) for row in rows]):
        some = [rows[i] for i in group]
        found = network.trunk(**model_inputs(network, some)).to(STATE_DTYPE).cpu().numpy()
        for row, states in zip(some, found, strict=True):
            file.write(states[: len(row.tokens)].tobytes())
        done += len(group)
        report_progress(Progress("hidden states", done, len(rows), "rows"))


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    ensure(
        free >= needed,
        "The hidden states need {needed} and {folder} has {free}: free some space, choose "
        "another place with XDG_CACHE_HOME, or use fewer layers (features=last).",
        needed=format_size(needed),
        folder=folder,
        free=format_size(free),
    )
