"""One sentence through a whole network: vectors, one block's parts, logits. T tokens, D width."""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from malmoi.errors import UsageError, require_that
from malmoi.inference import Model
from malmoi.inference.batches import model_inputs
from malmoi.interpret.forward_pass import encode_for_model
from malmoi.model import Activations, Network
from malmoi.model.attention import Attention, LayerInputs
from malmoi.studio.endpoint import TextRequest, TokenChance, model_view, readable_token
from malmoi.tokenizer import Encoding

SHOWN_TOKENS = 24  # the last ones of a longer text
SHOWN_NUMBERS = 24  # the first ones of a vector
NAMED_TOKENS = 200  # likeliest next tokens that are sent with their names
GUESSES = 8
Vectors = list[list[float]]  # one row per token: its first numbers


class NextToken(BaseModel):
    """The logits of the next token, so that the page can compute its distribution."""

    names: list[str]  # of the likeliest, in order
    logits: str  # of every token, largest first: float32, little-endian, in base64


@model_view("/next")
def next_token(model: Model, body: TextRequest) -> NextToken:
    """The logits of the next token."""
    logits = model.logits(body.text)[-1][: model.tokenizer.vocab_size]
    order = np.argsort(-logits, kind="stable")
    words = model.tokenizer
    return NextToken(
        names=[readable_token(words, words.token(int(i))) for i in order[:NAMED_TOKENS]],
        logits=b64encode(logits[order].astype("<f4").tobytes()).decode(),
    )


# ------------------------------------------------------------------ the path of a sentence


class PathRequest(TextRequest):
    """A sentence, and the layer whose parts are shown."""

    layer: int = Field(0, ge=0, le=10_000)
    head: int = Field(0, ge=0, le=10_000)


class BlockVectors(BaseModel):
    """What a block computes: its input, its norms, what attention and MLP add, its output."""

    before: Vectors
    attention_norm: Vectors  # what the norm beside attention gives
    attention: Vectors
    mlp_norm: Vectors
    mlp_hidden: Vectors  # after the activation, of the MLP's own width
    mlp: Vectors
    after: Vectors
    sizes: dict[str, list[float]]  # the norm of each of them, per token
    active: list[float]  # share of the MLP's hidden numbers above 0, per token


class HeadVectors(BaseModel):
    """One head of attention: softmax(q·k/√E) v (Vaswani et al. 2017 eq. 1)."""

    q: Vectors
    k: Vectors
    v: Vectors
    mix: Vectors  # the values, weighted
    size: int  # E: numbers of each of them
    scores: list[list[float]] | None  # q·k/√E [T][T]; none where more is added to them
    weights: list[list[float]]  # their softmax under the mask


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
    head: HeadVectors | None  # none without attention
    guesses: list[list[LogitGuess]]  # per token; empty without a head over the vocabulary
    parameters: dict[str, int]  # by part of the network
    plain: bool  # whether a block's output is its input and what its parts add, nothing else
    pre_norm: bool  # whether norms stand before attention and MLP, as in GPT-2
    cache_bytes: int  # of one token's keys and values in all layers
    rotary: bool  # whether positions turn queries and keys
    mlp_width: int


