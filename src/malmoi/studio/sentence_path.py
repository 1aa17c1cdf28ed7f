"""One sentence through a whole network: vectors, one block's parts, logits. T tokens, D width."""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.inference.batches import model_inputs
from malmoi.interpret.forward_pass import encode_for_model
from malmoi.model import Activations, Network
from malmoi.server.api.requests import ApiRequest, TextField
from malmoi.studio.endpoint import model_view
from malmoi.studio.tokens import TokenChance, readable_token
from malmoi.tokenizer import Encoding

SHOWN_TOKENS = 24  # the last ones of a longer text
SHOWN_NUMBERS = 24  # the first ones of a vector
NAMED_TOKENS = 200  # likeliest next tokens that are sent with their names
GUESSES = 8
Vectors = list[list[float]]  # one row per token: its first numbers


class NextRequest(ApiRequest):
    """A text whose next token is predicted."""

    text: TextField


class NextToken(BaseModel):
    """The logits of the next token, so that the page can compute its distribution."""

    names: list[str]  # of the likeliest, in order
    logits: str  # of every token, largest first: float32, little-endian, in base64


@model_view("/next")
def next_token(model: Model, body: NextRequest) -> NextToken:
    """The logits of the next token."""
    logits = model.logits(body.text)[-1][: model.tokenizer.vocab_size]
    order = np.argsort(-logits, kind="stable")
    words = model.tokenizer
    return NextToken(
        names=[readable_token(words, words.token(int(i))) for i in order[:NAMED_TOKENS]],
        logits=b64encode(logits[order].astype("<f4").tobytes()).decode(),
    )


# ------------------------------------------------------------------ the path of a sentence


class PathRequest(ApiRequest):
    """A sentence, and the layer whose parts are shown."""

    text: TextField
    layer: int = Field(0, ge=0, le=10_000)
    head: int = Field(0, ge=0, le=10_000)


class BlockVectors(BaseModel):
    """What a block computes: its input, what attention and MLP add, its output."""

    before: Vectors
    attention: Vectors
    mlp: Vectors
    after: Vectors
    sizes: dict[str, list[float]]  # the norm of each of them, per token
    weights: list[list[float]] | None  # the head's attention [T][T]; none without attention


class LogitGuess(TokenChance):
    logit: float


class SentencePath(BaseModel):
    """Everything of one forward pass that the page draws, rounded."""

    tokens: list[str]
    ids: list[int]
    first: int  # number of earlier tokens that are not shown
    spans: list[tuple[int, int]]  # of each token in the text
    embedding: dict[str, Vectors]  # token, position and segment, and their sum
    block: BlockVectors
    guesses: list[list[LogitGuess]]  # per token; empty without a head over the vocabulary
    parameters: dict[str, int]  # by part of the network
    plain: bool  # whether a block's output is its input and what its parts add, nothing else
    rotary: bool  # whether positions turn queries and keys
    mlp_width: int


@model_view("/path")
@torch.inference_mode()
def sentence_path(model: Model, wanted: PathRequest) -> SentencePath:
    """One forward pass, watched from the ids to the logits."""
    network = model.network
    c = network.config
    network.require_one_text("The path of a sentence")
    if wanted.layer >= c.depth or wanted.head >= c.heads:
        raise UsageError(
            "There are {layers} layers of {heads} heads here; choose one of them.",
            layers=c.depth,
            heads=c.heads,
        )
    encoding = encode_for_model(model, wanted.text)
    if not encoding.tokens:
        raise UsageError("There is no sentence: write a few words.", code="empty_prompt")
    shown = slice(max(0, len(encoding.tokens) - SHOWN_TOKENS), None)
    watched = Activations(attention=[] if _attends(network) else None)
    with _outputs(network) as parts:
        network.trunk(**model_inputs(network, [encoding]), activations=watched)
    words = model.tokenizer
    return SentencePath(
        tokens=[readable_token(words, words.token(token)) for token in encoding.tokens[shown]],
        ids=encoding.tokens[shown],
        first=shown.start,
        spans=encoding.offsets[shown],
        embedding=_embedding(network, encoding, shown),
        block=_block(watched, parts, wanted, shown),
        guesses=_guesses(model, watched.hidden[-1][0, -len(encoding.tokens) :][shown]),
        parameters=parameter_parts(network),
        plain=c.norm == "pre" and not c.embedding_residual and not c.is_lstm,
        rotary=c.positions == "rotary",
        mlp_width=c.mlp_width,
    )


