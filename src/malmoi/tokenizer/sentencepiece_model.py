"""SentencePiece's `.model` files, as the tokenizers that transformers makes of them.

A file is a protocol buffer: pieces with their scores, the kind of model, and a table of characters
to replace. XLM-R, ALBERT and LLaMA each add rules of their own.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Rust

from malmoi.errors import MalmoiError
from malmoi.system.limits import MAX_TEXT_GROWTH, MAX_VOCABULARY_TOKENS
from malmoi.system.untrusted import read_bytes
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.hf_settings import Settings
from malmoi.tokenizer.pipeline import SPACE
from malmoi.tokenizer.verify import longest_replacement

UNIGRAM, BPE = 1, 2  # kinds of models
NORMAL, CONTROL, DEFINED = 1, 3, 4  # types of pieces
# how many bytes the values of these wire types take
FIXED_SIZES = {1: 8, 5: 4}


class Piece(NamedTuple):
    text: str
    score: float
    type: int


class SentencePieceModel(NamedTuple):
    """What a file holds, and where it lies."""

    path: Path
    data: bytes
    pieces: list[Piece]
    kind: int
    charsmap: bytes

    def expect(self, kind: int) -> None:
        if self.kind != kind:
            names = {UNIGRAM: "Unigram", BPE: "BPE"}
            raise MalmoiError(
                "{path} is no {names} model, which such a tokenizer needs; it belongs to "
                "another one.",
                path=self.path,
                names=names[kind],
            )


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads a file; errors name it."""
    try:
        model = _parse(path, read_bytes(path))
    except (ValueError, IndexError, TypeError, AttributeError, struct.error):
        raise MalmoiError(
            "{path} is not a SentencePiece model, or it is damaged; copy or download it again.",
            path=path,
        ) from None
    if model.charsmap and longest_replacement(model.charsmap, str(path)) > MAX_TEXT_GROWTH:
        raise MalmoiError(
            "{path} may make a text more than {most} times as long.",
            path=path,
            most=MAX_TEXT_GROWTH,
        )
    return model


def _parse(path: Path, data: bytes) -> SentencePieceModel:
    pieces = []
    parts: dict[int, Any] = {}
    for number, value in message_fields(data):
        if number == 1:
            piece: dict[int, Any] = {1: b"", 2: bytes(4), 3: NORMAL} | dict(message_fields(value))
            pieces.append(Piece(piece[1].decode(), struct.unpack("<f", piece[2])[0], piece[3]))
        else:
            parts[number] = value
    if not 0 < len(pieces) <= MAX_VOCABULARY_TOKENS:
        raise ValueError("a model has pieces")
    trainer, normalizer = (dict(message_fields(parts.get(number, b""))) for number in (2, 3))
    return SentencePieceModel(path, data, pieces, trainer.get(3, UNIGRAM), normalizer.get(2, b""))


def message_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbered fields of a protocol buffer's message: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _integer(data, at)
            yield key >> 3, value
            continue
        size = FIXED_SIZES.get(wire, 0)
        if wire == 2:
            size, at = _integer(data, at)
        if at + size > len(data) or wire not in (1, 2, 5):
            raise ValueError("a field ends after the message")
        yield key >> 3, data[at : at + size]
        at += size


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, and where it ends."""
    value = shift = 0
    while data[at] > 127:
        if shift > 63:
            raise ValueError("an integer is too long")
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


# ------------------------------------------------------------------ families


def xlm_roberta(model: SentencePieceModel, names: dict[str, str], settings: Settings) -> Rust:
    """fairseq's order: <s>, <pad>, </s> and <unk> first, whatever the file has, and <mask> last."""
    model.expect(UNIGRAM)
    first = [(names[role], 0.0) for role in ("bos", "pad", "eos", "unk")]
    scores = [*first, *((p.text, p.score) for p in model.pieces[3:]), (names["mask"], 0.0)]
    rust = _unigram(scores, 3, settings)
    if model.charsmap:
        rust.normalizer = normalizers.Precompiled(model.charsmap)
    start, end = names["bos"], names["eos"]
    pipeline.frame(rust, f"{start} $A {end}", f"{start} $A {end} {end} $B {end}", start, end)
    return rust


def albert(model: SentencePieceModel, names: dict[str, str], settings: Settings) -> Rust:
    """Lowercased and without accents, unless the settings say otherwise."""
    model.expect(UNIGRAM)
    rust = _unigram([(p.text, p.score) for p in model.pieces], 1, settings)
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    rust.normalizer = normalizers.Sequence(steps)
    return pipeline.with_frame(rust, names)


def _unigram(scores: list[tuple[str, float]], unknown: int, settings: Settings) -> Rust:
    rust = Rust(models.Unigram(scores, unknown, byte_fallback=False))
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    spaces = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    rust.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return rust


def llama(model: SentencePieceModel, names: dict[str, str], settings: Settings) -> Rust:
    """Pieces are merged in the order of their ids, and unknown characters are bytes."""
    model.expect(BPE)
    vocab = {piece.text: id for id, piece in enumerate(model.pieces)}
    merges = [
        (text[:cut], text[cut:])
        for text in vocab
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    rust = Rust(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True))
    spaced = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if spaced else "never"
    rust.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    rust.decoder = pipeline.spaced_bytes_decoder(prefix_space=spaced)
    first, last = (
        names[role] if settings.get(f"add_{role}_token") else None for role in ("bos", "eos")
    )
    pipeline.with_ends(rust, first, last)
    return rust


def add_own_tokens(rust: Rust, model: SentencePieceModel, names: dict[str, str]) -> None:
    """Adds tokens without a role: control tokens are special, the trainer's others are text."""
    for piece in model.pieces:
        if piece.type in (CONTROL, DEFINED) and piece.text not in names.values():
            special = piece.type == CONTROL
            rust.add_tokens([AddedToken(piece.text, normalized=False, special=special)])
