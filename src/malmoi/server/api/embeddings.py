"""Vectors of texts, and documents ranked by their relevance to a query."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from math import tanh
from typing import Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from malmoi.errors import require_that
from malmoi.inference import Model
from malmoi.inference.embed import Float32Array, embed_texts
from malmoi.inference.predictors import NUMBER, ONE_LABEL
from malmoi.server.api.completions import prompts_of
from malmoi.server.api.requests import ApiRequest, Tokens, example, field
from malmoi.server.api.responses import ModelResponse, Usage
from malmoi.server.executor import (
    beginnings,
    check_reading,
    checkpoint,
    count_reading,
    require_characters,
    run_on_model,
    served_model,
)
from malmoi.tokenizer import Encoding

MAX_EMBEDDED_TEXTS = 2048  # as OpenAI's API
EmbeddingInput = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_EMBEDDED_TEXTS)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_EMBEDDED_TEXTS)]
)
router = APIRouter()


# ------------------------------------------------------------------ vectors


class EmbeddingRequest(ApiRequest, json_schema_extra=example(input=["a text", "another"])):
    """Texts to embed."""

    long_texts = frozenset({"input"})

    input: EmbeddingInput = Field(description="A text, its tokens, or a list of either.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = field(None, "Keep only the first N dimensions.", ge=1)
    normalize: bool | None = field(
        None, "Scale vectors to length 1; default: as a sentence encoder's folder says."
    )
    layers: list[int] = field(
        [-1], "0: the embedding, -1: the last; averaged.", min_length=1, max_length=200
    )
    pool: Literal["auto", "mean", "cls"] = field(
        "auto",
        "The mean over the tokens, the [CLS] token (a GPT's last token), or auto: as "
        "the folder of a sentence encoder says, else the mean.",
    )
    truncate: bool = field(False, "Truncate texts longer than the context.")


class EmbeddingVector(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="Numbers; as base64, little-endian fp32.")


class EmbeddingList(BaseModel):
    """The vectors of the texts, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingVector]
    model: str
    usage: Usage


@router.post("/v1/embeddings", tags=["OpenAI"])
async def embeddings_endpoint(ask: EmbeddingRequest, request: Request) -> EmbeddingList:
    """Embeds texts: hidden states averaged over `layers` and pooled.

    Vectors are scaled to length 1 only with `normalize` or if the folder of a sentence encoder
    requires it, also after truncation to `dimensions`.
    """
    served = served_model(request, ask)
    reader = served.model.masked  # as `Model.embed` reads
    width = reader.config.width
    sentence = reader.checkpoint.sentence
    require_that(
        ask.dimensions is None or ask.dimensions <= width,
        "dimensions is above this model's {width} dimensions.",
        width=width,
    )
    require_that(
        "" not in prompts_of(ask.input),
        "input has an empty text, which has no meaning to embed: leave it out.",
    )
    own = ask.pool == "auto" and sentence is not None and sentence.normalize
    scaled = own if ask.normalize is None else ask.normalize
    cut = ask.truncate or sentence is not None
    pooling = sentence and replace(sentence, normalize=False)  # after the cut, if at all

    def embed() -> tuple[list[Float32Array], int]:
        encodings = []
        tokens = 0
        for text in prompts_of(ask.input):
            checkpoint()
            if isinstance(text, str):
                if not cut:
                    require_characters(served, "input", len(text))
                (text,) = beginnings(served, text)
            encodings.append(_encoding(reader, text, truncate=cut))
            tokens += len(encodings[-1].tokens)
            check_reading(request, tokens)
        return embed_texts(reader.network, encodings, tuple(ask.layers), ask.pool, pooling), tokens

    found, read = await run_on_model(request, served, embed)
    vectors = [_cut(one, ask.dimensions, scaled=scaled) for one in found]
    return EmbeddingList(
        data=[
            EmbeddingVector(index=i, embedding=_written(one, ask.encoding_format))
            for i, one in enumerate(vectors)
        ],
        model=served.name,
        usage=Usage(prompt_tokens=read, total_tokens=read),
    )


