"""Heads: each maps hidden states to scores; losses live elsewhere.

B batch, T tokens, D width, V vocabulary, N classes, M slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.model.elementwise import ACTIVATIONS, Dropout, make_norm
from malmoi.model.transformer import Embedding, Transformer

ALIGNED_COLUMNS = 8  # a GPU's fast products write rows of a multiple of this


class VocabularyHead(nn.Module):
    """Scores over the vocabulary; `features` stops before the last matmul, for chunked losses."""

    def __init__(self, c: ModelConfig, token: nn.Embedding, *, bias: bool) -> None:
        super().__init__()
        self.cap = c.softcap
        self.weight = token.weight if c.tied else nn.Parameter(torch.empty_like(token.weight))
        self.bias = nn.Parameter(torch.zeros(c.vocab)) if bias else None

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def scores(self, features: Tensor) -> Tensor:
        if features.is_cuda and self.bias is None and self.weight.size(0) % ALIGNED_COLUMNS:
            # written by columns: 5x faster than F.linear for unaligned rows of 50,257
            product = self.weight @ features.flatten(0, -2).t()
            logits = cast(Tensor, product.t().unflatten(0, features.shape[:-1]))
        else:
            logits = F.linear(features, self.weight, self.bias)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scores(self.features(hidden))


class LMHead(VocabularyHead):
    """GPT-1 eq. 2: softmax(h Wₑᵀ), tied to the token embedding."""

    def __init__(self, c: ModelConfig, token: nn.Embedding) -> None:
        super().__init__(c, token, bias=c.lm_bias)
        both = c.mixer == "bilstm"  # two halves of the embedding's width, no projection
        same = both or c.token_width == c.width
        self.project = nn.Identity() if same else nn.Linear(c.width, c.token_width, bias=False)
        self.forward_width = c.token_width if both else None

    def features(self, hidden: Tensor) -> Tensor:
        """Of the next token; a two-way LSTM predicts it from its forward half."""
        return cast(Tensor, self.project(hidden[..., : self.forward_width]))

    def backward_features(self, hidden: Tensor) -> Tensor:
        """Of the previous token, from the backward half of a two-way LSTM."""
        return hidden[..., self.forward_width :]


class MLMHead(VocabularyHead):
    """BERT's MLM head: dense, activation and norm before the tied projection, plus a bias."""

    def __init__(self, c: ModelConfig, token: nn.Embedding) -> None:
        super().__init__(c, token, bias=True)
        self.activate = ACTIVATIONS[c.mlm_activation or c.activation]
        self.dense = nn.Linear(c.width, c.token_width, bias=not c.head_transform)
        self.norm = make_norm(c, c.token_width)

    def features(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.norm(self.activate(self.dense(hidden))))


class Pooler(nn.Module):
    """One vector per sequence: its first token ([CLS]), its last (GPT-1's ⟨e⟩) or the mean."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.pool = c.pool
        bias = not c.head_transform
        self.dense = nn.Linear(c.width, c.width, bias=bias) if c.pooler != "none" else nn.Identity()
        self.activate: Callable[[Tensor], Tensor] = ACTIVATIONS.get(c.pooler, nn.Identity())
        self.norm = make_norm(c) if c.head_transform else nn.Identity()

    def forward(
        self, hidden: Tensor, keep: Tensor | None = None, firsts: Tensor | None = None
    ) -> Tensor:
        return cast(Tensor, self.norm(self.activate(self.dense(self.pick(hidden, keep, firsts)))))

    def pick(self, hidden: Tensor, keep: Tensor | None, firsts: Tensor | None) -> Tensor:
        if firsts is None:
            return pool_tokens(self.pool, hidden, keep)
        require_that(self.pool != "mean", "Mean pooling needs data.packed=false.")
        return hidden.flatten(0, 1)[firsts]  # packed rows: flat indices of the tokens to pool


def pool_tokens(pool: str, hidden: Tensor, keep: Tensor | None) -> Tensor:
    """Each row's first or last token, or the mean of its tokens: [B, T, D] → [B, D]."""
    if pool == "mean":
        return token_mean(hidden, keep)
    first = pool == "first"
    if keep is None:
        return hidden[:, 0 if first else -1]
    at = keep.int().argmax(1) if first else keep.size(1) - 1 - keep.flip(1).int().argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), at]


def token_mean(hidden: Tensor, keep: Tensor | None) -> Tensor:
    """The mean of each row's tokens, without padding: [B, T, D] → [B, D]."""
    if keep is None:
        return hidden.mean(1)
    marks = keep[..., None].to(hidden.dtype)
    return (hidden * marks).sum(1) / marks.sum(1)


