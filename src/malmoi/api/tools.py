"""compress, export, plan, build_corpus, train_tokenizer, serve, recipes and tasks."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from malmoi.api.checks import check_options, lists_options, merge_settings
from malmoi.api.models import AnyModel
from malmoi.api.options import (
    CorpusOptions,
    DistilOptions,
    PlanOptions,
    PruneOptions,
    QuantizeOptions,
    ServeOptions,
    ShareOptions,
    TokenizerOptions,
)
from malmoi.api.records import Files
from malmoi.errors import require_known, require_that, required
from malmoi.messages import logger
from malmoi.system.files import require_free
from malmoi.system.progress import ProgressCallback, listening
from malmoi.system.storage import working_copy

if TYPE_CHECKING:
    from malmoi.compression.result import CompressionResult
    from malmoi.corpus.build import CorpusResult
    from malmoi.evaluation.task import Task
    from malmoi.inference.export import ExportResult
    from malmoi.planning.plan import RunPlan
    from malmoi.tokenizer.core import Tokenizer
    from malmoi.training.recipe import Recipe

METHODS: dict[str, tuple[str, type]] = {  # the function, and its options
    "quantize": ("quantize_model", QuantizeOptions),
    "prune": ("prune_model", PruneOptions),
    "distil": ("distil_model", DistilOptions),
    "share": ("share_layers", ShareOptions),
}


@overload
def compress(
    model: AnyModel,
    out: str | Path,
    method: Literal["quantize"] = "quantize",
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[QuantizeOptions],
) -> "CompressionResult": ...
@overload
def compress(
    model: AnyModel,
    out: str | Path,
    method: Literal["prune"],
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[PruneOptions],
) -> "CompressionResult": ...
@overload
def compress(
    model: AnyModel,
    out: str | Path,
    method: Literal["distil"],
    *,
    progress: ProgressCallback | None = None,
    **options: Unpack[DistilOptions],
) -> "CompressionResult": ...
@overload
def compress(
    model: AnyModel,
    out: str | Path,
    method: Literal["share"],
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[ShareOptions],
) -> "CompressionResult": ...
def compress(
    model: AnyModel,
    out: str | Path,
    method: Literal["quantize", "prune", "distil", "share"] = "quantize",
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> "CompressionResult":
    """Writes a smaller model and returns its size and quality before and after.

    quantize: fewer bits per weight (bits=8 or 4; GPTQ with calibration="text.txt"). prune: fewer
    weights, layers, heads or neurons, one kind at a time (sparsity=0.5, pattern="2:4",
    layers=[0, 2], heads=0.5, neurons=0.5). distil: a student of fewer layers learns from the model
    (data=…, task=…). share: layers share their weights, as in ALBERT (groups=1, embedding=128). A
    folder that is not empty is rejected unless overwrite=True; an unfinished student resumes.

    Examples:
        >>> result = malmoi.compress("runs/tiny-gpt", "runs/tiny-gpt-1", "prune", layers=[0])
        >>> result.weights[1] < result.weights[0]
        True
    """
    require_known(method, METHODS, "There is no method {name!r}.{hint}")
    name, known = METHODS[method]
    check_options(f"compress {method}", options, known)
    if method == "distil":
        options["overwrite"] = overwrite
        require_that(
            "data" in options,
            "A student is trained on text or on a task's rows: pass them as data.",
        )
    shrink = getattr(import_module(f"malmoi.compression.{method}"), name)
    with listening(progress), working_copy(out) as place:
        require_free(place, overwrite=overwrite or method == "distil")
        found: CompressionResult = shrink(_folder_of(model), place, **merge_settings(options))
    return found


def _folder_of(model: AnyModel) -> str | Path:
    """Returns the folder that a model was loaded from."""
    if isinstance(model, str | Path):
        return model
    return required(
        model.checkpoint.source, "This model has not been saved yet: call model.save(folder) first."
    )


def export(
    model: AnyModel,
    out: str | Path,
    *,
    format: Literal["onnx", "gguf"] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> "ExportResult":
    """Exports a model to one file for ONNX Runtime (.onnx) or llama.cpp (.gguf).

    dtype: fp32 or int8 for ONNX; f32, f16, bf16 or q8_0 for GGUF. The outputs of ONNX Runtime are
    compared with the model's before the file is written.

    Examples:
        >>> malmoi.export("runs/tiny-gpt", "model.gguf", dtype="q8_0")
        ExportResult(out='model.gguf', format='gguf', bytes=..., max_difference=None)
    """
    from malmoi.inference.export import export_model

    folder = _folder_of(model)
    with listening(progress), working_copy(out) as place:
        return export_model(folder, place, format=format, dtype=dtype, overwrite=overwrite)


@lists_options(PlanOptions)
def plan(
    recipe: "str | Recipe", *, gpus: int = 1, gpu: str = "h200", **options: Unpack[PlanOptions]
) -> "RunPlan":
    """Estimates parameters, FLOPs, memory, time and cost of a run on given GPUs.

    `malmoi plan` lists the known GPUs; describe any other with gpu_memory and gpu_tflops.

    Examples:
        >>> made = malmoi.plan("gpt2-small", gpus=8, gpu="h100", price=2.5)
        >>> made.parameters, made.fits
        (124439808, True)
    """
    from malmoi.planning.gpus import find_gpu
    from malmoi.planning.plan import Fleet, plan_run
    from malmoi.training.recipes import resolve_recipe

    check_options("plan", options, PlanOptions)
    given: dict[str, Any] = dict(options)
    figures = {name: given.pop(f"gpu_{name}", None) for name in ("memory", "tflops", "watts")}
    settings = given.pop("settings", {})
    fleet = Fleet(find_gpu(gpu, **figures), gpus, **given)
    return plan_run(resolve_recipe(recipe, settings), fleet)


@lists_options(CorpusOptions)
def build_corpus(
    sources: Files,
    out: str | Path,
    *,
    progress: ProgressCallback | None = None,
    **options: Unpack[CorpusOptions],
) -> "CorpusResult":
    """Cleans, filters, deduplicates, decontaminates and mixes raw text into a folder of shards.

    A source is a file, a folder, a glob, or NAME=SOURCE; give one or several. An unfinished build
    resumes; a different build in the same folder is rejected unless overwrite=True. A `part` of a
    build has no shards yet.

    Examples:
        >>> made = malmoi.build_corpus("book.txt", "corpus", min_words=3)
        >>> made.shards
        1
    """
    from malmoi.corpus.build import CorpusResult, run_build
    from malmoi.corpus.steps import Execution

    check_options("build_corpus", options, CorpusOptions)
    given: dict[str, Any] = merge_settings(options)
    execution = {name: given.pop(name) for name in ("workers", "executor", "part") if name in given}
    with listening(progress), working_copy(out) as place:
        found = run_build(sources, place, execution=Execution(**execution), **given)
    return CorpusResult.of(place, found)


@lists_options(TokenizerOptions)
def train_tokenizer(
    data: Files | None = None,
    out: str | Path | None = None,
    *,
    texts: Iterable[str] | None = None,
    overwrite: bool = False,
    **options: Unpack[TokenizerOptions],
) -> "Tokenizer":
    """Trains a tokenizer on files, or on `texts` in memory, and saves it to a folder.

    `pretrain` takes the folder as `tokenizer`; without `out` nothing is saved.

    Examples:
        >>> tokenizer = malmoi.train_tokenizer("book.txt", kind="byte-bpe", vocab=300)
        >>> tokenizer.decode(tokenizer.encode("The state").tokens)
        'The state'
        >>> malmoi.train_tokenizer(texts=["free and strong"], kind="char", vocab=20).id("f") is None
        False
    """
    from malmoi.text.documents import read_documents, require_documents
    from malmoi.tokenizer.training import train_tokenizer as train

    check_options("train_tokenizer", options, TokenizerOptions, "data", "out", "texts", "overwrite")
    require_that(
        (data is None) != (texts is None),
        "A tokenizer is trained on files (data) or on texts in memory (texts).",
    )
    if out is not None:
        require_free(Path(out), overwrite=overwrite)
    reader = read_documents(data) if data is not None else None
    if reader is not None:
        texts = (document.text for document in require_documents([reader]))
    tokenizer = train(texts or (), **options)
    for sentence in reader.describe() if reader is not None else ():
        logger.info(sentence)
    if out is not None:
        with working_copy(out) as place:
            require_free(place, overwrite=overwrite)
            tokenizer.save(place)
    return tokenizer


def recipes() -> "dict[str, Recipe]":
    """Returns the recipes that `pretrain` takes by name; `Recipe.override` changes a copy.

    Three more names, gpt, bert and both, have no fixed size: `pretrain` chooses it for the text,
    the minutes and the machine.

    Examples:
        >>> malmoi.recipes()["gpt2-small"].model.width
        768
    """
    from malmoi.training.recipes import RECIPES, SIZED

    return {name: make() for name, make in RECIPES.items() if name not in SIZED}


def tasks() -> "dict[str, Task]":
    """Returns the tasks that `finetune` and `evaluate` take by name.

    Examples:
        >>> malmoi.tasks()["sst2"].kind
        'classification'
    """
    from malmoi.evaluation.tasks import TASKS

    return dict(TASKS)


@lists_options(ServeOptions)
def serve(models: "AnyModel | Sequence[AnyModel]", **options: Unpack[ServeOptions]) -> None:
    """Serves models over HTTP until interrupted: OpenAI's API under /v1, the studio at /.

    The first model is the default. The server listens on localhost unless `host` is set.

    Examples:
        >>> malmoi.serve("runs/tiny-gpt", prot=8000)
        Traceback (most recent call last):
        malmoi.errors.UsageError: serve has no option 'prot'. Did you mean 'port'?
    """
    from malmoi.server.config import ServeConfig
    from malmoi.studio.serve import serve_models

    check_options("serve", options, ServeOptions)
    listed = models if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    given: dict[str, Any] = dict(options)
    where = {name: given.pop(name, None) for name in ("device", "dtype")}
    serve_models(listed, ServeConfig(**given), **where)
