"""Text to token ids and back: WordPiece, BPE, byte-level BPE and characters."""

from typing import TYPE_CHECKING

from malmoi.system.lazy import lazy_names
from malmoi.tokenizer.core import Encoding, Specials, Tokenizer, TokenRow

if TYPE_CHECKING:
    from malmoi.tokenizer.training import train_tokenizer
else:
    __getattr__ = lazy_names(__name__, training="train_tokenizer")

__all__ = ["Encoding", "Specials", "TokenRow", "Tokenizer", "train_tokenizer"]
