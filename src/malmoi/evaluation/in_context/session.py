"""An evaluation session: a model, a task, and its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from malmoi.errors import UsageError
from malmoi.evaluation.tasks import Task
from malmoi.inference import Model

ROWS_PER_UPDATE = 512  # rows between two words about how far it is
ExamRow = TypeVar("ExamRow")
RowResult = TypeVar("RowResult")


@dataclass(frozen=True)
class EvaluationSession:
    """A model, the task it is asked, how its choices are compared, and who hears how far it is."""

    task: Task
    model: Model
    scoring: str
    tell: Callable[[str], None]

    def in_steps(
        self,
        doing: str,
        rows: Sequence[ExamRow],
        do: Callable[[Sequence[ExamRow]], list[RowResult]],
    ) -> list[RowResult]:
        """Some rows at a time, so that there is something to tell."""
        found: list[RowResult] = []
        for start in range(0, len(rows), ROWS_PER_UPDATE):
            self.tell(f"{self.task.name}: {doing} {start:,} of {len(rows):,}")
            found += do(rows[start : start + ROWS_PER_UPDATE])
        return found


def language_head(model: Model) -> str:
    """The head that a model is asked by: lm of a GPT, mlm of a BERT."""
    for head in ("lm", "mlm"):
        if head in model.network.heads:
            return head
    raise UsageError(
        "This model cannot be asked in context: it has neither an lm head (GPT) nor an mlm head "
        "(BERT). "
        f"It can: {', '.join(model.abilities)}."
    )
