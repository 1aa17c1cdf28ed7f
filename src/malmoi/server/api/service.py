"""Which models are served, health and metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from malmoi import __version__
from malmoi.server.api.responses import HealthResponse, ModelCard, ModelList, VersionResponse
from malmoi.server.model_registry import ModelRegistry, ServedModel
from malmoi.tokenizer.chat_template import template_of

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
async def models(request: Request) -> Any:
    """The models that are served, in the order they were given."""
    names = request.app.state.registry.names
    return ModelList(data=[_card(name, one, request) for name, one in names.items()])


@router.get("/v1/models/{name}", response_model=ModelCard, tags=["OpenAI"])
async def model(name: str, request: Request) -> Any:
    """One of the models that are served."""
    return _card(name, request.app.state.registry.get(name), request)


@router.get("/health", response_model=HealthResponse, tags=["Server"])
async def health(request: Request) -> Any:
    """The server is up; while shutting down it answers 503."""
    registry: ModelRegistry = request.app.state.registry
    return HealthResponse(version=__version__, models=list(registry.names))


@router.head("/health", include_in_schema=False)
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def health_alone() -> Response:
    """Status without a body, for probes."""
    return Response()


@router.get("/version", response_model=VersionResponse, tags=["Server"])
async def version() -> Any:
    """The version of Malmoi."""
    return VersionResponse(version=__version__)


@router.get("/metrics", response_class=PlainTextResponse, tags=["Server"])
async def metrics(request: Request) -> Any:
    """Metrics for Prometheus."""
    text = request.app.state.metrics.text(request.app.state.registry)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _card(name: str, served: ServedModel, request: Request) -> ModelCard:
    model = served.model
    created = int(request.app.state.metrics.start)
    tokenizer = model.checkpoint.tokenizer
    chats = tokenizer is not None and template_of(tokenizer) is not None
    return ModelCard(
        id=name,
        created=created,
        abilities=[verb for verb in model.abilities if verb != "chat" or chats],
        context=model.config.context,
        labels=list(model.labels),
    )
