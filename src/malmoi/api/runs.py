"""Training and measuring: pretrain, finetune, evaluate, study."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from malmoi.api.models import AnyModel
from malmoi.api.options import (
    EvaluateOptions,
    Files,
    FinetuneOptions,
    PretrainOptions,
    StudyOptions,
    check_options,
    merge_settings,
)
from malmoi.errors import UsageError
from malmoi.system.progress import ProgressCallback, listening

if TYPE_CHECKING:
    from malmoi.evaluation.tasks import Task
    from malmoi.finetuning.finetune import FinetuneResult
    from malmoi.inference.model import Model
    from malmoi.studies.registry import StudyResult
    from malmoi.training.recipe import Recipe

Metrics = dict[str, float]


def pretrain(
    recipe: "str | Recipe",
    *,
    data: Files,
    out: str | Path,
    progress: ProgressCallback | None = None,
    **options: Unpack[PretrainOptions],
) -> "Model":
    """Trains a model from raw text into a folder that `transformers` opens.

    `recipe` is a name (`malmoi recipes` lists them), a recipe.json or a `Recipe`. Options are
    settings of the recipe (`minutes=3`, `lr=1e-3`, `vocab=300`, `text="message"` for a table's
    column), or any other by its path in `settings` (`{"train.floor": 0.1}`); `malmoi recipes NAME`
    lists all of them. The same call on the same folder resumes an unfinished run.

    Examples:
        >>> model = malmoi.pretrain(
        ...     "gpt-char", data="book.txt", out="runs/book", steps=2, context=16, device="cpu"
        ... )
        >>> model.config.context
        16
    """
    from malmoi.training.pretrain import run_pretraining as train

    given: dict[str, Any] = merge_settings(options)
    with listening(progress):
        return train(recipe, data=data, out=out, **given)


def finetune(
    model: AnyModel,
    task: "str | Task",
    data: Files,
    out: str | Path,
    dev: Files | None = None,
    *,
    progress: ProgressCallback | None = None,
    **options: Unpack[FinetuneOptions],
) -> "FinetuneResult":
    """Fine-tunes a BERT or a GPT for a task, into a folder that `transformers` opens.

    `task` is a name (`malmoi tasks` lists them), a kind such as "classification" for columns called
    text and label, or a `Task`: `malmoi.custom_task` names other columns. Without `dev` a tenth of
    the rows is held out. The same call on the same folder resumes an unfinished run;
    `restart=True` starts over. Options are `epochs`, `lr`, `batch`, `length`, `seed` and the others
    that `malmoi finetune --help` has.

    Examples:
        >>> result = malmoi.finetune(
        ...     "runs/tiny-bert", "classification", "reviews.csv", "runs/stars", device="cpu"
        ... )
        >>> sorted(result.metrics)
        ['accuracy', 'f1_macro']
    """
    from malmoi.finetuning.finetune import run_finetuning as tune

    check_options("finetune", options, FinetuneOptions, "dev", "progress")
    given: dict[str, Any] = merge_settings(options)
    with listening(progress):
        return tune(model, task, data, out, dev, **given)


@overload
def evaluate(
    model: AnyModel,
    task: "str | Task",
    data: Files | None = None,
    *,
    shots: int | Literal["max"] | None = None,
    progress: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> Metrics: ...
@overload
def evaluate(
    model: AnyModel,
    task: "str | Task",
    data: Files | None = None,
    *,
    shots: Sequence[int],
    progress: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> list[Metrics]: ...
def evaluate(
    model: AnyModel,
    task: "str | Task",
    data: Files | None = None,
    *,
    shots: int | str | Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> Metrics | list[Metrics]:
    """The metrics of a model on a task's rows: {"accuracy": 0.91, …, "examples": 872}.

    A fine-tuned model is evaluated as it is. With `shots` (0, 1, K or "max") a GPT or a BERT
    answers after that many examples in its prompt, and each metric has a standard error beside it;
    a list of numbers gives a list of metrics.

    Examples:
        >>> malmoi.evaluate("runs/reviews", "classification", "reviews.csv")
        {'accuracy': ..., 'f1_macro': ..., 'examples': 12}
        >>> found = malmoi.evaluate("runs/tiny-gpt", "classification", "reviews.csv", shots=[0, 2])
        >>> [one["shots"] for one in found]
        [0, 2]
    """
    from malmoi.evaluation.evaluate import evaluate_model as judge

    check_options("evaluate", options, EvaluateOptions, "shots", "data", "progress")
    given: dict[str, Any] = dict(options)
    if shots is not None:
        several = isinstance(shots, Sequence) and not isinstance(shots, str)
        given["shots"] = ",".join(map(str, cast("Sequence[int]", shots))) if several else shots
    with listening(progress):
        found: Metrics | list[Metrics] = judge(model, task, data, **given)
    return found


def study(
    name: str,
    *,
    data: Sequence[str],
    out: str | Path,
    progress: ProgressCallback | None = None,
    **options: Unpack[StudyOptions],
) -> "StudyResult":
    """Reproduces a paper's table or figure in a folder; what is already done there is kept.

    `malmoi study` lists the names.

    Examples:
        >>> malmoi.study("in-contxt", data=["book.txt"], out="runs/study")
        Traceback (most recent call last):
        malmoi.errors.UsageError: There is no study 'in-contxt'. Did you mean 'in-context'? ...
    """
    from malmoi.studies.registry import StudyResult, named_study

    check_options("study", options, StudyOptions)
    if isinstance(data, str):
        raise UsageError("data must be a list of sources: data=['book.txt'].")
    chosen = named_study(name)
    plan = chosen.plan.from_dict({"data": list(data), "out": str(out)})
    with listening(progress):
        facts = chosen.run(plan.override(merge_settings(options)))
    return StudyResult(name, Path(out), facts)
