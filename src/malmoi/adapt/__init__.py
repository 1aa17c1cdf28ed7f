"""Small changes beside a model that stays as it is: LoRA, soft prompts, prefixes; in PEFT's format."""

from malmoi.adapt.attach import attach
from malmoi.adapt.settings import AdapterConfig
from malmoi.adapt.store import check_target, is_adapter, read, write_adapter

__all__ = ["AdapterConfig", "attach", "check_target", "is_adapter", "read", "write_adapter"]
