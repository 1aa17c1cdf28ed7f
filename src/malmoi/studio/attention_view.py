"""Attention maps, the logit lens, vectors of texts and probes, as the page draws them.

L layers, H heads, T tokens, W words, N texts.
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from malmoi.demo.texts import BUILT_IN
from malmoi.errors import require_that
from malmoi.inference import Model
from malmoi.inference.embed import Float32Array
from malmoi.interpret.forward_pass import (
    AttentionMaps,
    LayerGuess,
    Reading,
    attention,
    by_words,
    chosen_reader,
    lens,
    word_groups,
)
from malmoi.interpret.probe import Probe, ProbeRow, probe_model
from malmoi.server.api.requests import NameField, TextField
from malmoi.studio.endpoint import (
    Index,
    Layer,
    ShortText,
    model_view,
    readable_token,
    require_head,
    token_chance,
)
from malmoi.text.conllu import conllu_rows
from malmoi.tokenizer import Tokenizer

VIEW_DIGITS = 4  # smaller differences are invisible
MAX_VIEW_NUMBERS = 32_000_000  # attention weights that are computed for a picture
THUMBNAIL = 24  # pixels of a head's small picture


@lru_cache(maxsize=2)  # another head of the same text is another request
def _maps(model: Model, text: str, pair: str | None, reading: Reading | None) -> AttentionMaps:
    return attention(chosen_reader(model, reading), text, pair, MAX_VIEW_NUMBERS)


@model_view("/attention")
def attention_view(  # noqa: PLR0913  # the fields of the view
    model: Model,
    text: TextField,
    pair: TextField | None = None,
    reading: Reading | None = None,  # of a model trained both ways
    layer: Index = 0,
    head: Index = 0,
    *,
    words: bool = False,  # pieces of a word merged
) -> dict[str, Any]:
    """One head's attention, rounded, and a thumbnail of every head's."""
    seen = _maps(model, text, pair, reading)
    groups = word_groups(seen) if words else [[i] for i in range(len(seen.tokens))]
    weights = by_words(seen.weights, groups) if words else seen.weights
    layers, heads = weights.shape[:2]
    require_head(layer, head, layers, heads)
    small = _thumbnails(weights)
    name = _word if words else _token
    return {
        "names": [name(model.tokenizer, seen, group) for group in groups],  # tokens, or words
        # of the chosen head: one row per query
        "weights": np.round(weights[layer, head].astype(np.float64), VIEW_DIGITS).tolist(),
        "small": small.shape[-1],  # pixels of a thumbnail's side
        # [L][H]: a byte per pixel, in base64
        "thumbnails": [[b64encode(one.tobytes()).decode() for one in some] for some in small],
    }


def _thumbnails(weights: Float32Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The maps [L, H, S, S] as bytes, each pixel the largest weight of its tile."""
    size = weights.shape[-1]
    starts = np.linspace(0, size, min(size, THUMBNAIL), endpoint=False).astype(int)
    rows = np.maximum.reduceat(weights, starts, axis=-2)
    return np.round(255 * np.maximum.reduceat(rows, starts, axis=-1).clip(0, 1)).astype(np.uint8)


def _token(tokenizer: Tokenizer, seen: AttentionMaps, group: Sequence[int]) -> str:
    return readable_token(tokenizer, seen.tokens[group[0]])


def _word(tokenizer: Tokenizer, seen: AttentionMaps, group: Sequence[int]) -> str:
    """A word without its leading space; a token without text, such as [CLS], by name."""
    ids = [tokenizer.id(seen.tokens[i]) for i in group]
    text = tokenizer.decode([id for id in ids if id is not None]).strip()
    return text or _token(tokenizer, seen, group)


# ------------------------------------------------------------------ the logit lens


@model_view("/lens")
def layer_guesses(
    model: Model,
    text: TextField,
    top: Annotated[int, Field(ge=1, le=50)] = 5,
    reading: Reading | None = None,
) -> dict[str, Any]:
    """Each layer's predictions at each position [L + 1][T][top], the embedding first."""
    found = lens(chosen_reader(model, reading) if reading else model, text, top)
    words = model.tokenizer

    def named(place: list[LayerGuess]) -> list[dict[str, Any]]:
        return [token_chance(words, one.token, one.probability) for one in place]

    return {
        "tokens": [readable_token(words, token) for token in found.tokens],
        "layers": [[named(place) for place in layer] for layer in found.guesses],
    }


# ------------------------------------------------------------------ a translation


