"""What every ability of a model builds on: its parts, its abilities, and how it encodes a text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from malmoi.checkpoint import Checkpoint, read_checkpoint
from malmoi.checkpoint.weights import check_room
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, require_that, required
from malmoi.inference.prompt import encode_prompt, require_fit
from malmoi.messages import msg
from malmoi.model import count_parameters
from malmoi.system.machine import hush_emulation, named_dtype, pick_device, this_machine
from malmoi.system.paths import is_adapter
from malmoi.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from malmoi.inference.predict import Predictor
    from malmoi.inference.predictors import TaskHead
    from malmoi.tracing.index import TextIndex

# available without fine-tuning: see zero_shot.py
ZERO_SHOT_ABILITIES = ("classify", "answer", "summarise", "translate")
LANGUAGE_ABILITIES = ("generate", "stream", "chat", "score", "perplexity", "bits_per_byte")
ABILITIES = {
    "lm": (*LANGUAGE_ABILITIES, "logits", *ZERO_SHOT_ABILITIES),
    "mlm": ("fill", "logits", "classify"),
    **dict.fromkeys(("classify", "tag", "span", "choice"), ("predict",)),
}


class LoadedModel:
    """A network with its tokenizer and labels."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.network = checkpoint.network.eval()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.required_tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def labels(self) -> tuple[str, ...]:
        return self.checkpoint.labels

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of loading: weights that were missing or unused, a changed dtype."""
        return self.checkpoint.notes

    @property
    def abilities(self) -> tuple[str, ...]:
        """The methods that this model's heads allow."""
        if self.config.encoder_depth:
            return ("translate", "cross_attention")
        if self.config.feature_count:
            return ("describe",)
        heads = [*self.network.heads]
        heads += [] if self.masked is self else self.masked.network.heads
        verbs = dict.fromkeys(verb for head in heads for verb in ABILITIES.get(head, ()))
        if self.config.mixer == "bilstm":  # its language model reads both ways: scores only
            verbs = dict.fromkeys(v for v in verbs if v in ("score", "perplexity", "bits_per_byte"))
        verbs |= {"predict": None} if self.task_head else {}
        from malmoi.inference.predictors import entailment_class

        described = self.checkpoint.sentence or entailment_class(self.checkpoint) is not None
        verbs |= {"classify": None} if described else {}
        return (*verbs, "embed")

    @cached_property
    def task_head(self) -> "TaskHead | None":
        """The head the model was fine-tuned with; None if it was not fine-tuned."""
        from malmoi.inference.predictors import task_heads

        found = task_heads(self.predictor) if self.checkpoint.tokenizer else []
        return found[0] if found else None

    @cached_property
    def predictor(self) -> "Predictor":
        """The network as it was fine-tuned to read its inputs."""
        from malmoi.inference.predict import Predictor

        return Predictor.of(self.checkpoint)

    @cached_property
    def masked(self) -> Self:
        """The bidirectional form of a model trained both ways; any other model itself."""
        both = self.config.both_ways and self._causal
        return type(self)(replace(self.checkpoint, network=self.network.masked())) if both else self

    def _require_text_input(self, verb: str) -> None:
        c = self.config
        require_that(
            not c.encoder_depth,
            "This model cannot {verb}: it translates. Use translate.",
            verb=verb,
        )
        require_that(
            not c.feature_count,
            "This model cannot {verb}: it generates text from features. Use describe.",
            verb=verb,
        )

    def _require_head(self, head: str, verb: str) -> None:
        self._require_text_input(verb)
        if head not in self.network.heads:
            raise UsageError(
                "This model cannot {verb}: it has no {head} head, only {heads}. It can: {can}.",
                verb=verb,
                head=head,
                heads=", ".join(self.network.heads) or msg("none"),
                can=", ".join(verb for verb in self.abilities if verb != "stream"),
            )

    @property
    def input_columns(self) -> dict[str, str]:
        """The columns that a fine-tuned model reads of a row: text, pair, and any choices."""
        from malmoi.inference.predictors import CHOICE

        names = ("text", "pair", "choices") if self.task_head is CHOICE else ("text", "pair")
        known = self.predictor.columns
        return {name: known[name] for name in names if name in known}

    @property
    def _ends(self) -> frozenset[int]:
        """Tokens that end a text: generation_config.json's, else the tokenizer's."""
        return frozenset(self.checkpoint.end_tokens)

    @cached_property
    def _own_text(self) -> "TextIndex":
        """The index of the text that the model was trained on, in its run's folder."""
        from malmoi.tracing.index import TextIndex

        sentence = "This model has not been saved yet: call model.save(folder) first."
        return TextIndex.open(required(self.checkpoint.source, sentence), self.tokenizer)

    @cached_property
    def _causal(self) -> bool:
        return self.network.trunk.is_causal

    def _encoded(self, text: str, *, truncate: bool) -> Encoding:
        """Encodes a text for this model; one that is too long is an error unless `truncate`."""
        read = encode_prompt if self._causal else Tokenizer.encode
        encoding = read(self.tokenizer, text, max_tokens=self._longest if truncate else None)
        return require_fit(encoding, self.config.context)

    @property
    def _longest(self) -> int:
        """Tokens at which a text is truncated: a sentence encoder's folder sets its own limit."""
        sentence = self.checkpoint.sentence
        limit = 0 if sentence is None else sentence.max_tokens
        return min(self.config.context, limit or self.config.context)


