"""The page /docs: every endpoint with its fields and a curl line, without external resources."""

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from malmoi.report.page import heading, html_page, html_table

router = APIRouter()
LEAD = "OpenAI's API and more. /openapi.json has the same for programs; / is the studio."
EXAMPLES: dict[str, Any] = {
    "model": "NAME",
    "prompt": "The state of",
    "input": ["a text"],
    "text": "a text",
    "messages": [{"role": "user", "content": "Hello"}],
}


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Every endpoint, made from the schema."""
    schema = request.app.openapi()
    base = str(request.base_url).rstrip("/")
    parts = [
        _endpoint(method.upper(), path, one, schema, base)
        for path, methods in schema["paths"].items()
        if not path.startswith("/studio")
        for method, one in methods.items()
    ]
    return HTMLResponse(html_page("Malmoi", LEAD, "".join(parts)))


def _endpoint(
    method: str, path: str, one: Mapping[str, Any], schema: Mapping[str, Any], base: str
) -> str:
    body = one.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = _resolved(body.get("schema", {}), schema).get("properties", {})
    needed = _resolved(body.get("schema", {}), schema).get("required", [])
    asked = {name: EXAMPLES.get(name, "…") for name in fields if name in needed}
    line = f"curl {base}{path}"
    if method == "POST":
        line += f" -H 'Content-Type: application/json' -d '{json.dumps(asked, ensure_ascii=False)}'"
    rows = [(name, *_described(field, needs=name in needed)) for name, field in fields.items()]
    table = html_table(("field", "type", "default", "meaning"), rows) if rows else ""
    about = html.escape(str(one.get("description", "")))
    return f"{heading(f'{method} {path}')}<p>{about}</p><pre>{html.escape(line)}</pre>{table}"


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
