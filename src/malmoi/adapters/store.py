"""An adapter's folder: a small weights file and the name of its base, in PEFT's format.

What PEFT has no field for (labels, the task, the base's fingerprint) is in adapter.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.adapters import peft
from malmoi.adapters.attach import fold_adapter
from malmoi.adapters.config import AdapterConfig
from malmoi.checkpoint import Checkpoint, read_checkpoint, table_for
from malmoi.checkpoint.read_folder import read_model_json
from malmoi.checkpoint.table import Table, function_of
from malmoi.checkpoint.translate import check_finite, check_labels, check_type, is_tied
from malmoi.checkpoint.weights import read_file, write_tensors
from malmoi.errors import MalmoiError, UsageError, ensure, explained, nearest, require_that
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.model.heads import HEADS, VOCABULARY_HEADS
from malmoi.system.files import output_folder, write_json, write_text
from malmoi.system.paths import ADAPTER_CONFIG, is_adapter
from malmoi.system.result import plain
from malmoi.system.storage import address, local_path
from malmoi.system.untrusted import (
    MAX_CLASSES,
    MAX_PATH_CHARACTERS,
    JsonObject,
    read_optional_object,
    shown,
)
from malmoi.tokenizer import Tokenizer

INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_fingerprint(base: Checkpoint) -> dict[str, Any]:
    """The model's config and a checksum of each tensor's bits, to detect any changed number."""
    c = base.network.config
    weights = base.network.state_dict().items()
    checksums = {k: checksum(v) for k, v in weights if not (c.tied and is_tied(k))}
    return {"model": plain(function_of(c)), "weights": checksums}


def checksum(tensor: Tensor) -> int:
    bits = tensor.detach().cpu().contiguous().view(INT_OF_BYTES[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))


def difference(then: JsonObject, now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints, in words; empty if they are equal."""
    model = then.object("model")
    weights = then.object("weights")
    if fields := [k for k, v in model.items() if now["model"].get(k) != v]:
        name = fields[0]
        return msg(
            "its {name} is {model} and was {model2}",
            name=shown(name),
            model=shown(now["model"].get(name)),
            model2=shown(model[name]),
        )
    if changed := [k for k, v in weights.items() if now["weights"].get(k) != v]:
        more = msg(" and {count} more tensors", count=len(changed) - 1) if changed[1:] else ""
        return msg("{name}{more} changed", name=shown(changed[0]), more=more)
    return ""


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_RECORD = "adapter.json"
PEFT_TYPES = ("LORA", "PROMPT_TUNING", "PREFIX_TUNING", "MALMOI_PROMPT")


# ------------------------------------------------------------------ writing


