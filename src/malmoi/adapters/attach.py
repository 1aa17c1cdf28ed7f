"""Adapters on a frozen network: LoRA (Hu et al. 2021), soft prompts and prefixes.

LoRA adds to a frozen weight a product of two thin matrices; soft tokens are vectors before every
text (prompt) or keys and values per layer (prefix). r rank, `in` and `out` sides of a weight.
"""

import random
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.adapters.config import AdapterConfig
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, require_known, require_that
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer

# a vocabulary starts with its commonest words; initial tokens are drawn from these (Lester 2021
# §3.2)
COMMON_WORD_COUNT = 5000


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
        add_soft_tokens(network, adapter, first_words(adapter, tokenizer, seed))


@torch.no_grad()
def fold_adapter(network: Network) -> None:
    """Prepares for inference: merges LoRA, and turns a GPT's prompt into keys and values."""
    for path, module in list(network.named_modules()):
        if isinstance(module, LoRALinear):
            network.set_submodule(path, module.merged())
    trunk = network.trunk
    if trunk.soft_prompt is not None and trunk.is_causal:
        trunk.prefix_kv = nn.Parameter(trunk.prompt_kv(trunk.soft_prompt))
        trunk.soft_prompt = None


# ------------------------------------------------------------------ LoRA


def block_parts(c: ModelConfig) -> dict[str, tuple[str, int, int]]:
    """A block's linear maps by name, each with the start and stop of its rows.

    Query, key and value share one weight, as do gate and up.
    """
    q = c.heads * c.size_per_head
    k = c.key_heads * c.size_per_head
    m = c.mlp_width
    named = {
        "qkv": ("attend.qkv", 0, q + 2 * k),
        "query": ("attend.qkv", 0, q),
        "key": ("attend.qkv", q, q + k),
        "value": ("attend.qkv", q + k, q + 2 * k),
        "out": ("attend.out", 0, c.width),
        "up": ("mlp.up", m, 2 * m) if c.gated else ("mlp.up", 0, m),
        "down": ("mlp.down", 0, c.width),
    }
    return named | ({"gate": ("mlp.up", 0, m)} if c.gated else {})


class LoRAPatch(nn.Module):
    """ΔW x = (α / r) · B A x on some rows of a linear map (Hu et al. 2021 eq. 3)."""

    def __init__(
        self, rows: tuple[int, int], a: Tensor, b: Tensor, scale: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        (self.start, self.stop), self.scale = rows, scale
        # [r, in], [out, r]
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(self.drop(x), self.a), self.b)

    def change(self) -> Tensor:
        """ΔW itself [out, in]."""
        return self.scale * (self.b.float() @ self.a.float())


class LoRALinear(nn.Linear):
    """A linear map with the same weight under the same name, plus LoRA patches."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.patches = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for patch in self.patches:
            y[..., patch.start : patch.stop] += patch(x)
        return y

    def joined(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """The patches on some rows as one (A, B): the A's stacked, the B's side by side."""
        patches = (p for p in self.patches if isinstance(p, LoRAPatch))
        met = [p for p in patches if p.start < stop and start < p.stop]
        if not met:
            return None
        b = []
        for p in met:
            low = max(start, p.start)
            high = min(stop, p.stop)
            b.append(F.pad(p.b[low - p.start : high - p.start], (0, 0, low - start, stop - high)))
        return torch.cat([p.a for p in met]), torch.cat(b, 1)

    def merged(self) -> nn.Linear:
        """A plain linear map with W + ΔW, so that inference costs no more (Hu et al. 2021 §4.1)."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = self.weight.detach().clone()
        for patch in self.patches:
            rows = weight[patch.start : patch.stop]
            rows.copy_(rows.float() + patch.change())  # type: ignore[operator]
        plain.weight = nn.Parameter(weight)
        plain.bias = self.bias
        return plain


def add_lora(network: Network, adapter: AdapterConfig, generator: torch.Generator) -> None:
    """Patches the named maps of every block; B starts at zero, so that nothing changes at first."""
    known = block_parts(network.config)
    for name in adapter.targets:
        require_known(name, known, "There is no linear layer {name!r} for adapter.targets.{hint}")
    for i in range(len(network.trunk.blocks)):
        for name in adapter.targets:
            path, start, stop = known[name]
            map_ = patched(network, f"trunk.blocks.{i}.{path}")
            a = torch.randn(adapter.rank, map_.in_features, generator=generator)
            a *= map_.in_features**-0.5
            b = torch.zeros(stop - start, adapter.rank)
            scale = adapter.alpha / adapter.rank
            map_.patches.append(LoRAPatch((start, stop), a, b, scale, adapter.dropout))


def patched(network: Network, path: str) -> LoRALinear:
    """The linear map at `path`, replaced by a `LoRALinear` if it is not one yet."""
    found = network.get_submodule(path)
    if not isinstance(found, nn.Linear):
        raise UsageError("{path} is not a linear layer, so LoRA cannot change it.", path=path)
    if isinstance(found, LoRALinear):
        return found
    added = LoRALinear(found)
    network.set_submodule(path, added)
    return added


# ------------------------------------------------------------------ soft tokens


@torch.no_grad()
def add_soft_tokens(network: Network, adapter: AdapterConfig, words: Tensor) -> None:
    """Adds n vectors before the embedded text (Lester et al. 2021 §2), or with `prefix` keys and
    values of n positions to every layer (Li & Liang 2021 §4.2, §7.4), initialised from words.
    """
    check_soft_tokens(network, len(words))
    vectors = network.trunk.embed.token(words.to(network.device)).clone()
    if adapter.kind == "prompt":
        set_prefix(network, soft_prompt=vectors)
        return
    learning = network.training
    prefix_kv = network.eval().trunk.prompt_kv(vectors)
    network.train(learning)
    set_prefix(network, prefix_kv=prefix_kv)


def first_words(adapter: AdapterConfig, tokenizer: Tokenizer, seed: int) -> Tensor:
    """n token ids: those of `adapter.init`, repeated or cut, or common ones drawn by the seed."""
    n = adapter.tokens
    if not adapter.init.strip():
        common = range(min(COMMON_WORD_COUNT, tokenizer.vocab_size))
        return torch.tensor(random.Random(seed).choices(common, k=n))
    tokens = tokenizer.encode(adapter.init, specials=False).tokens
    require_that(
        tokens,
        "adapter.init={init!r} leaves no token of this model's vocabulary.",
        init=adapter.init,
    )
    return torch.tensor((tokens * (n // len(tokens) + 1))[:n])


def set_prefix(
    network: Network, *, soft_prompt: Tensor | None = None, prefix_kv: Tensor | None = None
) -> None:
    """Sets the trained prefix; the context then holds that many fewer tokens of text."""
    n = prefix_kv.size(3) if prefix_kv is not None else len(soft_prompt)  # type: ignore[arg-type]
    check_soft_tokens(network, n)
    network.trunk.soft_prompt = None if soft_prompt is None else nn.Parameter(soft_prompt)
    network.trunk.prefix_kv = None if prefix_kv is None else nn.Parameter(prefix_kv)
    shorter = replace(network.config, context=network.config.context - n)
    network.config = network.trunk.config = shorter


def check_soft_tokens(network: Network, n: int) -> None:
    context = network.config.context
    require_that(
        n < context,
        "{n} soft tokens leave no room for text in this model's context of {context}; use fewer.",
        n=n,
        context=context,
    )
