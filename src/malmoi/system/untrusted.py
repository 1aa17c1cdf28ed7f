"""Files and requests that nobody vouches for: limits on them, and JSON checked as it is read.

The limits are far above real models and users, and far below what would exhaust a machine's memory
or keep it busy. An error is one sentence with the file, the key and what was expected.
"""

import gc
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from malmoi.errors import MalmoiError, UsageError, ensure, explained
from malmoi.messages import msg

# ------------------------------------------------------------------ limits

# files
MAX_JSON_BYTES = 512 * 2**20  # the largest tokenizer.json in use has about 35 MB
MAX_JSON_DEPTH = 64  # nesting of objects and lists
MAX_SHOWN_CHARACTERS = 60  # of a wrong value, in an error
# of data: a book has a million characters, and no text shrinks a hundredfold when it is packed
MAX_LINE_CHARACTERS = 1 << 25
MAX_GROWTH = 100
MIN_UNPACKED_BYTES = 1 << 26  # allowed for any file

MAX_PATH_CHARACTERS = 4_096

# models
MAX_LAYERS = 1 << 12  # GPT-3 has 96
MAX_CONTEXT_TOKENS = 1 << 22
MAX_SIZE = (1 << 31) - 1  # of a vocabulary, a width, a number of heads…
MAX_PATTERN_CHARACTERS = 1_000  # of an attention pattern
MAX_WEIGHT = 1e9  # squares of larger ones overflow in a norm
# of rotary or sinusoidal positions: a million tokens with heads of 128
MAX_POSITION_TABLE_BYTES = 512 * 2**20
MAX_CLASSES = 1 << 16

# tokenizers
MAX_VOCABULARY_TOKENS = 1 << 22  # a larger id makes the library walk through all smaller ones
MAX_VOCABULARY_HOLES = 1 << 16  # unused ids below the largest
MAX_TOKEN_CHARACTERS = 1 << 16
MAX_WORD_CHARACTERS = 10_000  # of one word for WordPiece
MAX_TEXT_GROWTH = 64  # how many times longer normalizers may make a text
MAX_TOKENIZER_REGEX_CHARACTERS = 10_000

# untrusted programs: chat templates, adapters' regular expressions
MAX_CONFINED_SECONDS = 5.0
MAX_CONFINED_BYTES = 512 * 2**20
MAX_RENDERED_CHARACTERS = 4_000_000
MAX_TEMPLATE_CHARACTERS = 1_000_000

# requests
MAX_CONTINUATIONS = 1_024  # of one prompt: n
MAX_BEAMS = 256
MAX_CHOICES = 100_000
MAX_CHOICE_CHARACTERS = 10_000_000  # of all choices together
MAX_REGEX_CHARACTERS = 10_000
MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1


def check_whole_number(name: str, value: object, low: int, high: int) -> int:
    """The value, if it is an integer within these bounds; raises otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(
            "{name} must be a whole number from {low:,} to {high:,}, not {value}.",
            name=name,
            low=low,
            high=high,
            value=shown(value),
        )
    return value


def shown(value: object) -> str:
    """A wrong value as an error shows it, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits; a value that contains itself
        return msg("a {type} too large to show", type=type(value).__name__)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 1]}…"


def format_size(count: float) -> str:
    """A number of bytes with its unit: 1.5 GB, 120 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


# ------------------------------------------------------------------ JSON

D = TypeVar("D")
T = TypeVar("T")
_REQUIRED: Any = object()
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
CALLED: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class JsonObject(dict[str, Any]):
    """A JSON object: raw values, with methods that check types.

    An absent or null key takes its default; without one it is an error.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        super().__init__(values)
        self.where = where
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"JsonObject({self.where!r}, {shown(dict(self))})"

    def text(self, key: str, *, default: D = _REQUIRED) -> str | D:
        return self._typed(key, str, default)

    def flag(self, key: str, *, default: D = _REQUIRED) -> bool | D:
        return self._typed(key, bool, default)

    def whole(
        self, key: str, *, default: D = _REQUIRED, low: int = 0, high: int = 2**63 - 1
    ) -> int | D:
        value = self._typed(key, int, default)
        if self.get(key) is not None and not low <= cast(int, value) <= high:
            raise self.wrong(
                key, msg("a whole number from {low:,} to {high:,}", low=low, high=high)
            )
        return value

    def number(self, key: str, *, default: D = _REQUIRED) -> float | D:
        return self._typed(key, float, default)

    def object(self, key: str, *, default: Mapping[str, Any] = _REQUIRED) -> "JsonObject":
        return JsonObject(self._typed(key, dict, default), self.where, f"{self._prefix}{key}.")

    def list_of(self, key: str, kind: type[T], *, default: list[T] = _REQUIRED) -> list[T]:
        values = self._typed(key, list, default)
        return [self._checked(f"{key}[{i}]", value, kind) for i, value in enumerate(values)]

    def map_of(self, key: str, kind: type[T], *, default: dict[str, T] = _REQUIRED) -> dict[str, T]:
        values = self._typed(key, dict, default)
        return {name: self._checked(f"{key}.{name}", value, kind) for name, value in values.items()}

    def require(self, condition: Any, key: str, expected: str) -> None:
        """Raises the error that the value of a key is not what is expected, unless it holds."""
        if not condition:
            raise self.wrong(key, expected)

    def wrong(self, key: str, expected: str, value: Any = None) -> MalmoiError:
        """The error for a value that is not what is expected: that of the key, or one inside it."""
        return MalmoiError(
            "{where}: {key} must be {expected}, not {value}.",
            where=self.where,
            key=(self._prefix + key)[:80],
            expected=msg(expected),
            value=shown(self.get(key) if value is None else value),
        )

    def _typed(self, key: str, kind: type[T], default: D) -> T | D:
        if (value := self.get(key)) is not None:
            return self._checked(key, value, kind)
        ensure(
            default is not _REQUIRED,
            "{where} has no {prefix}{key}, which must be {called}.",
            where=self.where,
            prefix=self._prefix,
            key=key,
            called=msg(CALLED[kind]),
        )
        return default

    def _checked(self, key: str, value: Any, kind: type[T]) -> T:
        if not is_a(value, kind):
            raise self.wrong(key, CALLED[kind], value)
        return float(value) if kind is float else value  # type: ignore[return-value]


