"""A model before and after its compression: opening it, its size, metrics and cost."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from timeit import Timer
from typing import Any

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint.hf_tables import GPT2_TABLE
from malmoi.checkpoint.read_folder import OWN_MODEL_TYPE, read_model_json
from malmoi.compression.options import JudgedOptions
from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.inference import Model, load
from malmoi.inference.export import read_whole
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.sampling import new_sequences
from malmoi.kernels.fast_argmax import fast_argmax_for
from malmoi.kernels.int8 import is_quantized, memory_of
from malmoi.model import Network, count_parameters
from malmoi.system.result import Result
from malmoi.text.documents import read_documents

# in tokens, if the context has room
PROMPT = 8
WRITTEN = 16
# the batch of an encoder
ROWS = 8
LENGTH = 64
Metrics = Mapping[str, float]


# ------------------------------------------------------------------ the cost of using a model


@dataclass(frozen=True)
class Cost:
    """Bytes of weights in memory; tokens generated, or rows encoded, per second."""

    memory: int
    unit: str
    rate: float


def cost_of(model: Model) -> Cost:
    """Measures memory, and speed after a warm-up."""
    writes = "generate" in model.abilities
    count, work = _writing(model) if writes else _reading(model)
    work()
    rounds, seconds = Timer(work).autorange()
    unit = "tokens/s" if writes else "rows/s"
    return Cost(memory_of(model.network), unit, count * rounds / seconds)


def _writing(model: Model) -> tuple[int, Callable[[], object]]:
    context = model.config.context
    prompt = min(PROMPT, context // 2)
    count = min(WRITTEN, context - prompt)
    config = GenerationConfig(count, Sampling(temperature=0))
    fast_argmax = fast_argmax_for(model.network)
    shown = [i % model.config.vocab for i in range(prompt)]

    def work() -> None:
        decoding = Decoding(model.network, new_sequences([shown], config, context), fast_argmax)
        for _ in range(count):
            decoding.step()

    return count, work


def _reading(model: Model) -> tuple[int, Callable[[], object]]:
    length = min(LENGTH, model.config.context)
    numbers = torch.arange(ROWS * length, device=model.network.device)
    tokens = numbers.remainder(model.config.vocab).view(ROWS, length)

    @torch.inference_mode()
    def work() -> object:
        return model.network.hidden(tokens)[0, 0, 0].item()  # synchronises with the GPU

    return ROWS, work


# ------------------------------------------------------------------ the result


@dataclass(frozen=True, repr=False)
class CompressionResult(Result):
    """A smaller model's folder; its weights, bytes on disk, metrics and cost before and after."""

    out: Path
    weights: tuple[int, int]
    size: tuple[int, int]
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    costs: tuple[Cost, Cost] | None = None  # of using them, if measured

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Rows of a table: what, before, after."""
        yield "weights", *_both(self.weights, ",")
        yield "MB on disk", *_both((self.size[0] / 1e6, self.size[1] / 1e6), ",.1f")
        if self.costs is not None:
            before, after = self.costs
            yield "MB in memory", *_both((before.memory / 1e6, after.memory / 1e6), ",.1f")
            yield before.unit, *_both((before.rate, after.rate), ",.3g")
        yield from ((name, *_both(values, ".4g")) for name, values in self.metrics.items())

    @classmethod
    def of(
        cls, before: tuple[Network, Path], after: tuple[Network, Path], *metrics: Metrics
    ) -> "CompressionResult":
        """Counts the weights of two networks and the bytes of their folders."""
        weights = count_parameters(before[0]), count_parameters(after[0])
        sizes = folder_size(before[1]), folder_size(after[1])
        return cls(after[1], weights, sizes, paired(*metrics) if metrics else {})


def _both(values: tuple[float, float], form: str) -> tuple[str, str]:
    return format(values[0], form), format(values[1], form)


def paired(before: Metrics, after: Metrics) -> dict[str, tuple[float, float]]:
    return {name: (value, after[name]) for name, value in before.items() if name in after}


def folder_size(folder: Path) -> int:
    """Bytes of the weights in a folder (for a file, its size)."""
    kinds = ("*.safetensors", "*.bin")
    files = [folder] if folder.is_file() else [file for kind in kinds for file in folder.glob(kind)]
    return sum(file.stat().st_size for file in files)


# ------------------------------------------------------------------ what all methods share


def open_whole(model: str | Path, out: Path) -> Checkpoint:
    """Loads the full model after checking that it can be compressed and written to `out`."""
    checkpoint = read_whole(model)
    checkpoint.network.require_attention("Compression")
    source = checkpoint.source or out
    require_that(
        source.resolve() != out.expanduser().resolve(),
        "--out {out} is the model itself; choose another folder.",
        out=out,
    )
    packed = source.is_dir() and read_model_json(source / "config.json").get("quantization_config")
    require_that(
        not packed and not is_quantized(checkpoint.network),
        "{model} is already quantised; start from the model it was made from.",
        model=model,
    )
    return checkpoint


def judged_options(options: Mapping[str, Any], *others: Path | None) -> JudgedOptions:
    """What to evaluate on; a task needs rows, here or among `others`."""
    judge = JudgedOptions(**options)
    require_that(
        judge.task is None or any((judge.data, *others)),
        "--task describes the rows in --data: give --data too.",
    )
    return judge


def measures(opened: Model, judge: JudgedOptions) -> dict[str, float]:
    """A model's quality: a task's metrics on rows, or perplexity on text; empty without data."""
    if judge.data is None:
        return {}
    if judge.task is not None:
        found = evaluate_model(opened, judge.task, judge.data)
        return {name: value for name, value in found.items() if isinstance(value, float)}
    require_that(
        "perplexity" in opened.abilities,
        "Plain text is scored by a GPT's perplexity; for this model give the --task of the rows.",
    )
    text = "\n\n".join(document.text for document in read_documents(judge.data))
    return {"perplexity": opened.perplexity(text)}


def folder_measures(folder: Path, judge: JudgedOptions) -> dict[str, float]:
    """`measures` of a model in a folder, which is not opened without data."""
    return {} if judge.data is None else measures(load(folder, device=judge.device), judge)


def remarks(out: Path) -> list[str]:
    """Notes about which tools open a compressed model's folder."""
    values = read_model_json(out / "config.json")
    if values.get("model_type") != OWN_MODEL_TYPE:
        return []
    notes = [
        "vLLM does not support this model; transformers opens the folder after `import malmoi`."
    ]
    config = ModelConfig.from_dict(values["model"])
    heads = set(values["heads"])
    if "quantization_config" in values and heads == {"lm"} and GPT2_TABLE.expresses(config, heads):
        notes.append(
            "For llama.cpp, export the original model with fewer bits: malmoi export gguf "
            "--dtype q8_0."
        )
    return notes