@model_view("/path")
@torch.inference_mode()
def sentence_path(model: Model, wanted: PathRequest) -> SentencePath:
    """One forward pass, watched from the ids to the logits."""
    network = model.network
    c = network.config
    network.require_one_text("The path of a sentence")
    require_that(
        wanted.layer < c.depth and wanted.head < c.heads,
        "There are {layers} layers of {heads} heads here; choose one of them.",
        layers=c.depth,
        heads=c.heads,
    )
    encoding = encode_for_model(model, wanted.text)
    if not encoding.tokens:
        raise UsageError("There is no sentence: write a few words.", code="empty_prompt")
    shown = slice(max(0, len(encoding.tokens) - SHOWN_TOKENS), None)
    watched = Activations(attention=[] if _attends(network) else None)
    with _parts(network) as parts:
        network.trunk(**model_inputs(network, [encoding]), activations=watched)
    size = len(encoding.tokens) - shown.start
    words = model.tokenizer
    return SentencePath(
        tokens=[readable_token(words, words.token(token)) for token in encoding.tokens[shown]],
        ids=encoding.tokens[shown],
        first=shown.start,
        spans=encoding.offsets[shown],
        embedding=_embedding(network, encoding, shown),
        block=_block(watched, parts, wanted.layer, size),
        head=_head(network, watched, parts, wanted, size),
        guesses=_guesses(model, watched.hidden[-1][0, -len(encoding.tokens) :][shown]),
        parameters=parameter_parts(network),
        plain=c.norm == "pre" and not c.embedding_residual and not c.is_lstm,
        pre_norm=c.norm == "pre",
        cache_bytes=kv_bytes(network),
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


def kv_bytes(network: Network) -> int:
    """Bytes of one token's keys and values in all layers."""
    c = network.config
    return 2 * c.depth * c.key_heads * c.size_per_head * network.dtype.itemsize


WATCHED = ("attend_norm", "attend", "mlp_norm", "mlp")


@contextmanager
def _parts(network: Network) -> Iterator[dict[str, list[Any]]]:
    """What the parts of every layer give, in order: outputs, the MLP's hidden numbers, q k v.

    Only of this thread: between two layers the server may run another request.
    """
    found: dict[str, list[Any]] = defaultdict(list)
    mine = get_ident()

    def keeper(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, given: Any, out: Any = None) -> None:
            value = given if out is None else out
            if get_ident() == mine:
                found[name].append(value[0] if isinstance(value, tuple) else value)

        return keep

    blocks = {id(block): block for block in network.blocks}  # layers may share one
    hooks = [hook for block in blocks.values() for hook in _hooks(block, keeper)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(block: nn.Module, keeper: Callable[[str], Callable[..., None]]) -> Iterator[Any]:
    yield block.register_forward_hook(keeper("block"))
    for name in WATCHED:
        if part := getattr(block, name, None):
            yield part.register_forward_hook(keeper(name))
    if down := getattr(getattr(block, "mlp", None), "down", None):
        yield down.register_forward_pre_hook(keeper("hidden"))
    if attend := getattr(block, "attend", None):
        yield _MixHook(attend, keeper("qkv"))


class _MixHook:
    """Tells the queries, keys and values of an attention, as its softmax gets them."""

    def __init__(self, attend: Attention, keep: Callable[..., None]) -> None:
        self.attend = attend

        def mix(qkv: tuple[Tensor, Tensor, Tensor], inputs: LayerInputs) -> Tensor:
            keep(attend, list(qkv))
            return type(attend).mix(attend, qkv, inputs)

        attend.mix = mix  # type: ignore[method-assign]

    def remove(self) -> None:
        del self.attend.mix


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
    watched: Activations, parts: dict[str, list[Any]], layer: int, size: int
) -> BlockVectors:
    nothing = torch.zeros_like(watched.hidden[0])

    def row(name: str) -> Tensor:
        some = parts[name]
        found: Tensor = (some[layer] if layer < len(some) else nothing)[0, -size:]
        return found

    vectors = {
        "before": watched.hidden[layer][0, -size:],
        "attention_norm": row("attend_norm"),
        "attention": row("attend"),
        "mlp_norm": row("mlp_norm"),
        "mlp_hidden": row("hidden"),
        "mlp": row("mlp"),
        "after": row("block"),
    }
    return BlockVectors(
        **{name: _numbers(vector) for name, vector in vectors.items()},
        sizes={name: _round(vector.float().norm(dim=-1)) for name, vector in vectors.items()},
        active=_round((vectors["mlp_hidden"] > 0).float().mean(-1)),
    )


def _head(
    network: Network,
    watched: Activations,
    parts: dict[str, list[Any]],
    wanted: PathRequest,
    size: int,
) -> HeadVectors | None:
    """One head's vectors and scores, of the last `size` tokens."""
    if not watched.attention or wanted.layer >= len(parts["qkv"]):
        return None
    q, k, v = parts["qkv"][wanted.layer]
    shared = wanted.head * k.size(1) // q.size(1)  # heads may share keys and values
    weights = watched.attention[wanted.layer][0, wanted.head]
    ours = {"q": q[0, wanted.head], "k": k[0, shared], "v": v[0, shared]}
    ours["mix"] = weights[:, -v.size(2) :].to(v.dtype) @ ours["v"]
    scores = ours["q"] @ ours["k"].T * q.size(-1) ** -0.5
    plain = type(network.blocks[0].attend) is Attention
    return HeadVectors(
        **{name: _numbers(vector[-size:]) for name, vector in ours.items()},
        size=q.size(-1),
        scores=_round(scores[-size:, -size:]) if plain else None,
        weights=_round(weights[-size:, -size:], 4),
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
