"""Settings of an adapter, which is trained while its base model is frozen. No torch here."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from malmoi.config import Config
from malmoi.errors import require

_require = partial(require, "Invalid adapter settings")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Config):
    """LoRA (Hu et al. 2021), prompt (Lester et al. 2021) or prefix tuning (Li & Liang 2021)."""

    kind: Literal["none", "lora", "prompt", "prefix"] = "none"
    rank: int = 8  # of LoRA's update B·A
    alpha: float = 16.0  # the update is scaled by alpha / rank
    targets: tuple[str, ...] = ("query", "value")  # the linear maps to adapt (Hu et al. 2021 §7.1)
    dropout: float = 0.0  # on the input of A
    tokens: int = 20  # soft tokens of a prompt, or positions of a prefix
    init: str = ""  # text to initialise them from; empty: words drawn from the vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "alpha", "tokens"):
            _require(
                getattr(self, name) > 0,
                "adapter.{name} must be positive, not {value}.",
                name=name,
                value=getattr(self, name),
            )
        _require(
            0 <= self.dropout < 1,
            "adapter.dropout must lie in [0, 1), not {dropout}.",
            dropout=self.dropout,
        )
        _require(
            bool(self.targets), "adapter.targets needs at least one linear layer, such as query."
        )
