"""Labels of words, and the spans that they make up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from malmoi.errors import UsageError
from malmoi.inference.predict import (
    Predictor,
    TextOrPair,
    name_of,
    score_tokens,
    split_pairs,
    token_scores,
)
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding

OUTSIDE_TAG = "O"  # the tag of a word outside any entity (CoNLL)


@dataclass(frozen=True, repr=False)
class Span(Result):
    """A labelled span of the text; `start` and `end` are character offsets.

    Examples:
        >>> malmoi.Span("Ann", "PER", start=0, end=3, score=0.9).label
        'PER'
    """

    text: str
    label: str
    start: int
    end: int
    score: float


def tag_texts(reading: Predictor, texts: Sequence[TextOrPair]) -> list[list[Span]]:
    """Predicts the labelled spans of each text."""
    encodings = reading.tokenizer.encode_batch(*split_pairs(texts))
    for encoding in encodings:
        if len(encoding.tokens) > reading.network.config.context:
            raise UsageError(
                "The text has {tokens} tokens, more than this model's context of {context}; "
                "split it into sentences.",
                tokens=len(encoding.tokens),
                context=reading.network.config.context,
            )
    scores = token_scores(reading.network, encodings, "tag")
    firsts = [text if isinstance(text, str) else text[0] for text in texts]
    tagged = zip(firsts, encodings, scores, strict=True)
    return [list(merge_tags(text, e, s, reading.labels)) for text, e, s in tagged]


def tag_words(reading: Predictor, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    """Tags the words of pre-split sentences; a word without tokens is tagged as outside."""
    pieces = reading.encode.pieces(
        reading.tokenizer, tuple(map(tuple, sentences)), reading.max_tokens
    )
    flat = [piece for some in pieces for piece in some]
    best: list[list[int]] = [[]] * len(flat)
    for group, scores in score_tokens(reading.network, [piece.row for piece in flat], "tag"):
        for i, places in zip(group, scores.argmax(-1).tolist(), strict=True):
            best[i] = places
    found = iter(best)
    return [
        [
            OUTSIDE_TAG if place is None else name_of(reading.labels, best_labels[place])
            for piece, best_labels in zip(some, found, strict=False)
            for place in piece.firsts
        ]
        for some in pieces
    ]


def merge_tags(
    text: str, encoding: Encoding, scores: Tensor, labels: Sequence[str]
) -> Iterator[Span]:
    """Merges the words of an entity: B-X begins, I-X continues; other labels are one word each."""
    entity: list[Span] = []
    for word in _words(text, encoding, scores.softmax(-1), labels):
        continues = word.label.startswith("I-")
        if entity and not (continues and entity[-1].label[1:] == word.label[1:]):
            yield _merged(text, entity)
            entity = []
        entity += [word] if word.label != OUTSIDE_TAG else []
    if entity:
        yield _merged(text, entity)


def _words(text: str, encoding: Encoding, chances: Tensor, labels: Sequence[str]) -> Iterator[Span]:
    """Yields each word with the label of its first token, the one trained (Devlin 2019 §5.3)."""
    words = enumerate(encoding.words)
    places = [at for at, word in words if word is not None and not encoding.specials[at]]
    for _, pieces in groupby(places, key=encoding.words.__getitem__):
        some = list(pieces)
        score, best = chances[some[0]].max(-1)
        start = encoding.offsets[some[0]][0]
        end = encoding.offsets[some[-1]][1]
        yield Span(text[start:end], name_of(labels, int(best)), start, end, float(score))


def _merged(text: str, words: Sequence[Span]) -> Span:
    start = words[0].start
    end = words[-1].end
    label = words[0].label
    name = label[2:] if label[:2] in ("B-", "I-") else label
    return Span(text[start:end], name, start, end, sum(word.score for word in words) / len(words))
