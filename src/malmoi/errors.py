"""Errors for users: one sentence with what is wrong, where, and what to do."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import TypeVar

from malmoi.messages import msg

T = TypeVar("T")

# characters of a wrong name that are compared with known ones; the time grows with its square
LONGEST_NAME = 100
SHOWN_NAMES = 4  # that begin with an unknown one
MOST_NAMES = 10_000  # that are compared
# torch's, as a RuntimeError
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "backend out of memory")


class MalmoiError(Exception):
    """The operation failed: a file is missing, damaged or does not fit. Commands exit with 1.

    Examples:
        >>> malmoi.load("nowhere")
        Traceback (most recent call last):
        malmoi.errors.MalmoiError: ...
    """

    def __init__(self, sentence: str, /, **values: object) -> None:
        super().__init__(msg(sentence, **values))


class UsageError(MalmoiError):
    """The request is invalid: an unknown name, an impossible setting. Commands exit with 2.

    `code` identifies common errors for programs: the server sends it, and the studio translates it.

    Examples:
        >>> malmoi.generate("runs/tiny-gpt", "The", temprature=0.5)
        Traceback (most recent call last):
        malmoi.errors.UsageError: generate has no setting 'temprature'. Did you mean 'temperature'?
    """

    def __init__(self, sentence: str, /, *, code: str | None = None, **values: object) -> None:
        super().__init__(sentence, **values)
        self.code = code


def require_that(
    condition: object, sentence: str, /, *, code: str | None = None, **values: object
) -> None:
    """Raises a UsageError with this sentence, which says what is needed, unless it holds."""
    if not condition:
        raise UsageError(msg(sentence, **values), code=code)


def ensure(
    condition: object,
    sentence: str,
    /,
    *,
    raises: type[MalmoiError] = MalmoiError,
    **values: object,
) -> None:
    """Raises a MalmoiError with this sentence, which says what is wrong, unless it holds."""
    if not condition:
        raise raises(msg(sentence, **values))


def require(what: str, condition: object, sentence: str, /, **values: object) -> None:
    """Raises a UsageError that begins with `what` unless the settings are consistent."""
    if not condition:
        raise UsageError("{what}: {sentence}", what=msg(what), sentence=msg(sentence, **values))


def require_known(name: str, known: Collection[str], sentence: str, /, **values: object) -> None:
    """Raises a sentence about an unknown {name}, with the nearest known one as its {hint}."""
    if name not in known:
        raise UsageError(msg(sentence, name=name, hint=nearest(name, known), **values))


def required(
    value: T | None, sentence: str, /, *, raises: type[MalmoiError] = UsageError, **values: object
) -> T:
    """The value; raises a sentence, which says what is needed, if there is none."""
    if value is None:
        raise raises(sentence, **values)
    return value


@contextmanager
def explained(
    kinds: type[Exception] | tuple[type[Exception], ...],
    sentence: str,
    /,
    *,
    raises: type[MalmoiError] = MalmoiError,
    **values: object,
) -> Iterator[None]:
    """Turns errors of these kinds into a sentence, whose {error} is what they said.

    It may also name the {type} of the error, and the {reason}, the first line of what it said.
    """
    try:
        yield
    except kinds as error:
        about = {"error": error, "type": type(error).__name__, "reason": first_line(error)}
        raise raises(sentence, **(about | values)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error of Python or of torch on any device."""
    message = str(error)
    out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return out or any(words in message for words in OUT_OF_MEMORY)


def first_line(error: Exception) -> str:
    """The first line of an error from elsewhere, or its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for an unknown name: names that begin with it, else the most similar one, else all
    names if there are few.
    """
    known = sorted(islice(names, MOST_NAMES))
    if close := similar_names(name, known):
        return did_you_mean(close)
    return msg(" Known: {known}.", known=", ".join(known)) if 0 < len(known) <= 20 else ""


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Names that begin with an unknown one, the shortest first; else the most similar one."""
    known = sorted(islice(names, MOST_NAMES))
    requested = name[:LONGEST_NAME].lower()
    begin = sorted((n for n in known if requested and n.lower().startswith(requested)), key=len)
    return (begin or get_close_matches(requested, known, n=1, cutoff=0.55))[:SHOWN_NAMES]


def did_you_mean(names: Iterable[str]) -> str:
    """The question at the end of an error."""
    return msg(" Did you mean {names}?", names=", ".join(map(repr, names)))
