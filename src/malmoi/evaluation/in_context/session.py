"""An evaluation session: a model, a task, its questions, and its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from malmoi.errors import UsageError
from malmoi.evaluation.prompts import TaskPrompt
from malmoi.evaluation.task import Example, Task
from malmoi.inference import Model
from malmoi.system.progress import Progress, report_progress

ROWS_PER_UPDATE = 512  # rows between progress updates
ExamRow = TypeVar("ExamRow")
RowResult = TypeVar("RowResult")


@dataclass(frozen=True)
class Question:
    """The full prompt, the item's own prompt, and how it was built."""

    before: str
    prompt: TaskPrompt
    example: Example
    shots: int = 0
    cut: bool = False  # whether its beginning was truncated to fit


@dataclass(frozen=True)
class EvaluationSession:
    """A model, the task it is evaluated on, and how its choices are compared."""

    task: Task
    model: Model
    scoring: str

    def in_steps(
        self,
        doing: str,
        rows: Sequence[ExamRow],
        do: Callable[[Sequence[ExamRow]], list[RowResult]],
    ) -> list[RowResult]:
        """Processes rows in chunks, reporting progress between them."""
        found: list[RowResult] = []
        for start in range(0, len(rows), ROWS_PER_UPDATE):
            found += do(rows[start : start + ROWS_PER_UPDATE])
            report_progress(Progress(f"{self.task.name}: {doing}", len(found), len(rows), "rows"))
        return found


def language_head(model: Model) -> str:
    """The model's language head: lm for a GPT, mlm for a BERT."""
    for head in ("lm", "mlm"):
        if head in model.network.heads:
            return head
    raise UsageError(
        "This model cannot be evaluated in context: it has neither an lm head (GPT) nor an mlm "
        f"head (BERT). It can: {', '.join(model.abilities)}."
    )
