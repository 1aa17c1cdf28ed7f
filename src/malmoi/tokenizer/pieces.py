"""Texts longer than a model reads at once: words with their first tokens, questions over overlapping windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from malmoi.errors import UsageError
from malmoi.tokenizer.core import Encoding, Tokenizer


@dataclass(frozen=True)
class Piece:
    """Some words as tokens: where each one's first token stands (None where it has none), and the first word."""

    encoding: Encoding
    firsts: tuple[int | None, ...]
    start: int = 0


def word_pieces(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], length: int) -> list[list[Piece]]:
    """Each sentence's words as one piece, or as halves of halves where that is more than `length` tokens."""
    encodings = tokenizer.encode_batch([" ".join(words) for words in sentences])
    return [list(_fitting(tokenizer, words, e, length, 0)) for words, e in zip(sentences, encodings, strict=True)]


def _fitting(
    tokenizer: Tokenizer, words: Sequence[str], encoding: Encoding, length: int, start: int
) -> Iterator[Piece]:
    if len(encoding.tokens) <= length:
        yield Piece(encoding, tuple(first_tokens(words, encoding)), start)
        return
    if len(words) < 2:
        cut = tokenizer.encode(" ".join(words), max_tokens=length)
        yield Piece(cut, tuple(first_tokens(words, cut)), start)
        return
    half = len(words) // 2
    for part, at in ((words[:half], start), (words[half:], start + half)):
        yield from _fitting(tokenizer, part, tokenizer.encode(" ".join(part)), length, at)


def first_tokens(words: Sequence[str], encoding: Encoding) -> Iterator[int | None]:
    """The place of each word's first token, by characters of the words joined with spaces."""
    at, begin = 0, 0
    places = [i for i, special in enumerate(encoding.specials) if not special]
    for word in words:
        end = begin + len(word)
        while at < len(places) and encoding.offsets[places[at]][1] <= begin:
            at += 1
        inside = at < len(places) and encoding.offsets[places[at]][0] < end
        yield places[at] if inside else None
        begin = end + 1


def windows(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], length: int, stride: int, most: int = 64
) -> list[list[Encoding]]:
    """Each (question, context) as windows of `length` tokens that move on by `stride` (Devlin 2019's SQuAD).

    A question longer than `most` tokens is cut. Offsets of the context stay those of the whole.
    """
    encodings = tokenizer.encode_batch([q for q, _ in pairs], [c for _, c in pairs])
    return [list(_windows(encoding, length, stride, most)) for encoding in encodings]


def _windows(e: Encoding, length: int, stride: int, most: int) -> Iterator[Encoding]:
    asked = [i for i, s in enumerate(e.segments) if s == 0 and not e.specials[i]]
    context = [i for i, s in enumerate(e.segments) if s == 1 and not e.specials[i]]
    dropped = set(asked[most:])
    frame = [i for i in range(len(e.tokens)) if i not in dropped and not (context and context[0] <= i <= context[-1])]
    head = [i for i in frame if not context or i < context[0]]
    room = length - len(frame)
    if room < 1:
        raise UsageError(f"{length} tokens leave no room for a context after the question; allow more.")
    step = min(stride, room)
    for start in range(0, max(1, len(context) - room + step), step):
        yield _take(e, [*head, *context[start : start + room], *frame[len(head) :]])


def _take(e: Encoding, places: Sequence[int]) -> Encoding:
    columns = (e.tokens, e.segments, e.offsets, e.specials, e.words)
    return Encoding(*([column[i] for i in places] for column in columns))  # type: ignore[arg-type]
