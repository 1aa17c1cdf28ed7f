"""Checkpoint folders in Hugging Face's format, readable and writable by both sides."""

from malmoi.checkpoint.folder import Checkpoint, read_checkpoint
from malmoi.checkpoint.save_folder import table_for, write_checkpoint

__all__ = ["Checkpoint", "read_checkpoint", "table_for", "write_checkpoint"]