def listed_texts(texts: str | Sequence[str], name: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    for text in listed:
        known = isinstance(text, str)
        require_that(
            known,
            "{name} must be a text or a list of texts, not {text!r:.60}.",
            name=name,
            text=text,
        )
    return listed


# ------------------------------------------------------------------ precision

INT8 = "int8"
PLACES = {"cpu": "processor", "cuda": "GPU", "mps": "Apple GPU"}


def open_for_use(
    path: str | Path, device: str | torch.device | None, dtype: str | torch.dtype | None
) -> Checkpoint:
    """Opens a folder, adapter or GGUF file as a network ready for use."""
    named = named_dtype(dtype) if isinstance(dtype, str) and dtype != INT8 else None
    named = dtype if isinstance(dtype, torch.dtype) else named
    where = pick_device(device or ("cpu" if dtype == INT8 else None))
    checkpoint = _read(path, packed=named is None and where.type == "cpu")
    if dtype == INT8:
        return _in_int8(checkpoint, where)
    if named is not None:
        checkpoint.network.to(where, named)
        if this_machine().inference_dtype(where.type, named) == named:
            return checkpoint
        hush_emulation()
        return _noted(
            checkpoint,
            "{name} is emulated on this {msg} and is many times slower than fp32; omit --dtype",
            name=_name(named),
            msg=msg(PLACES[where.type]),
        )
    return (_open_quantized if checkpoint.bits else _as_stored)(checkpoint, where)


def _read(path: str | Path, *, packed: bool) -> Checkpoint:
    if not is_adapter(path):
        return read_checkpoint(path, packed=packed)
    from malmoi.adapters.store import read_with_adapter

    return read_with_adapter(path, packed=packed)


def _in_int8(checkpoint: Checkpoint, where: torch.device) -> Checkpoint:
    from malmoi.kernels.decode_step import encode_texts
    from malmoi.kernels.int8 import quantize_int8

    quantize_int8(checkpoint.network.to(where, torch.float32)).trunk.fused_blocks = encode_texts
    return checkpoint


def _as_stored(checkpoint: Checkpoint, where: torch.device) -> Checkpoint:
    """Moves the network to a device in its stored dtype, unless this machine would emulate it."""
    stored = checkpoint.network.dtype
    computed = this_machine().inference_dtype(where.type, stored)
    if computed == stored:
        checkpoint.network.to(where)
        return checkpoint
    if where.type == "cpu":
        needed = count_parameters(checkpoint.network) * computed.itemsize
        check_room(needed, checkpoint.source or Path())
    # converted tensor by tensor, so that memory never holds a second network
    checkpoint.network.to(where, computed)
    note = "stored in {name}, computed in {name2}: this {msg} has no units for {name}"
    values = {"name": _name(stored), "name2": _name(computed), "msg": msg(PLACES[where.type])}
    return replace(_noted(checkpoint, note, **values), dtype=stored)


def _open_quantized(checkpoint: Checkpoint, where: torch.device) -> Checkpoint:
    """Keeps the weights quantized if there is a kernel, else dequantizes them with a note."""
    from malmoi.kernels.int8 import is_quantized, why_not

    bits = checkpoint.bits
    if is_quantized(checkpoint.network):
        return _in_int8(checkpoint, where)
    computed = this_machine().inference_dtype(where.type, named_dtype("bf16"))
    computed = computed if where.type == "cuda" else torch.float32
    checkpoint.network.to(where, computed)
    elsewhere = msg("our kernel for {bits} bits runs on CPUs only", bits=bits)
    reason = why_not() if where.type == "cpu" else elsewhere
    return _noted(
        checkpoint,
        "the weights of {bits} bits are computed in {name} and take its memory: {reason}",
        bits=bits,
        name=_name(computed),
        reason=reason,
    )


def _noted(checkpoint: Checkpoint, note: str, **values: object) -> Checkpoint:
    return replace(checkpoint, notes=(*checkpoint.notes, msg(note, **values)))


def _name(dtype: torch.dtype) -> str:
    return {named_dtype(n): n for n in ("fp32", "bf16", "fp16")}.get(dtype, str(dtype))
