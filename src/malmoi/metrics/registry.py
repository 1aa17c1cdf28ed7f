"""Metrics by name: functions of (gold, predicted)."""

import math
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import TypeVar

from malmoi.metrics.values import Labels
from malmoi.system.plugins import Registry

METRICS: Registry[Callable[..., float]] = Registry("metric", {})
LOWER_IS_BETTER = {"answer_loss"}
_COMPARED: dict[str, str] = {}  # what the package's own metrics compare
Function = TypeVar("Function", bound=Callable[..., float])


def compares(answers: str, *, lower_is_better: bool = False) -> Callable[[Function], Function]:
    """Makes a function a metric under its name; those of the same answers suit the same tasks."""

    def add(function: Function) -> Function:
        METRICS[function.__name__] = function
        _COMPARED[function.__name__] = answers
        if lower_is_better:
            LOWER_IS_BETTER.add(function.__name__)
        return function

    return add


def metrics_like(names: Iterable[str]) -> set[str]:
    """The metrics of the same answers as these; one that was registered may be of any answers."""
    answers = {_COMPARED.get(name) for name in names}
    return {name for name in METRICS if name in METRICS.origins or _COMPARED[name] in answers}


def metric(name: str) -> Callable[..., float]:
    """Looks up a metric by name."""
    return METRICS.find(name)


def score_predictions(
    names: Sequence[str], gold: Labels, predicted: Labels, labels: Sequence[str] = ()
) -> dict[str, float]:
    """Computes several metrics; averages over labels include all `labels`, even absent ones."""
    averaged = {"labels": labels} if labels else {}
    functions = {name: metric(name) for name in names}
    return {
        name: function(
            gold, predicted, **(averaged if "labels" in signature(function).parameters else {})
        )
        for name, function in functions.items()
    }


def goodness(name: str, value: float) -> float:
    """A metric's value with its sign such that more is better; NaN is the worst."""
    if math.isnan(value):
        return -math.inf
    return -value if name in LOWER_IS_BETTER else value


def is_better(name: str, a: float, b: float) -> bool:
    """Whether `a` is the better value of this metric."""
    return goodness(name, a) > goodness(name, b)
