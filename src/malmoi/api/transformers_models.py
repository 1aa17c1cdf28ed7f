"""Malmoi's own model type as classes of transformers, for folders that it has no class for.

`import malmoi` registers them with AutoConfig, AutoModel and its kin (see `transformers_hook`), so
that `AutoModel.from_pretrained(folder)` opens every folder. The network is ours: scores are those
of `malmoi.load`. Generation reads the whole text for every token: for speed use `malmoi.load`.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput

from malmoi.api.transformers_config import MalmoiConfig
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.errors import require_that
from malmoi.messages import msg
from malmoi.model import Activations, FeatureConfig, Network, initialise
from malmoi.system.machine import pick_device

# arguments of from_pretrained that concern downloads or transformers' own loading
HARMLESS = {
    "_from_auto", "adapter_kwargs", "attn_implementation", "cache_dir", "force_download",
    "local_files_only", "low_cpu_mem_usage", "proxies", "revision", "subfolder", "token",
    "trust_remote_code", "use_safetensors", "weights_only",
}  # fmt: skip


class MalmoiPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # it has no types
    """Base class: holds the network, and loads and saves folders with Malmoi."""

    config_class = MalmoiConfig
    base_model_prefix = "network"
    needs_head = ""  # of the network; none: the bare hidden states

    def __init__(self, config: MalmoiConfig, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(config)
        self.checkpoint = checkpoint or Checkpoint(_new_network(config))
        self.network = self.checkpoint.network
        require_that(
            not self.needs_head or self.needs_head in self._reader.heads,
            "{type} needs a {needs_head} head, and this folder has: {have}.",
            type=type(self).__name__,
            needs_head=self.needs_head,
            have=", ".join(self.network.heads) or msg("none"),
        )

    @property
    def _reader(self) -> Network:
        return self.network

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *_: object, **options: Any
    ) -> Any:
        """Opens a folder; `config`, `dtype` and `device_map` are honoured."""
        config = options.pop("config", None)
        dtype = options.pop("dtype", options.pop("torch_dtype", None))
        device = options.pop("device_map", None) or "cpu"
        loading_info = options.pop("output_loading_info", False)
        unknown = [name for name, value in options.items() if name not in HARMLESS and value]
        require_that(
            not unknown and not isinstance(device, dict),
            "A folder of Malmoi's own model type is opened without {unknown}: leave it out.",
            unknown=unknown or "a device_map",
        )
        device = pick_device() if device == "auto" else device
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        checkpoint = read_checkpoint(
            pretrained_model_name_or_path, dtype=None if dtype == "auto" else dtype, device=device
        )
        if not isinstance(config, MalmoiConfig):
            config = MalmoiConfig.from_pretrained(checkpoint.source)
        model = cls(config, checkpoint).eval()
        if model.can_generate():
            model.generation_config = GenerationConfig(**checkpoint.generation, use_cache=False)
        return (model, {"missing_keys": [], "unexpected_keys": []}) if loading_info else model

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Writes the folder as `malmoi.Model.save` does; ours and transformers open it."""
        write_checkpoint(replace(self.checkpoint, network=self.network), save_directory)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.network.trunk.embed.token

    def _inputs(
        self, input_ids: Tensor, mask: Tensor | None, segments: Tensor | None
    ) -> dict[str, Any]:
        """Converts the output of a transformers tokenizer to the network's inputs."""
        padded = mask is not None and not bool(mask.all())
        keep = mask.bool() if mask is not None and padded else None
        segments = segments if self.network.config.segments else None
        return {"tokens": input_ids, "keep": keep, "segments": segments}


def _new_network(config: MalmoiConfig) -> Network:
    features = getattr(config, "features", None)
    return initialise(
        Network(
            config.ours,
            dict(config.heads),
            pooler=config.pooler,
            features=FeatureConfig.from_dict(features) if features else None,
        )
    )


class MalmoiModel(MalmoiPreTrainedModel):
    """Hidden states."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        inputs = self._inputs(input_ids, attention_mask, token_type_ids)
        seen = Activations(attention=[] if output_attentions else None)
        hidden = self.network.trunk(**inputs, activations=seen)
        pooler = self.network.pooler
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=None if pooler is None else pooler(hidden, inputs["keep"], None),
            hidden_states=tuple(seen.hidden) if output_hidden_states else None,
            attentions=tuple(seen.attention) if seen.attention is not None else None,
        )


class _LabelledModel(MalmoiPreTrainedModel):
    """Base class for heads with one label per row of scores."""

    output: type[ModelOutput]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> ModelOutput:
        inputs = self._inputs(input_ids, attention_mask, token_type_ids)
        scores: Tensor = self._reader(**inputs, heads=(self.needs_head,))[self.needs_head]
        loss = None if labels is None else self._loss(scores, labels)
        return self.output(loss=loss, logits=scores)

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())


class MalmoiForCausalLM(_LabelledModel, GenerationMixin):  # type: ignore[misc]
    """Next tokens."""

    needs_head = "lm"
    output = CausalLMOutput

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super()._loss(scores[:, :-1], labels[:, 1:])

    def generate(self, inputs: Tensor | None = None, *given: Any, **options: Any) -> Any:
        """Generates as transformers does; warns of prompts that the tokenizer has ended."""
        prompts = options.get("input_ids", inputs)
        end = self.generation_config.eos_token_id
        if self.network.config.both_ways and prompts is not None and (prompts[:, -1] == end).any():
            warnings.warn(
                "A prompt ends with the end-of-text token, so the model starts another text: "
                "tokenize prompts with add_special_tokens=False.",
                stacklevel=2,
            )
        return super().generate(inputs, *given, **options)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Passes the whole text at every step: transformers' caches do not support our patterns."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}


class MalmoiForMaskedLM(_LabelledModel):
    """Masked tokens."""

    needs_head = "mlm"
    output = MaskedLMOutput

    @property
    def _reader(self) -> Network:
        return self.network.masked() if self.network.config.both_ways else self.network


class MalmoiForSequenceClassification(_LabelledModel):
    """One label a text."""

    needs_head = "classify"
    output = SequenceClassifierOutput


class MalmoiForTokenClassification(_LabelledModel):
    """One label a token."""

    needs_head = "tag"
    output = TokenClassifierOutput


AUTO_CLASSES = {
    "AutoModel": MalmoiModel,
    "AutoModelForCausalLM": MalmoiForCausalLM,
    "AutoModelForMaskedLM": MalmoiForMaskedLM,
    "AutoModelForSequenceClassification": MalmoiForSequenceClassification,
    "AutoModelForTokenClassification": MalmoiForTokenClassification,
}
