"""POST /v1/attention, /v1/lens and /v1/trace."""

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from malmoi.interpret.forward_pass import AttentionArray, attention, chosen_reader, lens
from malmoi.server.api.requests import AttentionRequest, LensRequest, TraceRequest
from malmoi.server.api.responses import AttentionResponse, LensResponse, TraceResponse
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import checkpoint, run_on_model, served_model

router = APIRouter()
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
