"""Splitting texts longer than the context: word pieces, and overlapping question windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import require_that
from malmoi.tokenizer.core import TEXTS_PER_CALL, Encoding, Tokenizer, TokenRow


class WordPieces(NamedTuple):
    """Some words as tokens: the first token of each (None if it has none), and the first word."""

    row: TokenRow
    firsts: tuple[int | None, ...]
    start: int


def word_pieces(
    tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], length: int
) -> list[list[WordPieces]]:
    """Each sentence as one piece, or halved until every piece has at most `length` tokens."""
    encodings = tokenizer.encode_batch([" ".join(words) for words in sentences])
    return [
        list(_fitting(tokenizer, words, e, length, 0))
        for words, e in zip(sentences, encodings, strict=True)
    ]


def _fitting(
    tokenizer: Tokenizer, words: Sequence[str], encoding: Encoding, length: int, start: int
) -> Iterator[WordPieces]:
    if len(encoding.tokens) > length and len(words) > 1:
        half = len(words) // 2
        for part, at in ((words[:half], start), (words[half:], start + half)):
            yield from _fitting(tokenizer, part, tokenizer.encode(" ".join(part)), length, at)
        return
    if len(encoding.tokens) > length:
        encoding = tokenizer.encode(" ".join(words), max_tokens=length)
    row = TokenRow(np.array(encoding.tokens, np.int32), np.array(encoding.segments, np.int32))
    yield WordPieces(row, tuple(first_tokens(words, encoding)), start)


def first_tokens(words: Sequence[str], encoding: Encoding) -> Iterator[int | None]:
    """The position of each word's first token in the words joined with spaces."""
    at = begin = 0
    places = [i for i, special in enumerate(encoding.specials) if not special]
    for word in words:
        end = begin + len(word)
        while at < len(places) and encoding.offsets[places[at]][1] <= begin:
            at += 1
        inside = at < len(places) and encoding.offsets[places[at]][0] < end
        yield places[at] if inside else None
        begin = end + 1


@dataclass(frozen=True, eq=False)
class ContextWindow(TokenRow):
    """A question and part of its context: the first token of that part, and token offsets."""

    first: int
    offsets: NDArray[np.int32]  # [tokens, 2]


def context_windows(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], length: int, stride: int, most: int = 64
) -> list[list[ContextWindow]]:
    """Each (question, context) as windows of `length` tokens, `stride` apart (Devlin 2019's SQuAD).

    A question is cut to `most` tokens. Offsets refer to the whole context.
    """
    found = []
    for start in range(0, len(pairs), TEXTS_PER_CALL):
        questions, contexts = zip(*pairs[start : start + TEXTS_PER_CALL], strict=True)
        encodings = tokenizer.encode_batch(questions, contexts)
        found += [list(_windows(encoding, length, stride, most)) for encoding in encodings]
    return found


def _windows(e: Encoding, length: int, stride: int, most: int) -> Iterator[ContextWindow]:
    tokens = np.array(e.tokens, np.int32)
    segments = np.array(e.segments, np.int32)
    text = ~np.array(e.specials)
    inside = np.flatnonzero(text & (segments == 1))
    asked = np.flatnonzero(text & (segments == 0))
    begin, end = (inside[0], inside[-1] + 1) if len(inside) else (len(tokens), len(tokens))
    head = np.setdiff1d(np.arange(begin), asked[most:])
    tail = np.arange(end, len(tokens))
    offsets = np.array(e.offsets[begin:end], np.int32).reshape(-1, 2)
    room = length - len(head) - len(tail)
    require_that(
        room >= 1,
        "{length} tokens leave no room for the context after the question; increase the limit.",
        length=length,
    )
    step = min(stride, room)
    for start in range(0, max(1, len(offsets) - room + step), step):
        stop = min(start + room, len(offsets))
        places = np.concatenate([head, np.arange(begin + start, begin + stop), tail])
        yield ContextWindow(tokens[places], segments[places], len(head), offsets[start:stop])
