"""What is read off the hidden states: a head maps them to scores and knows nothing of losses.

A `Network` is a trunk, a pooler and named heads. B batch, T tokens, D width, V vocabulary, N classes, M slots.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import UsageError, nearest
from malmoi.model.features import FeatureConfig, LayeredTransformer, MeanPooler, Reader
from malmoi.model.transformer import ACTIVATIONS, Transformer, make_norm

ALIGNED = 8  # a GPU's fast products write rows of a multiple of this


class VocabularyHead(nn.Module):
    """Scores over the vocabulary. `features` is all but the last product, so that a loss may take it in pieces."""

    def __init__(self, c: ModelConfig, token: nn.Embedding, bias: bool) -> None:
        super().__init__()
        self.cap = c.softcap
        self.weight = token.weight if c.tied else nn.Parameter(torch.empty_like(token.weight))
        self.bias = nn.Parameter(torch.zeros(c.vocab)) if bias else None

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def scores(self, features: Tensor) -> Tensor:
        if features.is_cuda and self.bias is None and self.weight.size(0) % ALIGNED:
            logits = turned_product(features, self.weight)
        else:
            logits = F.linear(features, self.weight, self.bias)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scores(self.features(hidden))


def turned_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, D] or [B, T, D] · weightᵀ, written column by column: for rows of 50,257 the kernel is five times slower."""
    return (weight @ x.flatten(0, -2).t()).t().unflatten(0, x.shape[:-1])


class LMHead(VocabularyHead):
    """GPT-1 eq. 2: softmax(h Wₑᵀ), tied to the token embedding."""

    def __init__(self, c: ModelConfig, token: nn.Embedding) -> None:
        super().__init__(c, token, bias=False)
        self.project = nn.Linear(c.width, c.token_width, bias=False) if c.token_width != c.width else nn.Identity()

    def features(self, hidden: Tensor) -> Tensor:
        return self.project(hidden)


class MLMHead(VocabularyHead):
    """BERT's: a dense layer, its activation and a norm before the tied scores, and a bias after."""

    def __init__(self, c: ModelConfig, token: nn.Embedding) -> None:
        super().__init__(c, token, bias=True)
        self.activate = ACTIVATIONS[c.mlm_activation or c.activation]
        self.dense, self.norm = nn.Linear(c.width, c.token_width), make_norm(c, c.token_width)

    def features(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activate(self.dense(hidden)))


class Pooler(nn.Module):
    """One vector for a sequence: its first token (BERT's [CLS]) or its last (GPT-1's ⟨e⟩), through a dense layer
    where the family has one."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.first = c.pool == "first"
        self.dense = nn.Linear(c.width, c.width) if c.pooler != "none" else nn.Identity()
        self.activate: Callable[[Tensor], Tensor] = ACTIVATIONS[c.pooler] if c.pooler != "none" else nn.Identity()

    def forward(self, hidden: Tensor, keep: Tensor | None = None, firsts: Tensor | None = None) -> Tensor:
        return self.activate(self.dense(self.pick(hidden, keep, firsts)))

    def pick(self, hidden: Tensor, keep: Tensor | None, firsts: Tensor | None) -> Tensor:
        if firsts is not None:  # packed rows: flat indices of the tokens that speak
            return hidden.flatten(0, 1)[firsts]
        if keep is None:
            return hidden[:, 0 if self.first else -1]
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, keep.int().argmax(1) if self.first else keep.size(1) - 1 - keep.flip(1).int().argmax(1)]


class Scores(nn.Module):
    """A linear map to N scores, of each token or of the pooled vector."""

    def __init__(self, c: ModelConfig, classes: int, bias: bool = True, width: int = 0) -> None:
        super().__init__()
        self.drop = nn.Dropout(c.dropout)
        self.linear = nn.Linear(width or c.width, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(x))


class DetectHead(nn.Module):
    """ELECTRA's discriminator: one score a token, positive where it was replaced (Clark et al. 2020 §2)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[c.activation]
        self.dense, self.linear = nn.Linear(c.width, c.width), nn.Linear(c.width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.activate(self.dense(hidden))).squeeze(-1)


HEADS: dict[str, Callable[[ModelConfig, nn.Embedding, int], nn.Module]] = {
    "lm": lambda c, token, n: LMHead(c, token),
    "mlm": lambda c, token, n: MLMHead(c, token),
    "nsp": lambda c, token, n: Scores(c, 2),
    "classify": lambda c, token, n: Scores(c, n, bias=c.pool == "first"),  # GPT-1 eq. 3 has no bias
    "choice": lambda c, token, n: Scores(c, 1),
    "tag": lambda c, token, n: Scores(c, n),
    "span": lambda c, token, n: Scores(c, 2),
    "detect": lambda c, token, n: DetectHead(c),
}
POOLED = {"nsp", "classify", "choice"}
READ = {"classify", "tag"}  # heads that a small model on frozen layers can have
VOCABULARY = {"lm", "mlm"}


