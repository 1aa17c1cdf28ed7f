"""Who is asked what: a model and a task, and how far the asking is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from malmoi.errors import UsageError
from malmoi.infer import Model
from malmoi.tasks import Task

AT_ONCE = 512  # rows between two words about how far it is
Row = TypeVar("Row")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Exam:
    """A model, the task it is asked, how its choices are compared, and who hears how far it is."""

    task: Task
    model: Model
    scoring: str
    tell: Callable[[str], None]

    def in_steps(self, doing: str, rows: Sequence[Row], do: Callable[[Sequence[Row]], list[Found]]) -> list[Found]:
        """Some rows at a time, so that there is something to tell."""
        found: list[Found] = []
        for start in range(0, len(rows), AT_ONCE):
            self.tell(f"{self.task.name}: {doing} {start:,} of {len(rows):,}")
            found += do(rows[start : start + AT_ONCE])
        return found


def head_of(model: Model) -> str:
    """The head that a model is asked by: lm of a GPT, mlm of a BERT."""
    for head in ("lm", "mlm"):
        if head in model.network.heads:
            return head
    raise UsageError(
        "This model cannot be asked in context: it has neither an lm head (GPT) nor an mlm head (BERT). "
        f"It can: {', '.join(model.abilities)}."
    )
