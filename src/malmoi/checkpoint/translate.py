"""Converts a folder's tensors to a network and back; notes missing heads and unused tensors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from malmoi.checkpoint.quantized import Quantized, Weight, by_rows
from malmoi.checkpoint.sizes import check_sizes
from malmoi.checkpoint.table import ONE_ROW, Table, TensorRule
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError
from malmoi.model import FeatureConfig, Network, initialise
from malmoi.model.heads import HEADS, LABEL_HEADS, VOCABULARY_HEADS
from malmoi.model.int8 import QuantizedLinear, plain_state
from malmoi.model.int8_row import Packed
from malmoi.system.limits import MAX_WEIGHT
from malmoi.system.untrusted import JsonObject, named

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # noqa: TID251  # on the disk


def state_of(network: Network) -> dict[str, Weight]:
    """A network's weights by name, with quantized ones as numbers and scales."""
    found: dict[str, Weight] = {}
    for name, weight in plain_state(network).items():
        if isinstance(weight, Packed):
            kept = Quantized.of(weight)
            found[name] = kept if name.startswith("trunk.blocks.") else kept.dense()
        else:
            found[name] = weight
    return found


def to_hf(table: Table, network: Network) -> dict[str, Weight]:
    ours = state_of(network)
    heads = set(network.heads)
    c = network.config
    theirs: dict[str, Weight] = {}
    for rule in table.expand(c, heads):
        if rule.ours in ours and not (c.tied and is_tied(rule.ours)):
            saved = by_rows(lambda t, save=rule.via.save: save(t, c), ours[rule.ours])
            theirs |= zip(rule.theirs, saved, strict=True)
    prefix = table.prefix if table.bare(heads, tied=c.tied) else ""
    return {name.removeprefix(prefix): weight for name, weight in theirs.items()}


def from_hf(
    table: Table, weights: dict[str, Weight], theirs: Mapping[str, Any], folder: Path
) -> tuple[Network, tuple[str, ...]]:
    theirs = theirs if isinstance(theirs, JsonObject) else JsonObject(theirs, str(folder))
    config = table.read_config(theirs, theirs.where)
    check_sizes(config, weights, theirs.where)
    weights = _under_current_names(table, weights)
    architectures = theirs.list_of("architectures", str, default=[])
    heads = _heads(table, architectures, weights, table.free if config.tied else ())
    pooler = any(
        rule.theirs[0] in weights
        for rule in table.rules
        if rule.ours.startswith("pooler.") and not rule.head
    )
    with named(theirs.where):
        network = empty(config, heads, pooler=pooler)
    rules = {rule.ours: rule for rule in table.expand(config, set(heads))}
    found, used = _translate(network, rules, weights, folder)
    notes = fill_network(network, found, folder, {name: rules[name].theirs[0] for name in rules})
    used |= {*table.twins, *table.twins.values()}
    buffers = (".position_ids", ".attn.bias", ".attn.masked_bias", ".inv_freq")
    unused = [k for k in weights if k not in used and not f".{k}".endswith(buffers)]
    return network, (*notes, *([listing("not used", unused)] if unused else []))


def _under_current_names(table: Table, weights: dict[str, Weight]) -> dict[str, Weight]:
    """Their tensors under current names: LayerNorm's gamma and beta, prefixes, aliases."""
    prefix = table.prefix
    if not any(key.startswith(prefix) for key in weights):
        names = [t for r in table.rules for t in r.theirs if t.startswith(prefix)]
        trunk = {name.removeprefix(prefix).split(".")[0] for name in names}
        weights = {prefix + k if k.split(".")[0] in trunk else k: v for k, v in weights.items()}
    renamed: dict[str, Weight] = {}
    for key, tensor in weights.items():
        stem, _, end = key.rpartition(".")
        ends = {"gamma": ".weight", "beta": ".bias"}
        renamed.setdefault(stem + ends[end] if end in ends else key, tensor)
    for one, other in table.twins.items():
        if one in renamed or other in renamed:
            first, second = (one, other) if one in renamed else (other, one)
            renamed.setdefault(second, renamed[first])
    ours = {rule.ours: rule.theirs[0] for rule in table.rules}
    for head in sorted(VOCABULARY_HEADS):  # a tied weight is stored once, under either name
        tied = ours.get(f"heads.{head}.weight")
        if tied in renamed:
            renamed.setdefault(ours["trunk.embed.token.weight"], renamed[tied])
    return renamed


