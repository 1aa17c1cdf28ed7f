"""Reads a GGUF language model as Hugging Face's config, weights and tokenizer.

Every stated length is checked against the bytes in the file. (The `gguf` package's own reader
trusts them: an array of 2⁶⁰ numbers makes it loop forever.) Layout, version 3: magic, version,
counts; metadata as (name, type, value); tensors as (name, shape, type, offset); padding; the
tensors' bytes.
"""

import mmap
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malmoi.checkpoint.hf_tables import LLAMA_TABLE, PLACE, SCALING_NUMBERS
from malmoi.checkpoint.table import Table
from malmoi.checkpoint.weights import check_room
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, ensure, explained, required
from malmoi.messages import msg
from malmoi.model.positions import rotary_frequencies
from malmoi.system.packages import optional_package
from malmoi.system.untrusted import shown
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.gguf import read_vocabulary

NUMBER_FORMATS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
TEXT_TYPE = 8
ARRAY_TYPE = 9
DAMAGED = "{path} is cut short or damaged: {reason}. Copy or download it again."


@dataclass
class Cursor:
    """Reads bytes sequentially and refuses to read past the end."""

    data: memoryview
    path: Path
    at: int = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:  # of every number and text
            reason = msg("the value at byte {at} is cut off", at=self.at)
            raise MalmoiError(DAMAGED, path=self.path, reason=reason)
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, format: str) -> Any:
        return struct.unpack(f"<{format}", self.take(struct.calcsize(f"<{format}")))[0]

    def text(self) -> str:
        try:
            return str(self.take(self.number("Q")), "utf-8")
        except UnicodeDecodeError:
            reason = msg("the text before byte {at} is not UTF-8", at=self.at)
            raise MalmoiError(DAMAGED, path=self.path, reason=reason) from None

    def count(self, what: str, smallest: int) -> int:
        """The number of entries that follow; refused if the file has no room for them."""
        count = int(self.number("Q"))
        fits = count * smallest <= len(self.data) - self.at
        reason = "it declares {count} {what} but is too short"
        ensure_whole(fits, self.path, reason, count=count, what=what)
        return count

    def value(self) -> Any:
        kind = self.number("I")
        several = kind == ARRAY_TYPE
        kind = self.number("I") if several else kind
        # a text begins with its length
        format = "Q" if kind == TEXT_TYPE else NUMBER_FORMATS.get(kind, "")
        reason = "there is no type {kind} for the value at byte {at}"
        ensure_whole(format, self.path, reason, kind=kind, at=self.at)
        size = struct.calcsize(format)
        count = self.count("values", size) if several else 1
        if kind == TEXT_TYPE:
            values = [self.text() for _ in range(count)]
        else:
            values = list(struct.unpack(f"<{count}{format}", self.take(count * size)))
        return values if several else values[0]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's location and type in the file."""

    shape: tuple[int, ...]  # in torch's order: the fastest dimension last
    kind: int
    start: int


