"""Text to token ids and back: train, load, encode, decode and save WordPiece, BPE and byte-level
BPE.
"""

from malmoi.tokenizer.core import Encoding, Specials, Tokenizer, TokenRow
from malmoi.tokenizer.training import train_tokenizer

__all__ = ["Encoding", "Specials", "TokenRow", "Tokenizer", "train_tokenizer"]
