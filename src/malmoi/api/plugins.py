"""Registration of your own tasks, metrics, objectives, schedules and attention patterns.

A registered name works like a built-in one: in `finetune` and `evaluate`, in a recipe, in
`settings`, and on the command line with `--plugin FILE.py`. An installed package can register names
through an entry point in the group "malmoi.plugins".
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from malmoi.errors import require_that

if TYPE_CHECKING:
    from malmoi.evaluation.task import Task
    from malmoi.model.patterns import Predicate
    from malmoi.training.losses import Objective
    from malmoi.training.recipe import TrainConfig

    Schedule = Callable[[float, TrainConfig], float]
    MakePattern = TypeVar("MakePattern", bound=Callable[..., Predicate])

Metric = Callable[[Sequence[Any], Sequence[Any]], float]


def register_task(task: "Task") -> "Task":
    """Registers a task under its name.

    Examples:
        >>> from dataclasses import replace
        >>> stars = malmoi.custom_task("classification", text="review", label="stars")
        >>> malmoi.register_task(replace(stars, name="my-stars")).name
        'my-stars'
        >>> "my-stars" in malmoi.tasks()
        True
    """
    from malmoi.evaluation.tasks import TASKS

    TASKS.register(task.name, task)
    return task


def register_metric(
    function: Metric, *, answers: str = "", lower_is_better: bool = False
) -> Metric:
    """Registers a metric, a function (gold, predicted) → number, under the function's name.

    Name it as `metric` of `finetune` (`--metric`), or in a task's `metrics`; the first of them
    selects the best checkpoint. With `answers` (names, numbers, ranks, tags, spans or texts) it is
    refused for tasks of other answers; otherwise it suits every task.

    Examples:
        >>> @malmoi.register_metric
        ... def share_of_good(gold, predicted):
        ...     return sum(label == "good" for label in predicted) / len(predicted)
        >>> task = malmoi.custom_task("classification", metrics=["accuracy", "share_of_good"])
        >>> malmoi.evaluate("runs/reviews", task, "reviews.csv")
        {'accuracy': ..., 'share_of_good': ..., 'examples': 12}
    """
    from malmoi.metrics.registry import METRICS, Metric as Record

    METRICS.register(function.__name__, Record(function, answers, lower_is_better))
    return function


def register_schedule(function: "Schedule") -> "Schedule":
    """Registers a learning-rate schedule under the function's name.

    The function takes the used share of the budget, from 0 to 1 after the warm-up, and the training
    settings; it returns the learning rate as a share of its peak.

    Examples:
        >>> @malmoi.register_schedule
        ... def square_root(progress, config):
        ...     return 1 - (1 - config.floor) * progress**0.5
        >>> malmoi.recipes()["gpt-char"].override({"train.schedule": "square_root"}).train.schedule
        'square_root'
    """
    from malmoi.training.recipe import SCHEDULES

    SCHEDULES.register(function.__name__, function)
    return function


def register_pattern(make: "MakePattern") -> "MakePattern":
    """Registers an attention pattern under the function's name.

    The function takes a `Layout` and the numbers after the colon; it returns a predicate (batch,
    head, query, key) → bool over tensors of positions. Patterns of `malmoi.model.patterns` combine.

    Examples:
        >>> @malmoi.register_pattern
        ... def every(at, step):
        ...     return lambda batch, head, query, key: (query - key) % step == 0
        >>> from malmoi.model.patterns import Layout, all_of, column, local, parse_pattern
        >>> @malmoi.register_pattern
        ... def dilated(at, window, step):
        ...     return all_of(local(at, window), column(at, step))
        >>> parse_pattern("causal & dilated:6,2").mask(Layout(1, 1, 8, offset=7)).int().flatten()
        tensor([0, 0, 0, 1, 0, 1, 0, 1], dtype=torch.int32)
    """
    from malmoi.model.patterns import PATTERNS

    require_that(
        not {"query", "key", "q", "k"}.intersection(signature(make).parameters),
        "{type} is a predicate, not a function that returns one: write def {type}(at): "
        "return lambda batch, head, query, key: …",
        type=make.__name__,
    )
    PATTERNS.register(make.__name__, make)
    return make


def register_objective(
    *, samples: Literal["lm", "mlm", "mlm+nsp", "both"]
) -> "Callable[[Callable[[], Objective]], Callable[[], Objective]]":
    """Registers a pre-training objective under the function's name.

    The function returns an `Objective`: ours add and scale, and a `Term` is a loss of your own (see
    `malmoi.training.losses`). `samples` is the objective of ours whose samples it learns from.

    Examples:
        >>> from malmoi.training.losses import mlm, nsp
        >>> @malmoi.register_objective(samples="mlm+nsp")
        ... def mostly_mlm():
        ...     return mlm() + 0.1 * nsp()
        >>> malmoi.recipes()["bert-tiny"].override({"objective": "mostly_mlm"}).samples
        'mlm+nsp'

        A loss of your own is a sum over the labels; the trainer divides it by their number.

        >>> from malmoi.training.losses import Objective, Term, lm
        >>> @malmoi.register_objective(samples="lm")
        ... def lm_with_z_loss():
        ...     def squares(done):
        ...         here = done.batch["lm_labels"] != -100
        ...         return (done.scores("lm").logsumexp(-1)[here] ** 2).sum()
        ...     return lm() + 1e-4 * Objective((Term("lm", "lm_labels", squares, name="z"),))
    """
    from malmoi.training.losses import OBJECTIVES
    from malmoi.training.recipe import OBJECTIVE_SAMPLES

    require_that(
        samples in OBJECTIVE_SAMPLES,
        "samples is one of {samples}, not {samples2!r}.",
        samples=", ".join(OBJECTIVE_SAMPLES),
        samples2=samples,
    )

    def register(make: "Callable[[], Objective]") -> "Callable[[], Objective]":
        OBJECTIVE_SAMPLES.register(make.__name__, samples)
        OBJECTIVES.register(make.__name__, make)
        return make

    return register
