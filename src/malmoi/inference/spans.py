"""Spans of a text: labels of words and what they make up, and answers from a context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from malmoi.errors import require_that
from malmoi.inference.batches import in_order
from malmoi.inference.predict import (
    Predictor,
    TextOrPair,
    name_of,
    score_tokens,
    split_pairs,
    token_scores,
)
from malmoi.inference.prompt import require_fit
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding
from malmoi.tokenizer.windows import ContextWindow, context_windows, word_pieces

OUTSIDE_TAG = "O"  # the tag of a word outside any entity (CoNLL)
MAX_ANSWER_TOKENS = 30  # maximum length of an answer (Devlin 2019's code)
NO_ANSWER_SCORE = 1e6  # the margin of "no answer" over the best span when the context is empty
MAX_STARTS = 20  # best starts and ends paired in each window
SpanScores = dict[tuple[int, int], float]  # by (start, end) character


# ------------------------------------------------------------------ labelled words


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
        require_fit(encoding, reading.network.config.context)
    scores = token_scores(reading.network, encodings, "tag")
    firsts = [text if isinstance(text, str) else text[0] for text in texts]
    tagged = zip(firsts, encodings, scores, strict=True)
    return [list(merge_tags(text, e, s, reading.labels)) for text, e, s in tagged]


def tag_words(reading: Predictor, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    """Tags the words of pre-split sentences; a word without tokens is tagged as outside."""
    words = tuple(map(tuple, sentences))
    pieces = reading.encode(word_pieces, reading.tokenizer, words, reading.max_tokens)
    flat = [piece for some in pieces for piece in some]
    batches = score_tokens(reading.network, [piece.row for piece in flat], "tag")
    found = iter(in_order((group, scores.argmax(-1).tolist()) for group, scores in batches))
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


# ------------------------------------------------------------------ answers


@dataclass(frozen=True, repr=False)
class ScoredSpan(Result):
    """A part of a text and its score; `start` and `end` are character offsets."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, repr=False)
class Candidate(ScoredSpan):
    """A possible answer; `start` and `end` are character offsets into the context."""


@dataclass(frozen=True, repr=False)
class Answer(Candidate):
    """The best candidate (an empty text if there is no answer), all, and the margin of "none".

    Examples:
        >>> malmoi.Answer("Paris", start=10, end=15, score=0.9, candidates=(), null=-3.0).text
        'Paris'
    """

    candidates: tuple[Candidate, ...]
    null: float


def answer_questions(
    reading: Predictor, questions: Sequence[tuple[str, str]], top: int = 5
) -> list[Answer]:
    """The best spans: max S·T_i + E·T_j, or none if s_null > s_best + threshold (BERT §4.3)."""
    for one in questions:
        require_that(
            not isinstance(one, str) and len(one) == 2,
            "A question needs its context: give (question, context), not {one!r:.60}.",
            one=one,
        )
    length = reading.max_tokens
    stride = min(reading.stride, length)
    cut = reading.encode(context_windows, reading.tokenizer, tuple(questions), length, stride)
    read = iter(_read(reading, [window for some in cut for window in some], max(top, 1)))
    return [
        _answer(context, [next(read) for _ in some], reading.threshold, top)
        for (_, context), some in zip(questions, cut, strict=True)
    ]


@torch.inference_mode()
def _read(
    reading: Predictor, windows: Sequence[ContextWindow], top: int
) -> list[tuple[float, SpanScores]]:
    """Each window's "no answer" score and the scores of its best spans."""
    last = reading.network.config.pool == "last"

    def read(some: list[ContextWindow], scores: Tensor) -> Iterator[tuple[float, SpanScores]]:
        ends = [len(window.tokens) - 1 if last else 0 for window in some]
        nulls = scores[range(len(some)), ends].sum(-1).tolist()
        return zip(nulls, _spans(some, scores, top), strict=True)

    batches = score_tokens(reading.network, windows, "span")
    return in_order((group, read([windows[i] for i in group], scores)) for group, scores in batches)


def _spans(windows: Sequence[ContextWindow], scores: Tensor, top: int) -> Iterator[SpanScores]:
    bounds = torch.tensor(
        [(w.first, w.first + len(w.offsets)) for w in windows], device=scores.device
    )
    places = torch.arange(scores.size(1), device=scores.device)
    inside = (places >= bounds[:, :1]) & (places < bounds[:, 1:])
    ordered = scores.masked_fill(~inside[..., None], -torch.inf).sort(
        dim=1, descending=True, stable=True
    )
    (starts, ends), (first, last) = (some[:, :MAX_STARTS].unbind(-1) for some in ordered)
    first = first[:, :, None]
    last = last[:, None]
    fits = (first <= last) & (last < first + MAX_ANSWER_TOKENS)
    totals = (starts[:, :, None] + ends[:, None]).masked_fill(~fits, -torch.inf).flatten(1)
    best = totals.sort(dim=1, descending=True, stable=True)
    begins, closes = (
        some.expand_as(fits).flatten(1).gather(1, best.indices) for some in (first, last)
    )
    read = (some.cpu().numpy() for some in (best.values, begins, closes))
    for window, *spans in zip(windows, *read, strict=True):
        found: SpanScores = {}
        for score, begin, close in zip(*spans, strict=True):
            if len(found) == top or score == -torch.inf:
                break
            place = (
                int(window.offsets[begin - window.first, 0]),
                int(window.offsets[close - window.first, 1]),
            )
            found.setdefault(place, float(score))
        yield found


def _answer(
    context: str, read: Sequence[tuple[float, SpanScores]], threshold: float, top: int
) -> Answer:
    found: SpanScores = {}
    null = min(score for score, _ in read)
    for _, spans in read:
        for place, score in spans.items():
            found[place] = max(score, found.get(place, score))
    ranked = sorted(found.items(), key=lambda item: item[1], reverse=True)[: max(top, 1)]
    # without the leading space of a byte-level token
    trimmed = [(b - len(context[a:b].lstrip()), b, score) for (a, b), score in ranked]
    candidates = tuple(Candidate(context[a:b], a, b, score) for a, b, score in trimmed)
    if not candidates:
        return Answer("", 0, 0, null, (), NO_ANSWER_SCORE)
    difference = null - candidates[0].score
    if difference > threshold:
        return Answer("", 0, 0, null, candidates[:top], difference)
    return Answer(**vars(candidates[0]), candidates=candidates[:top], null=difference)
