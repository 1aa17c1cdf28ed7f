"""Where a text is cut: to the tokens that fit (the papers' rule), or into pieces that encode one
by one.
"""

import re
from collections.abc import Iterator

# characters of a long text encoded at once; longer pieces neither spread over cores nor stay in
# cache
CHUNK_CHARACTERS = 8_192
# Where every family starts a new token whatever comes before: at a space after anything else, and,
# for text without
# spaces, at an ideographic stop after a letter. (A space belongs to the token after it, so it must
# stay with that.)
STOP_CHARACTERS = " \n。、，！？"
SAFE_CUT = re.compile(r"(?<=\S)(?=[ \n])|(?<=[A-Za-z0-9ぁ-ゖァ-ヺー一-龥가-힣])(?=[。、，！？])")


def truncate_to_tokens(sequences: list[int | None], max_tokens: int) -> list[int]:
    """The positions that stay when a sequence is cut to `max_tokens`; specials (None) always do."""
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
    """How much of each text of a pair fits: tokens go from the end of the longer one until both fit
    (BERT's rule).

    Where both end up cut and the room is odd, the text that was longer keeps the odd token, the
    second in a tie, as transformers' "longest_first" has it.
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
    """A long text in pieces of about PIECE characters, each cut where that cannot change a
    token.
    """
    start = 0
    while len(text) - start > 2 * CHUNK_CHARACTERS:
        cut = SAFE_CUT.search(text, start + CHUNK_CHARACTERS)
        if cut is None or cut.start() == len(text):
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text
