"""The studio's endpoints: a view is a function of a model and a request's body."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.server.api.requests import ApiRequest
from malmoi.server.executor import run_on_model
from malmoi.server.model_registry import ModelRegistry

router = APIRouter(prefix="/studio", tags=["studio"])
Body = TypeVar("Body", bound=ApiRequest)
View = TypeVar("View")
ModelView = Callable[[Model, Body], View]


class StudioRequest(BaseModel):
    """A request that names no model."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def model_view(path: str) -> Callable[[ModelView[Body, View]], ModelView[Body, View]]:
    """Serves a view of the model that its body names, computed by that model's executor."""

    def serve(view: ModelView[Body, View]) -> ModelView[Body, View]:
        async def endpoint(request: Request, body: Any) -> Any:
            served = registry_of(request).get(body.model)
            return await run_on_model(request, served, partial(view, served.model, body))

        _, body_type, view_type = get_type_hints(view).values()
        endpoint.__annotations__["body"] = body_type
        endpoint.__doc__ = view.__doc__
        router.add_api_route(
            path, endpoint, methods=["POST"], name=view.__name__, response_model=view_type
        )
        return view

    return serve


def registry_of(request: Request) -> ModelRegistry:
    found: ModelRegistry = request.app.state.registry
    return found


def runs_folder(request: Request) -> Path:
    folder: Path | None = request.app.state.settings.runs
    if folder is None:
        raise UsageError("No folder of runs was given: start the server with --runs DIR.")
    return folder
