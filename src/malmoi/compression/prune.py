"""Pruning: zeroes single weights, or removes whole layers, heads or neurons, least important first.

The importance of a head or a neuron to a loss is |∂L / ∂gate| of a gate on its output: the sum of
activation · gradient (Michel et al. 2019 eq. 2; Molchanov et al. 2017), by one pass for all.
B rows, T tokens, N parts, D width, H heads, G key/value heads, E head width, F neurons of an MLP.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.translate import empty, fill_network
from malmoi.compression.result import CompressionResult, folder_measures, judged_options, open_whole
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, explained, require_that
from malmoi.evaluation.examples import load_examples, require_labels
from malmoi.evaluation.features import FeatureView
from malmoi.evaluation.kinds import encode_examples, head_kind
from malmoi.evaluation.tasks import Task, named_task
from malmoi.finetuning.trainer import collate
from malmoi.inference.predict import Predictor
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.text.documents import read_documents
from malmoi.training.losses import IGNORE_LABEL, ForwardPass, Objective, lm
from malmoi.training.parallel import join_process_group

# limits: rows in total, rows per batch, tokens of each text
MAX_SAMPLE_ROWS = 512
ROWS_PER_BATCH = 8
MAX_SAMPLE_TOKENS = 512
SampleBatch = Mapping[str, Tensor]
# (name in the block, tensor) → what remains of that tensor


def prune_model(model: str | Path, out: str | Path, **options: Any) -> CompressionResult:
    """Prunes a model with exactly one of `PruneOptions`; its task, data and device judge it."""
    train = options.pop("train", None)
    chosen = {name: how for name in PRUNE_METHODS if (how := options.pop(name, None)) is not None}
    require_that(
        len(chosen) == 1,
        "Choose one of sparsity, pattern, layers, heads and neurons to prune by, not {chosen}.",
        chosen=", ".join(chosen) or msg("none"),
    )
    way, how = chosen.popitem()
    judge = judged_options(options, train)
    out = Path(out)
    checkpoint = open_whole(model, out)
    source = checkpoint.source or out
    arguments = [checkpoint.network, how]
    if train is not None:
        require_that(
            way in ("heads", "neurons"), "--train ranks heads and neurons, not {way}.", way=way
        )
        _count(how, 1, way)  # refuses an impossible share before the work
        device = join_process_group(judge.device).device
        arguments += [part_importance(checkpoint, way, judge.task, train, device)]
    smaller = PRUNE_METHODS[way](*arguments)
    before = {"zeros": zeros(checkpoint.network)} | folder_measures(source, judge)
    write_checkpoint(replace(checkpoint, network=smaller), out)
    after = {"zeros": zeros(smaller)} | folder_measures(out, judge)
    return CompressionResult.of((checkpoint.network, source), (smaller, out), before, after)


def zeros(network: Network) -> float:
    """The share of zeros among the blocks' linear weights."""
    weights = [linear.weight for linear in _linear_maps(network)]
    count = sum(weight.numel() for weight in weights)
    return sum(int((weight == 0).sum()) for weight in weights) / count


def _linear_maps(network: Network) -> list[nn.Linear]:
    return [module for module in network.trunk.blocks.modules() if isinstance(module, nn.Linear)]


# ------------------------------------------------------------------ single weights


@torch.no_grad()
def sparsified(network: Network, share: float) -> Network:
    """Sets the smallest weights of each linear map to zero (Han et al. 2015)."""
    require_that(
        0 < share < 1,
        "sparsity is the share of weights set to zero, between 0 and 1, not {share:g}.",
        share=share,
    )
    network = deepcopy(network)
    for linear in _linear_maps(network):
        count = linear.weight.numel()
        _clear(linear, count, count - round(share * count))
    return network


@torch.no_grad()
def patterned(network: Network, pattern: str) -> Network:
    """Keeps the N largest weights of every M adjacent inputs: "2:4" suits GPUs' sparse matmuls."""
    stay, block = _counts(pattern)
    network = deepcopy(network)
    for linear in _linear_maps(network):
        require_that(
            linear.in_features % block == 0,
            "The pattern {pattern} does not divide {features} inputs; choose another.",
            pattern=pattern,
            features=linear.in_features,
        )
        _clear(linear, block, stay)
    return network


def _clear(linear: nn.Linear, block: int, stay: int) -> None:
    """Keeps only the largest few of every group of adjacent weights."""
    sizes = linear.weight.abs().reshape(-1, block)
    gone = torch.zeros_like(sizes, dtype=torch.bool).scatter_(
        1, sizes.argsort(1)[:, : block - stay], value=True
    )
    linear.weight.masked_fill_(gone.view_as(linear.weight), 0)


def _counts(pattern: str) -> tuple[int, int]:
    stay, colon, block = pattern.partition(":")
    require_that(
        colon and stay.isdecimal() and block.isdecimal() and 0 < int(stay) < int(block),
        "A pattern is two numbers such as 2:4 (two of every four are kept); {pattern!r} is not.",
        pattern=pattern,
    )
    return int(stay), int(block)


# ------------------------------------------------------------------ whole parts


