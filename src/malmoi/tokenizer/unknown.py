"""Whether a vocabulary fits some texts."""

from collections.abc import Iterable
from itertools import islice

from malmoi.messages import msg
from malmoi.tokenizer.core import Tokenizer

MAX_UNKNOWN_SHARE = 0.03  # of the tokens: more, and words are missing rather than odd signs
SAMPLE_TEXTS = 1000


def unknown_note(tokenizer: Tokenizer, texts: Iterable[str]) -> str | None:
    """A sentence if more than a few percent of the tokens are unknown; of the first texts only."""
    unknown = tokenizer.specials.unk
    if unknown is None:
        return None
    rows = tokenizer.ids(list(islice(texts, SAMPLE_TEXTS)))
    total = sum(map(len, rows))
    share = sum(row.count(unknown) for row in rows) / max(total, 1)
    if share <= MAX_UNKNOWN_SHARE:
        return None
    name = tokenizer.token(unknown)
    return msg(
        "{share:.0%} of the tokens are {name}: this model's vocabulary does not cover "
        "these texts. Add tokens with malmoi tokenizer extend, or use another model.",
        share=share,
        name=name,
    )
