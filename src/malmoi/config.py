"""The model config, a frozen and validated record that converts to JSON and back. No torch here."""

import math
from dataclasses import dataclass, field
from typing import Literal

from malmoi.errors import require
from malmoi.settings import Config, described, require_bounds, setting
from malmoi.system.untrusted import (
    MAX_CONTEXT_TOKENS,
    MAX_LAYERS,
    MAX_PATTERN_CHARACTERS,
    MAX_POSITION_TABLE_BYTES,
    MAX_SIZE,
    format_size,
    shown,
)

LARGEST: dict[str, float] = {
    "depth": MAX_LAYERS,
    "encoder_depth": MAX_LAYERS,
    "context": MAX_CONTEXT_TOKENS,
    "rotary_base": math.inf,
    "local_rotary_base": math.inf,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The architecture of a model; every family is such a value (see model/families.py).

    Examples:
        >>> malmoi.ModelConfig(vocab=1000, width=128, heads=2).size_per_head
        64
    """

    vocab: int = field(metadata=described("Tokens in the vocabulary.", gt=0))
    context: int = setting(1024, "Longest sequence in tokens.", gt=0)
    width: int = setting(768, "Size of the hidden states.", gt=0)
    depth: int = setting(12, "Number of layers.", gt=0)
    encoder_depth: int = setting(
        0,
        "Layers of an encoder whose states every block attends to (Vaswani et al. 2017); 0: none.",
    )
    heads: int = setting(12, "Attention heads per layer.", gt=0)
    kv_heads: int = setting(0, "Key/value heads (grouped-query attention); 0: as many as heads.")
    head_width: int = setting(0, "Width of a head; 0: width / heads.")
    hidden: int = setting(
        0,
        "Width inside the MLP; 0: 4 × width, or about 8/3 × width for a gated MLP, which has 3 "
        "matrices.",
    )
    embed_width: int = setting(0, "Factorised embedding (ALBERT, ELECTRA); 0: width.")
    segments: int = setting(0, "Segments with an embedding of their own; 0: no segment embedding.")
    groups: int = setting(
        0, "Distinct blocks, shared over the depth (ALBERT: 1); 0: one per layer."
    )
    mixer: Literal["attention", "lstm", "bilstm"] = setting(
        "attention",
        "How tokens exchange information: attention, an LSTM, or an LSTM in each direction (ELMo).",
    )
    attention: tuple[str, ...] = setting(("causal",), "A pattern per layer, cycled over the depth.")
    both_ways: bool = setting(
        False,
        "A causal model that is also trained to fill masks: a masked token is then predicted one "
        "position to its left (GPT-BERT, Charpentier & Samuel 2024).",
    )
    positions: Literal[
        "learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "none"
    ] = setting(
        "learned",
        "Position scheme. sinusoidal_halves: all sines, then all cosines, as in the authors' code "
        "and Marian; relative: relative positions in every layer (Transformer-XL).",
    )
    memory: int = setting(
        0, "Tokens of earlier segments that the next segment attends to (Transformer-XL)."
    )
    position_offset: int = setting(
        0, "Rows of the table before the first token's (RoBERTa: pad id + 1)."
    )
    rotary_base: float = setting(10_000.0, "Base of the rotary angles.", gt=0)
    local_rotary_base: float = setting(
        0.0, "Base in layers with a `local` pattern; 0: rotary_base."
    )
    rotary_scaling: str = setting(
        "",
        'Stretches rotary positions to a longer context: "linear:4", "llama3:8,1,4,8192"; empty: '
        "off.",
    )
    norm: Literal["pre", "post"] = setting("pre", "pre: x + f(LN(x)); post: LN(x + f(x)).")
    norm_kind: Literal["layer", "rms"] = setting("layer", "LayerNorm or RMSNorm.")
    norm_bias: bool = setting(True, "Whether norms have a bias.")
    first_norm: bool = setting(
        True,
        "Norm before the first attention; ModernBERT, whose embedding is normalised, has none.",
    )
    feature_count: int = setting(
        0, "Precomputed vectors before the text (images, audio): their number and width; 0: none."
    )
    feature_width: int = setting(0, "Size of each of those vectors.")
    embed_scale: bool = setting(False, "Token embeddings times √width (Vaswani et al. 2017 §3.4).")
    embed_norm: bool = setting(False, "Norm after the embeddings.")
    final_norm: bool = setting(True, "Norm after the last block.")
    qk_norm: bool = setting(False, "Norms on queries and keys.")
    eps: float = setting(1e-5, "Added to the variance in norms.")
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu"] = setting(
        "gelu_tanh", "Activation of the MLP; swiglu and geglu are gated."
    )
    bias: bool = setting(True, "Whether linear layers have a bias.")
    embedding_residual: bool = setting(
        False, "Every block adds the token embeddings to its input and, projected, to its values."
    )
    skip_connections: bool = setting(
        False,
        "U-Net: each layer of the upper half adds the output of its mirror in the lower half.",
    )
    tied: bool = setting(True, "The vocabulary head reuses the token embedding.")
    lm_bias: bool = setting(False, "The next token's scores have a bias (Marian).")
    softcap: float = setting(
        0.0, "Limits the logits over the vocabulary: cap·tanh(x / cap); 0: off."
    )
    mlm_activation: Literal["", "gelu", "gelu_tanh", "relu", "relu2"] = setting(
        "", "Activation of the MLM head; empty: as in the blocks."
    )
    pool: Literal["first", "last", "mean"] = setting(
        "last", "Which tokens' states a sequence head reads."
    )
    pooler: Literal["none", "tanh", "relu", "gelu"] = setting(
        "none", "Activation of a dense layer before sequence heads."
    )
    head_transform: bool = setting(
        False,
        "Every head reads through a dense layer without bias, its activation and a norm "
        "(ModernBERT).",
    )
    generator_share: float = setting(
        0.25, "Width of ELECTRA's generator, as a share of the model's."
    )
    generator_depth: int = setting(0, "Layers of that generator; 0: the model's.", ge=0)
    dropout: float = setting(0.1, "Dropout of embeddings and of what blocks add.", ge=0, lt=1)
    attention_dropout: float = setting(0.1, "Dropout of attention weights.", ge=0, lt=1)
    init: Literal["normal", "truncated", "xavier", "fan_in"] = setting(
        "normal",
        "Initial weights. xavier: by the sizes of each matrix, the embedding N(0, 1/√width) "
        "(tensor2tensor).",
    )
    init_std: float = setting(0.02, "Standard deviation of initial weights.")
    residual_init: Literal["same", "scaled", "zero"] = setting(
        "same", "Initialisation of weights that write to the residual stream."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if not isinstance(value, bool) and isinstance(value, int | float):
                self._require(
                    0 <= value <= LARGEST.get(name, MAX_SIZE),
                    "{name} must lie in [0, {largest:,}], not {value}.",
                    name=name,
                    largest=LARGEST.get(name, MAX_SIZE),
                    value=shown(value),
                )
        require_bounds(self, "This model cannot be built")
        for sentence, holds in self._rules().items():
            self._require(holds, sentence)
        self._require(
            sum(map(len, self.attention)) <= MAX_PATTERN_CHARACTERS,
            "its attention patterns are longer than {most:,} characters.",
            most=MAX_PATTERN_CHARACTERS,
        )
        self._require(
            self._table_bytes <= MAX_POSITION_TABLE_BYTES,
            "{positions} positions for a context of {context:,} tokens need a table of "
            "{bytes}, above {most}.",
            bytes=format_size(self._table_bytes),
            most=format_size(MAX_POSITION_TABLE_BYTES),
        )
        for name in ("skip_connections", "embedding_residual", "groups", "segments", "both_ways"):
            excluded = self.encoder_depth and getattr(self, name)
            self._require(
                not excluded, "an encoder-decoder cannot be combined with {name}.", name=name
            )

    def _require(self, condition: object, sentence: str, /, **values: object) -> None:
        """Refuses the model unless the condition holds; the sentence can name all fields."""
        require("This model cannot be built", condition, sentence, **{**vars(self), **values})

    def _rules(self) -> dict[str, object]:
        """What must hold of the fields together, by the sentence that says so."""
        parts = (self.key_heads, self.qk_norm, self.mixer)
        prefix = f"prefix:{self.feature_count}"
        return {
            "{groups} groups are more than the depth {depth}.": self.distinct <= self.depth,
            "width {width} does not divide into {heads} heads; set head_width or change one "
            "of them.": self.head_width > 0 or self.width % self.heads == 0,
            "{heads} heads do not divide over {kv_heads} kv_heads.": (
                self.heads % self.key_heads == 0
            ),
            "attention needs at least one pattern, such as 'causal' or 'full'.": self.attention,
            "rotary positions need an even head width.": (
                self.positions != "rotary" or self.size_per_head % 2 == 0
            ),
            "{positions} positions end at the context and leave no room for a memory of "
            "earlier segments: set positions=relative.": (
                not self.memory or self.positions == "relative"
            ),
            "relative positions need softmax attention without kv_heads and qk_norm.": (
                self.positions != "relative" or parts == (self.heads, False, "attention")
            ),
            "head_transform needs the activation that pooler names, such as gelu.": (
                not self.head_transform or self.pooler != "none"
            ),
            "two LSTMs need a width of twice embed_width, not {width} and {embed_width}.": (
                self.mixer != "bilstm" or self.width == 2 * self.embed_width
            ),
            "LSTM layers cannot be shared (groups).": (
                not self.is_lstm or self.groups in (0, self.depth)
            ),
            "feature_count and feature_width belong together.": (
                bool(self.feature_count) == bool(self.feature_width)
            ),
            "a model with features needs the pattern 'causal | prefix:{feature_count}'.": (
                not self.feature_count or all(prefix in text for text in self.attention)
            ),
        }

    @property
    def _table_bytes(self) -> int:
        """Bytes of computed position tables, whose size no weights file can confirm."""
        widths = {
            "rotary": self.size_per_head,
            "sinusoidal": self.token_width,
            "sinusoidal_halves": self.token_width,
        }
        tables = 2 if self.local_rotary_base else 1
        return 4 * tables * self.context * widths.get(self.positions, 0)

    @property
    def size_per_head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def mlp_width(self) -> int:
        thirds = 64 * max(1, round(self.width / 24))
        return self.hidden or (thirds if self.activation == "geglu" else 4 * self.width)

    @property
    def units(self) -> int:
        """Memory cells of an LSTM layer in one direction."""
        return self.hidden or self.direction_width

    @property
    def direction_width(self) -> int:
        """Width of what an LSTM layer writes in one direction."""
        return self.width // 2 if self.mixer == "bilstm" else self.width

    @property
    def is_lstm(self) -> bool:
        return self.mixer in ("lstm", "bilstm")

    @property
    def recurrent(self) -> bool:
        """Whether the model carries a state of constant size instead of keys and values."""
        return self.mixer == "lstm"

    @property
    def state_size(self) -> int:
        """Numbers in a layer's recurrent state."""
        return self.width + self.units if self.recurrent else 0

    @property
    def cache_width(self) -> int:
        """Width of a head's cached keys and values; a recurrent state needs none."""
        return 0 if self.recurrent else self.size_per_head

    @property
    def max_length(self) -> int:
        """Maximum tokens of a text; a recurrent state or relative positions set no limit."""
        endless = self.recurrent and self.positions == "none"
        return MAX_CONTEXT_TOKENS if endless or self.memory else self.context

    @property
    def block_weights(self) -> int:
        """Weights in the large matrices of one block."""
        if self.is_lstm:
            projected = self.units != self.direction_width
            each = (9 if projected else 8) * self.units * self.direction_width
            return 2 * each if self.mixer == "bilstm" else each
        attention = self.width * self.size_per_head * 2 * (self.heads + self.key_heads)
        if self.positions == "relative":
            attention += self.width * self.heads * self.size_per_head
        return attention + self.width * self.mlp_width * (3 if self.gated else 2)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate (Shazeer 2020)."""
        return self.activation in ("swiglu", "geglu")

    @property
    def token_width(self) -> int:
        return self.embed_width or self.width

    @property
    def distinct(self) -> int:
        """Number of blocks with their own weights."""
        return self.groups or self.depth
