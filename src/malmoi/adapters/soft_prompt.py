"""Soft tokens: trained vectors before every text (prompt) or keys and values per layer (prefix)."""

import random
from dataclasses import replace

import torch
from torch import Tensor, nn

from malmoi.adapters.config import AdapterConfig
from malmoi.errors import UsageError
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer

# a vocabulary starts with its commonest words; initial tokens are drawn from these (Lester 2021
# §3.2)
COMMON_WORD_COUNT = 5000


def add_prompt(network: Network, adapter: AdapterConfig, tokenizer: Tokenizer, seed: int) -> None:
    """Adds n vectors before the embedded text, initialised from words (Lester et al. 2021 §2)."""
    words = first_words(adapter, tokenizer, seed).to(network.device)
    set_prefix(network, soft_prompt=network.trunk.embed.token(words).detach().clone())


def add_prefix(network: Network, adapter: AdapterConfig, tokenizer: Tokenizer, seed: int) -> None:
    """Adds keys and values of n positions to every layer, initialised from words.

    See Li & Liang 2021 §4.2 and §7.4.
    """
    words = first_words(adapter, tokenizer, seed).to(network.device)
    check_soft_tokens(network, len(words))
    learning = network.training
    with torch.no_grad():
        prefix_kv = network.eval().trunk.prompt_kv(network.trunk.embed.token(words))
    network.train(learning)
    set_prefix(network, prefix_kv=prefix_kv)


def first_words(adapter: AdapterConfig, tokenizer: Tokenizer, seed: int) -> Tensor:
    """n token ids: those of `adapter.init`, repeated or cut, or common ones drawn by the seed."""
    n = adapter.tokens
    if not adapter.init.strip():
        common = range(min(COMMON_WORD_COUNT, tokenizer.vocab_size))
        return torch.tensor(random.Random(seed).choices(common, k=n))
    tokens = tokenizer.encode(adapter.init, specials=False).tokens
    if not tokens:
        raise UsageError(
            "adapter.init={init!r} leaves no token of this model's vocabulary.", init=adapter.init
        )
    return torch.tensor((tokens * (n // len(tokens) + 1))[:n])


def set_prefix(
    network: Network, *, soft_prompt: Tensor | None = None, prefix_kv: Tensor | None = None
) -> None:
    """Sets the trained prefix; the context then holds that many fewer tokens of text."""
    n = len(soft_prompt) if soft_prompt is not None else 0
    n = prefix_kv.size(3) if prefix_kv is not None else n
    check_soft_tokens(network, n)
    network.trunk.soft_prompt = None if soft_prompt is None else nn.Parameter(soft_prompt)
    network.trunk.prefix_kv = None if prefix_kv is None else nn.Parameter(prefix_kv)
    shorter = replace(network.config, context=network.config.context - n)
    network.config = network.trunk.config = shorter


def check_soft_tokens(network: Network, n: int) -> None:
    context = network.config.context
    if n >= context:
        raise UsageError(
            "{n} soft tokens leave no room for text in this model's context of {context}; use "
            "fewer.",
            n=n,
            context=context,
        )


@torch.no_grad()
def freeze_prompt(network: Network) -> None:
    """Replaces a causal network's trained prompt by its keys and values, which no longer change."""
    trunk = network.trunk
    if trunk.soft_prompt is not None and trunk.is_causal:
        trunk.prefix_kv = nn.Parameter(trunk.prompt_kv(trunk.soft_prompt))
        trunk.soft_prompt = None
