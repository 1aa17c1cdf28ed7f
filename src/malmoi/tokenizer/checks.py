"""Refuses input that cannot be encoded or decoded, and explains the Rust library's errors."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

from malmoi.errors import MalmoiError, UsageError
from malmoi.messages import msg


def is_refusal(error: BaseException) -> bool:
    """Whether the library raised this, rather than Ctrl-C or SystemExit.

    It raises plain Exception, or for unexpected input a PanicException, which is not a subclass of
    Exception and cannot be imported.
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
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UsageError(
            "{name} must be a list of str, not {type}.", name=name, type=type(texts).__name__
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
