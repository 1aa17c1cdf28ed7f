"""The application of the API: routes, middleware and error handlers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from malmoi import __version__
from malmoi.server import error_replies
from malmoi.server.api import (
    chat,
    completions,
    docs_page,
    inspection,
    ollama,
    other_servers,
    predictions,
    responses_api,
    service,
)
from malmoi.server.config import ServeConfig
from malmoi.server.executor import ModelExecutors
from malmoi.server.middleware import RequestGuard, ServerState
from malmoi.server.model_registry import ModelRegistry
from malmoi.server.prometheus import Metrics

OPENAI = (service, completions, chat, responses_api)
API = (*OPENAI, predictions, inspection, other_servers, ollama, docs_page)
STATUS_MEANINGS: dict[int | str, str] = {
    400: "The request is invalid; the message says where.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or address.",
    413: "The body is too large.",
    429: "Too many requests; try again after Retry-After seconds.",
    500: "The request failed.",
    503: "The server is shutting down.",
    504: "The request timed out.",
    "default": "Another error.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": error_replies.ErrorReply, "description": meaning}
    for status, meaning in STATUS_MEANINGS.items()
}


def create_app(registry: ModelRegistry, settings: ServeConfig) -> FastAPI:
    """An app that serves these models; its lifespan closes them."""
    app = FastAPI(
        title="Malmoi",
        version=__version__,
        summary="BERT and GPT over HTTP: OpenAI's API, and endpoints for encoders.",
        docs_url=None,  # FastAPI's pages load scripts from other hosts; ours is docs_page.py
        redoc_url=None,
        responses=REFUSALS,
        lifespan=_lifespan,
    )
    app.state.registry, app.state.settings = registry, settings
    app.state.metrics, app.state.gate = Metrics(), ServerState()
    app.state.work = ModelExecutors(registry, settings)
    error_replies.install(app)
    for part in API:
        app.include_router(part.router)
    app.add_middleware(
        RequestGuard, gate=app.state.gate, settings=settings, metrics=app.state.metrics
    )
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=5)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends a dozen custom headers
            expose_headers=["X-Request-Id"],
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.work.close()
    app.state.registry.close(drain=False)
