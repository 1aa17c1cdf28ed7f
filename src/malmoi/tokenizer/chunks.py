"""Where texts are cut: to fit a number of tokens, or into chunks that encode independently."""

import re
from collections.abc import Iterator

# characters of a long text encoded at once; larger chunks neither spread over the cores nor stay in
# cache
CHUNK_CHARACTERS = 8_192
# Where every family starts a new token regardless of what precedes: at a space after a non-space
# and, for text without spaces, at an ideographic stop after a letter. (A space belongs to the token
# after it, so it must stay with that token.)
STOP_CHARACTERS = " \n。、，！？"
SAFE_CUT = re.compile(r"(?<=\S)(?=[ \n])|(?<=[A-Za-z0-9ぁ-ゖァ-ヺー一-龥가-힣])(?=[。、，！？])")


def truncate_to_tokens(sequences: list[int | None], max_tokens: int) -> list[int]:
    """The positions kept when truncating to `max_tokens`; special tokens (None) always stay."""
    first = sequences.count(0)
    second = sequences.count(1)
    room = max_tokens - (len(sequences) - first - second)
    limits = truncated(first, second, room) if second else (room, 0)
    seen = [0, 0]
    keep = []
    for at, which in enumerate(sequences):
        if which is not None:
            seen[which] += 1
            if seen[which] > limits[which]:
                continue
        keep.append(at)
    return keep


def truncated(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of each text of a pair fits: the longer one is truncated first (BERT's rule).

    If both are truncated and the room is odd, the longer text keeps the odd token, the second in a
    tie, as in transformers' "longest_first".
    """
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - room // 2
    return (long, short) if first > second else (short, long)


def split_long_text(text: str) -> Iterator[str]:
    """Splits into chunks of about CHUNK_CHARACTERS characters where that cannot change a token."""
    start = 0
    while len(text) - start > 2 * CHUNK_CHARACTERS:
        cut = SAFE_CUT.search(text, start + CHUNK_CHARACTERS)
        if cut is None or cut.start() == len(text):
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text
