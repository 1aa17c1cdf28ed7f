"""How a base is known again: its shape, and a checksum of each tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint.table import function_of
from malmoi.checkpoint.translate import is_tied
from malmoi.limits import shown
from malmoi.untrusted import JsonObject

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(base: Checkpoint) -> dict[str, Any]:
    """The model's config and the sum of each tensor's bits, which any changed number changes."""
    network = base.network
    weights = {k: v for k, v in network.state_dict().items() if not (network.config.tied and is_tied(k))}
    return {"model": function_of(network.config), "weights": {k: checksum(v) for k, v in weights.items()}}


def checksum(tensor: Tensor) -> int:
    bits = tensor.detach().cpu().contiguous().view(BITS[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))


def difference(then: JsonObject, now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints, in words; nothing where they are equal."""
    model, weights = then.object("model"), then.object("weights")
    fields = [k for k, v in model.items() if _plain(now["model"].get(k)) != _plain(v)]
    if fields:
        name = fields[0]
        return f"its {shown(name)} is {shown(now['model'].get(name))} and was {shown(model[name])}"
    changed = [k for k, v in weights.items() if now["weights"].get(k) != v]
    if changed:
        more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
        return f"{shown(changed[0])}{more} {'have' if more else 'has'} other numbers"
    return ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
