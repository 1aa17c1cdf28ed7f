"""Folders: what we write `transformers` opens, what it writes we open."""

from malmoi.checkpoint.folder import Checkpoint, read_checkpoint, table_for, write_checkpoint

__all__ = ["Checkpoint", "read_checkpoint", "table_for", "write_checkpoint"]
