"""One sentence through a whole network, one of its words predicted by two. T tokens, D width."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fastapi import Request
from pydantic import Field
from torch import Tensor, nn

from malmoi.errors import require_that, required
from malmoi.inference import Model
from malmoi.inference.batches import model_inputs
from malmoi.inference.prompt import mask_token
from malmoi.inference.pseudo_likelihood import SplitText, fills, pseudo_scores
from malmoi.inference.score import Score
from malmoi.interpret.forward_pass import attention, encode_for_model, likeliest
from malmoi.interpret.intervention import Tapped, layer_blocks, recorder, rewired, view_with_blocks
from malmoi.model import Activations, Layout, Network
from malmoi.model.attention import Attention, LayerInputs
from malmoi.server.api.requests import NameField, TextField
from malmoi.server.executor import run_on_model
from malmoi.studio.endpoint import (
    Index,
    Registry,
    ShortText,
    StudioRequest,
    covers,
    model_view,
    readable_token,
    require_head,
    router,
    token_chance,
)
from malmoi.studio.routes import mask_rows
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
    require_that(encoding.tokens, "There is no sentence: write a few words.", code="empty_prompt")
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
    found = {
        "before": watched.hidden[layer],
        **{shown: parts.get(part, nothing) for part, shown in WATCHED.items()},
        "after": watched.blocks[layer + 1],
    }
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
    return list(_round(vectors[:, :SHOWN_NUMBERS]))


def _round(values: Tensor, digits: int = 3) -> Any:
    return np.round(values.float().cpu().numpy().astype(np.float64), digits).tolist()


# ------------------------------------------------------------------ a word, predicted by two models

TOP_GUESSES = 5


class CompareRequest(StudioRequest):
    """A word of a sentence to predict."""

    text: ShortText
    place: int = Field(0, ge=0, le=2000)
    gpt: NameField | None = None  # none: that side stays empty
    bert: NameField | None = None


@router.post("/beside")
async def show_comparison(
    request: Request, registry: Registry, body: CompareRequest
) -> dict[str, Any]:
    """One word of a sentence, predicted by a GPT and by a BERT."""
    gpt, bert = (None if name is None else registry.get(name) for name in (body.gpt, body.bert))
    first = required(gpt or bert, "Choose a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    return await run_on_model(request, first, partial(compare_word, body.text, body.place, *models))


def compare_word(text: str, place: int, gpt: Model | None, bert: Model | None) -> dict[str, Any]:
    """Each model's prediction of a word; None for a side without one."""
    words = text.split()
    require_that(words, "There is no sentence: write a few words.", code="empty_prompt")
    require_that(
        place < len(words),
        "There is no word {place}: the sentence has {words}.",
        place=place + 1,
        words=len(words),
    )
    return {
        "words": words,
        "place": place,
        "gpt": None if gpt is None else _gpt(gpt, words, place),
        "bert": None if bert is None else _bert(bert.masked, words, place),
    }


def _gpt(model: Model, words: Sequence[str], place: int) -> dict[str, Any]:
    """p(word | the words before it): figures 3 to 8, one for each position."""
    before = " ".join(words[:place])
    seen = _looks(model, before, len(before) - 1, words[:place]) if place else []
    return {
        "words": words,  # as the model reads them
        "row": max(place - 1, 0),  # the word from which the guess is made
        # attention from there to each word: mean over the last layer's heads, 0 for unseen words
        "looks": [*seen, *[0.0] * (len(words) - len(seen))],
        "guesses": _likeliest(model, before),
        **_facts(model, words, place),
        **_scored(model.score(before, f" {words[place]}" if place else words[place])),
    }


def _bert(model: Model, words: Sequence[str], place: int) -> dict[str, Any]:
    """p(word | the words around it), the word masked: figures 10 and 11.

    A model of both readings guesses it from the position before.
    """
    ahead = int(model.config.both_ways)
    gap = model.tokenizer.token(mask_token(model.tokenizer))
    hidden = [*words[:place], gap, *words[place + 1 :]]
    text = " ".join(hidden)
    before = " ".join([*words[:place], ""])
    split = SplitText(before, words[place], " ".join(["", *words[place + 1 :]]))
    guesses = fills(model.network, model.tokenizer, text, TOP_GUESSES)[before.count(gap)]
    return {
        "words": hidden,
        "row": max(place - ahead, 0),
        "looks": _looks(model, text, len(before) - 2 * ahead, hidden),
        "guesses": [token_chance(model.tokenizer, one.token, one.probability) for one in guesses],
        **_facts(model, words, place),
        **_scored(pseudo_scores(model.network, model.tokenizer, [split], together=True)[0]),
    }


def _facts(model: Model, words: Sequence[str], place: int) -> dict[str, Any]:
    size = len(words)
    seen = model.network.trunk.patterns[0].mask(Layout(1, size, size))
    return {
        "mask": mask_rows(seen.expand(1, -1, size, size)[0, 0]),  # of the first layer, over words
        # whether the tokenizer does not know the word: its probability is then that of [UNK]
        "unknown": covers(model.tokenizer, words[place]).unknown > 0,
    }


def _scored(score: Score) -> dict[str, Any]:
    return {"logprob": score.logprob, "tokens": len(score.tokens)}


def _likeliest(model: Model, before: str) -> list[dict[str, Any]]:
    """The likeliest next tokens."""
    words = model.tokenizer
    logits = torch.from_numpy(model.logits(before)[-1:]).double()
    (best,) = likeliest(logits, words.vocab_size, TOP_GUESSES)
    return [token_chance(words, words.token(token), chance) for token, chance in best]


def _looks(model: Model, text: str, at: int, words: Sequence[str]) -> list[float]:
    """How much the token at or before character `at` attends to each word of the text."""
    offsets = encode_for_model(model, text).offsets
    weights = attention(model, text).weights
    asker = max(
        (i for i, (first, last) in enumerate(offsets) if first <= at and first < last), default=0
    )
    row = weights[-1].mean(0)[asker]
    return [float(row[places].sum()) for places in _places(offsets, words)]


def _places(offsets: Sequence[tuple[int, int]], words: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of each word of the joined text; a space belongs to the word after it."""
    begin = 0
    for word in words:
        end = begin + len(word)
        yield [i for i, (first, last) in enumerate(offsets) if begin < last <= end]
        begin = end + 1
