"""What PEFT calls an adapter's tensors: the model's own Hugging Face names behind a prefix of
its own.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from malmoi.checkpoint.table import TRANSPOSE, Table
from malmoi.model import Network

# of a wrapped model; soft tokens wrap it once less
LORA_PREFIX, SOFT_PREFIX = "base_model.model.", "base_model."
SOFT_TENSOR = "prompt_embeddings"


class PeftPlace(NamedTuple):
    """Some rows of one of our maps, and the map that they are there."""

    ours: str
    start: int
    stop: int
    theirs: str
    flipped: bool = False  # kept [in, out] there


def places(network: Network, table: Table | None) -> Iterator[PeftPlace]:
    """Every linear map of the blocks, cut as the family cuts it (BERT has query, key and value
    apart, GPT-2 not).
    """
    maps = {
        name: m
        for name, m in network.named_modules()
        if isinstance(m, nn.Linear) and ".blocks." in name
    }
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
    """A task's new weights under their names there; what has none (GPT-1 tags no words there)
    keeps ours.
    """
    ours = {name: tensor for name, tensor in network.state_dict().items() if name in names}
    theirs: dict[str, Tensor] = {}
    for rule in table.expand(network.config, set(network.heads)) if table else ():
        if rule.ours in ours:
            theirs |= zip(
                rule.theirs, rule.via.save(ours.pop(rule.ours), network.config), strict=True
            )
    return theirs | ours


def our_weights(
    network: Network, given: Mapping[str, Tensor], table: Table | None
) -> dict[str, Tensor]:
    """The other way: which of a network's own weights these are; one that is none of them keeps
    its name.
    """
    found = dict(given)
    for rule in table.expand(network.config, set(network.heads)) if table else ():
        if all(name in found for name in rule.theirs):
            found[rule.ours] = rule.via.load(*(found.pop(name) for name in rule.theirs))
    return found


def modules(names: Mapping[str, Tensor], table: Table | None) -> list[str]:
    """The modules that hold these tensors, as PEFT is told to keep them: the outermost that is
    not the trunk.
    """
    prefix = table.prefix if table else "trunk."
    inner = [name.rpartition(".")[0] for name in names]
    return sorted(
        {name if name.startswith(prefix) or table is None else name.split(".")[0] for name in inner}
    )
