"""Adapters in PEFT's format: config and tensors, in both directions."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from malmoi.adapters.attach import LoRALinear, LoRAPatch, patched, set_prefix
from malmoi.adapters.config import AdapterConfig
from malmoi.checkpoint.table import TRANSPOSE, Table
from malmoi.errors import MalmoiError, ensure, explained
from malmoi.model import Network
from malmoi.system.confined import Refused, match_patterns
from malmoi.system.confined_worker import match_names
from malmoi.system.untrusted import JsonObject, shown

# of a wrapped model; soft prompts are wrapped one level less
LORA_PREFIX = "base_model.model."
SOFT_PREFIX = "base_model."
SOFT_TENSOR = "prompt_embeddings"
# Settings that change LoRA's mathematics, with the only values we support.
REQUIRED_DEFAULTS = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
}


class PeftPlace(NamedTuple):
    """Rows of one of our linear maps, and the PEFT module they correspond to."""

    ours: str
    start: int
    stop: int
    theirs: str
    flipped: bool = False  # stored [in, out] there


def places(network: Network, table: Table | None) -> Iterator[PeftPlace]:
    """Every linear map of the blocks, split as the family splits it: BERT's query, key, value."""
    linear = ((name, m) for name, m in network.named_modules() if isinstance(m, nn.Linear))
    maps = {name: m for name, m in linear if ".blocks." in name}
    if table is None:
        yield from (PeftPlace(name, 0, m.out_features, name) for name, m in maps.items())
        return
    for rule in table.expand(network.config, set(network.heads)):
        ours = rule.ours.removesuffix(".weight")
        if ours in maps and rule.ours.endswith(".weight"):
            saved = rule.via.save(maps[ours].weight, network.config)
            sizes = [maps[ours].out_features] if len(saved) == 1 else [len(part) for part in saved]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            for theirs, start, size in zip(rule.theirs, starts, sizes, strict=True):
                yield PeftPlace(
                    ours, start, start + size, theirs.removesuffix(".weight"), rule.via is TRANSPOSE
                )


def new_weights(network: Network, names: set[str], table: Table | None) -> dict[str, Tensor]:
    """A task's new weights under Hugging Face's names, or ours if it has none (GPT-1 tagging)."""
    ours = {name: tensor for name, tensor in network.state_dict().items() if name in names}
    theirs: dict[str, Tensor] = {}
    for rule in table.expand(network.config, set(network.heads)) if table else ():
        if rule.ours in ours:
            saved = rule.via.save(ours.pop(rule.ours), network.config)
            theirs |= zip(rule.theirs, saved, strict=True)
    return theirs | ours


def our_weights(
    network: Network, given: Mapping[str, Tensor], table: Table | None
) -> dict[str, Tensor]:
    """Maps a file's tensors to our names, the inverse of `new_weights`; unknown names are kept."""
    found = dict(given)
    for rule in table.expand(network.config, set(network.heads)) if table else ():
        if all(name in found for name in rule.theirs):
            found[rule.ours] = rule.via.load(*(found.pop(name) for name in rule.theirs))
    return found


def modules(names: Mapping[str, Tensor], table: Table | None) -> list[str]:
    """PEFT's `modules_to_save` for these tensors: the outermost module that is not the trunk."""
    prefix = table.prefix if table else "trunk."
    inner = [name.rpartition(".")[0] for name in names]
    return sorted(
        {name if name.startswith(prefix) or table is None else name.split(".")[0] for name in inner}
    )


# ------------------------------------------------------------------ LoRA


def lora_config(network: Network, adapter: AdapterConfig, table: Table | None) -> dict[str, Any]:
    """PEFT's LoRA config; a map with several patches gets its own rank, and alpha to match."""
    found = _joined(network, table)
    own = ((place.theirs, len(a)) for place, (a, _) in found)
    ranks = {name: rank for name, rank in own if rank != adapter.rank}
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": [place.theirs for place, _ in found],
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: adapter.alpha * rank / adapter.rank for name, rank in ranks.items()
        },
        "fan_in_fan_out": any(place.flipped for place, _ in found),
        "bias": "none",
    }


def lora_tensors(network: Network, table: Table | None) -> dict[str, Tensor]:
    return {
        f"{LORA_PREFIX}{place.theirs}.lora_{letter}.weight": tensor
        for place, pair in _joined(network, table)
        for letter, tensor in zip("AB", pair, strict=True)
    }


def _joined(network: Network, table: Table | None) -> list[tuple[PeftPlace, tuple[Tensor, Tensor]]]:
    found = []
    for place in places(network, table):
        module = network.get_submodule(place.ours)
        pair = module.joined(place.start, place.stop) if isinstance(module, LoRALinear) else None
        found += [(place, pair)] if pair is not None else []
    return found