@model_view("/translation")
def translation_view(model: Model, text: TextField, layer: Layer = -1) -> dict[str, Any]:
    """A translation by beam search, and a decoder layer's attention to the source."""
    translation = model.translate(text)
    seen = model.cross_attention(text, translation, layer=layer)
    words = model.tokenizer
    return {
        "translation": translation,
        "source": [readable_token(words, token) for token in seen.source],
        "target": [readable_token(words, token) for token in seen.target],
        "weights": seen.weights.round(VIEW_DIGITS).tolist(),  # [target][source]
    }


# ------------------------------------------------------------------ texts on a plane

VectorArray = np.ndarray[Any, np.dtype[np.float64]]
Texts = Annotated[list[ShortText], Field(min_length=2, max_length=200)]
NEAREST_TEXTS = 5


@model_view("/embeddings")
def project_texts(
    model: Model, texts: Texts, layer: Layer = -1, pool: Literal["mean", "cls"] = "mean"
) -> dict[str, Any]:
    """Texts as points on a plane; neighbours are computed in the full space."""
    vectors = np.asarray(model.embed(texts, (layer,), pool, truncate=True), np.float64)
    plane, explained = principal(vectors)
    cosines = _cosines(vectors)
    return {
        "points": plane.tolist(),
        "explained": explained.tolist(),  # share of the variance of each direction
        "neighbours": [_nearest(i, row) for i, row in enumerate(cosines)],  # of each text
        # mean over pairs of texts: near 1 where all vectors point one way
        "cosine": float(cosines[~np.eye(len(texts), dtype=bool)].mean()),
    }


def principal(vectors: VectorArray) -> tuple[VectorArray, VectorArray]:
    """The first two principal components [N, 2] and their shares of variance, with fixed signs."""
    u, s, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    scores = np.pad(u * s, ((0, 0), (0, max(0, 2 - len(s)))))[:, :2]
    signs = np.sign(scores[np.abs(scores).argmax(0), (0, 1)])
    total = float((s**2).sum()) or 1.0
    shares = np.pad(s**2 / total, (0, max(0, 2 - len(s))))[:2]
    return scores * np.where(signs == 0, 1, signs), shares


def _cosines(vectors: VectorArray) -> VectorArray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms == 0, 1, norms)
    return unit @ unit.T


def _nearest(i: int, cosines: VectorArray) -> list[dict[str, float]]:
    """The nearest of the other texts, by their cosines with text i."""
    order = [int(j) for j in np.argsort(-cosines, kind="stable") if j != i]
    return [{"index": j, "cosine": float(cosines[j])} for j in order[:NEAREST_TEXTS]]


# ------------------------------------------------------------------ probes

Language = Literal["en", "ko"]
Lines = Annotated[str, Field(max_length=3_000_000)]
CONLLU_TABS = 9
MAX_PROBED = 3000  # words or texts
MIN_PROBED = 30  # lines: a fifth of fewer is no test
BUILT_IN_ROWS = 400  # sentences, half of them with their words shuffled


@model_view("/probe")
def probe_view(
    model: Model, lines: Lines, label: NameField = "upos", language: Language = "en"
) -> Probe:
    """A probe on labelled lines: CoNLL-U with a column as label, or a text, a tab and its label.

    Without lines, on the built-in sentences of a language.
    """
    return probe_model(model, probe_rows(lines, label, language), max_examples=MAX_PROBED)


def probe_rows(text: str, label: str, language: str) -> list[ProbeRow]:
    """The rows of pasted lines, of either kind."""
    lines = text.splitlines()
    given = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if any(line.count("\t") == CONLLU_TABS for _, line in islice(given, 50)):
        return [row[1:] for row in conllu_rows(enumerate(lines, 1), label)]
    if not given:
        return list(order_rows(language))
    require_that(
        len(given) >= MIN_PROBED,
        "{lines} lines are too few for a probe: a fifth of them is its test. Give {least} or "
        "more, or none for the built-in sentences.",
        lines=len(given),
        least=MIN_PROBED,
    )
    return list(tab_labelled(given))


@lru_cache(maxsize=2)
def order_rows(language: str) -> tuple[tuple[str, str], ...]:
    """Sentences of the built-in text, half of them with their words shuffled."""
    documents = BUILT_IN[language].documents()
    each = -(-BUILT_IN_ROWS // len(documents))
    return tuple(row for one in documents for row in one.rows[:each])[:BUILT_IN_ROWS]


def tab_labelled(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """The text and the label of each numbered line, which a tab separates."""
    for number, line in numbered:
        text, tab, label = line.rpartition("\t")
        require_that(tab, "Line {number}: write the text, a tab and its label.", number=number)
        yield text.strip(), label.strip()
