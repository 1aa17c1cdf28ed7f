"""Features of a task: examples as tokens and labels, for a BERT or a GPT with frame tokens."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from malmoi.errors import MalmoiError
from malmoi.evaluation.task import Example
from malmoi.inference.predict import Predictor, choice_pairs
from malmoi.inference.writing import AnswerRow, as_messages, encode_answer
from malmoi.messages import msg
from malmoi.tokenizer import Tokenizer, TokenRow
from malmoi.tokenizer.windows import ContextWindow, context_windows, word_pieces
from malmoi.training.losses import IGNORE_LABEL

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingItem:
    """A unit of training: one row, or the rows of an example's choices or orders, and its label."""

    rows: tuple[TokenRow, ...]
    label: Any
    continues: bool = False  # a further window of the example before it

    @property
    def length(self) -> int:
        return max(len(row.tokens) for row in self.rows)


@dataclass(frozen=True)
class AnswerItem(TrainingItem):
    """A conversation; its label has the next token at each position before an answer's token."""


@dataclass(frozen=True)
class FeatureView:
    """How examples are encoded."""

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    length: int  # maximum number of tokens in a row
    stride: int = 128  # between the windows over a long context
    both: bool = False  # pairs in both orders
    last: bool = False  # pools the last token, not the first
    choice_apart: bool = False  # the delimiter comes before a choice, not before its question
    ends: tuple[int, ...] = ()  # tokens that end an answer

    @classmethod
    def of(cls, reading: Predictor, labels: tuple[str, ...]) -> "FeatureView":
        """The encoding that a predictor uses."""
        return cls(
            reading.tokenizer,
            labels,
            reading.max_tokens,
            stride=reading.stride,
            both=reading.both,
            last=reading.network.config.pool == "last",
            choice_apart=reading.choice_apart,
            ends=reading.ends,
        )


def _encode(
    examples: Sequence[Example], view: FeatureView, *, turned: bool = False
) -> list[TokenRow]:
    """Encodes texts and pairs in separate batches; returns them in the examples' order."""
    found: list[TokenRow | None] = [None] * len(examples)
    for paired in (False, True):
        places = [i for i, e in enumerate(examples) if (e.pair is not None) == paired]
        firsts = [examples[i].text for i in places]
        seconds = [examples[i].pair or "" for i in places]
        if turned:
            firsts, seconds = seconds, firsts
        rows = view.tokenizer.rows(firsts, seconds if paired else None, max_tokens=view.length)
        for i, row in zip(places, rows, strict=True):
            found[i] = row
    return [row for row in found if row is not None]


def _labelled(
    examples: Sequence[Example], view: FeatureView, label: Callable[[Any], Any]
) -> Iterator[TrainingItem]:
    rows = [_encode(examples, view)] + ([_encode(examples, view, turned=True)] if view.both else [])
    for example, *some in zip(examples, *rows, strict=True):
        yield TrainingItem(tuple(some), label(example.label))


def classification_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    numbers = {name: i for i, name in enumerate(view.labels)}
    return _labelled(examples, view, numbers.__getitem__)


def multilabel_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Label vectors: 1 for each label of the example, 0 for the others."""
    return _labelled(
        examples, view, lambda held: tuple(float(name in held) for name in view.labels)
    )


def regression_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    return _labelled(examples, view, float)


def tagging_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Labels on the first token of each word."""
    numbers = {name: i for i, name in enumerate(view.labels)}
    for example, pieces in zip(
        examples, word_pieces(view.tokenizer, [e.words for e in examples], view.length), strict=True
    ):
        for number, piece in enumerate(pieces):
            labels = [IGNORE_LABEL] * len(piece.row.tokens)
            for word, place in enumerate(piece.firsts, start=piece.start):
                if place is not None:
                    labels[place] = numbers[example.label[word]]
            yield TrainingItem((piece.row,), labels, continues=number > 0)


def choice_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """One row per choice: (context, question + choice)."""
    questions = [(e.text, e.pair or "", e.choices) for e in examples]
    pairs = choice_pairs(view.tokenizer, questions, view.length if view.choice_apart else None)
    rows = iter(_encode([Example(*pair) for pair in pairs], view))
    for example in examples:
        yield TrainingItem(tuple(next(rows) for _ in example.choices), example.label)