def write_adapter(
    checkpoint: Checkpoint, base: Checkpoint, adapter: AdapterConfig, folder: Path
) -> None:
    """Saves what was trained: the adapter's weights, and those that the task added."""
    network = checkpoint.network
    table = table_for(base.network)
    lora = adapter.kind == "lora"
    own = peft.lora_tensors(network, table) if lora else peft.soft_tensors(network)
    config = peft.lora_config(network, adapter, table) if lora else peft.soft_config(network)
    new = peft.new_weights(network, _learnt(network), table)
    prefix = peft.LORA_PREFIX if lora else peft.SOFT_PREFIX
    tensors = own | {prefix + name: tensor for name, tensor in new.items()}
    types = [HEADS[head].peft_task for head in network.heads if HEADS[head].peft_task]
    config |= {
        "base_model_name_or_path": address(Path(str(base.source))),
        "task_type": types[0] if types else None,
        "inference_mode": True,
        "modules_to_save": peft.modules(new, table) or None,
    }
    meta = {"labels": checkpoint.labels, "malmoi": checkpoint.extra, "base": base_fingerprint(base)}
    heads = {name: len(checkpoint.labels) for name in network.heads}
    with output_folder(folder) as place:
        write_tensors(place / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(place)
        write_json(place / ADAPTER_RECORD, {"heads": heads, **meta})
        write_json(place / ADAPTER_CONFIG, config)
        write_text(place / "README.md", _card(config))


def _learnt(network: Network) -> set[str]:
    """Names of the network's own trained weights: a task's new layer, not the adapter."""
    own = ("trunk.soft_prompt", "trunk.prefix_kv")
    learning = (name for name, p in network.named_parameters() if p.requires_grad)
    return {name for name in learning if name not in own and ".patches." not in name}


def _card(config: Mapping[str, Any]) -> str:
    base = config["base_model_name_or_path"]
    return f"""---
library_name: peft
tags: [malmoi, {config["peft_type"].lower()}]
---
# An adapter ({config["peft_type"]})

It changes the model in `{base}`, which must be there and unchanged:

```python
import malmoi
malmoi.load(".")
```
"""


# ------------------------------------------------------------------ reading


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of an adapter's folder."""

    folder: Path
    config: JsonObject
    record: JsonObject
    tensors: dict[str, Tensor]


def read_with_adapter(
    source: str | Path, *, device: str | torch.device = "cpu", packed: bool = False
) -> Checkpoint:
    """Opens a model's folder, as `read_checkpoint` does, or an adapter's on its base."""
    if not is_adapter(source):
        return read_checkpoint(source, device=device, packed=packed)
    found = _open(local_path(source))
    base = _base(found)
    network = base.network
    _set_heads(found, network, table_for(network))
    fold_adapter(network)
    network.eval().to(device=device)
    own = (found.folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.load(found.folder) if own else base.tokenizer
    labels = tuple(found.record.list_of("labels", str, default=list(base.labels)))
    extra = dict(found.record.object("malmoi", default=base.extra))
    check_labels(network, labels, found.record.where)
    kept = (base.generation, base.notes, extra, found.folder, base.source_config)
    return Checkpoint(network, tokenizer, labels, *kept)


def _open(folder: Path) -> AdapterFolder:
    config = read_model_json(folder / ADAPTER_CONFIG)
    kind = config.text("peft_type", default="")
    ensure(
        kind in PEFT_TYPES,
        "{where} says peft_type {kind}, which Malmoi does not support.{hint}",
        where=config.where,
        kind=shown(kind),
        hint=nearest(kind, PEFT_TYPES),
    )
    ensure(
        (folder / ADAPTER_WEIGHTS).is_file(),
        "{folder} is an adapter without weights: {weights} is missing.",
        folder=folder,
        weights=ADAPTER_WEIGHTS,
    )
    tensors = read_file(folder / ADAPTER_WEIGHTS)
    for name, tensor in tensors.items():
        check_type(tensor, name, folder)
        check_finite(tensor, name, folder)
    return AdapterFolder(folder, config, read_optional_object(folder / ADAPTER_RECORD), tensors)


def _base(found: AdapterFolder) -> Checkpoint:
    """Opens the base, if it is still the one that the adapter was trained on."""
    named = found.config.text("base_model_name_or_path", default="")
    found.config.require(
        "\0" not in named and len(named) <= MAX_PATH_CHARACTERS,
        "base_model_name_or_path",
        "the path of a folder",
    )
    where = found.folder / named if (found.folder / named).is_dir() and named else named
    mend = msg(
        "Set base_model_name_or_path to its current path in {folder}.",
        folder=found.folder / ADAPTER_CONFIG,
    )
    ensure(
        named,
        "{folder} is an adapter that does not name its base. {mend}",
        folder=found.folder,
        mend=mend,
    )
    with explained(
        MalmoiError,
        "{folder} is an adapter of {named}, which cannot be opened: {error} {mend}",
        folder=found.folder,
        named=named,
        mend=mend,
    ):
        base = read_checkpoint(where)
    then = found.record.object("base", default={})
    base = _as_trained(base, then)
    changed = difference(then, base_fingerprint(base)) if then else ""
    ensure(
        not changed,
        "{folder} was trained on the model in {named}, which has changed since: "
        "{changed}. Restore that model, or train the adapter again.",
        folder=found.folder,
        named=named,
        changed=changed,
    )
    return base


def _as_trained(base: Checkpoint, then: JsonObject) -> Checkpoint:
    """The base in the reading that the adapter was trained with, if it reads both ways."""
    if not base.network.config.both_ways:
        return base
    masked = base.network.masked()
    attention = then.object("model", default={}).get("attention")
    return replace(base, network=masked) if attention == [*masked.config.attention] else base


def _set_heads(found: AdapterFolder, network: Network, table: Table | None) -> None:
    """Loads the adapter and the task's new weights into the base."""
    lora = found.config["peft_type"] == "LORA"
    prefix = peft.LORA_PREFIX if lora else peft.SOFT_PREFIX
    used = (
        peft.put_lora(network, found.config, found.tensors, table)
        if lora
        else peft.put_soft(network, found.config, found.tensors)
    )
    left = ((name, tensor) for name, tensor in found.tensors.items() if name not in used)
    new = {name.removeprefix(prefix): tensor for name, tensor in left}
    if new or "heads" in found.record:
        heads = found.record.object("heads", default={})
        classes = {name: heads.whole(name, high=MAX_CLASSES) for name in heads}
        with explained(UsageError, "{where}: {error}", where=found.record.where):
            _replace_heads(network, classes or _heads(found, new, table))
    weights = peft.our_weights(network, new, table)
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    for name, tensor in weights.items():
        ensure(
            shapes.get(name) == tensor.shape,
            "{folder}: {name} {shape} does not belong to this base.",
            folder=found.folder / ADAPTER_WEIGHTS,
            name=name,
            shape=list(tensor.shape),
        )
    network.load_state_dict(weights, strict=False)


def _heads(found: AdapterFolder, new: Mapping[str, Tensor], table: Table | None) -> dict[str, int]:
    """The head that PEFT's task type implies, with its number of classes."""
    task = found.config.text("task_type", default=None)
    head = next((name for name, one in HEADS.items() if task and one.peft_task == task), None)
    rules = {rule.ours: rule.theirs[0] for rule in table.rules} if table and head else {}
    weight = rules.get(f"heads.{head}.linear.weight", "")
    if head is None or weight not in new or not new[weight].dim():
        raise MalmoiError(
            "{folder} holds {first}, which the task {task} does not use.",
            folder=found.folder / ADAPTER_WEIGHTS,
            first=next(iter(new), "nothing new"),
            task=shown(task),
        )
    return {head: new[weight].size(0)}


def _replace_heads(network: Network, heads: Mapping[str, int]) -> None:
    for name in [name for name in network.heads if name not in heads]:
        del network.heads[name]
    for name, classes in heads.items():
        if name not in network.heads or name not in VOCABULARY_HEADS:
            network.add(name, classes)


def check_target(folder: Path) -> None:
    """Refuses to write an adapter over a whole model."""
    require_that(
        not (folder / "config.json").is_file(),
        "{folder} holds a full model; choose another folder for the adapter.",
        folder=folder,
    )