def _heads(
    table: Table, architectures: list[str], weights: Mapping[str, Weight], free: tuple[str, ...]
) -> dict[str, int]:
    """The heads in a folder and their classes: by its architecture, if their weights exist."""
    named = [h for a in architectures for h in table.architectures.get(a, ())]
    if not any(a in table.architectures for a in architectures):
        named = list(HEADS)
    held = {name: _score_tensors(table, name, weights) for name in dict.fromkeys([*free, *named])}
    taken: set[str] = set()
    found = {}
    for name, tensors in held.items():  # two heads may share a name there: the first one gets it
        if name in free or tensors - taken:
            found[name] = _classes(table, name, weights)
            taken |= tensors
    return found


def _score_tensors(table: Table, head: str, weights: Mapping[str, Weight]) -> set[str]:
    """The tensors found of a head's last matmul; earlier layers may belong to another head too."""
    ours = tuple(f"heads.{head}.{part}" for part in ("linear.weight", "weight", "bias"))
    rules = (rule for rule in table.rules if rule.head == head and rule.ours in ours)
    return {name for rule in rules for name in rule.theirs if name in weights}


def _classes(table: Table, head: str, weights: Mapping[str, Weight]) -> int:
    name = f"heads.{head}.linear.weight"
    found = (weights[r.theirs[0]] for r in table.rules if r.ours == name and r.theirs[0] in weights)
    return next((t.shape[0] for t in found if len(t.shape) == 2), 0)


def _translate(
    network: Network, rules: Mapping[str, TensorRule], weights: Mapping[str, Weight], folder: Path
) -> tuple[dict[str, Weight], set[str]]:
    shapes = {name: t.shape for name, t in network.state_dict().items()}
    found: dict[str, Weight] = {}
    used: set[str] = set()
    for name, rule in rules.items():
        used.update(rule.theirs)
        if name not in shapes or not all(t in weights for t in rule.theirs):
            continue
        given = [weights[t] for t in rule.theirs]
        for their_name, weight in zip(rule.theirs, given, strict=True):
            check_type(
                weight.scale if isinstance(weight, Quantized) else weight, their_name, folder
            )
        dimensions = len(shapes[name]) + (rule.via is ONE_ROW)
        rest = given[0].shape[1:]
        joinable = all(len(t.shape) == dimensions and t.shape[1:] == rest for t in given)
        tensor = by_rows(rule.via.load, *given) if joinable else given[0]
        if tensor.shape != shapes[name]:
            raise MalmoiError(
                f"{folder}: {rule.theirs[0]} has the shape "
                f"{list(weights[rule.theirs[0]].shape)}, but config.json asks for "
                f"{list(shapes[name])} in {name}; the weights and the config belong to different "
                "models."
            )
        found[name] = tensor
    return found, used


def empty(
    config: ModelConfig,
    heads: Mapping[str, int],
    *,
    pooler: bool,
    features: FeatureConfig | None = None,
) -> Network:
    """A network without memory for its weights, to be filled with those of a file."""
    with torch.device("meta"):
        network = Network(config, heads, pooler=pooler, features=features)
    if any(_computed(module) for module in network.modules()):
        _compute(network, Network(config, heads, pooler=pooler, features=features))
    return network


def _computed(module: nn.Module) -> dict[str, Tensor]:
    """A module's tensors that no file holds and the meta device could not compute.

    Malmoi's own name their device, so that there are none; a new module need not know that rule.
    """
    tensors = {**module._buffers, **vars(module)}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.is_meta
        if name not in module._buffers or name in module._non_persistent_buffers_set
    }


def _compute(network: Network, real: Network) -> None:
    for module, twin in zip(network.modules(), real.modules(), strict=True):
        for name in _computed(module):
            setattr(module, name, getattr(twin, name))


