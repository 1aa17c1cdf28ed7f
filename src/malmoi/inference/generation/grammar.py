"""Grammars of llguidance for choices, a regular expression and a JSON schema; or one as given."""

import json
import re
from collections.abc import Mapping
from typing import Any

from malmoi.errors import UsageError, first_line
from malmoi.system.limits import MAX_CHOICE_CHARACTERS, MAX_CHOICES, MAX_REGEX_CHARACTERS, shown

JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allow_general_unicode_escapes": True,
    "coerce_one_of": True,
}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname"}
FORMATS |= {"ipv4", "ipv6", "uuid", "uri"}
NAMED_PARTS = {"properties", "patternProperties", "$defs", "definitions"}


def _choices_grammar(texts: Any) -> str:
    listed = not isinstance(texts, str) and len(texts) > 0
    if not listed or not all(isinstance(text, str) and text for text in texts):
        raise UsageError("choices must be a list of texts of at least one character each.")
    if len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_CHOICE_CHARACTERS:
        raise UsageError(
            "choices has {texts:,} texts of {texts2:,} characters; the limits are {most:,} "
            "and {most2:,}.",
            texts=len(texts),
            texts2=sum(map(len, texts)),
            most=MAX_CHOICES,
            most2=MAX_CHOICE_CHARACTERS,
        )
    return _lark("|".join(map(re.escape, texts)))


def _regex_grammar(regex: str) -> str:
    if len(regex) > MAX_REGEX_CHARACTERS:
        raise UsageError(
            "The regular expression has {regex:,} characters, more than {most:,}. For one of "
            "many texts use choices.",
            regex=len(regex),
            most=MAX_REGEX_CHARACTERS,
        )
    if re.search(r"(?<!\\)(\\\\)*\\\Z", regex):  # llguidance would drop it
        raise UsageError(
            "The regular expression {regex} is invalid at character {regex2}: nothing follows "
            "the backslash.",
            regex=shown(regex),
            regex2=len(regex) - 1,
        )
    return _lark(regex)


def _lark(regex: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(regex, 'ds')}/"


def _schema_grammar(schema: Any) -> str:
    return f"start: {json_rule(schema)}"


def json_rule(schema: Any) -> str:
    """JSON of a schema, as a part of a rule."""
    if schema is not True and not isinstance(schema, Mapping):
        raise UsageError("json_schema must be an object, not {schema}.", schema=shown(schema))
    try:
        described = {"type": "object"} if schema is True else schema
        whole = {**_prepared(described, closed=not _joins(described)), "x-guidance": JSON_OPTIONS}
        return f"%json {json.dumps(whole)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            "json_schema is invalid: {error}.", error=first_line(error).rstrip(".")
        ) from error


def _joins(schema: Any) -> bool:
    """Whether several parts of a schema may describe one object."""
    if isinstance(schema, Mapping):
        several = "properties" in schema and schema.keys() & {"anyOf", "oneOf", "$ref"}
        return bool(several) or "allOf" in schema or _joins([*schema.values()])
    return isinstance(schema, list) and any(map(_joins, schema))


def _prepared(schema: Any, *, closed: bool) -> Any:
    """A schema as it is meant: where properties are named, a value is an object of these alone.

    Formats that llguidance does not know only annotate.
    """
    if isinstance(schema, list):
        return [_prepared(part, closed=closed) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {
        key: (_named_parts if key in NAMED_PARTS else _prepared)(part, closed=closed)
        for key, part in schema.items()
        if key != "format" or part in FORMATS
    }
    if isinstance(parts.get("properties"), Mapping):
        parts.setdefault("type", "object")
        if closed and {*parts.get("required", ())} <= parts["properties"].keys():
            parts.setdefault("additionalProperties", "patternProperties" in parts)
    return parts | {key: schema[key] for key in ("enum", "const") if key in schema}


def _named_parts(parts: Any, *, closed: bool) -> Any:
    if not isinstance(parts, Mapping):
        return parts
    return {name: _prepared(part, closed=closed) for name, part in parts.items()}


GRAMMARS = {
    "choices": _choices_grammar,
    "regex": _regex_grammar,
    "json_schema": _schema_grammar,
    "grammar": str,
}
