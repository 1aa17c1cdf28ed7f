"""Refuses input that cannot be encoded or decoded, and explains the Rust library's errors.

Some sizes in a tokenizer.json would make that library abort the process: a huge id makes it
allocate every id below; normalizers that multiply a text's length exhaust memory. The library
treats neither as an error, so both are refused here.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from operator import index
from typing import Any

import numpy as np

from malmoi.errors import MalmoiError, UsageError, ensure, explained, require_that
from malmoi.messages import msg
from malmoi.system import untrusted
from malmoi.system.untrusted import JsonObject


def is_refusal(error: BaseException) -> bool:
    """Whether the library raised this, rather than Ctrl-C or SystemExit.

    For unexpected input that is a PanicException, which is no Exception and cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def panics_explained(sentence: str) -> Iterator[None]:
    """Turns the library's errors into "sentence: reason." """
    try:
        yield
    except MalmoiError:
        raise
    except BaseException as error:
        if not is_refusal(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise MalmoiError("{where}: {wrong}.", where=msg(sentence), wrong=reason) from None


def check_texts(texts: Any, name: str) -> None:
    """Refuses anything but a list of str: the Rust library would take tuples for pairs."""
    require_that(
        isinstance(texts, Sequence) and not isinstance(texts, str),
        "{name} must be a list of str, not {type}.",
        name=name,
        type=type(texts).__name__,
    )
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(
                "Only str can be encoded; item {at} of {name} is {type}: {text!r:.60}.",
                at=at,
                name=name,
                type=type(text).__name__,
                text=text,
            )


def integers(ids: Any) -> list[int]:
    """Token ids as plain integers, from a list, an array or a tensor."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    try:
        return [index(value) for value in values]
    except TypeError:
        raise UsageError(
            "Token ids must be integers; these cannot be decoded: {ids!r:.80}.", ids=ids
        ) from None


@contextmanager
def encoding_explained(texts: Iterable[str], pairs: Iterable[str] = ()) -> Iterator[None]:
    """Explains why a text could not be encoded: usually a lone surrogate."""
    try:
        yield
    except BaseException as error:
        if not is_refusal(error):
            raise
        for at, text in enumerate((*texts, *pairs)):
            try:
                text.encode()
            except UnicodeEncodeError as where:
                raise MalmoiError(
                    "Text {at} is not valid Unicode: a lone surrogate U+{ord:04X} at "
                    "character {start}. Read the file with the right encoding, or replace it: "
                    "text.encode('utf-8', 'replace').decode().",
                    at=at,
                    ord=ord(text[where.start]),
                    start=where.start,
                ) from None
        raise MalmoiError("The text could not be encoded: {error}.", error=error) from None


# ------------------------------------------------------------------ sizes

DAMAGED_CHARSMAP = msg("{where}: its precompiled_charsmap is damaged.")
# keys that hold the parts of a Sequence
PARTS = ("normalizers", "pretokenizers", "processors", "decoders")


def check_state(state: JsonObject) -> None:
    """Refuses a tokenizer.json with unreasonable sizes."""
    model = state.object("model")
    vocab = model.get("vocab")
    if isinstance(vocab, Mapping):
        check_ids(vocab, state.where)
    elif isinstance(vocab, list):
        _check_size(vocab, state.where)
    model.whole("max_input_chars_per_word", default=0, high=untrusted.MAX_WORD_CHARACTERS)
    for i, token in enumerate(state.list_of("added_tokens", dict, default=[])):
        added = JsonObject(token, f"{state.where}, added_tokens[{i}]")
        added.whole("id", high=untrusted.MAX_VOCABULARY_TOKENS)
        if len(added.text("content")) > untrusted.MAX_TOKEN_CHARACTERS:
            raise added.wrong(
                "content",
                msg("a text of at most {most:,} characters", most=untrusted.MAX_TOKEN_CHARACTERS),
            )
    for part in ("normalizer", "decoder"):
        check_growth(state.where, part, _growth(state.get(part), state.where))
    _check_patterns(dict(state), state.where)


def check_growth(where: str, part: str, growth: int) -> None:
    ensure(
        growth <= untrusted.MAX_TEXT_GROWTH,
        "{where}: its {part} may make a text {growth:,} times as long; up to {most} are allowed.",
        where=where,
        part=part,
        growth=growth,
        most=untrusted.MAX_TEXT_GROWTH,
    )


def check_ids(vocab: Mapping[str, Any], where: str) -> None:
    """Requires a vocabulary's ids to be integers with few gaps."""
    _check_size(vocab, where)
    ids = vocab.values()
    if set(map(type, ids)) - {int}:
        # finds which one is wrong; slow for 250,000 tokens
        JsonObject({"vocab": vocab}, where).map_of("vocab", int)
    size = len(vocab)
    ensure(len(set(ids)) >= size, "{where}: two tokens have the same id.", where=where)
    for id in (min(ids, default=0), max(ids, default=0)):
        ensure(
            0 <= id < size + untrusted.MAX_VOCABULARY_HOLES,
            "{where}: a token has the id {id:,} in a vocabulary of {size:,}; it is damaged.",
            where=where,
            id=id,
            size=size,
        )


def _check_size(vocab: Sized, where: str) -> None:
    ensure(
        len(vocab) <= untrusted.MAX_VOCABULARY_TOKENS,
        "{where} has a vocabulary of {count:,} tokens; up to {most:,} are read.",
        where=where,
        count=len(vocab),
        most=untrusted.MAX_VOCABULARY_TOKENS,
    )


def _growth(part: Any, where: str) -> int:
    """How many times longer this part of the pipeline can make a text."""
    if not isinstance(part, dict):
        return 1
    growth = 1
    for inner in (one for name in PARTS for one in _listed(part.get(name))):
        growth *= _growth(inner, where)
    if part.get("type") == "Replace":
        pattern = part.get("pattern")
        content = part.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        added = len(content) if isinstance(content, str) else 0
        # a regex may match the empty string before every character
        growth *= max(1, -(-added // len(text)) if isinstance(text, str) and text else added + 1)
    if part.get("type") == "Precompiled":
        with explained((KeyError, TypeError, ValueError), DAMAGED_CHARSMAP, where=where):
            charsmap = base64.b64decode(part["precompiled_charsmap"], validate=True)
        growth *= longest_replacement(charsmap, where)
    return growth


def longest_replacement(data: bytes, where: str) -> int:
    """The longest replacement in a SentencePiece charsmap, in bytes; refuses one that is damaged.

    Its layout is a 4-byte length, a trie, then NUL-separated texts. Unicode's longest replacement
    of one character has 33 bytes. The library follows the trie (a double array, as in Darts-clone)
    without looking whether it leaves it, so that is checked here.
    """
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    ensure(not size % 4 and len(data) >= 4 + size, DAMAGED_CHARSMAP, where=where)
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    leaves = units >> 31 == 1
    next_units = np.arange(len(units)) ^ units >> 10 << ((units & 512) >> 6) | 255
    beyond = np.where(leaves, (units & 0x7FFFFFFF) >= len(texts), next_units >= len(units))
    ensure(not beyond.any(), DAMAGED_CHARSMAP, where=where)
    return max(1, *map(len, texts.split(b"\0")))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_patterns(part: Any, where: str) -> None:
    """Checks regular expressions anywhere in the pipeline except the vocabulary."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(_listed(part)):
        size = len(value) if key == "Regex" and isinstance(value, str) else 0
        ensure(
            size <= untrusted.MAX_TOKENIZER_REGEX_CHARACTERS,
            "{where} has a regular expression of {size:,} characters; up to {most:,} are read.",
            where=where,
            size=size,
            most=untrusted.MAX_TOKENIZER_REGEX_CHARACTERS,
        )
        if key not in ("model", "added_tokens") and isinstance(value, dict | list):
            _check_patterns(value, where)