def fill_network(
    network: Network, found: dict[str, Weight], folder: Path, theirs: Mapping[str, str]
) -> tuple[str, ...]:
    """Loads tensors into a network on the meta device; a head without weights is initialised."""
    wanted = [k for k in network.state_dict() if not (network.config.tied and is_tied(k))]
    missing = [k for k in wanted if k not in found]
    lost = [theirs.get(k, k) for k in missing if k.startswith("trunk.")]
    if lost:
        raise MalmoiError(
            f"{folder}: {len(lost)} weights of the model are missing, starting with {lost[0]}; "
            "it cannot be used."
        )
    fresh = _fresh_heads(network) if missing else {}
    plain, notes = _of_one_type(network, _place_quantized(network, found, folder), folder)
    network.load_state_dict({**plain, **{k: fresh[k] for k in missing}}, strict=False, assign=True)
    network.tie()
    new = [theirs.get(k, k) for k in missing]
    return (*notes, *([listing("newly initialised", new)] if new else []))


def _of_one_type(
    network: Network, found: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Converts the tensors to one dtype to compute in: mixed half precisions become fp32."""
    wanted = {name: tensor.dtype for name, tensor in network.state_dict().items()}
    for name, tensor in found.items():
        if wanted[name] == torch.float32:
            check_type(tensor, name, folder)
            check_finite(tensor, name, folder)
        elif tensor.dtype != wanted[name]:
            raise MalmoiError(
                f"{folder}: the weight {name} is kept as {_called(tensor.dtype)}, not as "
                f"{_called(wanted[name])}."
            )
    own = [name for name in found if wanted[name] == torch.float32]
    types = {found[name].dtype for name in own}
    if len(types) < 2 and torch.float64 not in types:
        return found, ()
    mixed = {name: found[name].to(torch.float32) for name in own}
    names = ", ".join(sorted(map(_called, types)))
    return {**found, **mixed}, (f"converted to float32: the weights have the types {names}",)


def check_type(tensor: Tensor, name: str, folder: Path) -> None:
    """Refuses dtypes that cannot be weights: integers and 8-bit types."""
    if tensor.dtype not in FLOATS:
        raise MalmoiError(
            f"{folder}: the weight {name} is kept as {_called(tensor.dtype)}; Malmoi reads "
            f"{', '.join(map(_called, FLOATS))} there."
        )


def check_labels(network: Network, labels: tuple[str, ...], where: str) -> None:
    """Refuses labels whose number differs from the number of classes."""
    classes = next((n for name, n in network.classes.items() if name in LABEL_HEADS), None)
    if labels and classes is not None and classes != len(labels):
        raise MalmoiError(
            f"{where} names {len(labels)} labels, and the model has {classes} classes."
        )


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_finite(tensor: Tensor, name: str, folder: Path) -> None:
    """Refuses weights that are NaN, or so large that results would be."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # no value is larger than the norm, which takes a third of the time
    if tensor.dtype == torch.float32 and torch.linalg.vector_norm(tensor) < MAX_WEIGHT:
        return
    if not all(x.abs() < MAX_WEIGHT for x in tensor.aminmax()):
        raise MalmoiError(
            f"{folder}: the weight {name} holds values that are NaN or beyond {MAX_WEIGHT:g}; it "
            "is damaged."
        )


def _place_quantized(network: Network, found: dict[str, Weight], folder: Path) -> dict[str, Tensor]:
    """Replaces plain maps by quantised ones and returns the remaining tensors.

    `found` is emptied on the way, so that no weight is in memory both as read and as laid out.
    """
    plain: dict[str, Tensor] = {}
    for name in sorted(found):  # sorted: a bias comes before its weight
        weight = found.pop(name)
        if not isinstance(weight, Quantized):
            plain[name] = weight
            continue
        check_type(weight.scale, name, folder)
        check_finite(weight.scale, name, folder)
        packed = weight.packed()
        where = name.removesuffix(".weight")
        if packed is None:
            plain[name] = weight.dense()
        else:
            network.set_submodule(where, QuantizedLinear(packed, plain.pop(f"{where}.bias", None)))
    return plain


def _fresh_heads(network: Network) -> dict[str, Tensor]:
    """New weights for every head, taken from a throwaway one-layer network."""
    config = replace(network.config, depth=1, groups=0)
    pooler = network.pooler is not None
    fresh = Network(config, network.classes, pooler=pooler, features=network.features)
    return dict(initialise(fresh, seed=0).state_dict())


def is_tied(name: str) -> bool:
    """Whether this is a vocabulary head's weight, tied to the token embedding."""
    return any(name == f"heads.{head}.weight" for head in VOCABULARY_HEADS)


def listing(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what}: {shown}"
