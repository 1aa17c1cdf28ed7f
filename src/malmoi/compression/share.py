"""Layer sharing and factorised embeddings, as in ALBERT (Lan et al. 2020 §3.1).

V vocabulary, D width, E width of an embedding.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from malmoi.checkpoint import write_checkpoint
from malmoi.compression.distil import open_teacher
from malmoi.compression.result import CompressionResult
from malmoi.errors import require_that
from malmoi.model import Network, initialise

EMBEDDING_WEIGHTS = (
    "trunk.embed.token.weight",
    "trunk.embed.position.weight",
    "trunk.embed.segment.weight",
)


def share_layers(
    model: str | Path, out: str | Path, *, groups: int = 1, embedding: int = 0
) -> CompressionResult:
    """Writes a model with `groups` distinct blocks, each the mean of the layers it replaces.

    With `embedding` the embeddings are factorised to that width by SVD. The model must be trained
    further, and is saved in fp32 for that.
    """
    out = Path(out)
    checkpoint = open_teacher(model, out)
    network = shared(checkpoint.network, groups, embedding)
    write_checkpoint(replace(checkpoint, network=network), out)
    return CompressionResult.of((checkpoint.network, checkpoint.source or out), (network, out))


@torch.no_grad()
def shared(old: Network, groups: int, embedding: int = 0) -> Network:
    """The network with fewer distinct blocks and a narrower embedding."""
    c = old.config
    require_that(
        1 <= groups <= c.distinct,
        "This model has {distinct} distinct layers: groups must be 1 to {distinct}, not {groups}.",
        distinct=c.distinct,
        groups=groups,
    )
    require_that(
        not embedding or 2 <= embedding <= c.token_width,
        "This model's embedding is {width} wide: give 2 to {width}, not {embedding}.",
        width=c.token_width,
        embedding=embedding,
    )
    require_that(
        embedding in (0, c.token_width) or c.token_width == c.width,
        "This model's embedding is factorised already ({width} of {width2}).",
        width=c.token_width,
        width2=c.width,
    )
    # a block shared by several layers has the norm that all but the first have
    first_norm = c.first_norm or groups < c.distinct
    config = replace(
        c, groups=groups, embed_width=embedding or c.embed_width, first_norm=first_norm
    )
    network = initialise(Network(config, old.classes, pooler=old.pooler is not None), 0)
    narrow = dict(_factorised(old, embedding)) if config.token_width != c.token_width else {}
    state = {**_same(old, network), **dict(_averaged(old, groups)), **narrow}
    network.load_state_dict(state, strict=False)
    return network.eval()


def _same(old: Network, new: Network) -> dict[str, Tensor]:
    """Tensors with the same shape in both networks, except the blocks."""
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    state = old.state_dict()
    outside = [name for name in state if not name.startswith("trunk.blocks.")]
    return {name: state[name] for name in outside if shapes.get(name) == state[name].shape}


def _averaged(old: Network, groups: int) -> Iterator[tuple[str, Tensor]]:
    """Each block is the mean of the layers that use it."""
    c = old.config
    states = [block.state_dict() for block in old.trunk.blocks]
    for group in range(groups):
        layers = [
            i * c.distinct // c.depth for i in range(c.depth) if i * groups // c.depth == group
        ]
        for name in {name: None for i in layers for name in states[i]}:
            parts = [states[i][name] for i in layers if name in states[i]]
            yield f"trunk.blocks.{group}.{name}", torch.stack(parts).mean(0)


def _factorised(old: Network, width: int) -> Iterator[tuple[str, Tensor]]:
    """The embeddings projected on their first singular vectors, and the map back to D.

    A norm over E values equals one over D if the vectors are centred in both: the mean over D is
    subtracted from the tables, one direction of E is left empty for it, and the rest is a rotation,
    which keeps lengths. Then only what the tables have beyond `width` − 1 directions is lost; the
    gain, the bias and √(D/E) are absorbed into the map.
    """
    state = old.state_dict()
    c = old.config
    tables = {name: state[name].double() for name in EMBEDDING_WEIGHTS if name in state}
    if c.embed_norm:
        tables = {name: table - table.mean(-1, keepdim=True) for name, table in tables.items()}
    every = torch.cat(list(tables.values()))
    # its eigenvectors are the right singular vectors, the largest last
    _, vectors = torch.linalg.eigh(every.T @ every)
    # [D, E]
    basis = vectors[:, -(width - 1) :] @ _centred(width).T if c.embed_norm else vectors[:, -width:]
    yield from ((name, (table @ basis).float()) for name, table in tables.items())
    back = basis
    bias = torch.zeros(c.width)
    if c.embed_norm:
        back = state["trunk.embed.norm.weight"].double()[:, None] * basis * (c.width / width) ** 0.5
        bias = state.get("trunk.embed.norm.bias", bias)
    yield "trunk.embed.project.weight", back.float()
    yield "trunk.embed.project.bias", bias.float()
    if "lm" in old.heads:
        yield "heads.lm.project.weight", basis.T.float()
        if not c.tied:
            yield "heads.lm.weight", (state["heads.lm.weight"].double() @ basis).float()


def _centred(width: int) -> Tensor:
    """An orthonormal basis [E, E − 1] of the vectors whose mean is zero."""
    plain = torch.cat((torch.ones(width, 1), torch.eye(width)[:, 1:]), 1).double()
    return cast(Tensor, torch.linalg.qr(plain)[0][:, 1:])
