"""Converts a folder's tensors to a network and back; notes missing and unused heads."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from malmoi.checkpoint.table import ONE_ROW, Table, TensorRule
from malmoi.checkpoint.weights import Quantized, Weight, by_rows, check_sizes, dense
from malmoi.config import ModelConfig
from malmoi.errors import ensure, nearest
from malmoi.messages import msg
from malmoi.model import Network, initialise
from malmoi.model.heads import HEADS, LABEL_HEADS, VOCABULARY_HEADS
from malmoi.system.packages import read_toml
from malmoi.system.untrusted import MAX_WEIGHT, JsonObject, named

if TYPE_CHECKING:
    from malmoi.model import FeatureConfig

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # noqa: TID251  # on the disk


def to_hf(table: Table, network: Network, like: Sequence[str] = ()) -> dict[str, Weight]:
    """The tensors of their class of such a network; `like` are classes to prefer."""
    from malmoi.checkpoint.quantized import state_of

    ours = state_of(network)
    c = network.config
    theirs: dict[str, Weight] = {}
    for rule in table.expand(c, set(network.heads)):
        if rule.ours in ours and not (c.tied and is_tied(rule.ours)):
            saved = by_rows(lambda t, save=rule.via.save: save(t, c), ours[rule.ours])
            theirs |= zip(rule.theirs, saved, strict=True)
    # if their class is the trunk alone, tensors lose its prefix
    is_bare = table.architecture(set(network.heads), c, like) == next(iter(table.architectures))
    prefix = table.prefix if is_bare else ""
    return {name.removeprefix(prefix): weight for name, weight in theirs.items()}


def from_hf(
    table: Table, weights: dict[str, Weight], theirs: Mapping[str, Any], folder: Path
) -> tuple[Network, tuple[str, ...]]:
    """A network of their weights, every one of them: used, equal to a used one, or explained."""
    theirs = theirs if isinstance(theirs, JsonObject) else JsonObject(theirs, str(folder))
    config = table.read_config(theirs, theirs.where)
    check_sizes(config, weights, theirs.where)
    architectures = theirs.list_of("architectures", str, default=[])
    notes = check_keys(table, theirs, theirs.where)
    notes += _dead_twins(table, config, weights)
    weights = _under_current_names(table, weights, folder)
    matrix = _tie(table, weights) if config.tied else ""
    heads = _heads(table, architectures, weights, table.free if config.tied and not matrix else ())
    if matrix and VOCABULARY_HEADS & heads.keys():
        config = replace(config, tied=False)
        note = "read as untied: {matrix} is not the embedding, although config.json ties them"
        notes += (msg(note, matrix=matrix),)
    pooler = [r.theirs[0] for r in table.rules if r.ours.startswith("pooler.") and not r.head]
    with named(theirs.where):
        network = empty(config, heads, pooler=not weights.keys().isdisjoint(pooler))
    rules = {rule.ours: rule for rule in table.expand(config, set(heads))}
    found = _translate(network, rules, weights, folder)
    used = {id(weights[name]) for ours in found for name in rules[ours].theirs}
    unused = {name: weight for name, weight in weights.items() if id(weight) not in used}
    notes += _unused_heads(table, network, unused, folder)
    notes += fill_network(network, found, folder, {name: rules[name].theirs[0] for name in rules})
    return network, notes


def _dead_twins(
    table: Table, config: ModelConfig, weights: Mapping[str, Weight]
) -> tuple[str, ...]:
    """Notes names that transformers would tie but for their values, and then ignores."""
    pairs = [both for both in table.twins.items() if config.tied and weights.keys() >= {*both}]
    return tuple(
        msg("not used, as in transformers: {other} differs from {one}", other=other, one=one)
        for one, other in pairs
        if not is_same(weights[one], weights[other])
    )


def _under_current_names(
    table: Table, weights: dict[str, Weight], folder: Path
) -> dict[str, Weight]:
    """Their tensors under current names: LayerNorm's gamma and beta, prefixes, copies."""
    prefix = table.prefix
    if not any(key.startswith(prefix) for key in weights):
        names = [t for r in table.rules for t in r.theirs if t.startswith(prefix)]
        trunk = {name.removeprefix(prefix).split(".")[0] for name in names}
        weights = {prefix + k if k.split(".")[0] in trunk else k: v for k, v in weights.items()}
    renamed: dict[str, Weight] = {}
    for key, tensor in weights.items():
        stem, _, end = key.rpartition(".")
        ends = {"gamma": ".weight", "beta": ".bias"}
        today = stem + ends[end] if end in ends else key
        first = renamed.setdefault(table.copies.get(today, today), tensor)
        ensure(
            is_same(first, tensor),
            "{folder}: {key} is not equal to its copy under another name; Malmoi has one weight "
            "for both, and cannot know which is meant.",
            folder=folder,
            key=key,
        )
    for one, other in (*table.copies.items(), *table.twins.items()):
        if one in renamed or other in renamed:
            renamed[one] = renamed[other] = renamed[one if one in renamed else other]
    return renamed


