"""What the Rust library says when it gives up, in a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from malmoi.errors import MalmoiError


def is_refusal(error: BaseException) -> bool:
    """Whether the library raised this, rather than Ctrl-C or the end of the program.

    It raises plain Exception for what it cannot read, and, where it did not expect an input at all,
    a PanicException, which is no Exception and has no name to import.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def panics_explained(sentence: str) -> Iterator[None]:
    """Whatever the library raises becomes "sentence: reason." """
    try:
        yield
    except MalmoiError:
        raise
    except BaseException as error:
        if not is_refusal(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise MalmoiError(f"{sentence}: {reason}.") from None