def put_lora(
    network: Network, config: JsonObject, tensors: Mapping[str, Tensor], table: Table | None
) -> set[str]:
    """Adds patches from a file's tensors and returns the names that were used."""
    for name, plain in REQUIRED_DEFAULTS.items():
        value = config.get(name, plain)
        ensure(
            value == plain,
            "This LoRA has {name}={value}, which Malmoi does not support.",
            name=name,
            value=shown(value),
        )
    known = {place.theirs: place for place in places(network, table)}
    keys = [key for key in tensors if ".lora_A." in key]
    names = [key.removeprefix(LORA_PREFIX).partition(".lora_A.")[0] for key in keys]
    alphas = _alphas(config, names)
    used: set[str] = set()
    for key, name in zip(keys, names, strict=True):
        place = known.get(name) or known.get(f"{table.prefix if table else ''}{name}")
        pair = key, key.replace(".lora_A.", ".lora_B.")
        if place is None or pair[1] not in tensors:
            raise MalmoiError(
                "This LoRA changes {name}, which is not a linear layer in its base's blocks.",
                name=name,
            )
        _put(network, place, tensors[pair[0]], tensors[pair[1]], config, alphas[name])
        used.update(pair)
    return used


def _put(
    network: Network, place: PeftPlace, a: Tensor, b: Tensor, config: JsonObject, alpha: float
) -> None:
    module = patched(network, place.ours)
    wanted = [place.stop - place.start, module.in_features]
    flat = a.dim() == b.dim() == 2
    ensure(
        flat and [b.size(0), a.size(1)] == wanted and b.size(1) == a.size(0) > 0,
        "This LoRA's matrices for {name}, {shapes}, do not fit the base's layer {wanted}: it was "
        "trained on another model.",
        name=place.theirs,
        shapes=f"{list(a.shape)}, {list(b.shape)}",
        wanted=wanted,
    )
    rank = len(a)
    scale = alpha / math.sqrt(rank) if config.flag("use_rslora", default=False) else alpha / rank
    module.patches.append(LoRAPatch((place.start, place.stop), a, b, scale))


def _alphas(config: JsonObject, names: Sequence[str]) -> dict[str, float]:
    """The alpha of each map: of the first pattern matching the end of its name, or the default."""
    given = config.object("alpha_pattern", default={})
    values = [given.number(pattern) for pattern in given]
    # Plain names cannot backtrack; any other regex runs in the confined process, with a timeout.
    simple = all(re.fullmatch(r"[\w.]*", pattern) for pattern in given)
    patterns = [rf"(.*\.)?({pattern})" for pattern in given]
    asked = {"patterns": patterns, "names": list(names)}
    with explained(
        Refused,
        "{where}: alpha_pattern has an invalid regular expression: {error}.",
        where=config.where,
    ):
        found = match_names(asked) if simple else match_patterns(**asked)
    usual = config.number("lora_alpha", default=8)
    return {
        name: usual if at is None else values[at] for name, at in zip(names, found, strict=True)
    }


# ------------------------------------------------------------------ soft tokens


def soft_config(network: Network) -> dict[str, Any]:
    c = network.config
    trunk = network.trunk
    prefix = trunk.prefix_kv is not None
    n = trunk.prefix_kv.size(3) if trunk.prefix_kv is not None else len(trunk.soft_prompt)  # type: ignore[arg-type]
    # With a bidirectional model our pooler reads [CLS], PEFT's the first soft token: not the same
    # model.
    prompt = "PROMPT_TUNING" if trunk.is_causal else "MALMOI_PROMPT"
    own: dict[str, Any] = (
        {"prefix_projection": False} if prefix else {"prompt_tuning_init": "RANDOM"}
    )
    return {
        "peft_type": "PREFIX_TUNING" if prefix else prompt,
        "num_virtual_tokens": n,
        "token_dim": c.key_heads * c.size_per_head if prefix else c.token_width,
        "num_attention_heads": c.key_heads if prefix else c.heads,
        "num_layers": c.depth,
        "num_transformer_submodules": 1,
        **own,
    }


def soft_tensors(network: Network) -> dict[str, Tensor]:
    """A prompt [n, E], or a prefix [n, depth · 2 · G · E]."""
    trunk = network.trunk
    if trunk.prefix_kv is not None:
        return {SOFT_TENSOR: trunk.prefix_kv.permute(3, 0, 1, 2, 4).flatten(1)}
    return {SOFT_TENSOR: trunk.soft_prompt}  # type: ignore[dict-item]


def put_soft(network: Network, config: JsonObject, tensors: Mapping[str, Tensor]) -> set[str]:
    ensure(
        not config.flag("prefix_projection", default=False),
        "This prefix has prefix_projection=true, which Malmoi does not support; save it without.",
    )
    ensure(SOFT_TENSOR in tensors, "The adapter's weights have no prompt_embeddings.")
    c = network.config
    found = tensors[SOFT_TENSOR].to(network.device, network.dtype)
    prefix = config["peft_type"] == "PREFIX_TUNING"
    wanted = c.depth * 2 * c.key_heads * c.size_per_head if prefix else c.token_width
    ensure(
        found.dim() == 2 and found.size(1) == wanted,
        "Soft tokens of shape {shape} do not fit a base model that needs {wanted} numbers each.",
        shape=list(found.shape),
        wanted=wanted,
    )
    if prefix:
        shape = (len(found), c.depth, 2, c.key_heads, c.size_per_head)
        set_prefix(network, prefix_kv=found.view(shape).permute(1, 2, 3, 0, 4).contiguous())
    else:
        set_prefix(network, soft_prompt=found)
    return {SOFT_TENSOR}
