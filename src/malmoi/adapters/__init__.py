"""Adapters on a frozen model: LoRA, soft prompts and prefixes, in PEFT's format."""

from typing import TYPE_CHECKING

from malmoi.system.lazy import lazy_names

if TYPE_CHECKING:
    from malmoi.adapters.attach import attach_adapter
    from malmoi.adapters.config import AdapterConfig
    from malmoi.adapters.store import check_target, read_with_adapter, write_adapter
else:
    __getattr__ = lazy_names(
        __name__,
        attach="attach_adapter",
        config="AdapterConfig",
        store="check_target read_with_adapter write_adapter",
    )

__all__ = [
    "AdapterConfig",
    "attach_adapter",
    "check_target",
    "read_with_adapter",
    "write_adapter",
]
