"""JSON schemas as regular expressions, so that generated text is always valid JSON of the schema.

What is generated is valid; not all that is valid can be generated: properties keep the schema's
order, those it does not name are left out, numbers have a limited size, and a definition that
contains itself is opened a few times, since a regular expression is finite.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, reduce
from math import ceil, floor
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.inference.generation.regex import (
    EMPTY,
    NOTHING,
    Regex,
    alternation,
    concat,
    parse_regex,
    repeat,
    within,
)
from malmoi.system.limits import shown

MAX_ANY_DEPTH = 4  # nesting depth of a value without a schema
MAX_RECURSION = 4  # how often a definition is opened inside itself
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_PARTS = 20_000
MAX_ITEMS = 10_000
MAX_DIGITS = 15  # exact in every JSON parser
MAX_DECIMALS = 3  # of a number with limits
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "discriminator"}
ANNOTATIONS |= {"$schema", "$id", "$comment", "readOnly", "writeOnly", "$defs", "definitions"}
NUMBER_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": NUMBER_LIMITS,
    "number": NUMBER_LIMITS,
    "array": {"items", "minItems", "maxItems", "prefixItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set[str](),
    "null": set[str](),
}
SHAPES: dict[str, type | tuple[type, ...]] = {
    "type": (str, list),
    "properties": Mapping,
    "required": list,
    "enum": list,
    "anyOf": list,
    "oneOf": list,
    "allOf": list,
    "prefixItems": list,
    "pattern": str,
}
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"  # the days that every month has
TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
FORMATS = {
    "date": DATE,
    "time": f"{TIME}Z",
    "date-time": f"{DATE}T{TIME}Z",
    "uuid": "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}",
    "ipv4": r"(1?[1-9]?[0-9]\.){3}1?[1-9]?[0-9]",
    "email": r"[a-z0-9]{1,20}(\.[a-z0-9]{1,20})?@([a-z0-9]{1,20}\.){1,2}[a-z]{2,6}",
}
PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))  # characters of a string without an escape


def json_schema_regex(schema: Any) -> Regex:
    """An expression that matches JSON texts of a schema only; True: any object."""
    if schema is True:
        return _any_object(MAX_ANY_DEPTH)
    if not isinstance(schema, Mapping):
        raise UsageError(f"json_schema must be an object, not {shown(schema)}.")
    found = SchemaCompiler(schema).value(schema, ())
    if found is NOTHING:
        raise UsageError("json_schema allows no value: its limits or references exclude all.")
    return found


# ------------------------------------------------------------------ values without a schema


def _text(text: str) -> Regex:
    return parse_regex("".join(f"\\{c}" if c in "\\.[]{}()|*+?^$" else c for c in text))


def _literal(value: Any) -> Regex:
    return _text(json.dumps(value, ensure_ascii=False))


@cache
def _primitives() -> dict[str, Regex]:
    # without surrogates: half of a pair is not a character
    escape = "u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
    whole = f"-?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
    return {
        "integer": parse_regex(whole),
        "number": parse_regex(whole + r"(\.[0-9]{1,15})?([eE][+\-]?[0-9]{1,2})?"),
        "boolean": parse_regex("true|false"),
        "null": parse_regex("null"),
        "character": parse_regex('[^"\\\\\0-\x1f]|' + rf'\\(["\\/bfnrt]|{escape})'),
        "comma": parse_regex(", ?"),
        "colon": parse_regex(": ?"),
        "quote": parse_regex('"'),
        "digit": parse_regex("[0-9]"),
    }


def _characters(least: int = 0, most: int | None = None) -> Regex:
    return repeat(_primitives()["character"], least, most)


def _quoted(inside: Regex) -> Regex:
    return concat(_primitives()["quote"], inside, _primitives()["quote"])


def _list(item: Regex, opening: str, least: int = 0, most: int | None = None) -> Regex:
    """[item, item, …] or {item, item, …}."""
    first, last = map(_text, opening)
    if most == 0:
        return concat(first, last)
    more = concat(_primitives()["comma"], item)
    rest = repeat(more, max(least - 1, 0), None if most is None else most - 1)
    inside = concat(item, rest)
    return concat(first, inside if least else alternation(EMPTY, inside), last)


@cache
def _any_object(depth: int) -> Regex:
    entry = concat(_quoted(_characters()), _primitives()["colon"], _any_value(depth - 1))
    return _list(entry, "{}")


@cache
def _any_value(depth: int) -> Regex:
    parts = [_primitives()[name] for name in ("number", "boolean", "null")]
    if depth > 0:
        parts += [_any_object(depth), _list(_any_value(depth - 1), "[]")]
    return alternation(_quoted(_characters()), *parts)


# ------------------------------------------------------------------ numbers within limits


def _between(low: str, high: str) -> Regex:
    """Numerals from low to high, which have their digits and the point in the same places."""
    if low == high:
        return _text(low)
    if low[0] == high[0]:
        return concat(_text(low[0]), _between(low[1:], high[1:]))
    zeros, nines = (low.translate(str.maketrans("0123456789", ten * 10)) for ten in "09")
    if (low, high) == (zeros, nines):
        return concat(*(_text(".") if sign == "." else _primitives()["digit"] for sign in low))
    first, last = int(low[0]) + 1, int(high[0]) - 1
    inner = parse_regex(f"[{first}-{last}]") if first <= last else NOTHING
    return alternation(
        concat(_text(low[0]), _between(low[1:], nines[1:])),
        concat(inner, _between(zeros[1:], nines[1:])),
        concat(_text(high[0]), _between(zeros[1:], high[1:])),
    )


def _numerals(first: int, last: int, decimals: int) -> Regex:
    """The numbers from first to last, in units of the last of these decimal places."""
    parts = []
    for sign, least, most in (("-", max(1, -last), -first), ("", max(0, first), last)):
        for size in range(decimals + 1, MAX_DIGITS + 1):
            low = max(least, 10 ** (size - 1) if size > decimals + 1 else 0)
            high = min(most, 10**size - 1)
            if low <= high:
                digits = [str(number).zfill(size) for number in (low, high)]
                if decimals:
                    digits = [f"{one[:-decimals]}.{one[-decimals:]}" for one in digits]
                parts.append(concat(_text(sign), _between(*digits)))
    return alternation(*parts)


def _number(kind: str, schema: Mapping[str, Any]) -> Regex:
    if not schema.keys() & (NUMBER_LIMITS - {"format"}):
        return _primitives()[kind]
    found = NOTHING
    for decimals in range(1 if kind == "integer" else MAX_DECIMALS + 1):
        unit = 10**decimals
        low, high = 1 - 10**MAX_DIGITS, 10**MAX_DIGITS - 1
        if (limit := _limit(schema, "minimum")) is not None:
            low = max(low, ceil(limit * unit))
        if (limit := _limit(schema, "exclusiveMinimum")) is not None:
            low = max(low, floor(limit * unit) + 1)
        if (limit := _limit(schema, "maximum")) is not None:
            high = min(high, floor(limit * unit))
        if (limit := _limit(schema, "exclusiveMaximum")) is not None:
            high = min(high, ceil(limit * unit) - 1)
        found = alternation(found, _numerals(low, high, decimals))
    return found


def _limit(schema: Mapping[str, Any], name: str) -> Fraction | None:
    value = schema.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise UsageError(f"json_schema's {name!r} must be a number, not {shown(value)}.")
    return None if value is None else Fraction(str(value))  # 0.1 is one tenth


# ------------------------------------------------------------------ schemas


class SchemaCompiler:
    """Turns the parts of a schema into expressions."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.parts = 0
        self.known: dict[tuple[str, frozenset[tuple[str, int]]], Regex] = {}

    def value(self, schema: Any, path: tuple[str, ...]) -> Regex:
        """The expression of a part; `path` has the references that lead to it, "" between."""
        self.parts += 1
        if self.parts > MAX_SCHEMA_PARTS or len(path) > MAX_SCHEMA_DEPTH:
            limit = f"{MAX_SCHEMA_PARTS:,} parts or {MAX_SCHEMA_DEPTH} levels"
            raise UsageError(f"json_schema has more than {limit}.")
        if isinstance(schema, bool):
            return _any_value(MAX_ANY_DEPTH - 1) if schema else NOTHING
        given = _constraining(schema)
        path = (*path, "")
        if "$ref" in given:
            return self._reference(str(given.pop("$ref")), given, path)
        for name in ("anyOf", "oneOf"):
            if name in given:
                parts = given.pop(name)
                if given:
                    parts = [_merged([self._resolved(part), given]) for part in parts]
                return alternation(*(self.value(part, path) for part in parts))
        if "allOf" in given:
            parts = [self._resolved(part) for part in given.pop("allOf")]
            return self.value(_merged([*parts, given]), path)
        if "const" in given or "enum" in given:
            return _constants(given)
        return self._typed(given, path)

    def _target(self, name: str) -> Any:
        found: Any = self.root
        for part in name.removeprefix("#").removeprefix("/").split("/") if name != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        if not name.startswith("#") or found is None:
            raise UsageError(f"json_schema refers to {name!r}, which it does not define.")
        return found

    def _resolved(self, part: Any) -> Any:
        only = isinstance(part, Mapping) and part.keys() - ANNOTATIONS == {"$ref"}
        return self._target(str(part["$ref"])) if only else part

    def _reference(self, name: str, beside: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
        target = self._target(name)
        if beside:
            return self.value(_merged([target, beside]), path)
        opened = Counter(path)
        if opened[name] >= MAX_RECURSION:
            return NOTHING
        key = (name, frozenset((one, count) for one, count in opened.items() if one))
        if key not in self.known:
            self.known[key] = self.value(target, (*path, name))
        return self.known[key]

    def _typed(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
        implied = [kind for kind, words in KEYWORDS.items() if words & schema.keys()]
        kinds = schema.get("type", implied[:1])
        listed = [kinds] if isinstance(kinds, str) else kinds
        if not schema:
            return _any_value(MAX_ANY_DEPTH - 1)
        for kind in listed:
            if kind not in KEYWORDS:
                raise UsageError(f"json_schema has no type {kind!r}.{nearest(str(kind), KEYWORDS)}")
        checked = {"type"}.union(*(KEYWORDS[kind] for kind in listed))
        if unknown := schema.keys() - checked:
            kind = " or ".join(listed) or "any"
            raise UsageError(f"json_schema's {min(unknown)!r} is not supported for type {kind}.")
        return alternation(*(self._one_type(kind, schema, path) for kind in listed))

    def _one_type(self, kind: str, schema: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
        match kind:
            case "string":
                return _quoted(_string(schema))
            case "integer" | "number":
                return _number(kind, schema)
            case "array":
                return self._array(schema, path)
            case "object":
                return self._object(schema, path)
        return _primitives()[kind]

    def _array(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
        least, most = _bounds(schema, "Items")
        items = self.value(schema.get("items", True), path)
        first = [self.value(part, path) for part in schema.get("prefixItems", ())]
        if not first:
            return _list(items, "[]", least, most)
        if least > len(first) or (most is not None and most < len(first)):
            raise UsageError("json_schema: an array with prefixItems has just these items here.")
        comma = _primitives()["comma"]
        parts = [part for one in first for part in (comma, one)][1:]
        return concat(_text("["), *parts, _text("]"))

    def _object(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> Regex:
        others = schema.get("additionalProperties", True)
        required = schema.get("required", [])
        properties = dict(schema.get("properties") or {})
        for name in required:
            if name not in properties and others is False:
                raise UsageError(f"json_schema requires {name!r}, which has no property.")
            properties.setdefault(name, others)
        if not properties and others is not False:
            entry = (_quoted(_characters()), _primitives()["colon"], self.value(others, path))
            return _list(concat(*entry), "{}")
        # the remaining properties: after another property, and at the start
        after = first = EMPTY
        for name, part in reversed(properties.items()):
            entry = (_literal(name), _primitives()["colon"], self.value(part, path))
            begun = concat(_primitives()["comma"], *entry, after)
            begin = concat(*entry, after)
            optional = name not in required
            first = alternation(begin, first) if optional else begin
            after = alternation(begun, after) if optional else begun
        return concat(_text("{"), first, _text("}"))


def _constraining(schema: Any) -> dict[str, Any]:
    """The keywords of a schema that constrain values."""
    if not isinstance(schema, Mapping):
        raise UsageError(f"A part of json_schema must be an object, not {shown(schema)}.")
    for name, kind in SHAPES.items():
        if name in schema and not isinstance(schema[name], kind):
            raise UsageError(f"json_schema's {name!r} cannot be {shown(schema[name])}.")
    return {key: part for key, part in schema.items() if key not in ANNOTATIONS}


def _merged(parts: Sequence[Any]) -> Mapping[str, Any]:
    """One schema for values that meet all of these."""
    wanted = [part for part in parts if part is not True and part != {}]
    if not all(isinstance(part, Mapping) for part in wanted):
        raise UsageError("A part of json_schema must be an object.")
    return reduce(_both, wanted, {})


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    found = dict(one)
    for key, value in other.items():
        if key in ANNOTATIONS or key not in found or found[key] == value:
            found[key] = value
        elif key == "required":
            found[key] = [*found[key], *(name for name in value if name not in found[key])]
        elif key == "properties" and not any(
            found[key].get(name, part) != part for name, part in value.items()
        ):
            found[key] = {**found[key], **value}
        else:
            raise UsageError(f"json_schema sets {key!r} twice for one value: merge the two.")
    closed = [part for part in (one, other) if part.get("additionalProperties") is False]
    if any(part.get("properties", {}).keys() != found["properties"].keys() for part in closed):
        raise UsageError("json_schema: additionalProperties inside allOf excludes properties.")
    return found


def _constants(schema: Mapping[str, Any]) -> Regex:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds
    if unknown := schema.keys() - {"const", "enum", "type"}:
        raise UsageError(f"json_schema's {min(unknown)!r} is not supported beside enum or const.")
    fitting = [one for one in values if listed is None or _kinds_of(one) & set(listed)]
    return alternation(*map(_literal, fitting))


def _kinds_of(value: Any) -> set[str]:
    """The JSON types of a value of Python."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds.get(type(value), "")}


def _string(schema: Mapping[str, Any]) -> Regex:
    """What is between the quotes."""
    least, most = _bounds(schema, "Length")
    form = schema.get("format")
    pattern = schema.get("pattern")
    if pattern is None and form not in FORMATS:
        return _characters(least, most)
    if len({"pattern", "format"} & schema.keys()) + bool(least or most is not None) > 1:
        raise UsageError("json_schema: a string has a pattern, a format or a length, not several.")
    return _pattern(pattern) if pattern is not None else parse_regex(FORMATS[str(form)])


def _pattern(pattern: str) -> Regex:
    """A pattern is found anywhere in a text, unless ^ and $ say where."""
    inside = within(parse_regex(pattern.removeprefix("^").removesuffix("$")), PLAIN)
    before = EMPTY if pattern.startswith("^") else _characters()
    after = EMPTY if pattern.endswith("$") else _characters()
    return concat(before, inside, after)


def _bounds(schema: Mapping[str, Any], what: str) -> tuple[int, int | None]:
    least = schema.get(f"min{what}", 0)
    most = schema.get(f"max{what}")
    whole = all(isinstance(n, int) and 0 <= n <= MAX_ITEMS for n in (least, most or 0))
    if not whole or (most is not None and most < least):
        raise UsageError(f"min{what} and max{what} of json_schema must be 0 to {MAX_ITEMS:,}.")
    return least, most
