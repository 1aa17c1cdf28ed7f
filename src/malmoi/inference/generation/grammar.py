"""Texts that are one of some choices, match a regular expression or follow a schema or grammar.

llguidance says which tokens may come next. It does not know how many may still be written: near the
limit only tokens are allowed after which an end was found. V vocabulary.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from numpy.typing import NDArray
from torch import Tensor

from malmoi.errors import MalmoiError, UsageError, first_line, require_that
from malmoi.inference.generation.constraints import Constraint, require_some
from malmoi.inference.generation.token_bytes import all_token_bytes
from malmoi.messages import msg
from malmoi.system.untrusted import (
    MAX_CHOICE_CHARACTERS,
    MAX_CHOICES,
    MAX_REGEX_CHARACTERS,
    MAX_SIZE,
    shown,
)
from malmoi.tokenizer import Tokenizer

JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allow_general_unicode_escapes": True,
    "coerce_one_of": True,
}
FORMATS = {
    *["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
}
NAMED_PARTS = {"properties", "patternProperties", "$defs", "definitions"}
MARGIN = 48  # bytes by which one token may lengthen the way to an end
TRIED = 16  # likeliest tokens whose way to an end is searched near the limit
# bytes in the order in which an end is searched: those that end JSON's values first
ASCII = tuple(dict.fromkeys(b'"}]0\n' + bytes(range(128))))
# any tokens may write what is the only continuation: some vocabularies lack those of llguidance
FREE = '%llguidance {"no_forcing": true}\n'


def _choices_grammar(texts: Any) -> str:
    listed = not isinstance(texts, str) and len(texts) > 0
    listed = listed and all(isinstance(text, str) and text for text in texts)
    require_that(listed, "choices must be a list of texts of at least one character each.")
    require_that(
        len(texts) <= MAX_CHOICES and sum(map(len, texts)) <= MAX_CHOICE_CHARACTERS,
        "choices may have {most:,} texts and {characters:,} characters, not more.",
        most=MAX_CHOICES,
        characters=MAX_CHOICE_CHARACTERS,
    )
    return _lark("|".join(map(re.escape, texts)))


def _regex_grammar(regex: str) -> str:
    require_that(
        len(regex) <= MAX_REGEX_CHARACTERS,
        "The regular expression has {regex:,} characters, more than {most:,}. Use choices.",
        regex=len(regex),
        most=MAX_REGEX_CHARACTERS,
    )
    require_that(
        not re.search(r"(?<!\\)(\\\\)*\\\Z", regex),  # llguidance would drop it
        "The regular expression {regex} is invalid at character {at}: nothing follows it.",
        regex=shown(regex),
        at=len(regex) - 1,
    )
    return _lark(regex)


def _lark(regex: str) -> str:
    return f"start: /{regex_to_lark(regex, 'ds')}/"


def json_rule(schema: Any) -> str:
    """JSON of a schema, as a part of a rule."""
    known = schema is True or isinstance(schema, Mapping)
    require_that(known, "json_schema must be an object, not {schema}.", schema=shown(schema))
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


GRAMMARS: dict[str, Callable[[Any], str]] = {
    "choices": _choices_grammar,
    "regex": _regex_grammar,
    "json_schema": lambda schema: f"start: {json_rule(schema)}",
    "grammar": str,
}


class Vocabulary:
    """A tokenizer as llguidance reads it: the bytes of every token and those that end a text."""

    is_tokenizer_wrapper = True  # what llguidance asks for

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.texts = (*all_token_bytes(tokenizer), b"")  # the last: an end where a model has none
        self.ids = {text: id for id, text in enumerate(self.texts)}
        self.ends = ends or {len(self.texts) - 1}
        self.eos_token_id = min(self.ends)
        self.bos_token_id = None
        self.special_token_ids = [id for id, text in enumerate(self.texts) if not text]
        self.tokens = [text or b"\xff%d" % id for id, text in enumerate(self.texts)]
        self.library = LLTokenizer(self, eos_token=sorted(self.ends))

    def tokens_along(self, text: bytes) -> set[int]:
        """The tokens that a text can begin with."""
        starts = (text[:size] for size in range(1, len(text) + 1))
        return {self.ids[start] for start in starts if start in self.ids}

    def __call__(self, text: str) -> list[int]:
        """Asked by llguidance for the tokens of a text to force; here none is forced."""
        return []


_vocabulary = lru_cache(maxsize=8)(Vocabulary)


def grammar_constraint(
    name: str, value: Any, tokenizer: Tokenizer, ends: frozenset[int]
) -> "GrammarConstraint":
    """The constraint of `choices`, `regex`, `json_schema` or a `grammar`."""
    constraint = _compiled(GRAMMARS[name](value), tokenizer, ends)
    if constraint.matcher.is_error():
        reason = _reason(constraint.matcher)
        if name == "regex":
            raise UsageError(
                "The regular expression {value} is invalid {reason}.",
                value=shown(value),
                reason=reason,
            )
        raise UsageError("{name} is invalid: {reason}.", name=name, reason=reason)
    return constraint


@lru_cache(maxsize=16)
def _compiled(grammar: str, tokenizer: Tokenizer, ends: frozenset[int]) -> "GrammarConstraint":
    """Kept for the next request with the same grammar."""
    return GrammarConstraint(grammar, _vocabulary(tokenizer, ends))


def _reason(matcher: Any) -> str:
    """The error of llguidance, with the character of an expression that it points to."""
    lines = [line.rstrip() for line in matcher.get_error().splitlines()]
    carets = [line.index("^") - 4 for line in lines if "^" in line and not line.strip("^ ")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors and carets:
        return msg("at character {carets}: {errors}", carets=carets[0], errors=errors[0])
    return str(lines[0]).rpartition("JSON schema: ")[2].rstrip(".")


class GrammarConstraint(Constraint):
    """Makes the whole text follow a grammar of llguidance."""

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.matcher = LLMatcher(vocabulary.library, FREE + grammar, log_level=0)
        self.ending = Ending(grammar)
        self.left = MAX_SIZE  # tokens that may still be written
        self.unchecked = 0  # steps until the limit can matter
        self.ways: dict[int, bytes] = {}  # near the limit: by the next token, bytes to an end

    def new_state(self, limit: int) -> Constraint:
        state = copy(self)
        state.matcher = self.matcher.deep_copy()
        state.ending = self.ending.new_state()
        state.left = limit
        return state

    @property
    def finished(self) -> bool:
        return bool(self.matcher.is_stopped())

    def allowed(self, scores: Tensor) -> Tensor:
        bits = _bits(self.matcher.compute_bitmask())
        if self.matcher.is_error() and "NoExtension" not in self.matcher.get_error():
            raise MalmoiError(
                "The text cannot be continued: {reason}.", reason=_reason(self.matcher)
            )
        mask = torch.zeros(len(scores), dtype=torch.bool)
        mask[: len(bits)] = torch.from_numpy(bits)[: len(scores)]
        if not self.matcher.is_accepting():
            mask[[id for id in self.vocabulary.ends if id < len(mask)]] = False
        require_some(mask, "no token can continue the text")
        self.unchecked -= 1
        return mask if self.unchecked >= 0 else self._before_an_end(mask, scores)

    def push(self, token: int) -> None:
        self.left -= 1
        self.matcher.consume_token(token)
        self.ending.push(self.vocabulary.texts[token], self.ways.get(token))

    def _before_an_end(self, mask: Tensor, scores: Tensor) -> Tensor:
        """Of these tokens, near the limit, likely ones that leave room for an end."""
        way = self.ending.find(self.left)
        if way is None:
            return mask
        spare = self.left - len(way) - MARGIN
        if spare > 0:
            self.unchecked = spare // MARGIN
            return mask
        texts = self.vocabulary.texts
        tried = self._likely(mask, scores) | self.vocabulary.tokens_along(way)
        ways = {id: self.ending.after(texts[id], way, self.left - 1) for id in tried if mask[id]}
        self.ways = {id: rest for id, rest in ways.items() if rest is not None}
        chosen = torch.zeros_like(mask)
        chosen[list(self.ways)] = True
        return chosen if self.ways else mask

    def _likely(self, mask: Tensor, scores: Tensor) -> set[int]:
        allowed = scores.masked_fill(~mask.to(scores.device), -torch.inf)
        return set(allowed.topk(min(TRIED, len(mask))).indices.tolist())


class Ending:
    """Searches short ends of a text, a byte at a time."""

    def __init__(self, grammar: str) -> None:
        self.matcher = LLMatcher(_bytes(), grammar, log_level=0)
        self.way: bytes | None = None

    def new_state(self) -> "Ending":
        state = copy(self)
        state.matcher = self.matcher.deep_copy()
        return state

    def push(self, text: bytes, way: bytes | None) -> None:
        """Goes on by a text, after which a way to an end may be known."""
        self.matcher.consume_tokens(list(text))
        self.way = way

    def find(self, most: int) -> bytes | None:
        """At most so many bytes that complete the text, if they are found."""
        if self.way is None:
            self.way = self._search(most)
        return self.way

    def after(self, text: bytes, way: bytes, most: int) -> bytes | None:
        """An end of at most so many bytes after a text: the rest of a way before it, or another."""
        self.matcher.consume_tokens(list(text))
        rests = (way.removeprefix(text), way[1:], way)
        known = (rest for rest in rests if len(rest) <= most and self.completes(rest))
        found = next(known, None) or self._search(most)
        self.matcher.rollback(len(text))
        return found

    def completes(self, rest: bytes) -> bool:
        """Whether the text can end after these bytes."""
        tokens = [*rest, _bytes().eos_token]
        return bool(self.matcher.validate_tokens(tokens) == len(tokens))

    def _search(self, most: int) -> bytes | None:
        way: list[int] = []
        seen = Counter[tuple[bytes, bytes]]()
        while not self.matcher.is_accepting() and len(way) <= most:
            step = [*self.matcher.compute_ff_bytes()] or self._step(seen)
            if not step:
                break
            self.matcher.consume_tokens(step)
            way += step
        complete = self.matcher.is_accepting() and len(way) <= most
        self.matcher.rollback(len(way))
        return bytes(way) if complete else None

    def _step(self, seen: Counter[tuple[bytes, bytes]]) -> list[int]:
        """A byte to a place that was reached most rarely; places are known by what may follow."""
        before = self.matcher.compute_bitmask()
        allowed = _bits(before)
        places: dict[bytes, list[int]] = {}
        ascii = [byte for byte in ASCII if allowed[byte]]
        for byte in ascii or np.flatnonzero(allowed).tolist():
            self.matcher.consume_token(byte)
            after = self.matcher.compute_bitmask()
            self.matcher.rollback(1)
            places.setdefault(after, []).append(byte)
            if not seen[before, after]:
                break
        if not places:
            return []
        rarest = min(places, key=lambda after: seen[before, after])
        seen[before, rarest] += 1
        return [places[rarest][(seen[before, rarest] - 1) % len(places[rarest])]]


@cache
def _bytes() -> Any:
    """A vocabulary of the 256 bytes."""
    return LLTokenizer("byte")


def _bits(mask: bytes) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
