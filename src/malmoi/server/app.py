"""The application: routes, middleware and error handlers."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from malmoi import __version__
from malmoi.server import errors
from malmoi.server.api import (
    chat,
    completions,
    docs_page,
    inspection,
    predictions,
    responses_api,
    server,
)
from malmoi.server.config import ServeConfig
from malmoi.server.executor import ModelExecutors
from malmoi.server.metrics import Metrics
from malmoi.server.middleware import RequestGuard, ServerState
from malmoi.server.registry import ModelRegistry
from malmoi.server.studio import ablation, finetuned, minimal_pairs, probing, routes

API = (server, completions, chat, responses_api, predictions, inspection, docs_page)
STUDIO_ROUTES = (routes, ablation, finetuned, probing, minimal_pairs)
STUDIO = Path(__file__).parent / "studio" / "static"
# block other hosts and inline scripts, because models and users write arbitrary text
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
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
    status: {"model": errors.ErrorReply, "description": meaning}
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
    errors.install(app)
    for part in (*API, *STUDIO_ROUTES):
        app.include_router(part.router)
    # after every route, so that routes answer 405 themselves
    app.router.default = Studio(directory=STUDIO, html=True)
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


class Studio(StaticFiles):
    """The studio's static files; 404 for everything else, for any method."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        try:
            return super().lookup_path(path)
        except (ValueError, OSError):  # no name that a file can have
            return "", None

    async def get_response(self, path: str, scope: Scope) -> Response:
        if self.lookup_path(path)[1] is None:
            raise HTTPException(404)
        return await super().get_response(path, scope)

    def file_response(self, *given: Any, **more: Any) -> Response:
        response = super().file_response(*given, **more)
        response.headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-cache"
        return response


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.work.close()
    app.state.registry.close(drain=False)
