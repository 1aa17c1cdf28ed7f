"""Endpoints that look inside a model: attention, the logit lens, traces in its training text."""

import json

from fastapi import APIRouter, Request, Response
from pydantic import Field

from malmoi.interpret.forward_pass import (
    AttentionArray,
    LayerGuess,
    Reading,
    attention,
    chosen_reader,
    lens,
)
from malmoi.server.api.requests import ApiRequest, TextField, Top, example, field
from malmoi.server.api.responses import ModelResponse
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import checkpoint, run_on_model, served_model
from malmoi.tracing.trace import Trace

ATTENTION_DIGITS = 6  # decimals of an attention weight
router = APIRouter()


class AttentionRequest(ApiRequest, json_schema_extra=example(text="어제 카페 갔었어")):
    """A text, or a pair of texts, whose attention maps to return."""

    text: str
    pair: str | None = None
    reading: Reading | None = field(None, "How a model trained both ways reads: masked unless set.")


class AttentionResponse(ModelResponse):
    """Attention maps."""

    tokens: list[str]
    words: list[int | None] = Field(description="The word each token belongs to.")
    segments: list[int] = Field(description="1 for the second text of a pair.")
    attention: list[list[list[list[float]]]] = Field(description="[layer][head][query][key]")


@router.post("/v1/attention", response_model=AttentionResponse, tags=["Look inside"])
async def attention_endpoint(ask: AttentionRequest, request: Request) -> Response:
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


class LensRequest(ApiRequest, json_schema_extra=example(text="The capital of France is", top=3)):
    """A text for the logit lens."""

    text: str
    top: Top = field(5, "Tokens at each position of each layer.")


class LensResponse(ModelResponse):
    """Each layer's predictions at each position."""

    tokens: list[str]
    layers: list[list[list[LayerGuess]]] = Field(
        description="[layer, the embedding first][place][best first]"
    )


@router.post("/v1/lens", response_model=LensResponse, tags=["Look inside"])
async def lens_endpoint(ask: LensRequest, request: Request) -> Response:
    """Each layer's prediction at each position, as if it were the last layer."""
    served = served_model(request, ask)

    def see() -> str:
        seen = lens(served.model, ask.text, ask.top, checkpoint)
        found = LensResponse(model=served.name, tokens=seen.tokens, layers=seen.guesses)
        return found.model_dump_json()

    return Response(await run_on_model(request, served, see), media_type="application/json")


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
    if not (settings.local or settings.trace):
        raise ApiError(403, "This server shows no training text: start it with --trace.")
    served = served_model(request, ask)
    options = ask.model_dump(exclude={"model", "text"})
    found = await run_on_model(request, served, lambda: served.model.trace(ask.text, **options))
    return TraceResponse(model=served.name, trace=found)
