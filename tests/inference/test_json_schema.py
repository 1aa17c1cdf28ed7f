"""JSON schemas as regular expressions: what they match, checked character by character."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malmoi.errors import UsageError
from malmoi.inference.generation.json_schema import json_schema_regex
from malmoi.inference.generation.regex import NOTHING, Derivatives, Regex


def matches(regex: Regex, text: str) -> bool:
    derivatives = Derivatives()
    for character in text:
        derivatives.begin()
        regex = derivatives.after(regex, ord(character))
        if regex is NOTHING:
            return False
    return regex.complete


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(alphabet='ab한글"\\/\n\t ', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet="ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text(alphabet="ab한", max_size=3), JSON_VALUES, max_size=3))
def test_any_object_matches(value: dict[str, Any]) -> None:
    def depth(one: Any) -> int:
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        return 1 + max(map(depth, inside), default=0) if isinstance(one, dict | list) else 0

    text = json.dumps(value, ensure_ascii=False)
    assert matches(json_schema_regex(True), text) == (depth(value) <= 4)
    assert not matches(json_schema_regex(True), text[:-1])
    assert not matches(json_schema_regex(True), f"[{text}]")


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "string"}, ['""', '"a\\n\\u00e9"'], ["a", '"a', '"\n"', '"a"b"']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
        ({"type": "integer"}, ["0", "-12"], ["01", "1.5", "-", "+1"]),
        ({"type": "number"}, ["1.5", "-2e10", "3"], [".5", "1.", "1e"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ["true"]),
        ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ["a", "2"]),
        ({"const": {"a": [1]}}, ['{"a": [1]}'], ["{}"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true, false]"], ["[,]", "[1]"]),
        (
            {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
            ["[1,1]"],
            ["[1]", "[1, 1, 1]"],
        ),
        ({"anyOf": [{"const": 1}, {"type": "boolean"}]}, ["1", "true"], ["2"]),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{}", '{"a": 1, "b": 2}'],
            ['{"a": true}'],
        ),
    ],
)
def test_what_a_schema_matches(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    regex = json_schema_regex(schema)
    assert [text for text in yes if not matches(regex, text)] == []
    assert [text for text in no if matches(regex, text)] == []


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_required_and_optional_properties(required: set[str], given_names: set[str]) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abcd"},
        "required": sorted(required),
    }
    text = json.dumps(dict.fromkeys(sorted(given_names), 1))
    assert matches(json_schema_regex(schema), text) == (required <= given_names)


def test_references() -> None:
    schema = {
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/point"}, "b": {"$ref": "#/$defs/point"}},
        "required": ["a", "b"],
    }
    assert matches(json_schema_regex(schema), '{"a": [1, 2], "b": []}')


@pytest.mark.parametrize("schema", [3, {"type": "array", "items": 3}, {"title": "no type"}])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(UsageError, match="json_schema"):
        json_schema_regex(schema)
