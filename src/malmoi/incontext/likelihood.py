"""How likely a model finds an answer, whatever the model: a GPT reads on, a BERT fills masks. And how likelihoods of
answers of unequal length are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from malmoi.incontext.exam import Exam, head_of
from malmoi.incontext.question import Question
from malmoi.infer import Score
from malmoi.infer.pseudo import Part, pseudo_scores
from malmoi.tasks.text import bare


@dataclass(frozen=True)
class Judged:
    """One answer as a model sees it: after its question, by itself, and how it is written."""

    score: Score
    alone: Score
    text: str


SCORINGS: dict[str, Callable[[Judged], float]] = {  # GPT-3 §2.4, and lm-evaluation-harness's acc_norm (byte)
    "total": lambda one: one.score.logprob,
    "token": lambda one: one.score.logprob / len(one.score.tokens),
    "byte": lambda one: one.score.logprob / len(one.text.strip().encode()),
    "unconditional": lambda one: one.score.logprob - one.alone.logprob,
}


def parts_of(question: Question) -> list[Part]:
    """What is judged of each choice, between what stands before it and behind it."""
    before, prompt = question.before, question.prompt
    if prompt.partial:
        return [Part(before + choice, prompt.ending) for choice in prompt.choices]
    return [Part(before, choice, prompt.ending) for choice in prompt.choices]


def likelihoods(exam: Exam, parts: Sequence[Part], *, together: bool = False) -> list[Score]:
    """log p of every part's middle: given what is before it (GPT), or around it (BERT)."""
    model = exam.model

    def read_on(some: Sequence[Part]) -> list[Score]:
        return model.score([part.before for part in some], [part.middle for part in some])

    def fill_in(some: Sequence[Part]) -> list[Score]:
        return pseudo_scores(model.network, model.tokenizer, some, together=together)

    return exam.in_steps("answer", parts, read_on if head_of(model) == "lm" else fill_in)


def judged(exam: Exam, questions: Sequence[Question], *, together: bool = False) -> list[list[Judged]]:
    """Every choice of every question; those of one stand side by side, so that what they share is read once."""
    parts = [part for question in questions for part in parts_of(question)]
    scores = likelihoods(exam, parts, together=together)
    middles = list(dict.fromkeys(part.middle for part in parts))
    alone = likelihoods(exam, [Part(bare(exam.task), middle) for middle in middles], together=together)
    by_itself = dict(zip(middles, alone, strict=True))
    found = iter(Judged(s, by_itself[p.middle], p.middle) for p, s in zip(parts, scores, strict=True))
    return [[next(found) for _ in question.prompt.choices] for question in questions]
