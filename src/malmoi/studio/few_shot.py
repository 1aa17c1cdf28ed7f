"""The few-shot lab: one item of a task with K examples, and the likelihood of each answer."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from pydantic import BaseModel, Field

from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import generate_examples, label_names, load_examples, require_labels
from malmoi.evaluation.in_context.graders import (
    SCORINGS,
    EvaluationSession,
    ScoredAnswer,
    score_answers,
    scorings,
)
from malmoi.evaluation.in_context.run import QuestionBuilder
from malmoi.evaluation.kinds import custom_task
from malmoi.evaluation.tasks import Example, Task, named_task
from malmoi.evaluation.tasks.language_modelling import ARITHMETIC
from malmoi.inference import Model
from malmoi.server.api.requests import ApiRequest, NameField, TextField
from malmoi.studio.endpoint import model_view
from malmoi.text.rows import parse_json_rows

LAB_TASKS = tuple(one.name for one in ARITHMETIC)  # tasks that need no file
DRAWN_EXAMPLES = 64  # items of such a task
FILE_ADVICE = " Fix the file, or skip such rows with --skip-bad (skip_bad=True)."
OFFERED_ANSWERS = 4  # choices for a generative task: its answer, and other items' answers


class AnswerChoice(BaseModel):
    """One answer: log p of its tokens, its score by the chosen scoring, and its share."""

    text: str
    logprob: float
    tokens: int
    score: float
    share: float
    right: bool


class FewShotView(BaseModel):
    prompt: str  # everything the model reads before the answer
    examples: int  # K
    most: int  # the largest possible K
    items: int
    scorings: list[str]
    choices: list[AnswerChoice]


class FewShotRequest(ApiRequest):
    """An item of a task, by its number, with some examples before it."""

    task: NameField
    lines: TextField = ""  # of JSON, for the task "own"
    item: int = Field(0, ge=0, le=100_000)
    shots: int = Field(0, ge=0, le=1000)
    seed: int = Field(0, ge=0, le=2**31)
    scoring: NameField = "total"


@model_view("/shots")
def few_shot_view(model: Model, wanted: FewShotRequest) -> FewShotView:
    """The item's prompt with its examples, and the likelihood of every answer."""
    if wanted.scoring not in (known := scorings(model)):
        raise UsageError(
            "There is no method {scoring!r} to compare answers; there are {known}.",
            scoring=wanted.scoring,
            known=", ".join(known),
        )
    task, rows = _rows(wanted)
    if not 0 <= wanted.item < len(rows):
        raise UsageError(
            "There is no item {item}: there are {rows}.", item=wanted.item + 1, rows=len(rows)
        )
    builder = QuestionBuilder(task, model, rows, wanted.shots, wanted.seed)
    question = builder.build(rows[wanted.item], wanted.item)
    together = wanted.scoring.startswith("cloze_")
    scoring = wanted.scoring.removeprefix("cloze_")
    found = score_answers(
        EvaluationSession(task, model, wanted.scoring), [question], together=together
    )[0]
    return FewShotView(
        prompt=question.before,
        examples=question.shots,
        most=len(rows) - 1,
        items=len(rows),
        scorings=known,
        choices=_choices(found, scoring, question.prompt.gold),
    )


def _choices(found: Sequence[ScoredAnswer], scoring: str, gold: int | None) -> list[AnswerChoice]:
    scores = [SCORINGS[scoring](one) for one in found]
    shares = _softmax(scores)
    rows = zip(found, scores, shares, strict=True)
    return [
        AnswerChoice(
            text=one.text,
            logprob=one.score.logprob,
            tokens=len(one.score.tokens),
            score=score,
            share=share,
            right=number == gold,
        )
        for number, (one, score, share) in enumerate(rows)
    ]


def _softmax(scores: Sequence[float]) -> list[float]:
    chances = np.exp(np.array(scores) - max(scores))
    return [float(chance) for chance in chances / chances.sum()]


# ------------------------------------------------------------------ rows


def _rows(wanted: FewShotRequest) -> tuple[Task, Sequence[Example]]:
    if wanted.task == "own":
        return _pasted(wanted.lines)
    if wanted.task not in LAB_TASKS:
        raise UsageError(
            "There is no task {task!r:.40} here; choose {lab_tasks}, or own for your own lines.",
            task=wanted.task,
            lab_tasks=", ".join(LAB_TASKS),
        )
    drawn = generate_examples(named_task(wanted.task), wanted.seed).rows[:DRAWN_EXAMPLES]
    return replace(named_task(wanted.task), kind="choice"), _with_choices(drawn, wanted.seed)


def _with_choices(rows: Sequence[Example], seed: int) -> list[Example]:
    """Turns generated answers into a choice among other items' answers."""
    rng = Random(f"lab:{seed}")
    answers = sorted({row.label[0] for row in rows})
    found = []
    for row in rows:
        others = rng.sample([one for one in answers if one != row.label[0]], OFFERED_ANSWERS - 1)
        offered = [row.label[0], *others]
        rng.shuffle(offered)
        found.append(replace(row, choices=tuple(offered), label=offered.index(row.label[0])))
    return found


def _pasted(lines: str) -> tuple[Task, Sequence[Example]]:
    """{"text": …, "label": …} a line, or {"text": …, "choices": […], "label": 0}."""
    numbered = list(enumerate(lines.splitlines(), start=1))
    chosen = (
        custom_task("choice", choices=["choices"])
        if '"choices"' in lines
        else custom_task("classification")
    )
    task = replace(chosen, rows=lambda path: parse_json_rows(numbered, "line"))
    try:
        rows = load_examples(task, "your lines").rows
        require_labels(rows)
        return replace(task, labels=label_names(task, rows)), rows
    except UsageError:
        raise
    except MalmoiError as error:  # the error is in the request
        # its advice concerns files and options, which do not apply to the page
        raise UsageError(str(error).replace(FILE_ADVICE, " Correct that line.")) from None
