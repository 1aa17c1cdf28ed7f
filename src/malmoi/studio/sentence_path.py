"""One sentence through a whole network: vectors, one block's parts, logits. T tokens, D width."""

from base64 import b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.inference.batches import model_inputs
from malmoi.interpret.forward_pass import encode_for_model
from malmoi.interpret.intervention import Tapped, layer_blocks, recorder, rewired, view_with_blocks
from malmoi.model import Activations, Network
from malmoi.model.attention import Attention, LayerInputs
from malmoi.server.api.requests import TextField
from malmoi.studio.endpoint import Index, model_view, readable_token, require_head, token_chance
from malmoi.tokenizer import Encoding

SHOWN_TOKENS = 24  # the last ones of a longer text
SHOWN_NUMBERS = 24  # the first ones of a vector
NAMED_TOKENS = 200  # likeliest next tokens that are sent with their names
GUESSES = 8
# the parts of a block that are shown, by the names on the page
WATCHED = {
    "attend_norm": "attention_norm",
    "attend": "attention",
    "mlp_norm": "mlp_norm",
    "hidden": "mlp_hidden",  # after the activation, of the MLP's own width
    "mlp": "mlp",
}
Vectors = list[list[float]]  # one row per token: its first numbers


@model_view("/next")
def next_token(model: Model, text: TextField) -> dict[str, Any]:
    """The logits of the next token, so that the page can compute its distribution."""
    logits = model.logits(text)[-1][: model.tokenizer.vocab_size]
    order = np.argsort(-logits, kind="stable")
    words = model.tokenizer
    return {
        # of the likeliest, in order
        "names": [readable_token(words, words.token(int(i))) for i in order[:NAMED_TOKENS]],
        # of every token, largest first: float32, little-endian, in base64
        "logits": b64encode(logits[order].astype("<f4").tobytes()).decode(),
    }


# ------------------------------------------------------------------ the path of a sentence


@model_view("/path")
@torch.inference_mode()
def sentence_path(
    model: Model, text: TextField, layer: Index = 0, head: Index = 0
) -> dict[str, Any]:
    """One forward pass, watched from the ids to the logits, rounded."""
    network = model.network
    c = network.config
    network.require_one_text("The path of a sentence")
    require_head(layer, head, c.depth, c.heads)
    encoding = encode_for_model(model, text)
    if not encoding.tokens:
        raise UsageError("There is no sentence: write a few words.", code="empty_prompt")
    shown = slice(max(0, len(encoding.tokens) - SHOWN_TOKENS), None)
    watched = Activations(attention=[] if c.mixer == "attention" else None)
    parts: dict[str, Any] = {}
    blocks = layer_blocks(network)
    blocks[layer] = _telling(blocks[layer], parts)
    trunk = view_with_blocks(network, blocks).trunk
    trunk(**model_inputs(network, [encoding]), activations=watched)
    size = len(encoding.tokens) - shown.start
    words = model.tokenizer
    return {
        "tokens": [readable_token(words, words.token(token)) for token in encoding.tokens[shown]],
        "ids": encoding.tokens[shown],
        "first": shown.start,  # number of earlier tokens that are not shown
        "spans": encoding.offsets[shown],  # of each token in the text
        "embedding": _embedding(network, encoding, shown),
        "block": _block(watched, parts, layer, size),
        "head": _head(watched.attention, parts, (layer, head), size),
        "guesses": _guesses(model, watched.hidden[-1][0, -len(encoding.tokens) :][shown]),
        "parameters": parameter_parts(network),
        # whether a block's output is its input and what its parts add, nothing else
        "plain": c.norm == "pre" and not c.embedding_residual and not c.is_lstm,
        "pre_norm": c.norm == "pre",  # whether norms stand before attention and MLP, as in GPT-2
        "cache_bytes": kv_bytes(network),
        "rotary": c.positions == "rotary",  # whether positions turn queries and keys
        "mlp_width": c.mlp_width,
    }


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