def with_layers(network: Network, layers: str | Sequence[int]) -> Network:
    """The network with only these layers, each with its own attention pattern."""
    config = network.config
    stay = _numbers(layers)
    require_that(
        config.distinct >= config.depth,
        "The layers of this model share their weights: removing some does not make it smaller.",
    )
    require_that(
        not config.skip_connections,
        "Skip connections pair the layers of this model: prune its heads or neurons instead.",
    )
    require_that(
        network.features is None,
        "A feature model reads these layers by index: prune before fine-tuning it.",
    )
    require_that(
        stay and stay == sorted(set(stay)) and 0 <= stay[0] <= stay[-1] < config.depth,
        "layers are the ones to keep, each once and in order, from 0 to {depth}; not {layers}.",
        depth=config.depth - 1,
        layers=layers,
    )
    patterns = [config.attention[i % len(config.attention)] for i in stay]
    attention = tuple(patterns[:1] if len(set(patterns)) == 1 else patterns)
    # if the first block is removed, the next one keeps its norm
    first_norm = config.first_norm or stay[0] > 0
    changed = replace(config, depth=len(stay), groups=0, attention=attention, first_norm=first_norm)
    return _rebuilt(network, changed, stay, [lambda name, tensor: tensor] * len(stay))


def _numbers(layers: str | Sequence[int]) -> list[int]:
    parts = layers.split(",") if isinstance(layers, str) else layers
    with explained(
        ValueError,
        "layers are comma-separated numbers, such as 0,2,4; not {layers}.",
        raises=UsageError,
        layers=layers,
    ):
        return [int(part) for part in parts]


def with_neurons(network: Network, share: float, sizes: Sequence[Tensor] | None = None) -> Network:
    """Keeps the same share of neurons in every MLP, the largest by `sizes` or |w_in| · |w_out|."""
    config = network.config
    stay = _count(share, config.mlp_width, "neurons")
    sizes = sizes or [_neuron_sizes(block.mlp) for block in network.trunk.blocks]
    parts = [partial(_kept_neurons, config.mlp_width, _largest(one, stay)) for one in sizes]
    return _rebuilt(network, replace(config, hidden=stay), range(config.distinct), parts)


def _neuron_sizes(mlp: Any) -> Tensor:
    """[F]; a gated neuron has two input rows, whose product counts."""
    write = mlp.down.weight.norm(dim=0)
    return cast(Tensor, mlp.up.weight.norm(dim=1).view(-1, len(write)).prod(0) * write)


def _kept_neurons(hidden: int, chosen: Tensor, name: str, tensor: Tensor) -> Tensor:
    if name.startswith("mlp.up."):
        return cast(Tensor, tensor.unflatten(0, (-1, hidden))[:, chosen].flatten(0, 1))
    return tensor[:, chosen] if name == "mlp.down.weight" else tensor


def with_heads(network: Network, share: float, sizes: Sequence[Tensor] | None = None) -> Network:
    """Keeps the same share of heads in every layer, the largest by `sizes` or by their output.

    Heads that share keys are kept or removed together.
    """
    config = network.config
    varies = any(pattern.varies_by_head for pattern in network.trunk.patterns)
    require_that(
        not varies and not network.trunk.needs_distances,
        "The heads of this model have patterns or biases of their own, so none can be removed.",
    )
    stay = _count(share, config.key_heads, "heads")
    sizes = sizes or [_head_sizes(block.attend, config) for block in network.trunk.blocks]
    parts = [partial(_kept_heads, config, _largest(one, stay)) for one in sizes]
    changed = replace(
        config,
        heads=stay * config.heads // config.key_heads,
        kv_heads=stay if config.kv_heads else 0,
        head_width=config.size_per_head,
    )
    return _rebuilt(network, changed, range(config.distinct), parts)


def _head_sizes(attend: Any, config: ModelConfig) -> Tensor:
    """|W_out W_value| of each group of heads [G]: how strongly its output depends on its input."""
    shape = (config.key_heads, config.size_per_head)
    # [G, E, D]
    value = attend.qkv.weight[-config.key_heads * config.size_per_head :].unflatten(0, shape)
    out = attend.out.weight.unflatten(1, (shape[0], -1, shape[1]))  # [D, G, H / G, E]
    written = torch.einsum("dgne,gei->gndi", out.float(), value.float())
    return cast(Tensor, written.flatten(1).norm(dim=1))


def _kept_heads(config: ModelConfig, chosen: Tensor, name: str, tensor: Tensor) -> Tensor:
    groups = config.key_heads
    if name.startswith("attend.qkv."):
        size = config.size_per_head
        sizes = (config.heads * size, groups * size, groups * size)
        parts = (one.unflatten(0, (groups, -1)) for one in tensor.split(sizes))
        return torch.cat([one[chosen].flatten(0, 1) for one in parts])
    if name == "again.value.weight":
        return cast(Tensor, tensor.unflatten(0, (groups, -1))[chosen].flatten(0, 1))
    if name == "attend.out.weight":
        return cast(Tensor, tensor.unflatten(1, (groups, -1))[:, chosen].flatten(1))
    return tensor


