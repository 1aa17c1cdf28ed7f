"""Which models are served, health and metrics; the page /docs."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import BaseModel, Field

from malmoi import __version__
from malmoi.report.page import render
from malmoi.server.model_registry import ServedModel
from malmoi.tokenizer.chat_template import template_of

router = APIRouter()
LEAD = "OpenAI's API and more. /openapi.json has the same for programs; / is the studio."


class ModelCard(BaseModel):
    """A model that is served."""

    id: str = Field(examples=["tiny-gpt"])
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "malmoi"
    abilities: list[str] = Field(
        description="The methods of malmoi.Model it supports; chat only with a chat template."
    )
    context: int = Field(description="Maximum context in tokens.")
    labels: list[str] = Field(description="Labels of a fine-tuned classifier or tagger.")


class ModelList(BaseModel):
    """The models that are served; the first is the default."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> ModelList:
    """The models that are served, in the order they were given."""
    names = request.app.state.registry.names
    return ModelList(data=[_card(name, one, request) for name, one in names.items()])


@router.get("/v1/models/{name}", tags=["OpenAI"])
async def model(name: str, request: Request) -> ModelCard:
    """One of the models that are served."""
    return _card(name, request.app.state.registry.get(name), request)


@router.get("/health", tags=["Server"])
async def health(request: Request) -> dict[str, Any]:
    """The server is up; while shutting down it answers 503."""
    return {
        "status": "ok",
        "version": __version__,
        "models": list(request.app.state.registry.names),
    }


@router.head("/health", include_in_schema=False)
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def health_alone() -> Response:
    """Status without a body, for probes."""
    return Response()


@router.get("/version", tags=["Server"])
async def version() -> dict[str, str]:
    """The version of Malmoi."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse, tags=["Server"])
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    return PlainTextResponse(
        request.app.state.metrics.text(request.app.state.registry),
        media_type="text/plain; version=0.0.4",
    )


def _card(name: str, served: ServedModel, request: Request) -> ModelCard:
    model = served.model
    tokenizer = model.checkpoint.tokenizer
    chats = tokenizer is not None and template_of(tokenizer) is not None
    return ModelCard(
        id=name,
        created=int(request.app.state.metrics.start),
        abilities=[verb for verb in model.abilities if verb != "chat" or chats],
        context=model.config.context,
        labels=list(model.labels),
    )


# ------------------------------------------------------------------ documentation


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Every endpoint with its fields and a curl line, without external resources."""
    schema = request.app.openapi()
    base = str(request.base_url).rstrip("/")
    endpoints = [
        _endpoint(method.upper(), path, one, schema, base)
        for path, methods in schema["paths"].items()
        if not path.startswith("/studio")
        for method, one in methods.items()
    ]
    page = render("server/api/docs.jinja", title="Malmoi", lead=LEAD, endpoints=endpoints)
    return HTMLResponse(page)


def _endpoint(
    method: str, path: str, one: Mapping[str, Any], schema: Mapping[str, Any], base: str
) -> tuple[str, str, str, list[tuple[str, ...]]]:
    """Its name, what it is for, a curl line, and its fields."""
    body = one.get("requestBody", {}).get("content", {}).get("application/json", {})
    form = _resolved(body.get("schema", {}), schema)
    fields = form.get("properties", {})
    needed = form.get("required", [])
    line = f"curl {base}{path}"
    if method == "POST":
        asked = json.dumps(form.get("examples", [{}])[0], ensure_ascii=False)
        line += f" -H 'Content-Type: application/json' -d '{asked}'"
    rows = [(name, *_described(field, needs=name in needed)) for name, field in fields.items()]
    return f"{method} {path}", str(one.get("description", "")), line, rows


def _resolved(found: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolves a reference to a component of the schema."""
    name = str(found.get("$ref", "")).rpartition("/")[2]
    resolved: Mapping[str, Any] = schema["components"]["schemas"][name] if name else found
    return resolved


def _described(field: Mapping[str, Any], *, needs: bool) -> Iterator[str]:
    kinds = [field, *field.get("anyOf", [])]
    named = [str(kind.get("type") or kind.get("$ref", "").rpartition("/")[2]) for kind in kinds]
    yield " or ".join(name for name in dict.fromkeys(named) if name and name != "null")
    yield "required" if needs else json.dumps(field.get("default"), ensure_ascii=False)
    yield str(field.get("description", ""))
