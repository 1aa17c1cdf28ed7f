"""Minimal pairs: which of two sentences that differ in one point is more likely to a model?"""

from collections.abc import Sequence

from malmoi.evaluation.in_context.graders import Graded
from malmoi.evaluation.in_context.session import EvaluationSession, Question, language_head
from malmoi.inference.pseudo_likelihood import sentence_logprobs
from malmoi.metrics import MeanWithError, mean_with_error
from malmoi.system.progress import Progress, report_progress

PAIRS_PER_UPDATE = 8192  # large, so that sentences of equal length fill a pass


def grade_pairs(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """How often the right sentence is more likely (Warstadt et al. 2020 §4), overall and by group.

    Likelihood for a GPT, pseudo-likelihood for a BERT. Ties count as wrong.
    """
    language_head(exam.model)  # raises an error if the model has none
    said: list[int] = []
    for start in range(0, len(questions), PAIRS_PER_UPDATE):
        some = questions[start : start + PAIRS_PER_UPDATE]
        said += _likelier(exam, some)
        report_progress(Progress(f"{exam.task.name}: pairs", len(said), len(questions), "pairs"))
    right: dict[str, list[float]] = {"accuracy": []}
    for question, chosen in zip(questions, said, strict=True):
        correct = float(chosen == question.example.label)
        right["accuracy"].append(correct)
        if question.example.group:
            right.setdefault(question.example.group, []).append(correct)
    measures: dict[str, MeanWithError] = {
        name: mean_with_error(values) for name, values in right.items()
    }
    return Graded(measures, said)


def _likelier(exam: EvaluationSession, questions: Sequence[Question]) -> list[int]:
    """The index of the more likely sentence of each pair; for ties, the wrong one."""
    texts = [text for question in questions for text in question.example.choices]
    scores = sentence_logprobs(exam.model.network, exam.model.tokenizer, texts)
    return [
        int(second > first or (second == first and question.example.label == 0))
        for question, first, second in zip(questions, scores[::2], scores[1::2], strict=True)
    ]
