"""The application of the API together with the studio page."""

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from malmoi.server.app import create_app
from malmoi.server.config import ServeConfig
from malmoi.server.model_registry import ModelRegistry
from malmoi.studio import (  # noqa: F401  # each adds its views to the router
    ablation,
    attention_view,
    claims,
    finetuned,
    pair_view,
    probing,
    projection,
    routes,
    sentence_path,
    translation_view,
)
from malmoi.studio.endpoint import router

PAGE = Path(__file__).parent / "static"
# block other hosts and inline scripts, because models and users write arbitrary text
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_studio(registry: ModelRegistry, settings: ServeConfig) -> FastAPI:
    """An app that serves these models to programs and, as a page, to people."""
    app = create_app(registry, settings)
    app.include_router(router)
    # after every route, so that routes answer 405 themselves
    app.router.default = StudioPage(directory=PAGE, html=True)
    return app


class StudioPage(StaticFiles):
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