def _count(share: float, whole: int, what: str) -> int:
    require_that(
        0 < share <= 1,
        "{what} is the share to keep, above 0 and at most 1, not {share:g}.",
        what=what,
        share=share,
    )
    return max(1, round(share * whole))


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The indices of the largest, in ascending order."""
    return sizes.topk(count).indices.sort().values


@torch.no_grad()
def _rebuilt(
    network: Network,
    config: ModelConfig,
    layers: Sequence[int],
    parts: Sequence[Callable[[str, Tensor], Tensor]],
) -> Network:
    """A network with this config from what remains of these layers, all else unchanged."""
    pooler = network.pooler is not None and network.features is None
    smaller = empty(config, network.classes, pooler=pooler, features=network.features)
    state = network.state_dict().items()
    weights = {name: tensor for name, tensor in state if not name.startswith("trunk.blocks.")}
    weights |= {
        f"trunk.blocks.{i}.{name}": part(name, tensor).contiguous()
        for i, (layer, part) in enumerate(zip(layers, parts, strict=True))
        for name, tensor in network.trunk.blocks[layer].state_dict().items()
    }
    fill_network(smaller, weights, Path(), {})
    return smaller.eval()


PRUNE_METHODS: dict[str, Callable[..., Network]] = {
    "sparsity": sparsified,
    "pattern": patterned,
    "layers": with_layers,
    "heads": with_heads,
    "neurons": with_neurons,
}


# ------------------------------------------------------------------ importance to a loss


def part_importance(
    checkpoint: Checkpoint, part: str, task: str | Task | None, data: Path, device: torch.device
) -> list[Tensor]:
    """The importance [N] of each block's "heads" (groups, if they share keys) or "neurons"."""
    network = checkpoint.network.to(device)
    objective, batches = (
        _of_text(checkpoint, data) if task is None else _of_rows(checkpoint, task, data)
    )
    count = network.config.key_heads if part == "heads" else network.config.mlp_width
    found = torch.zeros(network.config.distinct, count, device=device)
    for batch in batches:
        sent = {name: tensor.to(device) for name, tensor in batch.items()}
        for block, change in gradients(network, part, objective, sent):
            found[block] += change.unflatten(1, (count, -1)).sum(-1).abs().sum(0)
    network.to("cpu")
    return list(found.cpu())


@torch.enable_grad()
def gradients(
    network: Network, part: str, objective: Objective, batch: SampleBatch
) -> list[tuple[int, Tensor]]:
    """Activation · gradient of each block's heads or neurons, summed over tokens: [B, width]."""
    seen: list[tuple[int, Tensor]] = []

    def see(block: int, module: Any, given: tuple[Tensor]) -> None:
        seen.append((block, given[0]))

    writers: list[Any] = [
        b.attend.out if part == "heads" else b.mlp.down  # type: ignore[union-attr]
        for b in network.trunk.blocks
    ]
    hooks = [writer.register_forward_pre_hook(partial(see, i)) for i, writer in enumerate(writers)]
    try:
        done = ForwardPass.of(network, batch)
        loss = torch.stack([term.total(done) for term in objective.terms]).sum()
        slopes = torch.autograd.grad(loss, [active for _, active in seen])
    finally:
        for hook in hooks:
            hook.remove()
    pairs = zip(seen, slopes, strict=True)
    return [(block, (active.detach() * slope).float().sum(1)) for (block, active), slope in pairs]


def _of_rows(
    checkpoint: Checkpoint, task: str | Task, data: Path
) -> tuple[Objective, Iterator[SampleBatch]]:
    task = named_task(task) if isinstance(task, str) else task
    reading = Predictor.of(checkpoint)
    kind = head_kind(task)
    require_that(
        kind.head in checkpoint.network.heads,
        "This model has no {head} head, which the task {task} needs.",
        head=kind.head,
        task=task.name,
    )
    examples = load_examples(task, data).rows[:MAX_SAMPLE_ROWS]
    require_labels(examples)
    items = encode_examples(task, examples, FeatureView.of(reading, reading.labels))
    return kind.objective(None), (
        collate(items[i : i + ROWS_PER_BATCH], checkpoint.network.config)
        for i in range(0, len(items), ROWS_PER_BATCH)
    )


def _of_text(checkpoint: Checkpoint, data: Path) -> tuple[Objective, Iterator[SampleBatch]]:
    require_that(
        "lm" in checkpoint.network.heads,
        "Ranking by plain text needs a GPT; for this model give the --task of the rows.",
    )
    text = "\n\n".join(document.text for document in read_documents(data))
    tokens = torch.tensor(checkpoint.required_tokenizer.encode(text, specials=False).tokens)
    rows = tokens.split(min(checkpoint.network.config.context, MAX_SAMPLE_TOKENS))
    return lm(), (
        {"tokens": row[None], "lm_labels": F.pad(row[None, 1:], (0, 1), value=IGNORE_LABEL)}
        for row in islice(rows, MAX_SAMPLE_ROWS)
        if len(row) > 1
    )