def _tie(table: Table, weights: dict[str, Weight]) -> str:
    """Makes one weight of the embedding and the output matrix; the matrix's name if they differ.

    As in transformers, a config's word that they are tied does not count against the weights.
    """
    ours = {rule.ours: rule.theirs[0] for rule in table.rules}
    head = next(name for one in VOCABULARY_HEADS if (name := ours.get(f"heads.{one}.weight")))
    embedding = ours["trunk.embed.token.weight"]
    if head not in weights:
        return ""
    if not is_same(weights.setdefault(embedding, weights[head]), weights[head]):
        return head
    weights[head] = weights[embedding]
    return ""


def is_same(one: Weight, other: Weight) -> bool:
    """Whether two weights are equal, to the bit."""
    if one is other or isinstance(one, Quantized) or isinstance(other, Quantized):
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def _unused_heads(
    table: Table, network: Network, unused: Mapping[str, Weight], folder: Path
) -> tuple[str, ...]:
    """Names heads that the model's class lacks; refuses tensors that the family lacks."""
    opened = {None, *network.heads}
    rules = [r for r in table.rules if r.head not in opened or r.ours.startswith("pooler.")]
    idle = {name for rule in rules for name in rule.theirs}
    for name, weight in unused.items():
        constant = next((v for end, v in table.constants.items() if name.endswith(end)), None)
        known = name in idle or f".{name}".endswith(table.buffers)
        if constant is not None:
            stored = dense(weight).float()  # of half precision, perhaps
            computed = constant(network.config)
            same = stored.shape == computed.shape
            known = same and torch.allclose(stored, computed, rtol=0, atol=1e-3)
        ensure(
            known,
            "{folder} holds {name}, which a {model_type} with this config.json does not have, so "
            "the results could be others. If it is no part of the model, save it again with "
            "transformers.",
            folder=folder,
            name=name,
            model_type=table.model_type,
        )
    left = [name for name in unused if name in idle]
    return (listing("not used, since its class has no such head", left),) if left else ()


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
) -> dict[str, Weight]:
    shapes = {name: t.shape for name, t in network.state_dict().items()}
    found: dict[str, Weight] = {}
    for name, rule in rules.items():
        if name not in shapes or not all(t in weights for t in rule.theirs):
            continue
        given = [weights[t] for t in rule.theirs]
        for their_name, weight in zip(rule.theirs, given, strict=True):
            check_type(weight, their_name, folder)
        dimensions = len(shapes[name]) + (rule.via is ONE_ROW)
        rest = given[0].shape[1:]
        joinable = all(len(t.shape) == dimensions and t.shape[1:] == rest for t in given)
        tensor = by_rows(rule.via.load, *given) if joinable else given[0]
        ensure(
            tensor.shape == shapes[name],
            "{folder}: {theirs} has the shape {shape}, but config.json asks for {shapes}: they "
            "belong to different models.",
            folder=folder,
            theirs=rule.theirs[0],
            shape=list(given[0].shape),
            shapes=list(shapes[name]),
        )
        found[name] = tensor
    return found


def empty(
    config: ModelConfig,
    heads: Mapping[str, int],
    *,
    pooler: bool,
    features: "FeatureConfig | None" = None,
) -> Network:
    """A network without memory for its weights, to be filled with those of a file."""
    with torch.device("meta"):
        network = Network(config, heads, pooler=pooler, features=features)
    if any(_computed(module) for module in network.modules()):
        real = Network(config, heads, pooler=pooler, features=features)
        for module, twin in zip(network.modules(), real.modules(), strict=True):
            for name in _computed(module):
                setattr(module, name, getattr(twin, name))
    return network


def _computed(module: nn.Module) -> dict[str, Tensor]:
    """A module's tensors that no file holds and the meta device could not compute.

    Malmoi's own name their device, so that there are none; a new module need not know that rule.
    """
    return {
        name: tensor
        for name, tensor in {**module._buffers, **vars(module)}.items()
        if isinstance(tensor, Tensor) and tensor.is_meta
        if name not in module._buffers or name in module._non_persistent_buffers_set
    }


