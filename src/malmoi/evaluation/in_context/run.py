"""In-context evaluation of a task: reads rows, draws examples, builds prompts, grades."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.evaluation.contamination import Overlaps, contamination_report
from malmoi.evaluation.examples import (
    files_in,
    generate_examples,
    label_names,
    load_examples,
    require_labels,
)
from malmoi.evaluation.in_context.graders import EvaluationSession, Graded, Question, scorings
from malmoi.evaluation.in_context.question import QuestionBuilder, Shots, parse_shots
from malmoi.evaluation.kinds import kind_of
from malmoi.evaluation.prompts import templated
from malmoi.evaluation.task import Example, Task, metric_names
from malmoi.inference import Model
from malmoi.messages import msg
from malmoi.text.rows import RowSource

READINGS = ("causal", "masked")


@dataclass(frozen=True)
class InContextConfig:
    """How a task is evaluated in context."""

    shots: int | str = 0  # 0, 1, K, max, or several: "0,1,4"
    train: RowSource | None = None  # rows to draw examples from
    seed: int = 0  # for the examples, generated rows and a limited selection
    limit: int | None = None  # maximum number of items
    score: str = "total"  # how the likelihoods of choices are compared
    template: str | None = None  # another prompt template
    reading: str | None = None  # for a model trained both ways: causal (if none) or masked
    skip_bad: bool = False


@dataclass(frozen=True)
class InContextResult:
    """A model's metrics on a task with a given number of examples."""

    task: str
    shots: Shots
    verdict: Graded
    questions: list[Question] = field(repr=False)
    session: EvaluationSession = field(repr=False)
    notes: tuple[str, ...] = ()
    contamination: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """{"accuracy": 0.61, "accuracy_error": 0.02, …, "shots": 4, "examples": 500}."""
        measured: dict[str, float] = {}
        for name, value in self.verdict.measures.items():
            measured |= {name: value.mean, f"{name}_error": value.standard_error}
        count = sum(question.shots for question in self.questions) / len(self.questions)
        return {
            **measured,
            "shots": count if self.shots.as_many_as_fit else self.shots.count,
            "examples": len(self.questions),
            **({"truncated": cut} if (cut := sum(q.cut for q in self.questions)) else {}),
            **({"contamination": self.contamination} if self.contamination else {}),
        }

    def with_contamination(self, overlaps: Overlaps) -> "InContextResult":
        """Grades the clean and the dirty items again, each on their own."""

        def means(graded: Graded) -> dict[str, float]:
            return {name: value.mean for name, value in graded.measures.items()}

        def score(chosen: Sequence[int]) -> dict[str, float]:
            some = [self.questions[i] for i in chosen]
            return means(kind_of(self.session.task).grade(self.session, some))

        examples = [question.example for question in self.questions]
        report = contamination_report(examples, overlaps, means(self.verdict), score)
        return replace(self, contamination=report)


def evaluate_in_context(
    model: Model, task: Task, data: RowSource | None, asking: InContextConfig
) -> Iterator[InContextResult]:
    """Yields a result for each number of examples as it is computed."""
    wanted = parse_shots(asking.shots)
    model = _in_reading(model, asking.reading)
    if asking.score not in (known := scorings(model)):
        raise UsageError(
            "There is no method {score!r} to compare choices.{hint}",
            score=asking.score,
            hint=nearest(asking.score, known),
        )
    prompted = templated(task, asking.template)
    items, pool, notes = split_rows(prompted, data, asking)
    prompted = replace(prompted, metrics=metric_names(prompted))
    if kind_of(prompted).text_labels and not prompted.labels:
        prompted = replace(prompted, labels=label_names(prompted, [*items, *pool]))
    for shots in wanted:
        yield _result(
            EvaluationSession(prompted, model, asking.score),
            items,
            QuestionBuilder(prompted, model, pool, shots, asking.seed),
            notes,
        )


def _in_reading(model: Model, reading: str | None) -> Model:
    """The model in the reading that was asked for; refuses one that it was not trained for."""
    if reading is None:
        return model
    if reading not in READINGS:
        raise UsageError(
            "There is no reading mode {reading!r}.{hint}",
            reading=reading,
            hint=nearest(reading, READINGS),
        )
    causal = model.network.trunk.is_causal
    if reading == "causal" and not causal:
        raise UsageError("This model does not read left to right: leave `reading` out.")
    if reading == "masked" and causal:
        model.network.masked()  # refuses a model that reads left to right only
        return model.masked
    return model


def _result(
    exam: EvaluationSession, items: Sequence[Example], asker: QuestionBuilder, notes: Sequence[str]
) -> InContextResult:
    task = asker.task
    shots = asker.shots
    kind = kind_of(task)
    if kind.only_read:
        if shots.count or shots.as_many_as_fit:
            raise UsageError(
                "The task {task} reads whole texts and takes no examples: omit --shots.",
                task=task.name,
            )
        questions = [Question(item.text, asker.prompt(item), item) for item in items]
    else:
        questions = asker.build_all(items)
    graded = kind.grade(exam, questions)
    notes = (*notes, *_truncated(questions), *graded.notes)
    return InContextResult(task.name, shots, graded, questions, exam, notes)


def _truncated(questions: Sequence[Question]) -> Iterator[str]:
    cut = sum(question.cut for question in questions)
    answers = sum(question.answer_cut for question in questions)
    if cut:
        yield msg(
            "{cut:,} of {questions:,} items were truncated at the beginning to fit.",
            cut=cut,
            questions=len(questions),
        )
    if answers:
        yield msg(
            "{answers:,} of {questions:,} items have an answer that is longer than the "
            "context: only its end is scored.",
            answers=answers,
            questions=len(questions),
        )


def split_rows(
    task: Task, data: RowSource | None, asking: InContextConfig
) -> tuple[Sequence[Example], Sequence[Example], list[str]]:
    """The items to evaluate, the examples that may be shown, and notes about them."""
    train, dev = _files(task, data)
    found = (
        generate_examples(task, asking.seed)
        if dev is None
        else load_examples(task, dev, skip_bad=asking.skip_bad)
    )
    if not kind_of(task).only_read:
        require_labels(found.rows)
    source = train if asking.train is None else asking.train
    pool = found if source is None else load_examples(task, source, skip_bad=asking.skip_bad)
    notes = list(found.notes)
    shown = any(shots.count or shots.as_many_as_fit for shots in parse_shots(asking.shots))
    if source is None and shown:
        notes.append(
            "Examples are drawn from the other rows of the data, as there is no file of training "
            "rows (--train, train=…)."
        )
    return limited_rows(found.rows, asking.limit, asking.seed), pool.rows, notes


def _files(task: Task, data: RowSource | None) -> tuple[Path | None, RowSource | None]:
    """The training file, if a folder has one, and the files to evaluate."""
    if not isinstance(data, str | Path) or not Path(data).is_dir():
        return None, data
    train, dev = files_in(task, data)
    return train, dev or train


def limited_rows(rows: Sequence[Example], limit: int | None, seed: int) -> Sequence[Example]:
    """A random sample up to the limit: files are often sorted by label."""
    if limit is None or limit >= len(rows):
        return rows
    if limit < 1:
        raise UsageError("limit must be 1 or more, not {limit}.", limit=limit)
    return [rows[i] for i in sorted(Random(f"limit:{seed}").sample(range(len(rows)), limit))]
