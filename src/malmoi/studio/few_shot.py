"""The few-shot lab: one item of a task with K examples, and the likelihood of each answer."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Annotated, Any

import torch
from pydantic import Field

from malmoi.errors import MalmoiError, UsageError, require_that
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
from malmoi.server.api.requests import NameField, TextField
from malmoi.studio.endpoint import model_view
from malmoi.text.rows import parse_json_rows

LAB_TASKS = tuple(one.name for one in ARITHMETIC)  # tasks that need no file
DRAWN_EXAMPLES = 64  # items of such a task
MAX_JUDGED = 40  # items over which the share of right answers is counted
FILE_ADVICE = " Fix the file, or skip such rows with --skip-bad (skip_bad=True)."
OFFERED_ANSWERS = 4  # choices for a generative task: its answer, and other items' answers


@model_view("/shots")
def few_shot_view(  # noqa: PLR0913  # the fields of the view
    model: Model,
    task: NameField,
    lines: TextField = "",  # of JSON, for the task "own"
    item: Annotated[int, Field(ge=0, le=100_000)] = 0,
    shots: Annotated[int, Field(ge=0, le=1000)] = 0,
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0,
    scoring: NameField = "total",
    *,
    all_items: bool = False,  # count the right answers to all of them
) -> dict[str, Any]:
    """The item's prompt with its examples, and the likelihood of every answer."""
    require_that(
        scoring in (known := scorings(model)),
        "There is no method {scoring!r} to compare answers; there are {known}.",
        scoring=scoring,
        known=", ".join(known),
    )
    kind, rows = _rows(task, lines, seed)
    require_that(
        item < len(rows),
        "There is no item {item}: there are {rows}.",
        item=item + 1,
        rows=len(rows),
    )
    builder = QuestionBuilder(kind, model, rows, shots, seed)
    asked = [item, *(range(len(rows))[:MAX_JUDGED] if all_items else ())]
    questions = [builder.build(rows[i], i) for i in asked]
    together = scoring.startswith("cloze_")
    scored = score_answers(EvaluationSession(kind, model, scoring), questions, together=together)
    found = [
        _choices(answers, scoring.removeprefix("cloze_"), question.prompt.gold)
        for answers, question in zip(scored, questions, strict=True)
    ]
    best = [max(choices, key=lambda one: one["score"])["right"] for choices in found[1:]]
    return {
        "prompt": questions[0].before,  # everything the model reads before the answer
        "most": len(rows) - 1,  # the largest possible number of examples
        "items": len(rows),
        "scorings": known,
        "choices": found[0],
        # share of all items that are answered rightly, if asked for
        "right": sum(best) / len(best) if best else None,
    }


def _choices(found: Sequence[ScoredAnswer], scoring: str, gold: int | None) -> list[dict[str, Any]]:
    """Each answer, with log p of its tokens, its score and its share."""
    scores = [SCORINGS[scoring](one) for one in found]
    shares = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    return [
        {
            "text": one.text,
            "logprob": one.score.logprob,
            "alone": one.alone.logprob,  # without the question: the answer's own frequency
            "tokens": len(one.score.tokens),
            "score": score,
            "share": share,
            "right": number == gold,
        }
        for number, (one, score, share) in enumerate(zip(found, scores, shares, strict=True))
    ]


# ------------------------------------------------------------------ rows


def _rows(task: str, lines: str, seed: int) -> tuple[Task, Sequence[Example]]:
    if task == "own":
        return _pasted(lines)
    require_that(
        task in LAB_TASKS,
        "There is no task {task!r:.40} here; choose {lab_tasks}, or own for your own lines.",
        task=task,
        lab_tasks=", ".join(LAB_TASKS),
    )
    drawn = generate_examples(named_task(task), seed).rows[:DRAWN_EXAMPLES]
    return replace(named_task(task), kind="choice"), _with_choices(drawn, seed)


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
