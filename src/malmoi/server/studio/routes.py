"""The studio's endpoints: one for each view that /v1 does not already serve."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from malmoi.errors import UsageError
from malmoi.server.api.predictions import run_on_model
from malmoi.server.api.requests import ApiRequest, Token
from malmoi.server.registry import Registry
from malmoi.server.studio import (
    attention,
    compare,
    few_shot,
    lens,
    patterns,
    projection,
    runs,
    tokenization,
)
from malmoi.server.studio import tokens as spell
from malmoi.server.studio.overview import Overview, overview

router = APIRouter(prefix="/studio", tags=["studio"])

TextField = Annotated[str, Field(max_length=20_000)]
NameField = Annotated[str, Field(max_length=200)]


class StudioRequest(BaseModel):
    """A request that names no model."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class AttentionViewRequest(ApiRequest):
    """A text whose attention is drawn."""

    text: TextField
    pair: TextField | None = None
    words: bool = False  # pieces of a word merged


class BranchRequest(ApiRequest):
    """A text, and tokens that were written after it."""

    prompt: TextField = ""
    tokens: list[Token] = Field(default_factory=list, max_length=20_000)  # or the prompt's tokens
    written: Annotated[list[NameField], Field(max_length=4096)]


class LayersRequest(ApiRequest):
    """A text that every layer reads."""

    text: TextField
    top: int = Field(5, ge=1, le=50)


class TokenizationRequest(StudioRequest):
    """A text to cut."""

    text: TextField


class PatternRequest(StudioRequest):
    """A pattern to draw."""

    pattern: Annotated[str, Field(max_length=300)]
    length: int = Field(32, ge=1, le=128)  # tokens that are drawn
    at: int = Field(2048, ge=1, le=8192)  # tokens that the cost is of
    heads: int = Field(12, ge=1, le=128)


class FewShotRequest(ApiRequest):
    """An item of a task, to be asked with some examples."""

    task: NameField
    lines: TextField = ""
    item: int = Field(0, ge=0, le=100_000)
    shots: int = Field(0, ge=0, le=1000)
    seed: int = Field(0, ge=0, le=2**31)
    scoring: NameField = "total"


class ProjectionRequest(ApiRequest):
    """Texts to lay out on a plane."""

    texts: Annotated[
        list[Annotated[str, Field(max_length=2000)]], Field(min_length=2, max_length=200)
    ]
    layer: int = Field(-1, ge=-1000, le=1000)
    pool: Literal["mean", "cls"] = "mean"


class CompareRequest(StudioRequest):
    """A word of a sentence to guess."""

    text: Annotated[str, Field(max_length=2000)]
    place: int = Field(0, ge=0, le=2000)
    gpt: NameField | None = None  # none: that side stays empty
    bert: NameField | None = None


def _registry(request: Request) -> Registry:
    found: Registry = request.app.state.registry
    return found


async def _run_on_model(
    request: Request, name: str | None, show: Any, *given: Any, **named: Any
) -> Any:
    """Shows something of a model, at that model's own desk, as long as the client is there."""
    served = _registry(request).get(name)
    return await run_on_model(request, served, partial(show, served.model, *given, **named))


@router.get("/about")
def show_about(request: Request) -> Overview:
    """What is loaded, and what there is to look at."""
    models = ((served.name, served.model) for served in _registry(request))
    return overview(models, few_shot.LAB_TASKS, runs=request.app.state.settings.runs is not None)


@router.post("/branch")
async def show_branch(request: Request, body: BranchRequest) -> spell.PromptBranch:
    """The tokens from which another continuation goes on."""
    found: spell.PromptBranch = await _run_on_model(
        request, body.model, spell.prompt_branch, body.tokens or body.prompt, body.written
    )
    return found


@router.post("/attention")
async def show_attention(request: Request, body: AttentionViewRequest) -> attention.AttentionView:
    """Who looks at whom in every head, by tokens or by words."""
    found: attention.AttentionView = await _run_on_model(
        request, body.model, attention.attention_view, body.text, body.pair, words=body.words
    )
    return found


@router.post("/lens")
async def show_layers(request: Request, body: LayersRequest) -> lens.LayerGuesses:
    """What each layer would say at each place."""
    found: lens.LayerGuesses = await _run_on_model(
        request, body.model, lens.layer_guesses, body.text, body.top
    )
    return found


@router.post("/tokens")
def show_tokenization(request: Request, body: TokenizationRequest) -> tokenization.Tokenizations:
    """How every loaded tokenizer cuts a text."""
    return tokenization.tokenizations(
        ((served.name, served.model) for served in _registry(request)), body.text
    )


@router.post("/pattern")
def show_pattern(body: PatternRequest) -> patterns.DrawnPattern:
    """An attention pattern over some tokens, and what it costs over many."""
    return patterns.draw_pattern(body.pattern, body.length, body.at, body.heads)


@router.post("/shots")
async def show_few_shot(request: Request, body: FewShotRequest) -> few_shot.FewShotView:
    """One item of a task with its examples, and how likely each answer is."""
    wanted = few_shot.FewShotQuery(**body.model_dump(exclude={"model"}))
    found: few_shot.FewShotView = await _run_on_model(
        request, body.model, few_shot.few_shot_view, wanted
    )
    return found


@router.get("/runs")
def show_runs(request: Request) -> runs.RunViews:
    """The training runs under the folder that the server was given."""
    folder: Path | None = request.app.state.settings.runs
    if folder is None:
        raise UsageError("No folder of runs was named: start the server with --runs DIR.")
    return runs.list_runs(folder)


@router.post("/embeddings")
async def show_projection(request: Request, body: ProjectionRequest) -> projection.Projection:
    """Texts as points on a plane, and who is near whom."""
    found: projection.Projection = await _run_on_model(
        request, body.model, projection.project_texts, body.texts, body.layer, body.pool
    )
    return found


@router.post("/beside")
async def show_comparison(request: Request, body: CompareRequest) -> compare.Comparison:
    """One word of a sentence, guessed by a GPT and by a BERT."""
    gpt, bert = (
        None if name is None else _registry(request).get(name) for name in (body.gpt, body.bert)
    )
    first = gpt or bert
    if first is None:
        raise UsageError("Name a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    found: compare.Comparison = await run_on_model(
        request, first, partial(compare.compare_word, body.text, body.place, *models)
    )
    return found
