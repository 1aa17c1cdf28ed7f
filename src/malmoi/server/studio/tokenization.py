"""How each tokenizer cuts a text: the same text, side by side."""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from malmoi.inference import Model
from malmoi.inference.generation.token_bytes import token_bytes
from malmoi.tokenizer import Encoding, Tokenizer


class TokenView(BaseModel):
    """A token: as it stands in the vocabulary, and what of the text it covers.

    Byte-level tokens may be less than a character, or cross its borders: then `bytes` says what
    they hold.
    """

    id: int
    token: str
    text: str
    special: bool
    unknown: bool  # stands for what the vocabulary does not have
    bytes: str | None = None


class Tokenization(BaseModel):
    """A tokenizer's cut, and whose it is."""

    models: list[str]
    kind: str
    vocab: int
    unknown: int  # tokens that stand for what the vocabulary does not have
    pieces: list[TokenView]


class Tokenizations(BaseModel):
    characters: int
    bytes: int
    words: int
    cuts: list[Tokenization]


def tokenizations(models: Iterable[tuple[str, Model]], text: str) -> Tokenizations:
    """One cut a tokenizer; models that share one are named together."""
    found: dict[str, Tokenization] = {}
    for name, model in models:
        words = model.checkpoint.tokenizer
        if words is None:
            continue
        key = words.fingerprint()
        if key in found:
            found[key].models.append(name)
        else:
            found[key] = _cut(name, words, text)
    return Tokenizations(
        characters=len(text),
        bytes=len(text.encode()),
        words=len(text.split()),
        cuts=list(found.values()),
    )


def _cut(name: str, words: Tokenizer, text: str) -> Tokenization:
    encoding = words.encode(text)
    pieces = list(_pieces(words, encoding, text))
    unknown = sum(piece.unknown for piece in pieces)
    return Tokenization(
        models=[name], kind=words.kind, vocab=words.vocab_size, unknown=unknown, pieces=pieces
    )


def _pieces(words: Tokenizer, encoding: Encoding, text: str) -> Iterator[TokenView]:
    for token, (start, end), special in zip(
        encoding.tokens, encoding.offsets, encoding.specials, strict=True
    ):
        covered = text[start:end]
        held = b"" if special else token_bytes(words)[token]
        broken = words.kind == "byte-bpe" and held != covered.encode()
        shown = held.hex(" ").upper() if broken and held else None
        name = words.token(token)
        unknown = token == words.specials.unk
        yield TokenView(
            id=token, token=name, text=covered, special=special, unknown=unknown, bytes=shown
        )
