"""The options of each compression method. No torch here."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from malmoi.evaluation.task import Task


class JudgedOptions(TypedDict, total=False):
    """The data that a model is evaluated on before and after compression."""

    task: "str | Task | None"  # the task to evaluate rows by; None: text, by perplexity
    data: Path | None
    device: str | None


class QuantizeOptions(JudgedOptions, total=False):
    bits: Literal[8, 4]
    group: int  # inputs per scale; 0: a whole row at 8 bits, 32 at 4
    calibration: str | Path | None  # text to fit the rounded weights to, by GPTQ


class PruneOptions(JudgedOptions, total=False):
    """One pruning method, and the data to evaluate on."""

    sparsity: float | None  # share of each linear map's weights to set to zero
    pattern: str | None  # "2:4" keeps two of every four
    layers: str | Sequence[int] | None  # layers to keep
    heads: float | None  # share to keep
    neurons: float | None  # share to keep
    train: Path | None  # text, or rows of the task, to rank heads and neurons by


class ShareOptions(TypedDict, total=False):
    groups: int  # distinct blocks
    embedding: int  # width of a factorised embedding; 0: unchanged
