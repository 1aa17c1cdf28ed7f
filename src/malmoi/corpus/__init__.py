"""Documents in, documents out: reading text of any kind and splitting it into sentences."""

from malmoi.corpus.read import Document, Reader, read
from malmoi.corpus.sentences import split, splitter

__all__ = ["Document", "Reader", "read", "split", "splitter"]
