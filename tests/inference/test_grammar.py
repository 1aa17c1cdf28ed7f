"""Texts that follow a JSON schema or an expression: what matches, and what a model writes."""

import json
import random
from typing import Any

import jsonschema_rs
import pytest
import regex
import torch
from hypothesis import given, settings, strategies as st

from live_server import TEXTS, gpt_folder
from malmoi.errors import UsageError
from malmoi.inference import Model, load
from malmoi.inference.generation.grammar import grammar_constraint
from malmoi.inference.generation.token_bytes import all_token_bytes
from malmoi.tokenizer import train_tokenizer

WORDS = train_tokenizer(["the state of the union", "나는 오늘"], kind="byte-bpe", vocab=300)


def matches(schema: Any, text: str) -> bool:
    constraint = grammar_constraint("json_schema", schema, WORDS, frozenset({0}))
    return constraint.ending.completes(text.encode())


def parsed(text: str) -> Any:
    """Numbers of JSON have any exponent; Python's end at 1e308."""
    return json.loads(text, parse_float=lambda numeral: min(max(float(numeral), -1e300), 1e300))


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
    text = json.dumps(value, ensure_ascii=False)
    assert matches(True, text)
    assert not matches(True, text[:-1])
    assert not matches(True, f"[{text}]")


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
def test_schemas_match_valid_values(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not matches(schema, text)] == []
    assert [text for text in no if matches(schema, text)] == []


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_required_and_optional_properties(required: set[str], given_names: set[str]) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abcd"},
        "required": sorted(required),
    }
    text = json.dumps(dict.fromkeys(sorted(given_names), 1))
    assert matches(schema, text) == (required <= given_names)


def test_references() -> None:
    schema = {
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/point"}, "b": {"$ref": "#/$defs/point"}},
        "required": ["a", "b"],
    }
    assert matches(schema, '{"a": [1, 2], "b": []}')


@given(st.integers(-2000, 2000), st.integers(0, 1500), st.integers(-4000, 4000))
def test_whole_numbers_within_limits(low: int, size: int, number: int) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": low + size}
    for one in (number, low - 1, low, low + size, low + size + 1):
        assert matches(schema, str(one)) == (low <= one <= low + size), one


@given(st.decimals(-20, 20, places=2), st.decimals(0, 9, places=2), st.decimals(-30, 30, places=3))
def test_numbers_within_limits(low: Any, size: Any, number: Any) -> None:
    schema = {"type": "number", "minimum": float(low), "exclusiveMaximum": float(low + size + 1)}
    inside = low <= number < low + size + 1
    # written without trailing zeros, and zero without a sign
    numeral = format(abs(number) if number == 0 else number.normalize(), "f")
    assert matches(schema, numeral) == inside


@pytest.mark.parametrize("schema", [3, {"type": "array", "items": 3}, {"properties": []}])
def test_invalid_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(UsageError, match="json_schema"):
        matches(schema, "1")


# ------------------------------------------------------------------ what a model writes

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": -3, "maximum": 120},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    "recursion": TREE,
    "any object": {"type": "object"},
    "anything": {"title": "no type"},
    "strings": {
        "properties": {
            "free": {"type": "string"},
            "short": {"type": "string", "minLength": 1, "maxLength": 3},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
            "found": {"type": "string", "pattern": "\\w!"},
            "day": {"type": "string", "format": "date"},
            "mail": {"type": "string", "format": "email"},
        },
        "required": ["free", "short", "code", "found", "day", "mail"],
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "exclusiveMinimum": -0.25, "maximum": 7.5},
        "minItems": 2,
    },
    "unions": {
        "anyOf": [{"type": ["integer", "null"]}, {"enum": ["가", "나", 1.5, True]}],
        "default": None,
    },
    "merged": {
        "allOf": [{"$ref": "#/$defs/named"}, {"properties": {"b": {"const": {"x": [1]}}}}],
        "required": ["a", "b", "other"],
        "$defs": {"named": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of random weights, which knows nothing of JSON."""
    size = dict(n_positions=160, n_layer=1, n_embd=16, n_head=2)
    return load(gpt_folder(tmp_path_factory.mktemp("gpt") / "gpt", **size), device="cpu")


@pytest.mark.parametrize("name", SCHEMAS)
def test_generated_json_is_always_valid(gpt: Model, name: str) -> None:
    """Also at the limit of tokens: close to it only tokens are allowed that lead to an end."""
    check = jsonschema_rs.validator_for(SCHEMAS[name], validate_formats=True)
    written = set()
    for seed, limit in enumerate((100, 120, 140)):
        text = gpt.generate("a", json_schema=SCHEMAS[name], max_new_tokens=limit, seed=seed)
        check.validate(parsed(text))
        written.add(text)
    assert len(written) > 1


def simple_schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer", "minimum": 7},
            {"type": "number"},
            {"type": "boolean"},
            {"enum": ["x", 2, None]},
        ]
    )

    def joined(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        objects = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).flatmap(
            lambda named: st.sets(st.sampled_from([*named, ""])).map(
                lambda wanted: {
                    "type": "object",
                    "properties": named,
                    "required": sorted(wanted - {""}),
                }
            )
        )
        arrays = inner.map(lambda one: {"type": "array", "items": one, "maxItems": 3})
        return (
            objects
            | arrays
            | st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
        )

    return st.recursive(leaves, joined, max_leaves=5)


@settings(max_examples=10, deadline=None)
@given(simple_schemas(), st.integers(0, 99))
def test_generated_json_follows_random_schemas(
    gpt: Model, schema: dict[str, Any], seed: int
) -> None:
    text = gpt.generate("a", json_schema=schema, max_new_tokens=60, seed=seed)
    jsonschema_rs.validate(schema, parsed(text))


# ------------------------------------------------------------------ vocabularies

PATTERNS = [r"[가-힣 ]{2,9}\.", r"(the|of) ?[a-z]+", "[^a-z]{2,5}x?", "(a|ab|나는)*d", r"\w+ \d"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["byte-bpe", "bpe", "wordpiece", "char"])
def test_exactly_the_tokens_that_can_be_completed_are_allowed(kind: str, pattern: str) -> None:
    """By the partial matches of the package regex, for every token of whole characters."""
    tokenizer = train_tokenizer(TEXTS, kind=kind, vocab=400)
    end = tokenizer.vocab_size
    state = grammar_constraint("regex", pattern, tokenizer, frozenset({end})).new_state(10**6)
    texts = all_token_bytes(tokenizer)
    rng = random.Random(0)
    written = b""
    for _ in range(5):
        allowed = state.allowed(torch.zeros(end + 1)).tolist()
        for id, text in enumerate(texts):
            whole = (written + text).decode(errors="ignore")
            if text and whole.encode() == written + text:
                matching = regex.fullmatch(pattern, whole, partial=True) is not None
                assert allowed[id] == matching, (whole, text)
        assert allowed[end] == bool(regex.fullmatch(pattern, written.decode(errors="replace")))
        token = rng.choice([id for id, free in enumerate(allowed[:end]) if free] or [end])
        if token == end:
            return
        state.push(token)
        written += texts[token]
