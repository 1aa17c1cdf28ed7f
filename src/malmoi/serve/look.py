"""What goes on inside, over HTTP: attention and the lens."""

import json
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from malmoi.serve.asks import AttentionAsk, LensAsk
from malmoi.serve.executor import checkpoint
from malmoi.serve.inside import Array, attention, lens
from malmoi.serve.registry import Served
from malmoi.serve.replies import AttentionReply, LensReply
from malmoi.serve.understand import at_desk

router = APIRouter()
DIGITS = 6  # of an attention weight


@router.post("/v1/attention", response_model=AttentionReply, tags=["Look inside"])
async def see_attention(ask: AttentionAsk, request: Request) -> Any:
    """How much each token looks at each other one, in every head of every layer."""
    served: Served = request.app.state.registry.get(ask.model)

    def see() -> str:
        seen = attention(served.model, ask.text, ask.pair)
        told = {"model": served.name, "tokens": seen.tokens, "words": seen.words, "segments": seen.segments}
        return f'{json.dumps(told)[:-1]}, "attention": {_numbers(seen.weights)}}}'

    return Response(await at_desk(request, served, see), media_type="application/json")


def _numbers(weights: Array) -> str:
    """A tensor [L, H, T, T] as JSON, head by head: writing millions of numbers at once would hold everybody up."""
    rounded = weights.astype("float64").round(DIGITS)
    layers = []
    for layer in rounded:
        checkpoint()
        layers.append(", ".join(json.dumps(head.tolist(), allow_nan=False) for head in layer))
    return "[" + ", ".join(f"[{layer}]" for layer in layers) + "]"


@router.post("/v1/lens", response_model=LensReply, tags=["Look inside"])
async def see_lens(ask: LensAsk, request: Request) -> Any:
    """What each layer would say at each place if it were the last; a GPT speaks of the token that comes next."""
    served: Served = request.app.state.registry.get(ask.model)

    def see() -> str:
        seen = lens(served.model, ask.text, ask.top)
        layers = [[[LensReply.One(**asdict(one)) for one in place] for place in layer] for layer in seen.guesses]
        return LensReply(model=served.name, tokens=seen.tokens, layers=layers).model_dump_json()

    return Response(await at_desk(request, served, see), media_type="application/json")
