"""Endpoints of encoders and fine-tuned models: embed, fill, classify, tag, answer, score."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import tanh
from typing import Any
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request, Response

from malmoi.errors import UsageError, require_that
from malmoi.inference import Model
from malmoi.inference.embed import Float32Array, embed_texts
from malmoi.inference.engine import join_chunks
from malmoi.inference.predictors import ANSWER, NUMBER, ONE_LABEL, TAGS, TEXT_HEADS, TaskHead
from malmoi.inference.score import Score
from malmoi.inference.zero_shot import label_prompts, question_prompt
from malmoi.interpret.forward_pass import AttentionArray, attention, chosen_reader, lens
from malmoi.messages import msg
from malmoi.server.api.completions import prompts_of, too_long
from malmoi.server.api.requests import (
    AnswerRequest,
    AttentionRequest,
    ClassifyRequest,
    EmbeddingRequest,
    FillRequest,
    LensRequest,
    NerRequest,
    RerankRequest,
    ScoreRequest,
    TraceRequest,
)
from malmoi.server.api.responses import (
    AnswerResponse,
    AttentionResponse,
    ClassifyResponse,
    EmbeddingList,
    EmbeddingVector,
    FillResponse,
    LensResponse,
    NerResponse,
    RerankResponse,
    ScoreResponse,
    TraceResponse,
    Usage,
)
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import (
    GenerationStream,
    beginnings,
    check_reading,
    checkpoint,
    count_reading,
    require_characters,
    run_on_model,
    served_model,
    unless_disconnected,
)
from malmoi.server.model_registry import ServedModel
from malmoi.tokenizer import Encoding

# where models of each task head are asked
ENDPOINTS = {"/v1/classify": TEXT_HEADS, "/v1/ner": (TAGS,), "/v1/answer": (ANSWER,)}
router = APIRouter()


# ------------------------------------------------------------------ vectors


@router.post("/v1/embeddings", response_model=EmbeddingList, tags=["OpenAI"])
async def embeddings_endpoint(ask: EmbeddingRequest, request: Request) -> Any:
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
    data = [
        EmbeddingVector(
            index=i,
            embedding=_written(_cut(one, ask.dimensions, scaled=scaled), ask.encoding_format),
        )
        for i, one in enumerate(found)
    ]
    return EmbeddingList(
        data=data, model=served.name, usage=Usage(prompt_tokens=read, total_tokens=read)
    )


def _encoding(model: Model, text: str | list[int], *, truncate: bool) -> Encoding:
    if isinstance(text, str):
        return model._encoded(text, truncate=truncate)
    tokens = text[: model.config.context] if truncate else text
    if len(tokens) > model.config.context or max(tokens) >= model.config.vocab:
        most = msg(
            "{context} or fewer, each below {vocab}",
            context=model.config.context,
            vocab=model.config.vocab,
        )
        raise UsageError("The tokens must be {most}.", most=most)
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
    numbers: list[float] = vector.astype(np.float64).tolist()
    return numbers


# ------------------------------------------------------------------ cross-encoders


@router.post("/rerank", include_in_schema=False, response_model=RerankResponse)
@router.post("/v2/rerank", include_in_schema=False, response_model=RerankResponse)
@router.post(
    "/v1/rerank",
    response_model=RerankResponse,
    response_model_exclude_none=True,
    tags=["Understand"],
)
async def rerank_endpoint(ask: RerankRequest, request: Request) -> Any:
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
    documents = ask.texts if ask.return_documents else []
    results = [
        RerankResponse.One(
            index=i,
            relevance_score=scores[i],
            document=RerankResponse.Text(text=documents[i]) if documents else None,
        )
        for i in best
    ]
    usage = Usage(prompt_tokens=read, total_tokens=read)
    return RerankResponse(
        id=f"rerank-{uuid4().hex}", model=served.name, results=results, usage=usage
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


# ------------------------------------------------------------------ masked and fine-tuned models


@router.post("/v1/fill", response_model=FillResponse, tags=["Understand"])
async def fill_endpoint(ask: FillRequest, request: Request) -> Any:
    """The most likely tokens for each [MASK] in a text."""
    served = served_model(request, ask)
    fill = served.model.fill_masks
    masks = await run_on_model(request, served, lambda: fill(ask.text, top=ask.top))
    return FillResponse(model=served.name, fills=masks)


@router.post(
    "/v1/classify",
    response_model=ClassifyResponse,
    response_model_exclude_none=True,
    tags=["Understand"],
)
async def classify_endpoint(ask: ClassifyRequest, request: Request) -> Any:
    """Classifies texts with the fine-tuned head, or zero-shot with the given `labels`."""
    served = served_model(request, ask)
    texts = _pairs(ask, served)

    def label() -> list[Any]:
        if ask.labels is None:
            _need(served, TEXT_HEADS, "send labels to choose from")
            # a verbalizer reads each label's words after the text
            verbalized = "words" in served.model.checkpoint.extra
            passes = len(served.model.labels) if verbalized else 1
            count_reading(request, served.model, _flat(texts), passes=passes)
            return list(served.model.predict(texts))
        _check_labels(ask, texts, request, served.model)
        return list(served.model.classify(texts, ask.labels, prompt=ask.prompt))

    found = await run_on_model(request, served, label)
    return ClassifyResponse(model=served.name, data=[asdict(one) for one in found])  # type: ignore[misc]


def _pairs(ask: ClassifyRequest, served: ServedModel) -> list[Any]:
    texts = beginnings(served, ask.text)
    if ask.pair is None:
        return texts
    require_that(
        ask.labels is None, "A pair needs a model fine-tuned for pairs; with labels, use one text."
    )
    pairs = beginnings(served, ask.pair)
    require_that(
        len(pairs) == len(texts),
        "There are {texts} texts but {pairs} pairs: give one for each.",
        texts=len(texts),
        pairs=len(pairs),
    )
    return list(zip(texts, pairs, strict=True))


def _check_labels(
    ask: ClassifyRequest, texts: Sequence[str], request: Request, model: Model
) -> None:
    """A language model reads each prompt of a text once for each label, with its words."""
    labels = ask.labels or []
    longest = max(labels, key=len, default="")
    prompts = (
        f"{form}{text} {longest}"
        for text in texts
        for form in label_prompts(text, labels, ask.prompt)
    )
    count_reading(request, model, prompts, passes=len(labels))


def _flat(texts: Sequence[Any]) -> Iterator[str]:
    for text in texts:
        yield from (text,) if isinstance(text, str) else text


@router.post("/v1/ner", response_model=NerResponse, tags=["Understand"])
async def ner_endpoint(ask: NerRequest, request: Request) -> Any:
    """Finds the spans that a tagger was fine-tuned for, such as names."""
    served = served_model(request, ask)
    _need(served, (TAGS,), "serve one that was fine-tuned for tagging")
    texts = [ask.text] if isinstance(ask.text, str) else ask.text

    def mark() -> list[Any]:
        count_reading(request, served.model, texts)
        return list(served.model.predict(texts))

    return NerResponse(model=served.name, data=await run_on_model(request, served, mark))


@router.post("/v1/answer", response_model=AnswerResponse, tags=["Understand"])
async def answer_endpoint(ask: AnswerRequest, request: Request) -> Any:
    """Answers a question: extracted from its context by a span head, otherwise generated."""
    served = served_model(request, ask)
    if served.model.task_head is not ANSWER:
        return await _written_answer(ask, served, request)

    def find() -> Any:
        count_reading(request, served.model, question, cut=False)
        return served.model.predict(question)

    question = (ask.question, ask.context)
    found = await run_on_model(request, served, find)
    place = {"start": found.start, "end": found.end, "score": found.score}
    return AnswerResponse(
        model=served.name, answer=found.text, candidates=list(found.candidates), **place
    )


async def _written_answer(
    ask: AnswerRequest, served: ServedModel, request: Request
) -> AnswerResponse:
    limit = request.app.state.settings.max_tokens
    if ask.max_tokens > limit:
        raise too_long(ask.max_tokens, limit)
    require_characters(served, "context", len(ask.context))
    prompt = question_prompt(ask.question, ask.context)
    job = served.writer.job(prompt, max_new_tokens=ask.max_tokens, temperature=0, stop="\n")
    with GenerationStream(request, served, [job]) as generation:
        chunks = (await unless_disconnected(request.receive, generation.chunks()))[0]
    text = join_chunks(chunks).text.strip()
    return AnswerResponse(
        model=served.name, answer=text, start=None, end=None, score=None, candidates=[]
    )


@router.post("/v1/score", response_model=ScoreResponse, tags=["Understand"])
async def score_endpoint(ask: ScoreRequest, request: Request) -> Any:
    """Scores continuations of a context by log-probability, in total and per token."""
    served = served_model(request, ask)

    def weigh() -> list[Score]:
        count_reading(request, served.model, (ask.context + one for one in ask.continuations))
        return served.model.score(ask.context, ask.continuations)

    return ScoreResponse(model=served.name, data=await run_on_model(request, served, weigh))


def _need(served: ServedModel, heads: Sequence[TaskHead], instead: str) -> None:
    head = served.model.task_head
    if head not in heads:
        right = next((path for path, known in ENDPOINTS.items() if head in known), "")
        instead = msg("send it to {right}", right=right) if right else instead
        raise UsageError(
            "The model {served!r} was not fine-tuned for this: {instead}. It can: {can}.",
            served=served.name,
            instead=msg(instead),
            can=", ".join(served.model.abilities),
        )


# ------------------------------------------------------------------ looking inside

ATTENTION_DIGITS = 6  # decimals of an attention weight


@router.post("/v1/attention", response_model=AttentionResponse, tags=["Look inside"])
async def attention_endpoint(ask: AttentionRequest, request: Request) -> Any:
    """The attention of every head of every layer."""
    served = served_model(request, ask)

    def see() -> str:
        seen = attention(chosen_reader(served.model, ask.reading), ask.text, ask.pair)
        facts = {
            "model": served.name,
            "tokens": seen.tokens,
            "words": seen.words,
            "segments": seen.segments,
        }
        return f'{json.dumps(facts)[:-1]}, "attention": {_numbers(seen.weights)}}}'

    return Response(await run_on_model(request, served, see), media_type="application/json")


def _numbers(weights: AttentionArray) -> str:
    """A tensor [L, H, T, T] as JSON, head by head, so that other requests get their turn."""
    rounded = weights.astype("float64").round(ATTENTION_DIGITS)
    layers = []
    for layer in rounded:
        checkpoint()
        layers.append(", ".join(json.dumps(head.tolist(), allow_nan=False) for head in layer))
    return "[" + ", ".join(f"[{layer}]" for layer in layers) + "]"


@router.post("/v1/lens", response_model=LensResponse, tags=["Look inside"])
async def lens_endpoint(ask: LensRequest, request: Request) -> Any:
    """Each layer's prediction at each position, as if it were the last layer."""
    served = served_model(request, ask)

    def see() -> str:
        seen = lens(served.model, ask.text, ask.top, checkpoint)
        found = LensResponse(model=served.name, tokens=seen.tokens, layers=seen.guesses)
        return found.model_dump_json()

    return Response(await run_on_model(request, served, see), media_type="application/json")


@router.post("/v1/trace", response_model=TraceResponse, tags=["Look inside"])
async def trace_endpoint(ask: TraceRequest, request: Request) -> Any:
    """The longest pieces of a text in the text that the model was trained on.

    Other machines may read training text only if the server was started with --trace.
    """
    settings = request.app.state.settings
    if not (settings.local or settings.trace):
        raise ApiError(403, "This server shows no training text: start it with --trace.")
    served = served_model(request, ask)
    options = ask.model_dump(exclude={"model", "text"})
    found = await run_on_model(request, served, lambda: served.model.trace(ask.text, **options))
    return TraceResponse(model=served.name, trace=found)