def _encoding(model: Model, text: str | list[int], *, truncate: bool) -> Encoding:
    if isinstance(text, str):
        return model._encoded(text, truncate=truncate)
    c = model.config
    tokens = text[: c.context] if truncate else text
    require_that(
        len(tokens) <= c.context and max(tokens) < c.vocab,
        "The tokens must be {context} or fewer, each below {vocab}.",
        context=c.context,
        vocab=c.vocab,
    )
    size = len(tokens)
    return Encoding(tokens, [0] * size, [(0, 0)] * size, [False] * size, [None] * size)


def _cut(vector: Float32Array, dimensions: int | None, *, scaled: bool) -> Float32Array:
    """The first `dimensions` numbers, as Matryoshka embeddings allow, scaled to length 1."""
    cut = vector[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut / np.float32(length) if scaled and length > 0 else cut


def _written(vector: Float32Array, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return list(vector.astype(np.float64).tolist())


# ------------------------------------------------------------------ cross-encoders


class RerankDocument(BaseModel):
    """A document to rank, or that was ranked."""

    text: str


class RerankRequest(
    ApiRequest,
    json_schema_extra=example(query="Where is Ada?", documents=["Ada is in London.", "It rains."]),
):
    """Documents to rank by their relevance to a query, as in Cohere's, Jina's and vLLM's APIs."""

    long_texts = frozenset({"query", "documents"})

    query: str
    documents: Annotated[
        list[str | RerankDocument], Field(min_length=1, max_length=MAX_EMBEDDED_TEXTS)
    ]
    top_n: int | None = field(None, "Return only the N most relevant.", ge=1)
    return_documents: bool = field(True, "Return the texts too.")

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Reranked(BaseModel):
    """A document's relevance."""

    index: int = Field(description="The document's place in the request.")
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(ModelResponse):
    """Documents by relevance, the most relevant first."""

    id: str
    results: list[Reranked]
    usage: Usage


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", response_model_exclude_none=True, tags=["Understand"])
async def rerank_endpoint(ask: RerankRequest, request: Request) -> RerankResponse:
    """Ranks documents by relevance to a query; /v2/rerank, as Cohere's clients ask, is the same.

    A model fine-tuned on pairs of texts with two labels scores by the probability of the second; a
    model with one label by its value, passed through a sigmoid unless it was trained for
    regression; a sentence encoder by the cosine of the vectors.
    """
    served = served_model(request, ask)
    model = served.model
    pairs = _reads_pairs(model)
    require_that(
        pairs or model.checkpoint.sentence is not None,
        "The model {served!r} is neither a cross-encoder, which has one or two labels for a "
        "pair of texts, nor a sentence encoder. It can: {can}.",
        served=served.name,
        can=", ".join(model.abilities),
    )

    def rank() -> tuple[list[float], int]:
        query, *texts = beginnings(served, [ask.query, *ask.texts])
        passes = len(texts) if pairs else 1
        tokens = count_reading(request, model, [query], passes=passes) * passes
        tokens += count_reading(request, model, texts)
        check_reading(request, tokens)
        return _relevances(model, query, texts), tokens

    scores, read = await run_on_model(request, served, rank)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: ask.top_n]
    documents = [RerankDocument(text=text) if ask.return_documents else None for text in ask.texts]
    return RerankResponse(
        id=f"rerank-{uuid4().hex}",
        model=served.name,
        results=[Reranked(index=i, relevance_score=scores[i], document=documents[i]) for i in best],
        usage=Usage(prompt_tokens=read, total_tokens=read),
    )


def _reads_pairs(model: Model) -> bool:
    return model.task_head in (ONE_LABEL, NUMBER) and len(model.labels) in (1, 2)


def _relevances(model: Model, query: str, texts: Sequence[str]) -> list[float]:
    if _reads_pairs(model):
        return [_relevance(model, one) for one in model.predict([(query, text) for text in texts])]
    vectors = [_cut(one, None, scaled=True) for one in model.embed([query, *texts], truncate=True)]
    return [float(one @ vectors[0]) for one in vectors[1:]]


def _relevance(model: Model, found: Any) -> float:
    value = float(list(found.scores.values())[-1])
    stated = model.checkpoint.extra.get("problem_type") == NUMBER.problem_type
    return value if model.task_head is ONE_LABEL or stated else (1 + tanh(value / 2)) / 2
