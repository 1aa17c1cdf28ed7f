"""Answers to questions about a text: the best spans over windows of a long context, and whether there is one."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.infer.predict import Reading, token_scores
from malmoi.tokenizer import Encoding

LONGEST = 30  # tokens of an answer (Devlin 2019's code)
CERTAIN = 1e6  # how much likelier "no answer" is where the context is empty
STARTS = 20  # starts and ends that are paired in a window


@dataclass(frozen=True)
class Candidate:
    """A stretch of the context that may be the answer; `start` and `end` count its characters."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Answer:
    """The answer, empty where the text holds none; the best candidates; how much likelier "none" is than the best."""

    text: str
    start: int
    end: int
    score: float
    candidates: tuple[Candidate, ...]
    null: float


def answer(reading: Reading, questions: Sequence[tuple[str, str]], top: int = 5) -> list[Answer]:
    """The answer to each (question, context): max of S·T_i + E·T_j, j ≥ i, over all windows (BERT §4.2).

    There is none where s_null > s_best + threshold (BERT §4.3); a folder that never met such questions always answers.
    """
    for one in questions:
        if isinstance(one, str) or len(one) != 2:
            raise UsageError(f"A question needs its text: give pairs (question, context), not {one!r:.60}.")
    length = reading.longest
    cut = reading.cut(reading.tokenizer, tuple(questions), length, min(reading.stride, length))
    scores = iter(token_scores(reading.network, [window for some in cut for window in some], "span"))
    last = reading.network.config.pool == "last"
    return [
        _answer(context, [(window, next(scores)) for window in some], reading.threshold, top, last)
        for (_, context), some in zip(questions, cut, strict=True)
    ]


def _answer(context: str, read: Sequence[tuple[Encoding, Tensor]], threshold: float, top: int, last: bool) -> Answer:
    found: dict[tuple[int, int], float] = {}
    null = float("inf")
    for window, scores in read:
        null = min(null, float(scores[-1 if last else 0].sum()))
        for place, score in _spans(window, scores, max(top, 1)).items():
            found[place] = max(score, found.get(place, score))
    best = heapq.nlargest(max(top, 1), found.items(), key=lambda item: item[1])
    candidates = tuple(_candidate(context, a, b, score) for (a, b), score in best)
    if not candidates:
        return Answer("", 0, 0, null, (), CERTAIN)
    difference = null - candidates[0].score
    if difference > threshold:
        return Answer("", 0, 0, null, candidates[:top], difference)
    one = candidates[0]
    return Answer(one.text, one.start, one.end, one.score, candidates[:top], difference)


def _candidate(context: str, start: int, end: int, score: float) -> Candidate:
    """Without the space that a byte-level token may begin with."""
    start += len(context[start:end]) - len(context[start:end].lstrip())
    return Candidate(context[start:end], start, end, score)


def _spans(window: Encoding, scores: Tensor, top: int) -> dict[tuple[int, int], float]:
    """The best spans between the best starts and ends of a window: (first character, last) → score."""
    places = np.flatnonzero((np.array(window.segments) == 1) & ~np.array(window.specials, bool))
    starts, ends = scores.numpy()[places].T
    first, last = (np.argsort(-some, kind="stable")[:STARTS] for some in (starts, ends))
    fits = (first[:, None] <= last) & (last < first[:, None] + LONGEST)
    totals = np.where(fits, starts[first][:, None] + ends[last], -np.inf)
    found: dict[tuple[int, int], float] = {}
    for i, j in zip(*np.unravel_index(np.argsort(-totals, axis=None, kind="stable"), totals.shape), strict=True):
        if len(found) == top or totals[i, j] == -np.inf:
            break
        place = window.offsets[places[first[i]]][0], window.offsets[places[last[j]]][1]
        found.setdefault(place, float(totals[i, j]))
    return found