class LinearHead(nn.Module):
    """A linear map to N scores, per token or from the pooled vector."""

    def __init__(self, c: ModelConfig, classes: int, *, bias: bool = True, width: int = 0) -> None:
        super().__init__()
        self.drop = Dropout(c.dropout)
        self.linear = nn.Linear(width or c.width, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear(self.drop(x)))


class TokenHead(LinearHead):
    """ModernBERT's token classifier: dense, activation and norm before the scores."""

    def __init__(self, c: ModelConfig, classes: int) -> None:
        super().__init__(c, classes)
        self.dense = nn.Linear(c.width, c.width, bias=False)
        self.activate = ACTIVATIONS[c.pooler]
        self.norm = make_norm(c)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.activate(self.dense(x))))


def _token_head(c: ModelConfig, classes: int) -> nn.Module:
    return TokenHead(c, classes) if c.head_transform else LinearHead(c, classes)


class DetectHead(nn.Module):
    """ELECTRA's discriminator: one score per token, positive if replaced (Clark et al. 2020 §2)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[c.activation]
        self.dense = nn.Linear(c.width, c.width)
        self.linear = nn.Linear(c.width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.linear(self.activate(self.dense(hidden))).squeeze(-1))


class Generator(nn.Module):
    """ELECTRA's generator (Clark et al. 2020 §3.2), which shares the discriminator's embeddings."""

    def __init__(self, c: ModelConfig, embed: Embedding) -> None:
        super().__init__()
        self.config = replace(
            c,
            width=round(c.width * c.generator_share),
            heads=max(1, round(c.heads * c.generator_share)),
            hidden=round(c.mlp_width * c.generator_share),
            embed_width=c.token_width,
            depth=c.generator_depth or c.depth,
        )
        self.trunk = Transformer(self.config)
        for name in ("token", "position", "segment", "norm"):
            setattr(self.trunk.embed, name, getattr(embed, name))
        self.head = MLMHead(self.config, embed.token)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.head(hidden))


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Everything that depends on the kind of head, except tensor names in other libraries."""

    build: Callable[[ModelConfig, nn.Embedding, int], nn.Module]  # the last is the classes
    pooled: bool = False  # it scores a text's pooled vector, not each token
    labelled: bool = False  # one class per label; a small model on frozen layers can have it
    vocabulary: bool = False  # it scores the tokens of the vocabulary
    choices: bool = False  # a row is several texts, one score each
    outputs: tuple[str, ...] = ("logits",)  # as transformers names them
    peft_task: str = ""  # PEFT's task type
    hub_task: str = ""  # as the hub calls it
    usage: str = ""  # how a model card shows it


# Where a model has several, the first is exported, shown and explained: fine-tuned heads come
# before pre-trained ones.
HEADS = {
    "classify": HeadSpec(
        build=lambda c, token, n: LinearHead(c, n, bias=c.pool != "last"),  # GPT-1 eq. 3 has none
        pooled=True,
        labelled=True,
        peft_task="SEQ_CLS",
        hub_task="text-classification",
        usage='predict("a text")',
    ),
    "tag": HeadSpec(
        build=lambda c, token, n: _token_head(c, n),
        labelled=True,
        peft_task="TOKEN_CLS",
        hub_task="token-classification",
        usage='predict("Alice went to Seoul.")',
    ),
    "span": HeadSpec(
        build=lambda c, token, n: _token_head(c, 2),
        outputs=("start_logits", "end_logits"),
        peft_task="QUESTION_ANS",
        hub_task="question-answering",
        usage='predict(("Where did she go?", "Alice went to Seoul."))',
    ),
    "choice": HeadSpec(
        build=lambda c, token, n: LinearHead(c, 1),
        pooled=True,
        choices=True,
        hub_task="multiple-choice",
        usage='predict(("It rained, so", ("the street was wet.", "the sun shone.")))',
    ),
    "lm": HeadSpec(
        build=lambda c, token, n: LMHead(c, token),
        vocabulary=True,
        peft_task="CAUSAL_LM",
        hub_task="text-generation",
        usage='generate("The state of")',
    ),
    "mlm": HeadSpec(
        build=lambda c, token, n: MLMHead(c, token),
        vocabulary=True,
        hub_task="fill-mask",
        usage='fill("The {mask} of the union")',
    ),
    # unlike a classifier's, without dropout on the pooled vector
    "nsp": HeadSpec(build=lambda c, token, n: LinearHead(replace(c, dropout=0.0), 2), pooled=True),
    "detect": HeadSpec(build=lambda c, token, n: DetectHead(c)),
}
POOLED_HEADS = frozenset(name for name, head in HEADS.items() if head.pooled)
LABEL_HEADS = frozenset(name for name, head in HEADS.items() if head.labelled)
VOCABULARY_HEADS = frozenset(name for name, head in HEADS.items() if head.vocabulary)
