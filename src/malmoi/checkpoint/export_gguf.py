"""Exports a language model to a GGUF file, as llama.cpp's own converter would write it."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from malmoi.checkpoint.gguf import LLAMA_KEYS, ROPE_FACTORS, SIZES, gguf_package, tensor_names
from malmoi.checkpoint.hf_tables import GPT2_TABLE, LLAMA_TABLE
from malmoi.checkpoint.read_folder import Checkpoint
from malmoi.checkpoint.table import Table, function_of, resolve_rules
from malmoi.checkpoint.translate import to_hf
from malmoi.checkpoint.weights import dense
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, require_known, require_that
from malmoi.kernels.int8 import is_quantized
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.model.positions import rotary_frequencies
from malmoi.system.files import replace_file
from malmoi.system.progress import Progress, report_progress
from malmoi.tokenizer.gguf import gguf_vocabulary

# dtype → general.file_type
GGUF_DTYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
F32_TENSORS = ("position_embd.",)  # matrices that llama.cpp requires in f32
_LLAMA_SIZES = {
    "vocab_size": "vocab",
    "attention.value_length": "head_width",
    "rope.dimension_count": "head_width",
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """One of llama.cpp's architectures."""

    table: Table
    fields: Mapping[str, str]
    only: Mapping[str, Any]  # our config fields that it fixes and Hugging Face does not


GGUF_ARCHITECTURES = {
    "gpt2": GGUFArchitecture(
        GPT2_TABLE, SIZES | {"attention.layer_norm_epsilon": "eps"}, {"activation": "gelu_tanh"}
    ),
    "llama": GGUFArchitecture(LLAMA_TABLE, LLAMA_KEYS | _LLAMA_SIZES, {}),
}


def export_gguf(checkpoint: Checkpoint, path: Path, dtype: str = "f32") -> None:
    """Writes weights, config and tokenizer to one file; norms and biases stay in f32."""
    require_known(dtype, GGUF_DTYPES, "This file cannot be written as {name!r}.{hint}")
    network = checkpoint.network
    name = _kind(network)
    gguf = gguf_package()
    values = resolve_rules(network.config)
    fields = {theirs: values[ours] for theirs, ours in GGUF_ARCHITECTURES[name].fields.items()}
    sizes = fields | _scaling(network.config)
    metadata = {
        **{f"{name}.{field}": value for field, value in sizes.items()},
        **gguf_vocabulary(checkpoint.required_tokenizer, network.config.vocab),
        "general.file_type": int(gguf.LlamaFileType[GGUF_DTYPES[dtype]]),
        **({"general.quantization_version": gguf.GGML_QUANT_VERSION} if dtype == "q8_0" else {}),
        **({"general.name": checkpoint.source.name} if checkpoint.source else {}),
    }
    replace_file(
        path, lambda beside: _write(beside, name, metadata, _tensors(name, network), dtype)
    )


def _kind(network: Network) -> str:
    """The architecture that computes exactly this network; if there is none, raises with why."""
    heads = msg("the heads {heads}", heads=", ".join(network.heads) or msg("none"))
    require_that(
        set(network.heads) == {"lm"} and not (is_quantized(network) or network.features),
        "GGUF holds plain language models; this one has {what}. Export it to ONNX.",
        what=msg("int8 weights") if is_quantized(network) else heads,
    )
    require_that(
        not network.trunk.has_soft_tokens,
        "A GGUF file cannot hold soft tokens: they belong to an adapter.",
    )
    apart = {name: _differences(kind, network.config) for name, kind in GGUF_ARCHITECTURES.items()}
    near = min(apart, key=lambda name: len(apart[name]))
    require_that(
        not apart[near],
        "llama.cpp does not support it; it differs from {near}: {fields}. Export it to ONNX.",
        near=near,
        fields=", ".join(f"{field} = {value!r}" for field, value in apart[near].items()),
    )
    return near


def _differences(kind: GGUFArchitecture, config: ModelConfig) -> dict[str, Any]:
    """Fields of the model that the architecture does not support."""
    ours = function_of(config)
    try:
        theirs = function_of(kind.table.read_config(kind.table.write_config(config)))
    except MalmoiError:
        theirs = function_of(kind.table.family(vocab=config.vocab))
    theirs |= kind.only
    if config.rotary_scaling.startswith("yarn:") and not config.rotary_scaling.endswith(",32,1"):
        theirs["rotary_scaling"] = ""
    return {name: value for name, value in ours.items() if theirs[name] != value}


def _scaling(config: ModelConfig) -> dict[str, Any]:
    """Metadata of rotary scaling; LLaMA 3's rule is stored as a tensor instead."""
    rule, _, numbers = config.rotary_scaling.partition(":")
    if rule not in ("linear", "yarn"):
        return {}
    factor, *rest = (float(number) for number in numbers.split(","))
    scaling: dict[str, Any] = {"rope.scaling.type": rule, "rope.scaling.factor": factor}
    return scaling | ({"rope.scaling.original_context_length": int(rest[0])} if rest else {})


def _tensors(name: str, network: Network) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under llama.cpp's name, in its order."""
    config = network.config
    table = GGUF_ARCHITECTURES[name].table
    names, weights = tensor_names(name, table, config), to_hf(table, network)
    for number, (theirs, tensor) in enumerate(weights.items(), 1):
        report_progress(Progress("export", number, len(weights), "tensors"))
        called = names[theirs]
        yield called, _turned(called, dense(tensor), name, config)
    if config.rotary_scaling.startswith("llama3:"):
        plain, _ = rotary_frequencies(config.override({"rotary_scaling": ""}))
        yield ROPE_FACTORS, plain / rotary_frequencies(config)[0]


def _turned(called: str, tensor: Tensor, name: str, config: ModelConfig) -> Tensor:
    """GPT-2's matrices as [out, in]; LLaMA's query and key rows interleaved (x_2i, x_2i+1)."""
    if name == "gpt2":
        return tensor.T if tensor.dim() > 1 and called.startswith("blk.") else tensor
    heads = {"attn_q": config.heads, "attn_k": config.key_heads}.get(called.split(".")[-2])
    if heads is not None:
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _write(
    path: Path,
    name: str,
    metadata: Mapping[str, Any],
    tensors: Iterator[tuple[str, Tensor]],
    dtype: str,
) -> None:
    gguf = gguf_package()
    with closing(gguf.GGUFWriter(path, name)) as writer:
        for field, value in metadata.items():
            _add(writer, field, value)
        for called, tensor in tensors:
            numbers = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
            kind = _packing(called, numbers, dtype)
            writer.add_tensor(called, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add(writer: Any, field: str, value: Any) -> None:
    types = gguf_package().GGUFValueType
    kinds = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
    if not isinstance(value, list):
        writer.add_key_value(field, value, kinds[type(value)])
    elif value:
        writer.add_array(field, value)


def _packing(called: str, numbers: Any, dtype: str) -> Any:
    """A row that does not divide into blocks is kept as f16, as llama.cpp's converter does."""
    kinds = gguf_package().GGMLQuantizationType
    if numbers.ndim < 2 or called.startswith(F32_TENSORS):
        return kinds.F32
    whole = numbers.shape[-1] % gguf_package().GGML_QUANT_SIZES[kinds[dtype.upper()]][0] == 0
    return kinds[dtype.upper()] if whole else kinds.F16