class GGUFFile:
    """Metadata and tensors of a GGUF file; tensors are read and dequantized on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as opened:
            ensure(path.stat().st_size, "{path} is empty; copy or download it again.", path=path)
            self.data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        cursor = Cursor(self.data, path)
        tensors, entries = self._header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = cursor.text()
            self.metadata[name] = cursor.value()
        found = dict(self._entry(cursor) for _ in range(tensors))
        step = self.metadata.get("general.alignment", 32)
        possible = isinstance(step, int) and step >= 1
        ensure_whole(possible, path, "an alignment of {step} is impossible", step=shown(step))
        start = -(-cursor.at // step) * step
        self.tensors = {
            name: StoredTensor(t.shape, t.kind, start + t.start) for name, t in found.items()
        }
        for name in self.tensors:
            self._bytes(name)

    def _header(self, cursor: Cursor) -> tuple[int, int]:
        ensure(
            bytes(cursor.take(4)) == b"GGUF",
            "{path} is no GGUF file: it does not begin with GGUF.",
            path=self.path,
        )
        version = cursor.number("I")
        ensure(
            version in (2, 3),
            "{path} is a GGUF file of version {version}; Malmoi reads versions 2 and 3.",
            path=self.path,
            version=version,
        )
        # by the bytes of the smallest possible entry
        return cursor.count("tensors", 24), cursor.count("metadata", 13)

    def _entry(self, cursor: Cursor) -> tuple[str, StoredTensor]:
        name = cursor.text()
        sizes = cursor.number("I")
        reason = "{name} has {sizes} dimensions"
        ensure_whole(sizes <= 4, self.path, reason, name=shown(name), sizes=sizes)
        shape = tuple(int(cursor.number("Q")) for _ in range(sizes))[::-1]
        return name, StoredTensor(shape, int(cursor.number("I")), int(cursor.number("Q")))

    def _bytes(self, name: str) -> memoryview:
        """A tensor's bytes, once they are checked to be in the file."""
        stored = self.tensors[name]
        called = shown(name)
        gguf = gguf_package()
        with self._known_format(called, stored.kind):
            # how many numbers make a block, and its size in bytes
            block, size = map(int, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(stored.kind)])
        shape = list(stored.shape)
        in_blocks = shape and shape[-1] % block == 0
        reason = "{name} {shape} has no blocks of {n}"
        ensure_whole(in_blocks, self.path, reason, name=called, shape=shape, n=block)
        end = stored.start + prod(shape) // block * size
        reason = "{name} ends at byte {end} of fewer"
        ensure_whole(end <= len(self.data), self.path, reason, name=called, end=end)
        return self.data[stored.start : end]

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantised to fp32."""
        stored = self.tensors[name]
        gguf = gguf_package()
        rows = np.frombuffer(self._bytes(name), np.uint8).reshape(*stored.shape[:-1], -1)
        kind = gguf.GGMLQuantizationType(stored.kind)
        # a damaged scale may be infinite; no need for NumPy to warn
        with self._known_format(shown(name), kind.name), np.errstate(all="ignore"):
            numbers = gguf.quants.dequantize(rows, kind)
        return torch.from_numpy(np.array(numbers, np.float32)).reshape(stored.shape)

    def _known_format(self, name: str, kind: object) -> AbstractContextManager[None]:
        """Explains that a format is unknown."""
        why = msg("{name} has an unknown format ({kind})", name=name, kind=kind)
        unknown = (ValueError, KeyError, NotImplementedError)
        return explained(unknown, DAMAGED, path=self.path, reason=why)


def ensure_whole(condition: object, path: Path, reason: str, **values: object) -> None:
    """Refuses a damaged file, with the reason, unless the condition holds."""
    ensure(condition, DAMAGED, path=path, reason=msg(reason, **values))


def gguf_package() -> Any:
    """The `gguf` package, which knows the layout of every quantised type."""
    return optional_package("gguf", "A GGUF file")


# ------------------------------------------------------------------ the model

SIZES = {  # llama.cpp's metadata keys after the architecture's name → our config fields
    "context_length": "context",
    "embedding_length": "width",
    "block_count": "depth",
    "feed_forward_length": "hidden",
    "attention.head_count": "heads",
}
LLAMA_KEYS = SIZES | {
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_width",
    "attention.layer_norm_rms_epsilon": "eps",
    "rope.freq_base": "rotary_base",
}
LLAMA_NAMES = {one.ours: one.theirs.removeprefix(PLACE) for one in LLAMA_TABLE.fields}
SCALING_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
# LLaMA 3's frequency divisors, which the file has instead of the scaling rule
ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Tokenizer, dict[str, Any]]:
    """What a folder would hold: config.json, weights, tokenizer, generation_config.json."""
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    ensure(
        architecture == "llama",
        "{path} holds a model of the kind {architecture}; Malmoi reads llama from GGUF files.",
        path=path,
        architecture=shown(architecture),
    )
    config = read_gguf_config(file)
    # bytes once unpacked to fp32
    check_room(4 * sum(prod(tensor.shape) for tensor in file.tensors.values()), path)
    tokenizer = read_vocabulary(file.metadata, str(path))
    return config, read_gguf_weights(file, config), tokenizer, _generation(file.metadata)


def read_gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config.json that the metadata describes."""
    meta = {k.removeprefix("llama."): v for k, v in file.metadata.items() if k.startswith("llama.")}
    for name in SIZES:
        ensure(name in meta, "{path} does not say llama.{name}.", path=file.path, name=name)
    named = {
        LLAMA_NAMES[ours]: _number(file.path, key, meta[key])
        for key, ours in LLAMA_KEYS.items()
        if key in meta
    }
    embedding = required(
        file.tensors.get("token_embd.weight"),
        "{path} is no whole model: no token_embd.weight.",
        raises=MalmoiError,
        path=file.path,
    )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **named,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    model = LLAMA_TABLE.read_config(config, str(file.path))
    share = meta.get("rope.dimension_count", model.size_per_head) / model.size_per_head
    return config | {"rope_scaling": _scaling(file, meta, model) | {"partial_rotary_factor": share}}


