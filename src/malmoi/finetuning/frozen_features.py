"""Feature-based adaptation (BERT §5.3, table 7): a small model on cached frozen hidden states."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError, nearest
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.task import Task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.hidden_states import HiddenStateCache, row_key
from malmoi.inference.embed import check_layers
from malmoi.model import FeatureConfig, Network
from malmoi.model.heads import LABEL_HEADS, POOLED_HEADS
from malmoi.tokenizer import TokenRow

# depth → (layers, whether they are combined by a weighted sum)
LAYER_CHOICES: dict[str, Callable[[int], tuple[tuple[int, ...], bool]]] = {
    "embeddings": lambda depth: ((0,), False),
    "second-to-last": lambda depth: ((depth - 1,), False),
    "last": lambda depth: ((depth,), False),
    "last4": lambda depth: (_last4(depth), False),
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
    if head not in LABEL_HEADS:
        raise UsageError(
            f"features support labels and numbers; {task.kind} is learnt by fine-tuning the "
            "whole model."
        )
    depth = start.network.config.depth
    layers, weighted = _chosen(settings.features, depth)
    recurrent = 0 if head in POOLED_HEADS else settings.recurrent
    return FeatureConfig(layers=layers, weighted=weighted, recurrent=recurrent)


def _chosen(name: str, depth: int) -> tuple[tuple[int, ...], bool]:
    if name in LAYER_CHOICES:
        return LAYER_CHOICES[name](depth)
    word, _, numbers = name.partition("=")
    try:
        if word != "layers":
            raise ValueError
        given = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        known = f"{', '.join(LAYER_CHOICES)} or layers=8,9,-1"
        raise UsageError(
            f"There are no features {name!r}.{nearest(name, LAYER_CHOICES)} Use {known}."
        ) from None
    check_layers(given, depth)
    return tuple(layer % (depth + 1) for layer in given), False


class CachedTrunk(nn.Module):
    """Replaces the trunk, reading the same hidden states from disk."""

    def __init__(self, network: Network, states: HiddenStateCache) -> None:
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
        for i, (row, n) in enumerate(
            zip(torch.stack(parts, 1).cpu().numpy(), lengths, strict=True)
        ):
            found[i, :n] = self.states[row_key(row[:, :n])]
        return found.to(weight.device)


@contextmanager
def cached_states(network: Network, rows: Callable[[], Sequence[TokenRow]]) -> Iterator[None]:
    """A context in which the frozen trunk's states of these rows are read, not recomputed."""
    if network.features is None:
        yield
        return
    trunk = network.trunk
    network.trunk = CachedTrunk(network, HiddenStateCache.of(network, rows()))  # type: ignore[assignment]
    try:
        yield
    finally:
        network.trunk = trunk
