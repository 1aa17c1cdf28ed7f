"""Limits on untrusted files and requests, far above real models and users.

They are also far below what would exhaust a machine's memory or keep it busy.
"""

from malmoi.errors import UsageError
from malmoi.messages import msg

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
