"""Exports a model as a single file for ONNX Runtime or llama.cpp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from malmoi.adapters.store import read_with_adapter
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.save_folder import model_json
from malmoi.checkpoint.sentence_pooling import write_sentence_pooling
from malmoi.errors import require_known, require_that
from malmoi.messages import logger
from malmoi.system.files import output_folder, require_free, write_json
from malmoi.system.paths import is_adapter
from malmoi.system.result import Result

ExportFormat = Literal["onnx", "gguf"]


@dataclass(frozen=True, repr=False)
class ExportResult(Result):
    """The exported file, and the maximum difference of ONNX Runtime's scores from the model's."""

    out: Path
    format: ExportFormat
    bytes: int
    max_difference: float | None = None


def read_whole(model: str | Path, dtype: torch.dtype | None = None) -> Checkpoint:
    """Loads a full model; an adapter must be merged into its base first."""
    require_that(
        not is_adapter(model),
        "{model} is an adapter; merge it first: malmoi merge --model {model} --out DIR",
        model=model,
    )
    return read_checkpoint(model, dtype=dtype)


def merge_adapter(model: str | Path, out: Path, *, overwrite: bool = False) -> None:
    """Writes an adapter and its base as one model."""
    require_that(is_adapter(model), "{model} is not an adapter to merge.", model=model)
    require_that(not is_adapter(out), "{out} holds an adapter; choose another folder.", out=out)
    require_free(out, overwrite=overwrite)
    write_checkpoint(read_with_adapter(model), out)


def export_model(
    model: str | Path,
    out: Path,
    *,
    format: ExportFormat | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> ExportResult:
    """Exports a model to `out`, in the format of its suffix, after checking that it is possible."""
    suffix = out.suffix.removeprefix(".")
    chosen = cast(ExportFormat, format or suffix)
    require_known(chosen, get_args(ExportFormat), "There is no format {name!r} to export to.{hint}")
    require_that(
        suffix == chosen,
        "--out {out} should be a file whose name ends in .{chosen}.",
        out=out,
        chosen=chosen,
    )
    require_that(not out.is_dir(), "{out} is a folder; --out names a file here.", out=out)
    require_free(out, overwrite=overwrite)
    checkpoint = read_whole(model, torch.float32)
    for note in checkpoint.notes:
        logger.warning(note)
    far = None
    if chosen == "onnx":
        far = _write_onnx(checkpoint, out, dtype or "fp32", overwrite=overwrite)
    else:
        from malmoi.checkpoint.export_gguf import export_gguf

        with output_folder(out.parent) as place:
            export_gguf(checkpoint, place / out.name, dtype or "f32")
    return ExportResult(out, chosen, out.stat().st_size, far)


def _write_onnx(checkpoint: Checkpoint, out: Path, dtype: str, *, overwrite: bool) -> float:
    from malmoi.checkpoint.export_onnx import export_onnx

    apart = out.parent.resolve() != checkpoint.source
    for name in ("tokenizer.json", "config.json") if apart else ():
        require_free(out.parent / name, overwrite=overwrite)
    if checkpoint.tokenizer is None:
        logger.warning("The model has no tokenizer, so none is written beside the file.")
    if checkpoint.network.config.both_ways and checkpoint.network.trunk.is_causal:
        logger.warning("This model reads both ways; the file holds its causal reading alone.")
    with output_folder(out.parent) as place:
        far = export_onnx(checkpoint, place / out.name, dtype)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(place)
        if apart:  # transformers' and optimum's pipelines read the labels from it
            write_json(place / "config.json", model_json(checkpoint))
            write_sentence_pooling(checkpoint.sentence, place, checkpoint.network.config.width)
    return far
