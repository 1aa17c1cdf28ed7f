"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference.engine import QueueFull
from malmoi.messages import msg, translate

HEADERS = {  # by status; a full server may be asked again after a second
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
TYPES = {
    401: "authentication_error",
    403: "authentication_error",
    429: "rate_limit_error",
}  # others by whose fault it is
KINDS: dict[type[MalmoiError], tuple[int, str]] = {  # the most particular first
    QueueFull: (429, "busy"),
    UsageError: (400, ""),
    MalmoiError: (500, "failed"),
}
CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(examples=["There is no model 'tiny-gtp'. Did you mean 'tiny-gpt'?"])
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["model"])
    code: str | None = Field(examples=["model_not_found"])


class ErrorReply(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class ApiError(Exception):
    """An error response: an HTTP status, a sentence, and codes for programs."""

    def __init__(
        self,
        status: int,
        sentence: str,
        /,
        *,
        param: str | None = None,
        code: str | None = None,
        **values: object,
    ) -> None:
        self.message: str = msg(sentence, **values)
        super().__init__(self.message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return TYPES.get(self.status, other)

    def body(self) -> dict[str, Any]:
        # a lone surrogate quoted from the request could not be encoded
        message = self.message.encode("utf-8", "replace").decode()
        param = self.param and self.param.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self, request: Request | None = None) -> JSONResponse:
        """The response, in Korean where the request accepts that first, as the studio's may."""
        accepted = request.headers.get("Accept-Language", "") if request is not None else ""
        self.message = translate(self.message, "ko" if accepted.startswith("ko") else "en")
        return JSONResponse(self.body(), self.status, HEADERS.get(self.status))


class ClientGone(ApiError):
    """The client disconnected: there is nobody to answer."""


def refuse_unless(condition: object, status: int, sentence: str, /, **about: Any) -> None:
    """Raises an `ApiError` with this status and sentence unless what a request needs holds."""
    if not condition:
        raise ApiError(status, sentence, **about)


def api_error(error: BaseException) -> ApiError:
    """Any exception as an error response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return wrong_shape(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _sentence(error), code=CODES.get(error.status_code))
    for kind, (status, code) in KINDS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), code=getattr(error, "code", code))
    return ApiError(500, "Internal error; see the server's log.", code="internal_error")


def log(error: BaseException) -> None:
    """Prints the traceback of an unexpected error."""
    if api_error(error).code == "internal_error":
        traceback.print_exception(error, file=sys.stderr)


def install(app: FastAPI) -> None:
    """Registers the error handlers."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        response = api_error(error).response(request)
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    for kind in (ApiError, MalmoiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def wrong_shape(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request body."""
    first = error.errors()[0]
    if first["type"] == "unknown_field":
        about = first["ctx"]
        return ApiError(400, about["said"], param=about["name"], code="unknown_field")
    where = str(first["loc"][1]) if len(first["loc"]) > 1 else None
    if first["type"] == "json_invalid" or where is None:
        return ApiError(
            400, "The body must be one JSON object, sent as application/json.", code="invalid_json"
        )
    # a union field reports one error per alternative; those of another type tell nothing
    here = [one for one in error.errors() if one["loc"][1:2] == first["loc"][1:2]]
    fitting = [one for one in here if not one["type"].endswith("_type")] or here
    named = [(_path(one, error.body), one["msg"]) for one in fitting]
    path = named[0][0]
    wrong = list(dict.fromkeys(reason for place, reason in named if place == path))[:4]
    return ApiError(
        400,
        "{where}: {wrong}.",
        param=where,
        code="invalid_value",
        where=path or where,
        wrong="; or: ".join(wrong),
    )


def _path(error: Mapping[str, Any], body: Any) -> str:
    """Where in a body a value is, such as messages.0.content, or a field lacks."""
    found = []
    for part in error["loc"][1:]:
        with suppress(KeyError, IndexError, TypeError):  # the name of an alternative
            body = body[part]
            found.append(str(part)[:80])
    return ".".join([*found, str(error["loc"][-1])] if error["type"] == "missing" else found)


def _sentence(error: HTTPException) -> str:
    if error.status_code == 404:
        return "There is no such endpoint; see /openapi.json."
    if error.status_code == 405:
        return msg(
            "This endpoint does not accept this method; it accepts {value}.",
            value=(error.headers or {}).get("Allow", "another"),
        )
    return str(error.detail)