def parameter_parts(network: Network) -> dict[str, int]:
    """Parameters by part; tied ones are counted where they are first met, in the embedding."""
    found = dict.fromkeys(("embedding", "attention", "mlp", "head", "other"), 0)
    for name, weight in network.named_parameters():
        found[_part(name)] += weight.numel()
    return found


def _part(name: str) -> str:
    if name.startswith("trunk.embed."):
        return "embedding"
    if ".blocks." in name:
        kind = name.split(".blocks.", 1)[1].split(".")[1]
        return {"attend": "attention", "mlp": "mlp"}.get(kind, "other")
    return "head" if name.startswith(("heads.", "pooler.")) else "other"


def _attends(network: Network) -> bool:
    try:
        network.require_attention("The path")
    except UsageError:
        return False
    return True


@contextmanager
def _outputs(network: Network) -> Iterator[dict[str, list[Tensor]]]:
    """The outputs of attention, MLP and block of every layer, in order."""
    found: dict[str, list[Tensor]] = {"attend": [], "mlp": [], "block": []}
    hooks = []
    for name, kept in found.items():
        modules = {getattr(block, name, None) for block in network.blocks}
        if name == "block":
            modules = set(network.blocks)

        def keep(_: nn.Module, __: object, out: Any, kept: list[Tensor] = kept) -> None:
            kept.append(out[0] if isinstance(out, tuple) else out)

        hooks += [module.register_forward_hook(keep) for module in modules if module is not None]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _embedding(network: Network, encoding: Encoding, shown: slice) -> dict[str, Vectors]:
    """The vectors that are added for each token, before any norm (BERT figure 2)."""
    embed = network.trunk.embed
    device = network.device
    tokens = torch.tensor(encoding.tokens[shown], device=device)
    found = {"token": embed.token(tokens) * embed.scale}
    if embed.position is not None:
        first = embed.position_offset + shown.start
        found["position"] = embed.position(torch.arange(first, first + len(tokens), device=device))
    if embed.segment is not None:
        found["segment"] = embed.segment(torch.tensor(encoding.segments[shown], device=device))
    total = torch.stack(list(found.values())).sum(0)
    return {name: _numbers(vectors) for name, vectors in {**found, "sum": total}.items()}


def _block(
    watched: Activations, parts: dict[str, list[Tensor]], wanted: PathRequest, shown: slice
) -> BlockVectors:
    layer = wanted.layer
    nothing = torch.zeros_like(watched.hidden[0])
    vectors = {
        "before": watched.hidden[layer],
        "attention": parts["attend"][layer] if layer < len(parts["attend"]) else nothing,
        "mlp": parts["mlp"][layer] if layer < len(parts["mlp"]) else nothing,
        "after": parts["block"][layer],
    }
    size = watched.hidden[0].size(1) - shown.start
    rows = {name: vector[0, -size:] for name, vector in vectors.items()}
    weights = watched.attention[layer][0, wanted.head] if watched.attention else None
    return BlockVectors(
        **{name: _numbers(row) for name, row in rows.items()},
        sizes={name: _round(row.float().norm(dim=-1)) for name, row in rows.items()},
        weights=None if weights is None else _round(weights[-size:, -size:], 4),
    )


def _guesses(model: Model, states: Tensor) -> list[list[LogitGuess]]:
    head = model.network.language_head
    if not head:
        return []
    words = model.tokenizer
    logits = model.network.read(head, states).float()[:, : words.vocab_size]
    best = logits.topk(min(GUESSES, words.vocab_size))
    chances = best.values - logits.logsumexp(-1, keepdim=True)
    rows = zip(best.indices.tolist(), best.values.tolist(), chances.exp().tolist(), strict=True)
    return [
        [
            LogitGuess(text=readable_token(words, words.token(i)), logit=round(l, 3), probability=p)
            for i, l, p in zip(*row, strict=True)
        ]
        for row in rows
    ]


def _numbers(vectors: Tensor) -> Vectors:
    found: Vectors = _round(vectors[:, :SHOWN_NUMBERS])
    return found


def _round(values: Tensor, digits: int = 3) -> Any:
    return np.round(values.float().cpu().numpy().astype(np.float64), digits).tolist()
