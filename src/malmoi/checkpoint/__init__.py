"""Checkpoint folders in Hugging Face's format, readable and writable by both sides."""

from typing import TYPE_CHECKING

from malmoi.checkpoint.read_folder import Checkpoint, read_checkpoint
from malmoi.system.lazy import lazy_names

if TYPE_CHECKING:
    from malmoi.checkpoint.save_folder import table_for, write_checkpoint
else:
    __getattr__ = lazy_names(__name__, save_folder="table_for write_checkpoint")

__all__ = ["Checkpoint", "read_checkpoint", "table_for", "write_checkpoint"]
