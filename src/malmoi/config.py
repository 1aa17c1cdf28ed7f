"""The model config, a frozen and validated record that converts to JSON and back. No torch here.

`Config` is the base of every record a user may write (a model, a recipe): it checks types and
choices on construction, suggests the nearest field for a misspelt one, and takes typed overrides
such as {"train.lr": "3e-4"}.
"""

import ast
import inspect
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from itertools import takewhile
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from malmoi.errors import MalmoiError, UsageError, nearest, require
from malmoi.messages import msg
from malmoi.system.limits import (
    MAX_CONTEXT_TOKENS,
    MAX_LAYERS,
    MAX_PATTERN_CHARACTERS,
    MAX_POSITION_TABLE_BYTES,
    MAX_SIZE,
    format_size,
    shown,
)
from malmoi.system.result import PlainValue, plain
from malmoi.system.untrusted import is_a, parse, parse_object

logger = logging.getLogger(__name__)
_require = partial(require, "This model cannot be built")

LARGEST = {"depth": MAX_LAYERS, "encoder_depth": MAX_LAYERS, "context": MAX_CONTEXT_TOKENS}
UNBOUNDED = {"rotary_base": math.inf, "local_rotary_base": math.inf}


RENAMED_FIELDS = {  # old names, accepted for one more release
    "TrainConfig": {"rematerialise": "gradient_checkpointing", "matrix_lr": "muon_lr"},
    "FinetuneConfig": {"untrained": "from_scratch"},
    "options": {"restart": "overwrite"},  # of the public functions
}


def current_fields(record: str, values: Mapping[str, object]) -> dict[str, Any]:
    """The values under the current field names; an old name is reported on stderr."""
    return {current_field(record, name): value for name, value in values.items()}


def current_field(record: str, name: str) -> str:
    new = RENAMED_FIELDS.get(record, {}).get(name)
    if new:
        _note_renamed(name, new)
    return new or name


