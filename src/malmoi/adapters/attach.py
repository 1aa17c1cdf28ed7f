"""Attaches a new adapter to a network, or folds a trained one into it."""

import torch

from malmoi.adapters.config import AdapterConfig
from malmoi.adapters.lora import add_lora, merge_lora
from malmoi.adapters.soft_prompt import add_prefix, add_prompt, freeze_prompt
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer


def attach_adapter(
    network: Network, adapter: AdapterConfig, tokenizer: Tokenizer, seed: int = 0
) -> None:
    """Adds the trainable parameters that `adapter` describes; the network's own stay unchanged."""
    if adapter.kind == "none":
        return
    network.require_attention("An adapter")
    if adapter.kind == "lora":
        add_lora(network, adapter, torch.Generator().manual_seed(seed))
    else:
        add = add_prompt if adapter.kind == "prompt" else add_prefix
        add(network, adapter, tokenizer, seed)


def fold_adapter(network: Network) -> None:
    """Prepares for inference: merges LoRA, and turns a GPT's prompt into keys and values."""
    merge_lora(network)
    freeze_prompt(network)