class Network(nn.Module):
    """A trunk and named heads; calling it runs only the heads asked for.

    `heads` maps a name to its number of classes (0 where that is fixed); a pooler comes with the heads that need it.
    With `features` the trunk is frozen and a small model reads its layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        heads: Mapping[str, int],
        *,
        pooler: bool = False,
        features: FeatureConfig | None = None,
    ) -> None:
        super().__init__()
        self.config, self.features = config, features
        self.trunk = LayeredTransformer(config, features.layers) if features else Transformer(config)
        self.reader = Reader(config, features) if features else None
        self.pooler: nn.Module | None = MeanPooler() if features else Pooler(config) if pooler else None
        self.heads = nn.ModuleDict()
        for name, classes in heads.items():
            self.add(name, classes)

    @property
    def width(self) -> int:
        """Of what the heads read."""
        return self.config.width if self.reader is None else self.reader.width

    def add(self, name: str, classes: int = 0) -> None:
        if name not in HEADS:
            raise UsageError(f"There is no head {name!r}.{nearest(name, HEADS)}")
        if name in ("classify", "tag") and classes < 1:
            raise UsageError(f"The head {name!r} needs the number of its classes.")
        if self.reader is not None:
            self._add_to_reader(name, classes)
            return
        if name in POOLED and self.pooler is None:
            self.pooler = Pooler(self.config)
        self.heads[name] = HEADS[name](self.config, self.trunk.embed.token, classes)

    def _add_to_reader(self, name: str, classes: int) -> None:
        if name not in READ:
            raise UsageError(
                f"A small model on frozen layers has no head {name!r}; it can have {' or '.join(sorted(READ))}."
            )
        self.heads[name] = Scores(self.config, classes, width=self.width)

    def tie(self) -> None:
        """Makes vocabulary heads share the token embedding again, after its weight was replaced."""
        for head in self.heads.values() if self.config.tied else ():
            if isinstance(head, VocabularyHead):
                head.weight = self.trunk.embed.token.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        heads: tuple[str, ...] | None = None,
        slots: Tensor | None = None,
        firsts: Tensor | None = None,
        keep: Tensor | None = None,
        **inputs: object,
    ) -> dict[str, Tensor]:
        """Scores of each head asked for (all by default). `slots` [M]: vocabulary heads read only these flat places."""
        hidden = self.hidden(tokens, keep=keep, **inputs)
        return {name: self.read(name, hidden, keep, slots, firsts) for name in heads or tuple(self.heads)}

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None, **inputs: object) -> Tensor:
        """What the heads read [B, T, D]: the trunk's last layer, or what the small model makes of its frozen ones."""
        states: Tensor = self.trunk(tokens, keep=keep, **inputs)
        return states if self.reader is None else cast(Tensor, self.reader(states, keep))

    def read(
        self,
        name: str,
        hidden: Tensor,
        keep: Tensor | None = None,
        slots: Tensor | None = None,
        firsts: Tensor | None = None,
    ) -> Tensor:
        if name not in self.heads:
            have = ", ".join(self.heads) or "none"
            raise UsageError(f"This model has no head {name!r} (it has: {have}); it was trained for something else.")
        if name in POOLED:
            return cast(Tensor, self.heads[name](cast(nn.Module, self.pooler)(hidden, keep, firsts)))
        if name in VOCABULARY and slots is not None:
            hidden = hidden.flatten(0, 1)[slots]
        return cast(Tensor, self.heads[name](hidden))


def parameters(network: nn.Module) -> int:
    """Distinct weights, a tied one counted once."""
    return sum(p.numel() for p in network.parameters())


@torch.no_grad()
def initialise(network: Network, seed: int | None = None) -> Network:
    """Draws the weights by the family's rule: N(0, σ), truncated for BERT; biases 0, norms 1; what writes to the
    residual stream scaled by 1/√(2·depth) (GPT-2 §2.3) or set to zero."""
    c = network.config
    generator = None if seed is None else torch.Generator(_device(network)).manual_seed(seed)
    for module in network.modules():
        for parameter_name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                weight.fill_(float(parameter_name == "weight"))
            elif parameter_name == "bias":
                weight.zero_()
            else:
                _draw(weight, c, generator)
    for block in network.trunk.blocks:
        for writer in (block.attend.out, block.mlp.down):  # type: ignore[union-attr]
            writer.weight.mul_({"same": 1.0, "scaled": (2 * c.depth) ** -0.5, "zero": 0.0}[c.residual_init])  # type: ignore[union-attr, operator]
    if network.reader is not None:
        network.reader.reset(generator)
    return network


def _draw(weight: Tensor, c: ModelConfig, generator: torch.Generator | None) -> None:
    if c.init == "truncated":
        nn.init.trunc_normal_(weight, std=c.init_std, a=-2 * c.init_std, b=2 * c.init_std, generator=generator)
    else:
        nn.init.normal_(weight, std=c.init_std, generator=generator)


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device