@cache
def _note_renamed(old: str, new: str) -> None:
    logger.warning(
        msg("The setting {old} is now {new}; the old name will be removed.", old=old, new=new)
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A frozen record whose fields are checked against their annotations."""

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            object.__setattr__(
                self, name, coerce(getattr(self, name), kind, f"{type(self).__name__}.{name}")
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Builds the record from JSON values; suggests the nearest name for an unknown field."""
        values = current_fields(cls.__name__, values)
        for name in values:
            if name not in field_types(cls):
                raise UsageError(
                    "{type} has no field {name}.{hint}",
                    type=cls.__name__,
                    name=shown(name),
                    hint=nearest(name, field_types(cls)),
                )
        optional = {f.name for f in fields(cls) if (f.default, f.default_factory) != (MISSING,) * 2}
        missing = [name for name in field_types(cls) if name not in optional | values.keys()]
        if missing:
            raise UsageError(
                "{type} needs a value for {missing}.", type=cls.__name__, missing=", ".join(missing)
            )
        return cls(**values)

    def to_dict(self) -> dict[str, PlainValue]:
        """The fields as JSON values."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_object(text, msg("The text of a {type}", type=cls.__name__)))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def override(self, changes: Mapping[str, object]) -> Self:
        """A copy with changes such as {"train.lr": "3e-4"}; text is parsed as the field's type."""
        kinds = field_types(type(self))
        here: dict[str, Any] = {}
        inside: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            name, _, rest = path.partition(".")
            name = current_field(type(self).__name__, name)
            if name not in kinds:
                raise UsageError(
                    "There is no setting {name}.{hint}", name=shown(name), hint=nearest(name, kinds)
                )
            if rest:
                inside.setdefault(name, {})[rest] = value
            else:
                here[name] = _read(value, kinds[name]) if isinstance(value, str) else value
        for name, parts in inside.items():
            inner = here.get(name, getattr(self, name))
            if not isinstance(inner, Config):
                raise UsageError(
                    "{type}.{name} is a single value, it has no field {next!r}.",
                    type=type(self).__name__,
                    name=name,
                    next=next(iter(parts)),
                )
            here[name] = inner.override(parts)
        return replace(self, **here)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The architecture of a model; every family is such a value (see model/families.py).

    Examples:
        >>> malmoi.ModelConfig(vocab=1000, width=128, heads=2).size_per_head
        64
    """

    vocab: int  # tokens in the vocabulary
    context: int = 1024  # longest sequence in tokens
    width: int = 768  # size of the hidden states
    depth: int = 12  # layers
    # layers of an encoder whose states every block attends to (Vaswani et al. 2017); 0: none
    encoder_depth: int = 0
    heads: int = 12  # attention heads per layer
    kv_heads: int = 0  # key/value heads (grouped-query attention); 0: as many as heads
    head_width: int = 0  # 0: width / heads
    # width inside the MLP; 0: 4 × width, or about 8/3 × width for a gated MLP, which has 3 matrices
    hidden: int = 0
    embed_width: int = 0  # factorised embedding (ALBERT, ELECTRA); 0: width
    segments: int = 0  # 0: no segment embedding
    groups: int = 0  # distinct blocks, shared over the depth (ALBERT: 1); 0: one per layer
    # how tokens exchange information: softmax attention, linear attention (Katharopoulos et al.
    # 2020), an LSTM, or an LSTM in each direction (ELMo)
    mixer: Literal["attention", "linear", "lstm", "bilstm"] = "attention"
    attention: tuple[str, ...] = ("causal",)  # a pattern per layer, cycled over the depth
    # a causal model that is also trained to fill masks: a masked token is then predicted one
    # position to its left (GPT-BERT, Charpentier & Samuel 2024)
    both_ways: bool = False
    # sinusoidal_halves: all sines, then all cosines, as in the authors' code and Marian;
    # relative: relative positions in every layer (Transformer-XL)
    positions: Literal[
        "learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "none"
    ] = "learned"
    memory: int = 0  # tokens of earlier segments that the next segment attends to (Transformer-XL)
    position_offset: int = 0  # rows of the table before the first token's (RoBERTa: pad id + 1)
    rotary_base: float = 10_000.0  # base of the rotary angles
    local_rotary_base: float = 0.0  # in layers with a `local` pattern; 0: rotary_base
    # stretches rotary positions to a longer context: "linear:4", "llama3:8,1,4,8192"; empty: off
    rotary_scaling: str = ""
    norm: Literal["pre", "post"] = "pre"  # x + f(LN(x)), or LN(x + f(x))
    norm_kind: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    norm_bias: bool = True  # whether norms have a bias
    # norm before the first attention; ModernBERT, whose embedding is normalised, has none
    first_norm: bool = True
    # precomputed vectors before the text (images, audio): their number and width; 0: none
    feature_count: int = 0
    feature_width: int = 0  # size of each of those vectors
    embed_scale: bool = False  # token embeddings times √width (Vaswani et al. 2017 §3.4)
    embed_norm: bool = False  # norm after the embeddings
    final_norm: bool = True  # norm after the last block
    qk_norm: bool = False  # norms on queries and keys
    eps: float = 1e-5  # added to the variance in norms
    # of the MLP; swiglu and geglu are gated
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu"] = (
        "gelu_tanh"
    )
    bias: bool = True  # whether linear layers have a bias
    # every block adds the token embeddings to its input and, projected, to its values
    embedding_residual: bool = False
    # U-Net: each layer of the upper half adds the output of its mirror in the lower half
    skip_connections: bool = False
    tied: bool = True  # the vocabulary head reuses the token embedding
    lm_bias: bool = False  # the next token's scores have a bias (Marian)
    softcap: float = 0.0  # limits the logits over the vocabulary: cap·tanh(x / cap); 0: off
    # activation of the MLM head; empty: as in the blocks
    mlm_activation: Literal["", "gelu", "gelu_tanh", "relu", "relu2"] = ""
    pool: Literal["first", "last", "mean"] = "last"  # which tokens' states a sequence head reads
    # activation of a dense layer before sequence heads
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"
    # every head reads through a dense layer without bias, its activation and a norm (ModernBERT)
    head_transform: bool = False
    # width of ELECTRA's generator, as a share of the model's
    generator_share: float = 0.25
    dropout: float = 0.1  # of embeddings and of what blocks add
    attention_dropout: float = 0.1  # of attention weights
    # xavier: by the sizes of each matrix, the embedding N(0, 1/√width) (tensor2tensor)
    init: Literal["normal", "truncated", "xavier", "fan_in"] = "normal"
    init_std: float = 0.02  # standard deviation of initial weights
    # initialisation of weights that write to the residual stream
    residual_init: Literal["same", "scaled", "zero"] = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers()
        self._check_attention()
        self._check_positions()
        self._check_parts()

    def _check_numbers(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, bool) and isinstance(value, int | float):
                largest = (LARGEST | UNBOUNDED).get(name, MAX_SIZE)
                _require(
                    0 <= value <= largest,
                    "{name} must lie in [0, {largest:,}], not {value}.",
                    name=name,
                    largest=largest,
                    value=shown(value),
                )
        for name in ("vocab", "context", "width", "depth", "heads", "rotary_base"):
            _require(
                getattr(self, name) > 0,
                "{name} must be positive, not {value}.",
                name=name,
                value=getattr(self, name),
            )
        for name in ("dropout", "attention_dropout"):
            _require(
                0 <= getattr(self, name) < 1,
                "{name} must lie in [0, 1), not {value}.",
                name=name,
                value=getattr(self, name),
            )
        _require(
            self.distinct <= self.depth,
            "{groups} groups are more than the depth {depth}.",
            groups=self.groups,
            depth=self.depth,
        )

    def _check_attention(self) -> None:
        _require(
            self.head_width > 0 or self.width % self.heads == 0,
            "width {width} does not divide into {heads} heads; set head_width or change one "
            "of them.",
            width=self.width,
            heads=self.heads,
        )
        _require(
            self.heads % self.key_heads == 0,
            "{heads} heads do not divide over {kv_heads} kv_heads.",
            heads=self.heads,
            kv_heads=self.kv_heads,
        )
        _require(
            bool(self.attention),
            "attention needs at least one pattern, such as 'causal' or 'full'.",
        )
        _require(
            sum(map(len, self.attention)) <= MAX_PATTERN_CHARACTERS,
            "its attention patterns are longer than {most:,} characters.",
            most=MAX_PATTERN_CHARACTERS,
        )
        _require(
            self.mixer != "linear" or self.attention in (("causal",), ("full",)),
            "linear attention is causal or full in every layer, without another pattern.",
        )

    def _check_positions(self) -> None:
        _require(
            self.positions != "rotary" or self.size_per_head % 2 == 0,
            "rotary positions need an even head width.",
        )
        _require(
            not self.memory or self.positions == "relative",
            "{positions} positions end at the context and leave no room for a memory of "
            "earlier segments: set positions=relative.",
            positions=self.positions,
        )
        _require(
            self.positions != "relative"
            or (self.key_heads == self.heads and not self.qk_norm and self.mixer == "attention"),
            "relative positions need softmax attention without kv_heads and qk_norm.",
        )
        _require(
            self._table_bytes <= MAX_POSITION_TABLE_BYTES,
            "{positions} positions for a context of {context:,} tokens need a table of "
            "{bytes}, above {most}.",
            positions=self.positions,
            context=self.context,
            bytes=format_size(self._table_bytes),
            most=format_size(MAX_POSITION_TABLE_BYTES),
        )

    def _check_parts(self) -> None:
        """Parts that some families have and others exclude."""
        _require(
            not self.head_transform or self.pooler != "none",
            "head_transform needs the activation that pooler names, such as gelu.",
        )
        _require(
            self.mixer != "bilstm" or self.width == 2 * self.embed_width,
            "two LSTMs need a width of twice embed_width, not {width} and {width2}.",
            width=self.width,
            width2=self.embed_width,
        )
        _require(
            not self.is_lstm or self.groups in (0, self.depth),
            "LSTM layers cannot be shared (groups).",
        )
        _require(
            bool(self.feature_count) == bool(self.feature_width),
            "feature_count and feature_width belong together.",
        )
        _require(
            not self.feature_count
            or all(f"prefix:{self.feature_count}" in text for text in self.attention),
            "a model with features needs the pattern 'causal | prefix:{count}'.",
            count=self.feature_count,
        )
        for name in ("skip_connections", "embedding_residual", "groups", "segments", "both_ways"):
            _require(
                not (self.encoder_depth and getattr(self, name)),
                "an encoder-decoder cannot be combined with {name}.",
                name=name,
            )

    @property
    def _table_bytes(self) -> int:
        """Bytes of computed position tables, whose size no weights file can confirm."""
        widths = {"rotary": self.size_per_head}
        widths |= dict.fromkeys(("sinusoidal", "sinusoidal_halves"), self.token_width)
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
        usual = (
            64 * max(1, round(self.width / 24)) if self.activation == "geglu" else 4 * self.width
        )
        return self.hidden or usual

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
        return self.mixer == "lstm" or (self.mixer == "linear" and self.attention == ("causal",))

    @property
    def state_size(self) -> int:
        """Numbers in a layer's recurrent state."""
        if not self.recurrent:
            return 0
        linear = self.heads * self.size_per_head * (self.size_per_head + 1)
        return self.width + self.units if self.is_lstm else linear

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
            width = self.direction_width
            projection = width * self.units if self.units != width else 0
            each = 8 * self.units * width + projection
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


def field_types(cls: Any) -> dict[str, Any]:
    """The annotation of every field of a record."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def coerce(value: Any, kind: Any, where: str) -> Any:
    """The value in its annotation's type (an int as a float, a list as a tuple), or an error."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        if value not in args:
            choices = ", ".join(map(repr, args))
            hint = nearest(str(value), map(str, args))
            raise UsageError(
                "{where} must be one of {choices}, not {value}.{hint}",
                where=where,
                choices=choices,
                value=shown(value),
                hint=hint,
            )
        return value
    if origin in (Union, UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if value is None else coerce(value, inner, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(coerce(v, args[0], where) for v in value)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return kind.from_dict(value)  # type: ignore[union-attr]
    if not is_a(value, origin or kind):
        raise UsageError(
            "{where} must be {called}, not {value}.",
            where=where,
            called=msg(_called(kind)),
            value=shown(value),
        )
    return float(value) if kind is float else value


def _called(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names[tuple] = "a list"
    return names.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))


def _read(text: str, kind: Any) -> Any:
    """Parses command-line text as JSON unless the field is text; a list may omit its brackets."""
    if kind is str or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [_read(part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip()]
    try:
        value = parse(text, "The value")
    except MalmoiError:
        words = {"none": None, "yes": True, "no": False, "true": True, "false": False}
        value = words[text.lower()] if text.lower() in words else parse_number(text)
    # 1e5 for an integer
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def parse_number(text: str) -> float | str:
    """Parses .5, 1e9, 10M, 1.5B; anything else stays text."""
    scale = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    try:
        return float(text if scale == 1 else text[:-1]) * scale
    except ValueError:
        return text


def field_comments(record: type) -> dict[str, str]:
    """The comments of a record's fields: beside each, or in the lines above it."""
    source = inspect.getsource(record)
    lines = source.splitlines()
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = (line.strip() for line in reversed(lines[: node.lineno - 1]))
            above = [line[2:] for line in takewhile(lambda line: line.startswith("# "), before)]
            beside = lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
            comment = beside or " ".join(reversed(above))
            found[node.target.id] = comment.partition("  # noqa")[0]
    return found
