"""Likelihoods of answers under a GPT or a BERT's masks, and how unequal lengths are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from malmoi.evaluation.in_context.session import EvaluationSession, Question, language_head
from malmoi.evaluation.prompts import answer_cue
from malmoi.inference import Score
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer's score after its question, its score alone, and its text."""

    score: Score
    alone: Score
    text: str


# GPT-3 §2.4, and lm-evaluation-harness's acc_norm (byte)
SCORINGS: dict[str, Callable[[ScoredAnswer], float]] = {
    "total": lambda one: one.score.logprob,
    "token": lambda one: one.score.logprob / len(one.score.tokens),
    "byte": lambda one: one.score.logprob / len(one.text.strip().encode()),
    "unconditional": lambda one: one.score.logprob - one.alone.logprob,
}


def answer_parts(question: Question) -> list[SplitText]:
    """Each choice as the part to score between what precedes and follows it."""
    before = question.before
    prompt = question.prompt
    if prompt.partial:
        return [SplitText(before + choice, prompt.ending) for choice in prompt.choices]
    return [SplitText(before, choice, prompt.ending) for choice in prompt.choices]


def part_likelihoods(
    exam: EvaluationSession, parts: Sequence[SplitText], *, together: bool = False
) -> list[Score]:
    """log p of every part's middle, given what precedes it (GPT) or surrounds it (BERT)."""
    model = exam.model

    def read_on(some: Sequence[SplitText]) -> list[Score]:
        return model.score([part.before for part in some], [part.middle for part in some])

    def fill_in(some: Sequence[SplitText]) -> list[Score]:
        return pseudo_scores(model.network, model.tokenizer, some, together=together)

    return exam.in_steps("answer", parts, read_on if language_head(model) == "lm" else fill_in)


def score_answers(
    exam: EvaluationSession, questions: Sequence[Question], *, together: bool = False
) -> list[list[ScoredAnswer]]:
    """Scores every choice of every question, ordered so that shared prefixes are read once."""
    parts = [part for question in questions for part in answer_parts(question)]
    scores = part_likelihoods(exam, parts, together=together)
    middles = list(dict.fromkeys(part.middle for part in parts))
    alone = part_likelihoods(
        exam, [SplitText(answer_cue(exam.task), middle) for middle in middles], together=together
    )
    by_itself = dict(zip(middles, alone, strict=True))
    found = iter(
        ScoredAnswer(s, by_itself[p.middle], p.middle) for p, s in zip(parts, scores, strict=True)
    )
    return [[next(found) for _ in question.prompt.choices] for question in questions]
