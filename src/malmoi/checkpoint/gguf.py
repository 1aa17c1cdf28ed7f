"""Converts a GGUF language model to Hugging Face's config, weights and tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.checkpoint.gguf_file import GGUFFile
from malmoi.checkpoint.hf_tables import LLAMA_TABLE
from malmoi.checkpoint.sizes import check_room
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError
from malmoi.model.positions import rotary_frequencies
from malmoi.system.limits import shown
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.gguf import read_vocabulary

GGUF_FIELDS = {  # llama.cpp's metadata keys after "llama."
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
OPTIONAL_FIELDS = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
SCALING_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# LLaMA 3's frequency divisors, which the file has instead of the scaling rule
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFContents:
    """What a GGUF file holds, under Hugging Face's names."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    generation: dict[str, Any]


def read_gguf(path: Path) -> GGUFContents:
    """Reads everything that a folder would hold."""
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise MalmoiError(
            "{path} holds a model of the kind {architecture}; Malmoi reads llama from GGUF files.",
            path=path,
            architecture=shown(architecture),
        )
    config = read_gguf_config(file)
    # bytes once unpacked to fp32
    check_room(4 * sum(prod(tensor.shape) for tensor in file.tensors.values()), path)
    tokenizer = read_vocabulary(file.metadata, str(path))
    return GGUFContents(
        config, read_gguf_weights(file, config), tokenizer, _generation(file.metadata)
    )


def read_gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config.json that the metadata describes."""
    meta = {
        key.removeprefix("llama."): value
        for key, value in file.metadata.items()
        if key.startswith("llama.")
    }
    missing = [name for name in GGUF_FIELDS if name not in meta]
    if missing:
        raise MalmoiError(
            "{path} does not say llama.{missing}, which is needed to build the model.",
            path=file.path,
            missing=missing[0],
        )
    if meta.get("expert_count"):
        raise MalmoiError(
            "{path} holds a mixture of {count} experts, which Malmoi does not support.",
            path=file.path,
            count=meta["expert_count"],
        )
    named = {
        theirs: _number(file.path, ours, meta[ours])
        for ours, theirs in (GGUF_FIELDS | OPTIONAL_FIELDS).items()
        if ours in meta
    }
    if "token_embd.weight" not in file.tensors:
        raise MalmoiError(
            "{path} holds no token_embd.weight: it is not a whole model.", path=file.path
        )
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **named}
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    model = LLAMA_TABLE.read_config(config, str(file.path))
    for name, stored in file.tensors.items():
        _check_shape(file.path, name, stored.shape, model)
    share = meta.get("rope.dimension_count", model.size_per_head) / model.size_per_head
    return config | {"rope_scaling": _scaling(file, meta, model) | {"partial_rotary_factor": share}}


def _check_shape(path: Path, name: str, shape: tuple[int, ...], c: ModelConfig) -> None:
    if name == ROPE_FACTORS:
        return
    *place, part, end = name.split(".")
    if part not in TENSOR_NAMES or place[:1] not in ([], ["blk"]) or len(place) not in (0, 2):
        raise MalmoiError(
            "{path} holds {name}, which Malmoi's llama does not use.", path=path, name=shown(name)
        )
    queries, keys = (n * c.size_per_head for n in (c.heads, c.key_heads))
    rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "ffn_gate": c.mlp_width}
    rows |= {"ffn_up": c.mlp_width, "token_embd": c.vocab, "output": c.vocab}
    columns = {"attn_output": queries, "ffn_down": c.mlp_width}
    flat = end == "bias" or part.endswith("_norm")
    want = (rows.get(part, c.width), *(() if flat else (columns.get(part, c.width),)))
    if shape != want:
        raise MalmoiError(
            "{path}: {name} has the shape {shape} where its sizes require {want}.",
            path=path,
            name=shown(name),
            shape=list(shape),
            want=list(want),
        )


def _number(path: Path, name: str, value: Any) -> Any:
    """One number for all layers; floats as meant, not as fp32 rounds them (9.9999997e-06)."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise MalmoiError(
                "{path}: llama.{name} differs between layers, but Malmoi supports one value "
                "for all of them.",
                path=path,
                name=name,
            )
        value = value[0]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _scaling(file: GGUFFile, meta: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    if ROPE_FACTORS in file.tensors:
        return _recognised(file, config)
    named = {theirs: meta[ours] for ours, theirs in SCALING_FIELDS.items() if ours in meta}
    return named if named.get("rope_type", "none") != "none" else {}


def _recognised(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """LLaMA 3's scaling rule, recovered by recomputing the divisors that the file stores."""
    factors = file.tensor(ROPE_FACTORS)
    rule: dict[str, Any] = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rule |= {"rope_type": "llama3", "factor": float(factors.max())}
    plain, _ = rotary_frequencies(config)
    scaled, _ = rotary_frequencies(
        config.override({"rotary_scaling": f"llama3:{rule['factor']},1,4,8192"})
    )
    if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors, rtol=1e-3):
        raise MalmoiError(
            "{path}: its rotary positions are scaled by factors that are not LLaMA 3's.",
            path=file.path,
        )
    return rule


def read_gguf_weights(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name, with query and key rows in its order."""
    keys = config.get("num_key_value_heads", config["num_attention_heads"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": keys}
    weights: dict[str, Tensor] = {}
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        *place, part, end = name.split(".")
        prefix = f"model.layers.{place[1]}." if place else ""
        tensor = file.tensor(name)
        if part in heads:  # llama.cpp rotates (x_2i, x_2i+1), Hugging Face (x_i, x_i+E/2)
            tensor = tensor.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        weights[f"{prefix}{TENSOR_NAMES[part]}.{end}"] = tensor
    return weights


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the bos token, and end-of-text and end-of-turn tokens as eos."""
    named = {
        role: metadata.get(f"tokenizer.ggml.{role}_token_id")
        for role in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = [named[role] for role in ("eos", "eot", "eom") if named[role] is not None]
    values = {"bos_token_id": named["bos"], "pad_token_id": named["padding"]}
    values["eos_token_id"] = ends[0] if len(set(ends)) == 1 else list(dict.fromkeys(ends)) or None
    return {key: value for key, value in values.items() if value is not None}