def answer_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Windows over the context; in those without the answer, the null token is the target.

    A question whose answer fits into no window is skipped: it would teach that there is none.
    """
    pairs = [(e.text, e.pair or "") for e in examples]
    lost = []
    for example, some in zip(
        examples, context_windows(view.tokenizer, pairs, view.length, view.stride), strict=True
    ):
        places = [_place(window, example.label) for window in some]
        if example.label and not any(places):
            lost.append(example.place)
            continue
        for number, (window, place) in enumerate(zip(some, places, strict=True)):
            null = len(window.tokens) - 1 if view.last else 0
            row = TokenRow(window.tokens, window.segments)
            yield TrainingItem((row,), place or (null, null), continues=number > 0)
    if lost and len(lost) == len(examples):
        raise MalmoiError(
            "No answer fits into {length} tokens; raise --length.", length=view.length
        )
    if lost:
        logger.warning(
            msg(
                "{lost:,} of {examples:,} rows are skipped, the first at {first}: their "
                "answers do not fit into {length} tokens.",
                lost=len(lost),
                examples=len(examples),
                first=lost[0],
                length=view.length,
            )
        )


def _place(window: ContextWindow, answers: Sequence[tuple[str, int]]) -> tuple[int, int] | None:
    """The first and last token of the first answer, if the window contains all of it."""
    if not answers:
        return None
    text, start = answers[0]
    end, (begins, ends) = start + len(text), window.offsets.T
    inside = np.flatnonzero((ends > start) & (begins < end)) + window.first
    if not len(inside) or begins[0] > start or ends[-1] < end:
        return None
    return int(inside[0]), int(inside[-1])


def writing_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Conversations with their answers; only the answers' tokens are learnt, their end included."""
    rows = [answer_row(example, view) for example in examples]
    if not any(row.spans for row in rows):
        raise MalmoiError(
            "No answer fits with its prompt into {length} tokens; raise --length, or give "
            "shorter prompts.",
            length=view.length,
        )
    _note_cuts(examples, rows, view.length)
    for row in rows:
        if row.spans:
            tokens = np.array(row.tokens, np.int32)
            labels = [IGNORE_LABEL] * len(tokens)
            for first, end in row.spans:
                labels[first - 1 : end - 1] = row.tokens[first:end]
            yield AnswerItem((TokenRow(tokens, np.zeros_like(tokens)),), labels)


def answer_row(example: Example, view: FeatureView) -> AnswerRow:
    """The tokens of an example's conversation and its first reference answer."""
    messages = list(example.messages) or as_messages(example.input)
    return encode_answer(view.tokenizer, messages, example.label[0], view.ends, view.length)


def _note_cuts(examples: Sequence[Example], rows: Sequence[AnswerRow], length: int) -> None:
    many = f"{len(rows):,}"
    prompts = sum(row.prompt_cut for row in rows)
    if prompts:
        logger.warning(
            msg(
                "{prompts:,} of {many} prompts do not fit with their answers into {length} "
                "tokens and are truncated at the end.",
                prompts=prompts,
                many=many,
                length=length,
            )
        )
    answers = sum(row.answer_cut and bool(row.spans) for row in rows)
    if answers:
        logger.warning(
            msg(
                "{answers:,} of {many} answers do not fit into {length} tokens and are "
                "truncated at the end.",
                answers=answers,
                many=many,
                length=length,
            )
        )
    lost = [e.place for e, row in zip(examples, rows, strict=True) if not row.spans]
    if lost:
        logger.warning(
            msg(
                "{lost:,} of {many} rows are skipped, the first at {first}: their prompts "
                "alone fill {length} tokens.",
                lost=len(lost),
                many=many,
                first=lost[0],
                length=length,
            )
        )


def similarity_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Scores are mapped to 0…1, from the lowest to the highest of the rows."""
    scores = [float(e.label) for e in examples]
    low = min(scores, default=0.0)
    width = max(scores, default=1.0) - low or 1.0
    yield from _items(examples, view, [(score - low) / width for score in scores])


def retrieval_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """The label numbers the distinct positives, so that equal ones do not repel each other."""
    numbers = {text: i for i, text in enumerate(dict.fromkeys(e.pair for e in examples))}
    yield from _items(examples, view, [numbers[e.pair] for e in examples])


def _items(
    examples: Sequence[Example], view: FeatureView, labels: Sequence[Any]
) -> Iterator[TrainingItem]:
    texts = [(e.text, e.pair or "", *e.choices) for e in examples]
    flat = [text for some in texts for text in some]
    rows = iter(view.tokenizer.rows(flat, max_tokens=view.length))
    for some, label in zip(texts, labels, strict=True):
        yield TrainingItem(tuple(next(rows) for _ in some), label)
