"""Shared by all compression methods: loading the model and evaluating it before and after."""

from collections.abc import Mapping
from pathlib import Path

from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint.folder import OWN_MODEL_TYPE, read_model_json
from malmoi.checkpoint.hf_tables import GPT2_TABLE
from malmoi.compression.options import JudgedOptions
from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import Task
from malmoi.inference import Model, load
from malmoi.inference.export import read_whole
from malmoi.kernels.int8 import is_quantized
from malmoi.text.documents import read_documents


def open_whole(model: str | Path, out: Path) -> Checkpoint:
    """Loads the full model after checking that it can be compressed and written to `out`."""
    checkpoint = read_whole(model)
    checkpoint.network.require_attention("Compression")
    source = checkpoint.source
    if source is None or source.resolve() == out.expanduser().resolve():
        raise UsageError("--out {out} is the model itself; choose another folder.", out=out)
    packed = source.is_dir() and read_model_json(source / "config.json").get("quantization_config")
    if packed or is_quantized(checkpoint.network):
        raise UsageError(
            "{model} is already quantised; start from the model it was made from.", model=model
        )
    return checkpoint


def check_rows(task: str | Task | None, *files: Path | None) -> None:
    if task is not None and not any(files):
        raise UsageError("--task describes the rows in --data: give --data too.")


def measures(model: str | Path, judge: JudgedOptions) -> dict[str, float]:
    """The metrics of a model in a folder; empty, without opening it, if there is no data."""
    if judge.data is None:
        return {}
    return measured(load(model, device=judge.device), judge.task, judge.data)


def measured(opened: Model, task: str | Task | None, data: Path) -> dict[str, float]:
    """A model's quality: a task's metrics on rows, or perplexity on text."""
    if task is not None:
        found = evaluate_model(opened, task, data)
        return {name: value for name, value in found.items() if isinstance(value, float)}
    if "perplexity" not in opened.abilities:
        raise UsageError(
            "Plain text in --data is scored by a GPT's perplexity; for this model give the "
            "--task of the rows."
        )
    text = "\n\n".join(document.text for document in read_documents(data))
    return {"perplexity": opened.perplexity(text)}


def paired(
    before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    return {name: (value, after[name]) for name, value in before.items()}


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