def kv_bytes(network: Network) -> int:
    """Bytes of one token's keys and values in all layers."""
    c = network.config
    return 2 * c.depth * c.key_heads * c.size_per_head * network.dtype.itemsize


def _telling(block: nn.Module, found: dict[str, Any]) -> nn.Module:
    """A copy of a block that tells what its parts give, the MLP's hidden numbers, and q k v."""
    parts = {name: getattr(block, name) for name in WATCHED if getattr(block, name, None)}
    if "attend" in parts:
        attend: Attention = rewired(parts["attend"])
        parts["attend"] = attend

        def mix(qkv: tuple[Tensor, Tensor, Tensor], inputs: LayerInputs) -> Tensor:
            found["qkv"] = qkv  # as its softmax gets them
            found["plain"] = type(attend) is Attention
            return type(attend).mix(attend, qkv, inputs)

        attend.mix = mix  # type: ignore[method-assign]
    if down := getattr(parts.get("mlp"), "down", None):
        parts["mlp"] = rewired(parts["mlp"], down=Tapped(down, recorder(found, "hidden"), None))
    told = {name: Tapped(part, None, recorder(found, name)) for name, part in parts.items()}
    return rewired(block, **told)


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


def _block(watched: Activations, parts: dict[str, Any], layer: int, size: int) -> dict[str, Any]:
    """What a block computes: its input, its norms, what attention and MLP add, its output."""
    nothing = torch.zeros_like(watched.hidden[0])
    found = {"before": watched.hidden[layer]}
    found |= {shown: parts.get(part, nothing) for part, shown in WATCHED.items()}
    found["after"] = watched.blocks[layer + 1]
    vectors = {name: vector[0, -size:] for name, vector in found.items()}
    return {
        **{name: _numbers(vector) for name, vector in vectors.items()},
        # the norm of each of them, per token
        "sizes": {name: _round(vector.float().norm(dim=-1)) for name, vector in vectors.items()},
        # share of the MLP's hidden numbers above 0, per token
        "active": _round((vectors["mlp_hidden"] > 0).float().mean(-1)),
    }


def _head(
    attention: list[Tensor] | None, parts: dict[str, Any], at: tuple[int, int], size: int
) -> dict[str, Any] | None:
    """One head of attention, for the last `size` tokens: softmax(q·k/√E) v.

    Vaswani et al. 2017 eq. 1; None without attention.
    """
    if not attention or "qkv" not in parts:
        return None
    layer, head = at
    q, k, v = parts["qkv"]
    shared = head * k.size(1) // q.size(1)  # heads may share keys and values
    weights = attention[layer][0, head]
    ours = {"q": q[0, head], "k": k[0, shared], "v": v[0, shared]}
    ours["mix"] = weights[:, -v.size(2) :].to(v.dtype) @ ours["v"]
    scores = ours["q"] @ ours["k"].T * q.size(-1) ** -0.5
    return {
        **{name: _numbers(vector[-size:]) for name, vector in ours.items()},
        "size": q.size(-1),  # E: numbers of each of them
        # q·k/√E [T][T]; none where more is added to them
        "scores": _round(scores[-size:, -size:]) if parts["plain"] else None,
        "weights": _round(weights[-size:, -size:], 4),  # their softmax under the mask
    }


def _guesses(model: Model, states: Tensor) -> list[list[dict[str, Any]]]:
    """The likeliest tokens after each; empty without a head over the vocabulary."""
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
            token_chance(words, words.token(i), p) | {"logit": round(l, 3)}
            for i, l, p in zip(*row, strict=True)
        ]
        for row in rows
    ]


def _numbers(vectors: Tensor) -> Vectors:
    found: Vectors = _round(vectors[:, :SHOWN_NUMBERS])
    return found


def _round(values: Tensor, digits: int = 3) -> Any:
    return np.round(values.float().cpu().numpy().astype(np.float64), digits).tolist()
