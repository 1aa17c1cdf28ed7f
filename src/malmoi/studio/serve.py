"""Models behind an OpenAI-compatible API and the studio page, until the server is stopped."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from malmoi.inference import Model
from malmoi.messages import joined, logger
from malmoi.server.app import Server, address, create_app, listen
from malmoi.server.config import ServeConfig
from malmoi.server.model_registry import ModelRegistry
from malmoi.server.workers import MultiServer, default_workers
from malmoi.studio import ablation, attention_view, claims, few_shot, routes, runs, sentence_path  # noqa: F401  # each adds its views to the router
from malmoi.studio.endpoint import router


def serve_models(
    models: Sequence[Model | str | Path],
    settings: ServeConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    on_ready: Callable[[str], object] = lambda address: None,
) -> None:
    """Listens, loads the models and answers; `on_ready` gets the server's address."""
    for file in settings.pairs:
        runs.pair_examples(file)  # report a bad file now, not in the studio
    with listen(settings) as where:
        registry = ModelRegistry.open(models, settings, device=device, dtype=dtype)
        for one in registry:
            for note in one.model.notes:
                logger.warning(joined(": ", (one.name, note)))
        if not settings.local and settings.api_key is None:
            logger.warning(
                "Other machines can reach this server, and no API key is set: anyone there may use "
                "it."
            )
        for one in registry:
            if one.engine is not None:
                slots = one.engine.batch.slots
                logger.info(
                    "{name}: at most {max_bytes:,.0f} MiB of KV cache for {slots} "
                    "sequences of {capacity:,} tokens (--slots)",
                    name=one.name,
                    max_bytes=slots.max_bytes / 2**20,
                    slots=settings.slots,
                    capacity=slots.capacity,
                )
        logger.info(
            "{names} at {address} (the studio) and {address}/v1 (the API)",
            names=", ".join(registry.names),
            address=address(where),
        )
        on_ready(address(where))
        count = default_workers(registry) if settings.workers is None else settings.workers
        app = create_studio(registry, settings, guarded=not count)
        if count:
            MultiServer(app, settings, where, count).run()
        else:
            Server(app, settings).run(sockets=[where])


# ------------------------------------------------------------------ the application

PAGE = Path(__file__).parent / "static"
HEADERS = {
    # block other hosts and inline scripts, because models and users write arbitrary text
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def create_studio(
    registry: ModelRegistry, settings: ServeConfig, *, guarded: bool = True
) -> FastAPI:
    """An app that serves these models to programs and, as a page, to people."""
    app = create_app(registry, settings, guarded=guarded)
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
        response.headers.update(HEADERS)
        return response
