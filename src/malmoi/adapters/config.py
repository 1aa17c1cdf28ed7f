"""Settings of an adapter, which is trained while its base model is frozen. No torch here."""

from dataclasses import dataclass
from typing import Literal

from malmoi.errors import require
from malmoi.settings import Config, require_bounds, setting


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Config):
    """LoRA (Hu et al. 2021), prompt (Lester et al. 2021) or prefix tuning (Li & Liang 2021)."""

    kind: Literal["none", "lora", "prompt", "prefix"] = setting(
        "none", "Train only an adapter: lora, prompt or prefix."
    )
    rank: int = setting(8, "Rank of LoRA's update B·A.", gt=0)
    alpha: float = setting(16.0, "The update is scaled by alpha / rank.", gt=0)
    targets: tuple[str, ...] = setting(
        ("query", "value"), "The linear maps to adapt (Hu et al. 2021 §7.1)."
    )
    dropout: float = setting(0.0, "Dropout on the input of A.", ge=0, lt=1)
    tokens: int = setting(20, "Soft tokens of a prompt, or positions of a prefix.", gt=0)
    init: str = setting("", "Text to initialise them from; empty: words drawn from the vocabulary.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bounds(self, "Invalid adapter settings", "adapter.")
        require(
            "Invalid adapter settings",
            self.targets,
            "adapter.targets needs at least one linear layer, such as query.",
        )
