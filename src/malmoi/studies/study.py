"""A study: a paper's table or figure as cells, and what papers.toml says about it.

A new study is a function from a plan and a seed to cells, a name in `MODULES`, and an entry in
papers.toml: the paper, its numbers, its findings and the words of the page.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from malmoi.errors import require_known
from malmoi.studies.data import StudyData, StudyTask
from malmoi.studies.scale import Scale
from malmoi.system.untrusted import read_object
from malmoi.training.recipe import Recipe

# study → the module with its cells: bert-size is `bert_size_cells` there
MODULES = {
    **dict.fromkeys(("bert-masking", "bert-objectives", "bert-size", "bert-features"), "tables"),
    **dict.fromkeys(("gpt1-transfer", "gpt1-zeroshot", "gpt1-ablation", "gpt2-zeroshot"), "tables"),
    **{"in-context": "in_context", "gpt3-scaling": "scaling", "gpt3-contamination": "tables"},
    **{"gpt3-sparse": "scaling", "bert-vs-gpt": "bert_vs_gpt", "korean": "korean"},
    "compression": "compression",
}


class Words(NamedTuple):
    """A text of a page in both languages."""

    en: str
    ko: str

    def format(self, **values: object) -> "Words":
        return Words(*(text.format(**values) for text in self))


@dataclass(frozen=True)
class JudgedModel:
    """Input of a measure: the folder of the pre-trained model, and a scratch folder."""

    folder: Path
    scratch: Path
    seed: int
    device: str | None = None

    def facts(self) -> dict[str, Any]:
        """Parameters, tokens, steps, seconds and valid_loss of the pre-training."""
        return dict(read_object(self.folder / "facts.json"))


Measure = Callable[..., dict[str, float]]


@dataclass(frozen=True)
class Cell:
    """One row of the table with one seed: a recipe, its training text, and a measure.

    The measure is `partial(function, **options)` of a function at the top of a module, called with
    a `JudgedModel`; it returns a number for each of its columns. Without a recipe nothing is
    pre-trained, and the model's `folder` is its scratch folder.
    """

    row: str
    seed: int
    measure: "partial[dict[str, float]]"
    recipe: Recipe | None = None
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyPlan:
    """Everything that the cells of a study depend on."""

    scale: Scale
    data: StudyData

    def tasks(self, *roles: str) -> list[StudyTask]:
        """The first available task of each role, cut to the rows that the scale uses."""
        return self.data.of(*roles, train_rows=self.scale.train_rows, dev_rows=self.scale.dev_rows)

    def cell(self, row: str, recipe: Recipe, measure: Measure, **options: Any) -> Cell:
        """A cell whose model is trained on the study's text."""
        return Cell(row, recipe.train.seed, partial(measure, **options), recipe, self.data.text)

    def tuned(
        self, row: str, recipe: Recipe, tasks: Iterable[StudyTask], column: str = "", **options: Any
    ) -> Iterator[Cell]:
        """Cells whose model is fine-tuned, by the scale's settings and these options."""
        from malmoi.studies.measures import fine_tuned

        settings = self.scale.tuning(recipe.train.seed) | options
        for task in tasks:
            named = column.format(task.name)
            yield self.cell(row, recipe, fine_tuned, task=task, options=settings, column=named)


@dataclass(frozen=True)
class Study:
    """A paper's table or figure: its words and numbers, and the module that has its cells."""

    name: str
    record: Mapping[str, Any]

    @property
    def paper(self) -> str:
        return str(self.record["paper"])

    @property
    def about(self) -> Words:
        return Words(*self.record["about"])

    @property
    def caption(self) -> Words:
        return Words(*self.record["caption"])

    @property
    def notes(self) -> list[Words]:
        return [Words(*note) for note in self.record.get("notes", ())]

    @property
    def theirs(self) -> Mapping[str, Mapping[str, float]]:
        """row → the paper's numbers."""
        numbers: Mapping[str, Mapping[str, float]] = self.record.get("theirs", {})
        return numbers

    @property
    def findings(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.record["findings"]
        return found

    @cached_property
    def _module(self) -> Any:
        return import_module(f"malmoi.studies.{MODULES[self.name]}")

    def cells(self, plan: StudyPlan, seeds: Iterable[int]) -> list[Cell]:
        make = getattr(self._module, f"{self.name.replace('-', '_')}_cells")
        return [cell for seed in seeds for cell in make(plan, seed)]

    def shown_by(self, what: str) -> Any:
        """The study's own function that draws its "figure" or fills its "notes", if it has one."""
        return getattr(self._module, "SHOWN", {}).get((self.name, what))


@cache
def _records() -> dict[str, Any]:
    return tomllib.loads((files("malmoi.studies") / "papers.toml").read_text("utf-8"))


def named_study(name: str) -> Study:
    require_known(name, MODULES, "There is no study {name!r}.{hint} `malmoi study` lists them.")
    return Study(name, _records()[name])
