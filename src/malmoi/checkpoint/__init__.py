"""Folders: what we write `transformers` opens, what it writes we open."""

from malmoi.checkpoint.folder import Checkpoint, read, table_for, write

__all__ = ["Checkpoint", "read", "table_for", "write"]
