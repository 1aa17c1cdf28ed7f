"""The options of each compression method, as records of settings. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from malmoi.settings import option, setting

if TYPE_CHECKING:
    from malmoi.evaluation.task import Task


@dataclass(frozen=True, kw_only=True)
class JudgedOptions:
    """The data that a model is evaluated on before and after compression."""

    task: "str | Task | None" = setting(
        None, "Task to evaluate rows by.", shown="text, by perplexity"
    )
    data: Path | None = option(None, "Text, or rows of the task, to evaluate on before and after.")
    device: str | None = option(
        None, "cpu, cuda, cuda:1… or mps.", shown="a GPU if there is one", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    bits: Literal[8, 4] = option(8, "Bits per weight: 8 or 4.", typed=int)
    group: int = option(0, "Inputs that share a scale; 0: a whole row, or 32 at 4 bits.")
    calibration: str | Path | None = option(
        None, "Calibration text for GPTQ, similar to the model's input.", typed=Path
    )


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """One pruning method, and the data to rank by."""

    sparsity: float | None = option(None, "Fraction of the weights to set to zero.")
    pattern: str | None = option(None, "Sparsity pattern: 2:4 keeps two of every four weights.")
    layers: str | Sequence[int] | None = option(
        None, "Layers to keep, e.g. 0,2,4.", metavar="N,…", typed=str
    )
    heads: float | None = option(None, "Fraction of each layer's heads to keep.")
    neurons: float | None = option(None, "Fraction of each MLP's neurons to keep.")
    train: Path | None = option(
        None, "Text, or rows of the task, to measure which heads or neurons matter least."
    )


@dataclass(frozen=True, kw_only=True)
class ShareOptions:
    groups: int = option(1, "Distinct blocks, shared over the depth.")
    embedding: int = option(0, "Width of a factorised embedding; 0: unchanged.")


@dataclass(frozen=True, kw_only=True)
class DistilOptions:
    layers: int | Sequence[int] | None = option(
        None, "Layers of the student.", shown="half the teacher's", typed=int
    )
    student: str | Path | None = option(
        None, "Student with a different architecture.", metavar="DIR", typed=str
    )
    temperature: float = option(2.0, "Softmax temperature of the teacher.")
    soft: float | None = option(
        None,
        "Weight of the distillation loss; the labels get the rest.",
        shown="5/7 for text, 1/2 for a task",
    )