def _number(path: Path, name: str, value: Any) -> Any:
    """One number for all layers; floats as meant, not as fp32 rounds them (9.9999997e-06)."""
    if isinstance(value, list):
        ensure(
            len(set(value)) == 1,
            "{path}: llama.{name} must be one for all layers.",
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
    numbers = (float(factors.max()), 1.0, 4.0, 8192)
    rule = f"llama3:{','.join(map(str, numbers))}"
    plain, _ = rotary_frequencies(config)
    scaled, _ = rotary_frequencies(config.override({"rotary_scaling": rule}))
    same = factors.shape == plain.shape and torch.allclose(plain / scaled, factors, rtol=1e-3)
    ensure(same, "{path} scales rotary positions by another rule than LLaMA 3.", path=file.path)
    return {"rope_type": "llama3", **dict(zip(SCALING_NUMBERS["llama3"], numbers, strict=True))}


def read_gguf_weights(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name, with query and key rows in its order."""
    model = LLAMA_TABLE.read_config(config, str(file.path))
    # no more layers than tensors, whatever the metadata say
    model = replace(model, depth=min(model.depth, len(file.tensors)))
    theirs = {called: name for name, called in tensor_names("llama", LLAMA_TABLE, model).items()}
    heads = {"attn_q": model.heads, "attn_k": model.key_heads}
    weights: dict[str, Tensor] = {}
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        ensure(
            name in theirs,
            "{path} holds {name}, which Malmoi's llama does not use.",
            path=file.path,
            name=shown(name),
        )
        tensor = file.tensor(name)
        count = heads.get(name.split(".")[-2], 0)
        # llama.cpp rotates (x_2i, x_2i+1), Hugging Face (x_i, x_i+E/2)
        if count and len(tensor) % (2 * count) == 0:
            tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        weights[theirs[name]] = tensor
    return weights


def tensor_names(architecture: str, table: Table, config: ModelConfig) -> dict[str, str]:
    """llama.cpp's name for each tensor of a language model, by Hugging Face's."""
    gguf = gguf_package()
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    called = gguf.get_tensor_name_map(kind, config.depth).get_name
    names = (name for rule in table.expand(config, {"lm"}) for name in rule.theirs)
    return {name: called(name, try_suffixes=(".weight", ".bias")) for name in names}


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the bos token, and end-of-text and end-of-turn tokens as eos."""
    roles = ("bos", "eos", "eot", "eom", "padding")
    named = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles}
    ends = [named[role] for role in ("eos", "eot", "eom") if named[role] is not None]
    values = {
        "bos_token_id": named["bos"],
        "pad_token_id": named["padding"],
        "eos_token_id": ends[0] if len(set(ends)) == 1 else list(dict.fromkeys(ends)) or None,
    }
    return {key: value for key, value in values.items() if value is not None}
