"""What encoders and fine-tuned models say: vectors, masks filled, labels, names, answers, likelihoods."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request

from malmoi.errors import UsageError
from malmoi.infer import Model
from malmoi.infer.ask import ask_about
from malmoi.infer.embed import Array, vectors
from malmoi.serve.asks import AnswerAsk, ClassifyAsk, EmbeddingAsk, FillAsk, NerAsk, ScoreAsk
from malmoi.serve.completions import prompts_of
from malmoi.serve.orders import Order
from malmoi.serve.registry import Served
from malmoi.serve.replies import (
    AnswerReply,
    ClassifyReply,
    Embedding,
    EmbeddingList,
    FillReply,
    NerReply,
    ScoreReply,
    Usage,
)
from malmoi.serve.work import unless_gone
from malmoi.tokenizer import Encoding

router = APIRouter()
AT_ONCE = 32  # texts after which a long list lets others have the model
One = TypeVar("One")
Found = TypeVar("Found")


async def at_desk(request: Request, served: Served, task: Callable[[], Found]) -> Found:
    """Has a model do something, one thing at a time, as long as the client is there."""
    return await unless_gone(request.receive, request.app.state.work.do(served, task))


async def in_parts(
    request: Request, served: Served, items: Sequence[One], task: Callable[[Sequence[One]], list[Found]]
) -> list[Found]:
    """The same for a long list, in turn with what others ask."""
    found: list[Found] = []
    for start in range(0, len(items), AT_ONCE):
        some = items[start : start + AT_ONCE]
        found += await at_desk(request, served, lambda some=some: task(some))  # type: ignore[misc]
    return found


# ------------------------------------------------------------------ vectors


@router.post("/v1/embeddings", response_model=EmbeddingList, tags=["OpenAI"])
async def embeddings(ask: EmbeddingAsk, request: Request) -> Any:
    """Texts as vectors: hidden states averaged over `layers` and pooled, as `malmoi embed` gives them (not scaled)."""
    served: Served = request.app.state.registry.get(ask.model)
    width = served.model.config.width
    if ask.dimensions not in (None, width):
        raise UsageError(f"The vectors of this model have {width} dimensions; others are not offered.")

    def vector(texts: Sequence[Any]) -> list[tuple[Array, int]]:
        read = [_encoding(served.model, text, ask.truncate) for text in texts]
        found = vectors(served.model.network, read, tuple(ask.layers), ask.pool)
        return [(one, len(encoding.tokens)) for one, encoding in zip(found, read, strict=True)]

    found = await in_parts(request, served, prompts_of(ask.input), vector)
    data = [Embedding(index=i, embedding=_written(one, ask.encoding_format)) for i, (one, _) in enumerate(found)]
    read = sum(tokens for _, tokens in found)
    return EmbeddingList(data=data, model=served.name, usage=Usage(prompt_tokens=read, total_tokens=read))


def _encoding(model: Model, text: str | list[int], truncate: bool) -> Encoding:
    if isinstance(text, str):
        return model._encoded(text, truncate)
    tokens = text[: model.config.context] if truncate else text
    if len(tokens) > model.config.context or max(tokens) >= model.config.vocab:
        raise UsageError(
            f"The tokens must be {model.config.context} or fewer, each of them below {model.config.vocab}."
        )
    size = len(tokens)
    return Encoding(tokens, [0] * size, [(0, 0)] * size, [False] * size, [None] * size)


def _written(vector: Array, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float64).tolist()
    return numbers


# ------------------------------------------------------------------ masked and fine-tuned models


@router.post("/v1/fill", response_model=FillReply, tags=["Understand"])
async def fill(ask: FillAsk, request: Request) -> Any:
    """The best tokens for each [MASK] in a text."""
    served: Served = request.app.state.registry.get(ask.model)
    found = await at_desk(request, served, lambda: served.model.fill(ask.text, top=ask.top))
    masks = found if isinstance(found[0], list) else [found]
    return FillReply(model=served.name, fills=[[vars(one) for one in mask] for mask in masks])


@router.post("/v1/classify", response_model=ClassifyReply, tags=["Understand"])
async def classify(ask: ClassifyAsk, request: Request) -> Any:
    """A label for each text: what a model was fine-tuned to say, or the likeliest of the `labels` given."""
    served: Served = request.app.state.registry.get(ask.model)
    texts = _pairs(ask)

    def label(some: Sequence[Any]) -> list[Any]:
        if ask.labels is None:
            _need(served, "classify", "give it labels to choose among")
            return list(served.model.predict(list(some)))
        return [served.model.classify(text, ask.labels, prompt=ask.prompt) for text in some]

    found = await in_parts(request, served, texts, label)
    return ClassifyReply(model=served.name, data=[asdict(one) for one in found])  # type: ignore[misc]


def _pairs(ask: ClassifyAsk) -> list[Any]:
    texts = [ask.text] if isinstance(ask.text, str) else ask.text
    if ask.pair is None:
        return texts
    if ask.labels is not None:
        raise UsageError("A pair goes to a model that was fine-tuned for pairs; with labels, write both into the text.")
    pairs = [ask.pair] if isinstance(ask.pair, str) else ask.pair
    if len(pairs) != len(texts):
        raise UsageError(f"There are {len(texts)} texts and {len(pairs)} pairs; give one pair for each text.")
    return list(zip(texts, pairs, strict=True))


@router.post("/v1/ner", response_model=NerReply, tags=["Understand"])
async def ner(ask: NerAsk, request: Request) -> Any:
    """The names in each text, or whatever else a tagger was fine-tuned to mark."""
    served: Served = request.app.state.registry.get(ask.model)
    _need(served, "tag", "serve one that was fine-tuned for tagging")
    texts = [ask.text] if isinstance(ask.text, str) else ask.text
    found = await in_parts(request, served, texts, lambda some: list(served.model.predict(list(some))))
    return NerReply(model=served.name, data=[[asdict(span) for span in spans] for spans in found])  # type: ignore[misc]


@router.post("/v1/answer", response_model=AnswerReply, tags=["Understand"])
async def answer(ask: AnswerAsk, request: Request) -> Any:
    """The answer to a question: found in its context by a model fine-tuned for that, else written by a GPT."""
    served: Served = request.app.state.registry.get(ask.model)
    if "span" not in served.model.network.heads:
        return await _written_answer(ask, served, request)
    found = await at_desk(request, served, lambda: served.model.predict((ask.question, ask.context)))
    candidates = [AnswerReply.One(**asdict(one)) for one in found.candidates]
    place = {"start": found.start, "end": found.end, "score": found.score}
    return AnswerReply(model=served.name, answer=found.text, candidates=candidates, **place)


async def _written_answer(ask: AnswerAsk, served: Served, request: Request) -> AnswerReply:
    state, engine = request.app.state, served.writer
    if ask.max_tokens > state.settings.max_tokens:
        raise UsageError(f"max_tokens is {ask.max_tokens}, and this server writes {state.settings.max_tokens} at most.")
    job = engine.job(ask_about(ask.question, ask.context), max_new_tokens=ask.max_tokens, temperature=0, stop="\n")
    with Order(engine, [job], state.settings.timeout, state.metrics) as order:
        done = (await unless_gone(request.receive, order.whole()))[0]
    return AnswerReply(model=served.name, answer=done.text.strip(), start=None, end=None, score=None, candidates=[])


@router.post("/v1/score", response_model=ScoreReply, tags=["Understand"])
async def score(ask: ScoreAsk, request: Request) -> Any:
    """How likely a GPT finds each continuation of a context: natural logarithms, in all and token by token."""
    served: Served = request.app.state.registry.get(ask.model)
    task = lambda some: served.model.score(ask.context, list(some))  # noqa: E731
    found = await in_parts(request, served, ask.continuations, task)
    return ScoreReply(model=served.name, data=[asdict(one) for one in found])  # type: ignore[misc]


def _need(served: Served, head: str, instead: str) -> None:
    heads = [*served.model.network.heads, *(["classify"] if "words" in served.model.checkpoint.extra else [])]
    if head not in heads:
        can = ", ".join(served.model.abilities)
        raise UsageError(f"The model {served.name!r} was not fine-tuned for this: {instead}. It can: {can}.")
