"""The studio's endpoints that concern no model, all of them, or two."""

from functools import partial
from typing import Annotated

from fastapi import Request
from pydantic import Field

from malmoi.errors import UsageError
from malmoi.server.api.requests import NameField, TextField
from malmoi.server.executor import run_on_model
from malmoi.studio import compare, few_shot, pattern_view, run_curves, tokens
from malmoi.studio.endpoint import StudioRequest, registry_of, router, runs_folder
from malmoi.studio.overview import Overview, overview


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
    others: list[Annotated[str, Field(max_length=300)]] = Field([], max_length=8)


class CompareRequest(StudioRequest):
    """A word of a sentence to predict."""

    text: Annotated[str, Field(max_length=2000)]
    place: int = Field(0, ge=0, le=2000)
    gpt: NameField | None = None  # none: that side stays empty
    bert: NameField | None = None


@router.get("/about")
def show_about(request: Request) -> Overview:
    """The loaded models and the available views."""
    models = ((served.name, served.model) for served in registry_of(request))
    return overview(models, few_shot.LAB_TASKS, runs=request.app.state.settings.runs is not None)


@router.post("/tokens")
def show_tokenization(request: Request, body: TokenizationRequest) -> tokens.Tokenizations:
    """How every loaded tokenizer splits a text."""
    return tokens.tokenizations(
        ((served.name, served.model) for served in registry_of(request)), body.text
    )


@router.post("/coverage")
def show_coverage(request: Request, body: CoverageRequest) -> tokens.Coverages:
    """How much of a text each model's tokenizer knows."""
    served = (registry_of(request).get(name) for name in body.models)
    return tokens.coverages(((one.name, one.model) for one in served), body.text)


@router.post("/pattern")
def show_pattern(body: PatternRequest) -> pattern_view.DrawnPattern:
    """An attention pattern over some tokens, and its cost over many beside that of others."""
    drawn = pattern_view.draw_pattern(body.pattern, body.length, body.at, body.heads)
    shares = [pattern_view.pattern_share(other, body.at) for other in body.others]
    return drawn.model_copy(update={"others": shares})


@router.get("/runs")
def show_runs(request: Request, axis: run_curves.Axis = "tokens") -> run_curves.RunViews:
    """The training runs under the server's --runs folder."""
    return run_curves.list_runs(runs_folder(request), axis)


@router.post("/beside")
async def show_comparison(request: Request, body: CompareRequest) -> compare.Comparison:
    """One word of a sentence, predicted by a GPT and by a BERT."""
    gpt, bert = (
        None if name is None else registry_of(request).get(name) for name in (body.gpt, body.bert)
    )
    first = gpt or bert
    if first is None:
        raise UsageError("Choose a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    return await run_on_model(
        request, first, partial(compare.compare_word, body.text, body.place, *models)
    )
