"""Which models are served, health and metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from malmoi import __version__
from malmoi.server.api.responses import HealthResponse, ModelCard, ModelList
from malmoi.server.registry import Registry, ServedModel

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
async def models(request: Request) -> Any:
    """The models that are served, in the order they were given."""
    return ModelList(data=[_card(one, request) for one in request.app.state.registry])


@router.get("/v1/models/{name}", response_model=ModelCard, tags=["OpenAI"])
async def model(name: str, request: Request) -> Any:
    """One of the models that are served."""
    return _card(request.app.state.registry.get(name), request)


@router.get("/health", response_model=HealthResponse, tags=["Server"])
async def health(request: Request) -> Any:
    """The server is up; while shutting down it answers 503."""
    registry: Registry = request.app.state.registry
    return HealthResponse(version=__version__, models=registry.names)


@router.head("/health", include_in_schema=False)
async def health_alone() -> Response:
    """Status without a body, for probes."""
    return Response()


@router.get("/metrics", response_class=PlainTextResponse, tags=["Server"])
async def metrics(request: Request) -> Any:
    """Metrics for Prometheus."""
    text = request.app.state.metrics.text(request.app.state.registry)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _card(served: ServedModel, request: Request) -> ModelCard:
    model = served.model
    created = int(request.app.state.metrics.start)
    return ModelCard(
        id=served.name,
        created=created,
        abilities=list(model.abilities),
        context=model.config.context,
        labels=list(model.labels),
    )