def fill_network(
    network: Network, found: dict[str, Weight], folder: Path, theirs: Mapping[str, str]
) -> tuple[str, ...]:
    """Loads tensors into a network on the meta device; a head without weights is initialised."""
    wanted = [k for k in network.state_dict() if not (network.config.tied and is_tied(k))]
    missing = [k for k in wanted if k not in found]
    lost = [theirs.get(k, k) for k in missing if k.startswith("trunk.")]
    ensure(
        not lost,
        "{folder}: {lost} weights of the model are missing, starting with {first}.",
        folder=folder,
        lost=len(lost),
        first="".join(lost[:1]),
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
        kinds = FLOATS if wanted[name] == torch.float32 else (wanted[name],)
        check_type(tensor, name, folder, kinds)
        check_finite(tensor, name, folder)
    own = [name for name in found if wanted[name] == torch.float32]
    types = {found[name].dtype for name in own}
    if len(types) < 2 and torch.float64 not in types:
        return found, ()
    mixed = {name: found[name].to(torch.float32) for name in own}
    names = ", ".join(sorted(map(_called, types)))
    note = msg("converted to float32: the weights have the types {names}", names=names)
    return {**found, **mixed}, (note,)


def check_type(
    weight: Weight, name: str, folder: Path, kinds: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Refuses dtypes that cannot be weights: integers and 8-bit types."""
    dtype = weight.scale.dtype if isinstance(weight, Quantized) else weight.dtype
    ensure(
        dtype in kinds,
        "{folder}: the weight {name} is kept as {called}; Malmoi reads {floats} there.",
        folder=folder,
        name=name,
        called=_called(dtype),
        floats=", ".join(map(_called, kinds)),
    )


def check_labels(network: Network, labels: tuple[str, ...], where: str) -> None:
    """Refuses labels whose number differs from the number of classes."""
    classes = next((n for name, n in network.classes.items() if name in LABEL_HEADS), None)
    ensure(
        not labels or classes is None or classes == len(labels),
        "{where} names {labels} labels, and the model has {classes} classes.",
        where=where,
        labels=len(labels),
        classes=classes,
    )


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_finite(tensor: Tensor, name: str, folder: Path) -> None:
    """Refuses weights that are NaN, or so large that results would be."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # no value is larger than the norm, which takes a sixth of the time; GPT-2's lie by columns
    if tensor.dtype == torch.float32:
        flat = (tensor if tensor.is_contiguous() else tensor.mT).reshape(-1)
        if flat.dot(flat) < MAX_WEIGHT**2:
            return
    ensure(
        all(x.abs() < MAX_WEIGHT for x in tensor.aminmax()),
        "{folder}: the weight {name} holds values that are NaN or beyond {most:g}; it is damaged.",
        folder=folder,
        name=name,
        most=MAX_WEIGHT,
    )


def _place_quantized(network: Network, found: dict[str, Weight], folder: Path) -> dict[str, Tensor]:
    """Places quantised maps; empties `found`, so that no weight is in memory twice."""
    plain: dict[str, Tensor] = {}
    for name in sorted(found):  # sorted: a bias comes before its weight
        weight = found.pop(name)
        if not isinstance(weight, Quantized):
            plain[name] = weight
            continue
        from malmoi.checkpoint.quantized import place_quantized

        check_type(weight, name, folder)
        check_finite(weight.scale, name, folder)
        where = name.removesuffix(".weight")
        if place_quantized(network, where, weight, plain.get(f"{where}.bias")):
            plain.pop(f"{where}.bias", None)
        else:
            plain[name] = weight.dense()
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
    more = msg(" and {count} more", count=len(names) - 4) if len(names) > 4 else ""
    return msg("{what}: {names}{more}", what=msg(what), names=", ".join(names[:4]), more=more)


# ------------------------------------------------------------------ keys of a config.json

# the keys that may be left unread, by the reason why they cannot change what a model computes
HARMLESS: dict[str, str] = read_toml("malmoi.checkpoint", "harmless.toml")
UNREAD = frozenset(name for names in HARMLESS.values() for name in names.split())
# every kind of dropout, and the ids of special tokens, which the tokenizer decides
UNREAD_KINDS = re.compile(r".*(dropout|layerdrop|pdrop).*|.*_token_id")


def check_keys(table: Table, theirs: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A note about keys that neither a table nor the lists above explain."""
    classes = theirs.get("architectures") or [""]
    known = not isinstance(classes, list) or classes[0] in ("", *table.architectures)
    ensure(
        known or "auto_map" not in theirs,
        "{where} asks for code of its own (auto_map), which Malmoi does not run: {name} is none of "
        "transformers' classes.",
        where=where,
        name=classes[0],
    )
    unread = table.unread(theirs, where)
    unknown = [k for k in unread if k not in UNREAD and not UNREAD_KINDS.fullmatch(k)]
    if not unknown:
        return ()
    return (
        msg(
            "config.json has settings that no {model_type} of transformers has: {names}.{hint}",
            model_type=table.model_type,
            names=", ".join(unknown[:4]),
            hint=nearest(unknown[0], table.known),
        ),
    )
