"""The studio's own addresses: one for each view that /v1 does not serve already. What they show is in `sights/`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from malmoi.errors import UsageError
from malmoi.serve.asks import Ask, Token
from malmoi.serve.registry import Registry
from malmoi.serve.sights import beside, cost, curves, cuts, layers, looks, points, shots, spell
from malmoi.serve.sights.about import About, about
from malmoi.serve.understand import at_desk

router = APIRouter(prefix="/studio", tags=["studio"])

Text = Annotated[str, Field(max_length=20_000)]
Name = Annotated[str, Field(max_length=200)]


class Bare(BaseModel):
    """A request that names no model."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LookAsk(Ask):
    """A text whose attention is drawn."""

    text: Text
    pair: Text | None = None
    words: bool = False  # pieces of a word merged


class BranchAsk(Ask):
    """A text, and tokens that were written after it."""

    prompt: Text = ""
    tokens: list[Token] = Field(default_factory=list, max_length=20_000)  # or the prompt's tokens
    written: Annotated[list[Name], Field(max_length=4096)]


class LayersAsk(Ask):
    """A text that every layer reads."""

    text: Text
    top: int = Field(5, ge=1, le=50)


class CutsAsk(Bare):
    """A text to cut."""

    text: Text


class PatternAsk(Bare):
    """A pattern to draw."""

    pattern: Annotated[str, Field(max_length=300)]
    length: int = Field(32, ge=1, le=128)  # tokens that are drawn
    at: int = Field(2048, ge=1, le=8192)  # tokens that the cost is of
    heads: int = Field(12, ge=1, le=128)


class ShotsAsk(Ask):
    """An item of a task, to be asked with some examples."""

    task: Name
    lines: Text = ""
    item: int = Field(0, ge=0, le=100_000)
    shots: int = Field(0, ge=0, le=1000)
    seed: int = Field(0, ge=0, le=2**31)
    scoring: Name = "total"


class PointsAsk(Ask):
    """Texts to lay out on a plane."""

    texts: Annotated[list[Annotated[str, Field(max_length=2000)]], Field(min_length=2, max_length=200)]
    layer: int = Field(-1, ge=-1000, le=1000)
    pool: Literal["mean", "cls"] = "mean"


class BesideAsk(Bare):
    """A word of a sentence to guess."""

    text: Annotated[str, Field(max_length=2000)]
    place: int = Field(0, ge=0, le=2000)
    gpt: Name | None = None  # none: that side stays empty
    bert: Name | None = None


def _registry(request: Request) -> Registry:
    found: Registry = request.app.state.registry
    return found


async def _at_desk(request: Request, name: str | None, show: Any, *given: Any, **named: Any) -> Any:
    """Shows something of a model, at that model's own desk, as long as the client is there."""
    served = _registry(request).get(name)
    return await at_desk(request, served, partial(show, served.model, *given, **named))


@router.get("/about")
def show_about(request: Request) -> About:
    """What is loaded, and what there is to look at."""
    models = ((served.name, served.model) for served in _registry(request))
    return about(models, shots.LAB, runs=request.app.state.settings.runs is not None)


@router.post("/branch")
async def show_branch(request: Request, body: BranchAsk) -> spell.Branch:
    """The tokens from which another continuation goes on."""
    found: spell.Branch = await _at_desk(request, body.model, spell.branch, body.tokens or body.prompt, body.written)
    return found


@router.post("/attention")
async def show_looks(request: Request, body: LookAsk) -> looks.Looks:
    """Who looks at whom in every head, by tokens or by words."""
    found: looks.Looks = await _at_desk(request, body.model, looks.looks, body.text, body.pair, words=body.words)
    return found


@router.post("/lens")
async def show_layers(request: Request, body: LayersAsk) -> layers.Layers:
    """What each layer would say at each place."""
    found: layers.Layers = await _at_desk(request, body.model, layers.layers, body.text, body.top)
    return found


@router.post("/tokens")
def show_cuts(request: Request, body: CutsAsk) -> cuts.Cuts:
    """How every loaded tokenizer cuts a text."""
    return cuts.cuts(((served.name, served.model) for served in _registry(request)), body.text)


@router.post("/pattern")
def show_pattern(body: PatternAsk) -> cost.Drawn:
    """An attention pattern over some tokens, and what it costs over many."""
    return cost.draw(body.pattern, body.length, body.at, body.heads)


@router.post("/shots")
async def show_shots(request: Request, body: ShotsAsk) -> shots.Shown:
    """One item of a task with its examples, and how likely each answer is."""
    wanted = shots.Ask(**body.model_dump(exclude={"model"}))
    found: shots.Shown = await _at_desk(request, body.model, shots.ask, wanted)
    return found


@router.get("/runs")
def show_runs(request: Request) -> curves.Runs:
    """The training runs under the folder that the server was given."""
    folder: Path | None = request.app.state.settings.runs
    if folder is None:
        raise UsageError("No folder of runs was named: start the server with --runs DIR.")
    return curves.runs(folder)


@router.post("/embeddings")
async def show_points(request: Request, body: PointsAsk) -> points.Points:
    """Texts as points on a plane, and who is near whom."""
    found: points.Points = await _at_desk(request, body.model, points.points, body.texts, body.layer, body.pool)
    return found


@router.post("/beside")
async def show_beside(request: Request, body: BesideAsk) -> beside.Beside:
    """One word of a sentence, guessed by a GPT and by a BERT."""
    gpt, bert = (None if name is None else _registry(request).get(name) for name in (body.gpt, body.bert))
    first = gpt or bert
    if first is None:
        raise UsageError("Name a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    found: beside.Beside = await at_desk(request, first, partial(beside.beside, body.text, body.place, *models))
    return found
