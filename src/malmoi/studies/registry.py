"""The registry of studies. A new one is a package with a config and a function, and a line here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmoi.config import Config
from malmoi.errors import UsageError, nearest
from malmoi.studies.in_context import study as in_context
from malmoi.system.result import PlainValue, Result


@dataclass(frozen=True, repr=False)
class StudyResult(Result):
    """A finished study: its folder, which holds report.md, and its numbers."""

    name: str
    out: Path
    facts: dict[str, PlainValue] = field(repr=False)

    @property
    def report(self) -> Path:
        return self.out / "report.md"


@dataclass(frozen=True)
class Study:
    """A paper's table or figure: its settings, and the function that runs it in a folder."""

    name: str
    about: str
    plan: type[Config]
    run: Callable[[Any], dict[str, Any]]


STUDIES = {
    study.name: study
    for study in (
        Study(
            "in-context",
            "accuracy by the number of examples, for three sizes (GPT-3 figure 1.2)",
            in_context.InContextStudyConfig,
            in_context.run_in_context_study,
        ),
    )
}


def named_study(name: str) -> Study:
    if name not in STUDIES:
        raise UsageError(
            f"There is no study {name!r}.{nearest(name, STUDIES)} `malmoi study` lists them."
        )
    return STUDIES[name]
