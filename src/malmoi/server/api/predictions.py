"""What models say of texts: fill, classify, tag, answer, score; where they have read it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from malmoi.errors import UsageError, require_that
from malmoi.inference import Model
from malmoi.inference.engine import join_chunks
from malmoi.inference.predictors import ANSWER, TAGS, TEXT_HEADS, TaskHead
from malmoi.inference.pseudo_likelihood import Fill
from malmoi.inference.score import Score
from malmoi.inference.spans import Candidate, Span
from malmoi.inference.zero_shot import label_prompts, question_prompt
from malmoi.messages import msg
from malmoi.server.api.completions import check_length
from malmoi.server.api.requests import ApiRequest, TextField, TextList, Top, example, field
from malmoi.server.api.responses import ModelResponse
from malmoi.server.error_replies import refuse_unless
from malmoi.server.executor import (
    GenerationStream,
    beginnings,
    count_reading,
    require_characters,
    run_on_model,
    served_model,
    unless_disconnected,
)
from malmoi.server.model_registry import ServedModel
from malmoi.tracing.trace import Trace

# where models of each task head are asked
ENDPOINTS = {"/v1/classify": TEXT_HEADS, "/v1/ner": (TAGS,), "/v1/answer": (ANSWER,)}
router = APIRouter()
T = TypeVar("T")


class FillRequest(ApiRequest, json_schema_extra=example(text="나는 오늘 [MASK] 갔다.", top=5)):
    """A text with masks."""

    text: str
    top: Top = field(5, "Candidates for each mask.")


class FillResponse(ModelResponse):
    """The best tokens for each mask."""

    fills: list[list[Fill]]


@router.post("/v1/fill", tags=["Understand"])
async def fill_endpoint(ask: FillRequest, request: Request) -> FillResponse:
    """The most likely tokens for each [MASK] in a text."""
    served = served_model(request, ask)
    fill = served.model.fill_masks
    masks = await run_on_model(request, served, lambda: fill(ask.text, top=ask.top))
    return FillResponse(model=served.name, fills=masks)


class ClassifyRequest(
    ApiRequest, json_schema_extra=example(text="I love this movie!", labels=["good", "bad"])
):
    """Texts to classify, by a fine-tuned model or zero-shot among the labels given."""

    long_texts = frozenset({"text", "pair"})

    text: str | TextList
    pair: str | TextList | None = field(None, "The second text of each pair.")
    labels: Annotated[list[str], Field(min_length=2, max_length=64)] | None = field(
        None, "Labels to choose from, for a model without a classification head."
    )
    prompt: str | None = field(None, "A prompt with {text} and optionally {labels}.")


class ClassifyResponse(ModelResponse):
    """The label, or labels, of each text."""

    class One(BaseModel):
        label: str | None = field(None, "For a model that gives each text one label.")
        labels: list[str] | None = field(None, "For a multi-label model.")
        scores: dict[str, float]

    data: list[One]


@router.post("/v1/classify", response_model_exclude_none=True, tags=["Understand"])
async def classify_endpoint(ask: ClassifyRequest, request: Request) -> ClassifyResponse:
    """Classifies texts with the fine-tuned head, or zero-shot with the given `labels`."""
    served = served_model(request, ask)
    texts = _pairs(ask, served)

    def label() -> list[Any]:
        if ask.labels is None:
            _need(served, TEXT_HEADS, "send labels to choose from")
            # a verbalizer reads each label's words after the text
            verbalized = "words" in served.model.checkpoint.extra
            passes = len(served.model.labels) if verbalized else 1
            parts = (part for one in texts for part in ([one] if isinstance(one, str) else one))
            count_reading(request, served.model, parts, passes=passes)
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


class NerRequest(ApiRequest, json_schema_extra=example(text="Ada Lovelace lived in London.")):
    """Texts to tag."""

    text: str | TextList


class NerResponse(ModelResponse):
    """The tagged spans of each text; start and end are character offsets."""

    data: list[list[Span]]


@router.post("/v1/ner", tags=["Understand"])
async def ner_endpoint(ask: NerRequest, request: Request) -> NerResponse:
    """Finds the spans that a tagger was fine-tuned for, such as names."""
    served = served_model(request, ask)
    _need(served, (TAGS,), "serve one that was fine-tuned for tagging")
    texts = [ask.text] if isinstance(ask.text, str) else ask.text
    spans: Any = await _read(request, served, texts, lambda: served.model.predict(texts))
    return NerResponse(model=served.name, data=spans)


class AnswerRequest(
    ApiRequest, json_schema_extra=example(question="Where is Ada?", context="Ada is in London.")
):
    """A question, optionally about a text."""

    long_texts = frozenset({"context"})

    question: str
    context: str = ""
    max_tokens: int = field(32, "For a generated (not an extracted) answer.", ge=1)


class AnswerResponse(ModelResponse):
    """An answer: extracted from the text, with its offsets, or generated."""

    answer: str = Field(description="Empty if the text does not contain the answer.")
    start: int | None = field(None, "Character offsets in the context; null if generated.")
    end: int | None = None
    score: float | None = None
    candidates: tuple[Candidate, ...] = ()


@router.post("/v1/answer", tags=["Understand"])
async def answer_endpoint(ask: AnswerRequest, request: Request) -> AnswerResponse:
    """Answers a question: extracted from its context by a span head, otherwise generated."""
    served = served_model(request, ask)
    if served.model.task_head is not ANSWER:
        return AnswerResponse(model=served.name, answer=await _write(ask, served, request))
    question = (ask.question, ask.context)
    predict = partial(served.model.predict, question)
    found: Any = await _read(request, served, question, predict, cut=False)
    return AnswerResponse(
        model=served.name,
        answer=found.text,
        start=found.start,
        end=found.end,
        score=found.score,
        candidates=found.candidates,
    )


async def _write(ask: AnswerRequest, served: ServedModel, request: Request) -> str:
    """A generated answer."""
    check_length(ask.max_tokens, request)
    require_characters(served, "context", len(ask.context))
    prompt = question_prompt(ask.question, ask.context)
    job = served.writer.job(prompt, max_new_tokens=ask.max_tokens, temperature=0, stop="\n")
    with GenerationStream(request, served, [job]) as generation:
        chunks = (await unless_disconnected(request.receive, generation.chunks()))[0]
    return join_chunks(chunks).text.strip()


class ScoreRequest(
    ApiRequest,
    json_schema_extra=example(
        context="The capital of France is", continuations=[" Paris", " Rome"]
    ),
):
    """Continuations of one context to score."""

    context: str = ""
    continuations: TextList


class ScoreResponse(ModelResponse):
    """The log-probability of each continuation."""

    data: list[Score]


@router.post("/v1/score", tags=["Understand"])
async def score_endpoint(ask: ScoreRequest, request: Request) -> ScoreResponse:
    """Scores continuations of a context by log-probability, in total and per token."""
    served = served_model(request, ask)
    texts = (ask.context + one for one in ask.continuations)
    score = served.model.score
    data = await _read(request, served, texts, lambda: score(ask.context, ask.continuations))
    return ScoreResponse(model=served.name, data=data)


async def _read(
    request: Request,
    served: ServedModel,
    texts: Iterable[str],
    task: Callable[[], T],
    *,
    cut: bool = True,
) -> T:
    """Runs a task that reads these texts, unless they are too many."""

    def work() -> T:
        count_reading(request, served.model, texts, cut=cut)
        return task()

    return await run_on_model(request, served, work)


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


# ------------------------------------------------------------------ inside a model


class TraceRequest(ApiRequest, json_schema_extra=example(text="the state of the union", top=3)):
    """A text to find in the model's training text."""

    long_texts = frozenset({"text", "words"})

    text: TextField
    words: TextField = field("", "Only matches with some of these words of the text.")
    top: Top = field(5, "Longest matches.")
    sentences: Top = field(3, "Sentences of the training text for each match.")
    nearest: int = field(0, "Also this many sentences with similar hidden states.", ge=0, le=100)


class TraceResponse(ModelResponse):
    """What of a text is in the training text."""

    trace: Trace


@router.post("/v1/trace", tags=["Look inside"])
async def trace_endpoint(ask: TraceRequest, request: Request) -> TraceResponse:
    """The longest pieces of a text in the text that the model was trained on.

    Other machines may read training text only if the server was started with --trace.
    """
    settings = request.app.state.settings
    refuse_unless(
        settings.local or settings.trace,
        403,
        "This server shows no training text: start it with --trace.",
    )
    served = served_model(request, ask)
    options = ask.model_dump(exclude={"model", "text"})
    found = await run_on_model(request, served, lambda: served.model.trace(ask.text, **options))
    return TraceResponse(model=served.name, trace=found)
