"""Text to token ids and back: WordPiece, BPE, byte-level BPE and characters."""

from malmoi.tokenizer.core import Encoding, Specials, Tokenizer, TokenRow
from malmoi.tokenizer.training import train_tokenizer

__all__ = ["Encoding", "Specials", "TokenRow", "Tokenizer", "train_tokenizer"]
