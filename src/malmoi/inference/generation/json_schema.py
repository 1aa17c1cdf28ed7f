"""JSON schemas as regular expressions, so that generated text is always valid JSON of the schema.

Objects list their properties in the schema's order. Strings, numbers and nesting are bounded, so
that a text ends; recursive references are an error, since a regular expression is finite.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.inference.generation.regex import EMPTY, Regex, alternation, concat, parse_regex, repeat
from malmoi.system.limits import shown

MAX_ANY_DEPTH = 4  # nesting depth of a value without a schema
MAX_SCHEMA_DEPTH = 32
MAX_ITEMS = 10_000
ANNOTATIONS = {"title", "description", "default", "examples", "format", "deprecated", "$schema"}
ANNOTATIONS |= {"$id", "$comment", "readOnly", "writeOnly", "$defs", "definitions"}
KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def json_schema_regex(schema: Any) -> Regex:
    """An expression that matches exactly the JSON texts of a schema; True: any object."""
    if schema is True:
        return _any_object(MAX_ANY_DEPTH)
    if not isinstance(schema, Mapping):
        raise UsageError(f"json_schema must be an object, not {shown(schema)}.")
    return _value(schema, schema, ())


def _literal(value: Any) -> Regex:
    text = json.dumps(value, ensure_ascii=False)
    return parse_regex("".join(f"\\{c}" if c in "\\.[]{}()|*+?^$" else c for c in text))


@cache
def _primitives() -> dict[str, Regex]:
    integer = r"-?(0|[1-9][0-9]{0,14})"
    return {
        "integer": parse_regex(integer),
        "number": parse_regex(integer + r"(\.[0-9]{1,15})?([eE][+\-]?[0-9]{1,2})?"),
        "boolean": parse_regex("true|false"),
        "null": parse_regex("null"),
        "character": parse_regex('[^"\\\\\0-\x1f]|' + r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})'),
        "comma": parse_regex(", ?"),
        "colon": parse_regex(": ?"),
    }


def _string(least: int = 0, most: int | None = None) -> Regex:
    quote = parse_regex('"')
    return concat(quote, repeat(_primitives()["character"], least, most), quote)


def _list(item: Regex, opening: str, least: int = 0, most: int | None = None) -> Regex:
    """[item, item, …] or {item, item, …}."""
    first, last = (parse_regex(f"\\{sign}") for sign in opening)
    if most == 0:
        return concat(first, last)
    more = concat(_primitives()["comma"], item)
    rest = repeat(more, max(least - 1, 0), None if most is None else most - 1)
    inside = concat(item, rest)
    return concat(first, inside if least else alternation(EMPTY, inside), last)


@cache
def _any_object(depth: int) -> Regex:
    return _list(concat(_string(), _primitives()["colon"], _any_value(depth - 1)), "{}")


@cache
def _any_value(depth: int) -> Regex:
    parts = [_string(), *(_primitives()[name] for name in ("number", "boolean", "null"))]
    if depth > 0:
        parts += [_any_object(depth), _list(_any_value(depth - 1), "[]")]
    return alternation(*parts)


def _value(schema: Any, root: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
    """The expression of a schema inside `root`; `path` holds the references followed so far."""
    if schema is True or schema == {}:
        return _any_value(MAX_ANY_DEPTH - 1)
    if not isinstance(schema, Mapping):
        raise UsageError(f"A part of json_schema must be an object, not {shown(schema)}.")
    if len(path) > MAX_SCHEMA_DEPTH:
        raise UsageError(f"json_schema nests more than {MAX_SCHEMA_DEPTH} levels deep.")
    inner = partial(_value, root=root, path=(*path, ""))
    if "$ref" in schema:
        return _reference(str(schema["$ref"]), root, path)
    if "const" in schema:
        return _literal(schema["const"])
    if "enum" in schema:
        return alternation(*map(_literal, schema["enum"]))
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return alternation(*map(inner, schema[name]))
    kinds = schema.get("type", "object" if "properties" in schema else None)
    listed = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(listed, Sequence) or not listed:
        raise UsageError(f"A part of json_schema has no type: {shown(dict(schema))}.")
    return alternation(*(_typed(kind, schema, inner) for kind in listed))


def _reference(name: str, root: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
    if name in path:
        raise UsageError(f"json_schema refers to {name} inside {name}; recursion is not supported.")
    found: Any = root
    for part in name.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not name.startswith("#/") or found is None:
        raise UsageError(f"json_schema refers to {name!r}, which it does not define.")
    return _value(found, root, (*path, name))


def _typed(kind: Any, schema: Mapping[str, Any], inner: Callable[[Any], Regex]) -> Regex:
    builders = {"string": _string_of, "array": _array, "object": _object}
    known = [*builders, "integer", "number", "boolean", "null"]
    if kind not in known:
        raise UsageError(f"json_schema has no type {kind!r}.{nearest(str(kind), known)}")
    unknown = schema.keys() - KEYWORDS.get(kind, set()) - ANNOTATIONS - {"type"}
    if unknown and not isinstance(schema.get("type"), list):
        raise UsageError(f"json_schema's {min(unknown)!r} is not supported for type {kind}.")
    return builders[kind](schema, inner) if kind in builders else _primitives()[kind]


def _string_of(schema: Mapping[str, Any], _: Callable[[Any], Regex]) -> Regex:
    return _string(*_bounds(schema, "Length"))


def _array(schema: Mapping[str, Any], inner: Callable[[Any], Regex]) -> Regex:
    return _list(inner(schema.get("items", True)), "[]", *_bounds(schema, "Items"))


def _bounds(schema: Mapping[str, Any], what: str) -> tuple[int, int | None]:
    least = schema.get(f"min{what}", 0)
    most = schema.get(f"max{what}")
    whole = all(isinstance(n, int) and 0 <= n <= MAX_ITEMS for n in (least, most or 0))
    if not whole or (most is not None and most < least):
        raise UsageError(f"min{what} and max{what} of json_schema must be 0 to {MAX_ITEMS:,}.")
    return least, most


def _object(schema: Mapping[str, Any], inner: Callable[[Any], Regex]) -> Regex:
    properties = schema.get("properties") or {}
    required = set(schema.get("required", ()))
    if missing := required - properties.keys():
        raise UsageError(f"json_schema requires {min(missing)!r}, which has no property.")
    others = schema.get("additionalProperties", not properties)
    if not properties and others:
        return _list(concat(_string(), _primitives()["colon"], inner(others)), "{}")
    if others and others is not True:
        raise UsageError("json_schema: additionalProperties beside properties is not supported.")
    # the remaining properties: after another property, and at the start
    after = first = EMPTY
    for name, part in reversed(properties.items()):
        entry = concat(_literal(name), _primitives()["colon"], inner(part))
        begun = concat(_primitives()["comma"], entry, after)
        begin = concat(entry, after)
        optional = name not in required
        first = alternation(begin, first) if optional else begin
        after = alternation(begun, after) if optional else begun
    return concat(parse_regex(r"\{"), first, parse_regex(r"\}"))
