"""Small changes beside a model that stays as it is: LoRA, soft prompts, prefixes; in PEFT's
format.
"""

from malmoi.adapters.attach import attach_adapter
from malmoi.adapters.config import AdapterConfig
from malmoi.adapters.store import check_target, is_adapter, read_with_adapter, write_adapter

__all__ = [
    "AdapterConfig",
    "attach_adapter",
    "check_target",
    "is_adapter",
    "read_with_adapter",
    "write_adapter",
]
