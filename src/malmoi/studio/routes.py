"""The studio's endpoints: one for each view that /v1 does not already serve."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Concatenate, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.server.api.requests import ApiRequest, NameField, TextField, Token
from malmoi.server.executor import run_on_model
from malmoi.server.model_registry import ModelRegistry
from malmoi.studio import (
    attention_view,
    compare,
    few_shot,
    path,
    pattern_view,
    projection,
    run_curves,
    tokens,
    translation_view,
)
from malmoi.studio.overview import Overview, overview

router = APIRouter(prefix="/studio", tags=["studio"])
P = ParamSpec("P")
View = TypeVar("View")


class StudioRequest(BaseModel):
    """A request that names no model."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class BranchRequest(ApiRequest):
    """A prompt, and the tokens generated after it."""

    prompt: TextField = ""
    tokens: list[Token] = Field(default_factory=list, max_length=20_000)  # or the prompt's tokens
    written: Annotated[list[NameField], Field(max_length=4096)]


class TranslationRequest(ApiRequest):
    """A text to translate, and the decoder layer whose attention is drawn."""

    text: TextField
    layer: int = Field(-1, ge=-1000, le=1000)


class LayersRequest(ApiRequest):
    """A text for the logit lens."""

    text: TextField
    top: int = Field(5, ge=1, le=50)


class TokenizationRequest(StudioRequest):
    """A text to tokenize."""

    text: TextField


class CoverageRequest(StudioRequest):
    """A text, and the models that are to read it."""

    text: TextField
    models: Annotated[list[NameField], Field(max_length=8)]


class PatternRequest(StudioRequest):
    """A pattern to draw."""

    pattern: Annotated[str, Field(max_length=300)]
    length: int = Field(32, ge=1, le=128)  # tokens that are drawn
    at: int = Field(2048, ge=1, le=8192)  # tokens for which the cost is computed
    heads: int = Field(12, ge=1, le=128)


class ProjectionRequest(ApiRequest):
    """Texts to project onto a plane."""

    texts: Annotated[
        list[Annotated[str, Field(max_length=2000)]], Field(min_length=2, max_length=200)
    ]
    layer: int = Field(-1, ge=-1000, le=1000)
    pool: Literal["mean", "cls"] = "mean"


class CompareRequest(StudioRequest):
    """A word of a sentence to predict."""

    text: Annotated[str, Field(max_length=2000)]
    place: int = Field(0, ge=0, le=2000)
    gpt: NameField | None = None  # none: that side stays empty
    bert: NameField | None = None


def _registry(request: Request) -> ModelRegistry:
    found: ModelRegistry = request.app.state.registry
    return found


def runs_folder(request: Request) -> Path:
    folder: Path | None = request.app.state.settings.runs
    if folder is None:
        raise UsageError("No folder of runs was given: start the server with --runs DIR.")
    return folder


async def show_view(
    request: Request,
    name: str | None,
    view: Callable[Concatenate[Model, P], View],
    *given: P.args,
    **named: P.kwargs,
) -> View:
    """A view of a model, computed by that model's executor."""
    served = _registry(request).get(name)
    return await run_on_model(request, served, partial(view, served.model, *given, **named))


@router.get("/about")
def show_about(request: Request) -> Overview:
    """The loaded models and the available views."""
    models = ((served.name, served.model) for served in _registry(request))
    return overview(models, few_shot.LAB_TASKS, runs=request.app.state.settings.runs is not None)


@router.post("/branch")
async def show_branch(request: Request, body: BranchRequest) -> tokens.PromptBranch:
    """The tokens from which to generate another continuation."""
    return await show_view(
        request, body.model, tokens.prompt_branch, body.tokens or body.prompt, body.written
    )


@router.post("/attention")
async def show_attention(
    request: Request, body: attention_view.AttentionViewRequest
) -> attention_view.AttentionView:
    """Attention in one head, by tokens or by words, and thumbnails of all heads."""
    return await show_view(request, body.model, attention_view.attention_view, body)


@router.post("/next")
async def show_next(request: Request, body: path.NextRequest) -> path.NextToken:
    """The logits of the next token."""
    return await show_view(request, body.model, path.next_token, body.text)


@router.post("/path")
async def show_path(request: Request, body: path.PathRequest) -> path.SentencePath:
    """One sentence through the whole network."""
    return await show_view(request, body.model, path.sentence_path, body)


@router.post("/translation")
async def show_translation(
    request: Request, body: TranslationRequest
) -> translation_view.TranslationView:
    """A translation, and its attention to the source."""
    return await show_view(
        request, body.model, translation_view.translation_view, body.text, body.layer
    )


@router.post("/lens")
async def show_layers(request: Request, body: LayersRequest) -> attention_view.LayerGuesses:
    """Each layer's predictions at each position."""
    return await show_view(request, body.model, attention_view.layer_guesses, body.text, body.top)


@router.post("/tokens")
def show_tokenization(request: Request, body: TokenizationRequest) -> tokens.Tokenizations:
    """How every loaded tokenizer splits a text."""
    return tokens.tokenizations(
        ((served.name, served.model) for served in _registry(request)), body.text
    )


@router.post("/coverage")
def show_coverage(request: Request, body: CoverageRequest) -> tokens.Coverages:
    """How much of a text each model's tokenizer knows."""
    served = (_registry(request).get(name) for name in body.models)
    return tokens.coverages(((one.name, one.model) for one in served), body.text)


@router.post("/pattern")
def show_pattern(body: PatternRequest) -> pattern_view.DrawnPattern:
    """An attention pattern over some tokens, and its cost over many."""
    return pattern_view.draw_pattern(body.pattern, body.length, body.at, body.heads)


@router.post("/shots")
async def show_few_shot(request: Request, body: few_shot.FewShotRequest) -> few_shot.FewShotView:
    """One item of a task with its examples, and the likelihood of each answer."""
    return await show_view(request, body.model, few_shot.few_shot_view, body)


@router.get("/runs")
def show_runs(request: Request, axis: run_curves.Axis = "tokens") -> run_curves.RunViews:
    """The training runs under the server's --runs folder."""
    return run_curves.list_runs(runs_folder(request), axis)


@router.post("/embeddings")
async def show_projection(request: Request, body: ProjectionRequest) -> projection.Projection:
    """Texts as points on a plane, with nearest neighbours."""
    return await show_view(
        request, body.model, projection.project_texts, body.texts, body.layer, body.pool
    )


@router.post("/beside")
async def show_comparison(request: Request, body: CompareRequest) -> compare.Comparison:
    """One word of a sentence, predicted by a GPT and by a BERT."""
    gpt, bert = (
        None if name is None else _registry(request).get(name) for name in (body.gpt, body.bert)
    )
    first = gpt or bert
    if first is None:
        raise UsageError("Choose a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    return await run_on_model(
        request, first, partial(compare.compare_word, body.text, body.place, *models)
    )
