"""How each tokenizer cuts a text: the same text, side by side."""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from malmoi.decode.spell import spelling
from malmoi.infer import Model
from malmoi.tokenizer import Encoding, Tokenizer


class Piece(BaseModel):
    """A token: as it stands in the vocabulary, and what of the text it covers.

    Byte-level tokens may be less than a character, or cross its borders: then `bytes` says what they hold.
    """

    id: int
    token: str
    text: str
    special: bool
    unknown: bool  # stands for what the vocabulary does not have
    bytes: str | None = None


class Cut(BaseModel):
    """A tokenizer's cut, and whose it is."""

    models: list[str]
    kind: str
    vocab: int
    unknown: int  # tokens that stand for what the vocabulary does not have
    pieces: list[Piece]


class Cuts(BaseModel):
    characters: int
    bytes: int
    words: int
    cuts: list[Cut]


def cuts(models: Iterable[tuple[str, Model]], text: str) -> Cuts:
    """One cut a tokenizer; models that share one are named together."""
    found: dict[str, Cut] = {}
    for name, model in models:
        words = model.checkpoint.tokenizer
        if words is None:
            continue
        key = words.fingerprint()
        if key in found:
            found[key].models.append(name)
        else:
            found[key] = _cut(name, words, text)
    return Cuts(characters=len(text), bytes=len(text.encode()), words=len(text.split()), cuts=list(found.values()))


def _cut(name: str, words: Tokenizer, text: str) -> Cut:
    encoding = words.encode(text)
    pieces = list(_pieces(words, encoding, text))
    unknown = sum(piece.unknown for piece in pieces)
    return Cut(models=[name], kind=words.kind, vocab=words.vocab_size, unknown=unknown, pieces=pieces)


def _pieces(words: Tokenizer, encoding: Encoding, text: str) -> Iterator[Piece]:
    for token, (start, end), special in zip(encoding.tokens, encoding.offsets, encoding.specials, strict=True):
        covered, held = text[start:end], b"" if special else spelling(words)[token]
        broken = words.kind == "byte-bpe" and held != covered.encode()
        shown = held.hex(" ").upper() if broken and held else None
        name, unknown = words.token(token), token == words.specials.unk
        yield Piece(id=token, token=name, text=covered, special=special, unknown=unknown, bytes=shown)
