"""Word attributions: leave-one-out, and gradient × input. T tokens, D width."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from malmoi.errors import UsageError, require_known
from malmoi.inference.base import LoadedModel
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import TEXT_HEADS
from malmoi.interpret.forward_pass import RunOptions, Subject, run_text
from malmoi.interpret.intervention import run_layers, view_with_taps
from malmoi.system.result import Result

AttributionMethod = Literal["leave-one-out", "gradient"]
ScoreTexts = Callable[[Sequence[str], str], list[float]]  # p(target) of each text
WORD = re.compile(r"\S+")


@dataclass(frozen=True, repr=False)
class Piece(Result):
    """A word or token of a text and its score; `start` and `end` are character offsets."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, repr=False)
class Attribution(Result):
    """The contribution of each word to an answer.

    Leave-one-out: p(target) − p(target without the word). Gradient × input: how log p(target)
    changes, to the first order, with the token's embedding grown by its own size.
    """

    method: AttributionMethod
    target: str  # a label, or a token
    probability: float  # of the target, for the whole text
    pieces: tuple[Piece, ...]


def attribution(
    model: LoadedModel, subject: Subject, text: str, target: str | None, method: AttributionMethod
) -> Attribution:
    """Attributes an answer, by default the predicted one, to the words of a text."""
    known = get_args(AttributionMethod)
    require_known(method, known, "There is no method {name!r}.{hint}")
    subject.require_answer()
    if method == "gradient":
        return gradient_input(subject, text, target)
    mask = subject.tokenizer.specials.mask
    fixed = None if mask is None else subject.tokenizer.token(mask)

    def label_chances(texts: Sequence[str]) -> list[dict[str, float]]:
        assert model.task_head is not None
        found = model.task_head.predict(Predictor.of(model.checkpoint), texts)
        return [prediction.scores for prediction in found]

    def chances(texts: Sequence[str], target: str) -> list[float]:
        if model.task_head in TEXT_HEADS:
            subject.label_index(target)
            return [scores[target] for scores in label_chances(texts)]
        index = target_index(subject, torch.zeros(1), target)
        logits = [run_text(subject, text, (), RunOptions()).logits[-1] for text in texts]
        return [float(torch.tensor(row).softmax(-1)[index]) for row in logits]

    if target is None and model.task_head in TEXT_HEADS:
        (scores,) = label_chances([text])
        target = max(scores, key=scores.__getitem__)
    likeliest = target or run_text(subject, text, (), RunOptions(top=1)).guesses[-1][0].name
    return leave_one_out(text, likeliest, chances, fixed)


def leave_one_out(text: str, target: str, score: ScoreTexts, fixed: str | None) -> Attribution:
    """Predicts the text again without each of its words, except `fixed`, a mask."""
    words = [m for m in WORD.finditer(text) if fixed is None or fixed not in m.group()]
    whole, *without = score([text, *(without_word(text, *m.span()) for m in words)], target)
    pieces = tuple(
        Piece(m.group(), *m.span(), whole - p) for m, p in zip(words, without, strict=True)
    )
    return Attribution("leave-one-out", target, whole, pieces)


def without_word(text: str, start: int, end: int) -> str:
    """A text without one word and one of its adjacent spaces."""
    after = text[end:]
    return text[:start] + after[1:] if after[:1].isspace() else text[:start].rstrip() + after


def gradient_input(subject: Subject, text: str, target: str | None) -> Attribution:
    """x · ∂ log p(target) / ∂x for each token's embedding x."""
    encoding = subject.encode(text)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach().requires_grad_())
        return kept[0]

    with torch.enable_grad():
        view = view_with_taps(subject.network, {("embedding", 0): keep})
        last = view.trunk.norm(run_layers(view.trunk, subject.inputs([encoding]))[-1])
        at = subject.answer_positions(encoding)[-1:]
        logs = subject.scores(view, last, at)[0].float().log_softmax(-1)
        index = target_index(subject, logs, target)
        (slope,) = torch.autograd.grad(logs[index], kept[0])
    scores = (kept[0].detach() * slope).sum(-1)[0].tolist()
    pieces = tuple(
        Piece(subject.tokenizer.token(token), *offsets, score)
        for token, offsets, score in zip(encoding.tokens, encoding.offsets, scores, strict=True)
    )
    probability = float(logs[index].detach().exp())
    return Attribution("gradient", subject.name(index), probability, pieces)


def target_index(subject: Subject, logs: Tensor, target: str | None) -> int:
    """The class of a target; without one, the most likely class."""
    if target is None:
        return int(logs.detach().argmax())
    if subject.labels_texts:
        return subject.label_index(target)
    found = subject.tokenizer.id(target)
    if found is None:
        raise UsageError("This model's vocabulary has no token {target!r:.60}.", target=target)
    return found