def is_a(value: object, kind: type) -> bool:
    """Whether a JSON value has this type: true is not a number, and numbers must be finite."""
    if isinstance(value, bool) or kind is not float:
        return isinstance(value, kind) and not (isinstance(value, bool) and kind is int)
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond float range
        return False


def named(where: str) -> AbstractContextManager[None]:
    """Adds the file's name to errors about its fields."""
    return explained(UsageError, "{where}: {error}", where=where)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses garbage collection while a file becomes hundreds of thousands of objects.

    None of them is garbage, and each collection would go through every object of the process: with
    torch and transformers imported, that is a third of the time that GPT-2's tokenizer takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_object(path: Path) -> JsonObject:
    return parse_object(read_text(path), str(path))


def read_optional_object(path: Path) -> JsonObject:
    """The object of a file; empty where there is none."""
    return read_object(path) if path.is_file() else JsonObject({}, str(path))


def parse_object(text: str, where: str) -> JsonObject:
    """The object of a JSON text; `where` names it in errors."""
    value = parse(text, where)
    if not isinstance(value, dict):
        raise MalmoiError(
            "{where} must hold a JSON object, not {value}.", where=where, value=shown(value)
        )
    return JsonObject(value, where)


def parse(text: str, where: str) -> Any:
    """Parses JSON to plain values, with bounded depth."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise MalmoiError(
            "{where} is not JSON: {msg} at line {lineno}, column {colno}; was it cut short? "
            "Copy or download it again.",
            where=where,
            msg=error.msg,
            lineno=error.lineno,
            colno=error.colno,
        ) from None
    except ValueError:  # from a number: Python limits the digits it converts
        raise MalmoiError(
            "{where} holds a number of thousands of digits; it is damaged.", where=where
        ) from None
    except RecursionError:
        raise _too_deep(where) from None
    _check_depth(value, where)
    if HALF_CHARACTER.search(text):
        _check_characters(value, where)
    return value


def _check_characters(value: Any, where: str) -> None:
    r"""Refuses lone surrogates (\ud800), which JSON can express and UTF-8 cannot."""
    with explained(
        UnicodeEncodeError,
        "{where} holds half a character (a lone surrogate); it is damaged.",
        where=where,
    ):
        json.dumps(value, ensure_ascii=False).encode()


def _check_depth(value: Any, where: str) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        parts = (one.values() if type(one) is dict else one for one in level)
        # a vocabulary has a hundred thousand values, so that `isinstance` takes too long
        level = [one for part in parts for one in part if type(one) is dict or type(one) is list]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> MalmoiError:
    return MalmoiError(
        "{where} nests more than {most} levels deep, which no valid file does.",
        where=where,
        most=MAX_JSON_DEPTH,
    )


def read_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """A UTF-8 text file of bounded size, with any kind of newlines."""
    try:
        text = read_bytes(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise MalmoiError(
            "{path} is not UTF-8 text: {reason} at byte {start}.",
            path=path,
            reason=error.reason,
            start=error.start,
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    too_large = "{path} has {size:,} bytes; Malmoi reads such a file up to {max_bytes:,}."
    try:
        size = path.stat().st_size
        ensure(size <= max_bytes, too_large, path=path, size=size, max_bytes=max_bytes)
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or error
        raise MalmoiError("{path} cannot be read: {strerror}.", path=path, strerror=why) from None


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings under dotted names: {"a": {"b": 1}} → ("a.b", 1)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
