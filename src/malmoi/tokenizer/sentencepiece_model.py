"""SentencePiece's `.model` files, as the tokenizers that transformers makes of them.

A file is a protocol buffer: pieces with their scores, the kind of model, and a table of characters
to replace. XLM-R, ALBERT and LLaMA each add rules of their own. A Marian's texts are cut by
SentencePiece's own library: source and target have a model each, and one vocab.json numbers the
pieces of both. A piece that one model does not know may be in the vocabulary all the same, so that
only the library's cuts give transformers' ids. A mark is written between the pieces, as between
morphemes.
"""

import re
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer as Rust, decoders, models, normalizers, pre_tokenizers

from malmoi.errors import ensure, explained
from malmoi.system.packages import optional_package
from malmoi.system.untrusted import MAX_VOCABULARY_TOKENS, read_bytes
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.checks import check_growth, longest_replacement
from malmoi.tokenizer.chunks import MARK, Offsets
from malmoi.tokenizer.hf_settings import Settings
from malmoi.tokenizer.pipeline import SPACE

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
        ensure(
            self.kind == kind,
            "{path} is no {name} model, which such a tokenizer needs.",
            path=self.path,
            name={UNIGRAM: "Unigram", BPE: "BPE"}[kind],
        )


def read_sentencepiece(path: Path) -> SentencePieceModel:
    with explained(
        (ValueError, IndexError, TypeError, AttributeError, struct.error),
        "{path} is not a SentencePiece model, or it is damaged; copy or download it again.",
        path=path,
    ):
        model = _parse(path, read_bytes(path))
    if model.charsmap:
        check_growth(str(path), "normalizer", longest_replacement(model.charsmap, str(path)))
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
    charsmap = normalizers.Precompiled(model.charsmap) if model.charsmap else None
    rust = _unigram(scores, 3, charsmap, settings)
    start, end = names["bos"], names["eos"]
    pair = f"{start} $A {end} {end} $B {end}"
    return pipeline.frame(rust, f"{start} $A {end}", pair, start, end)


def albert(model: SentencePieceModel, names: dict[str, str], settings: Settings) -> Rust:
    """Lowercased and without accents, unless the settings say otherwise."""
    model.expect(UNIGRAM)
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    scores = [(p.text, p.score) for p in model.pieces]
    return pipeline.with_frame(_unigram(scores, 1, normalizers.Sequence(steps), settings), names)


def _unigram(
    scores: list[tuple[str, float]], unknown: int, normalizer: Any, settings: Settings
) -> Rust:
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    spaces = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    return pipeline.assembled(
        models.Unigram(scores, unknown, byte_fallback=False),
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces]),
        decoder=decoders.Metaspace(SPACE, prepend_scheme=scheme),
    )


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
    spaced = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if spaced else "never"
    rust = pipeline.assembled(
        models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True),
        pre_tokenizer=pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False),
        decoder=pipeline.spaced_bytes_decoder(prefix_space=spaced),
    )
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


# ------------------------------------------------------------------ Marian

LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)  # of the target, at the start of a source
OTHER_MARK = "\U0002fffe"  # for a mark in the text itself; unknown too


@dataclass(frozen=True)
class MarianPieces:
    """Both models, and which of them cuts texts."""

    source: bytes
    target: bytes
    side: Literal["source", "target"] = "source"

    def __post_init__(self) -> None:
        optional_package("sentencepiece", "A translation model's tokenizer")

    @cached_property
    def _library(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=getattr(self, self.side))

    def marked(self, texts: Sequence[str], names: re.Pattern[str] | None) -> list[str]:
        """The texts as pieces with marks between them; `names` are found and kept whole."""
        parts = [list(_parts(text, names)) for text in texts]
        plain = [text for some in parts for text, whole in some if not whole]
        pieces = iter(self._library.encode(plain, out_type=str))
        return [
            MARK.join(p for text, whole in some for p in ([text] if whole else next(pieces)))
            for some in parts
        ]

    def places(self, text: str, names: re.Pattern[str] | None) -> Offsets:
        """Where each piece of a text lies in it."""
        found: Offsets = []
        start = 0
        for part, whole in _parts(text, names):
            places = [(0, len(part))] if whole else self._places(part)
            found += [(start + begin, start + end) for begin, end in places]
            start += len(part)
        return found

    def _places(self, text: str) -> Offsets:
        """The library counts bytes of the text in UTF-8: begin and end are fields 4 and 5."""
        ends = list(accumulate((len(letter.encode()) for letter in text), initial=0))
        told = self._library.encode(text, out_type="serialized_proto")
        pieces = (
            dict(message_fields(value)) for number, value in message_fields(told) if number == 2
        )
        return [(bisect_left(ends, p.get(4, 0)), bisect_left(ends, p.get(5, 0))) for p in pieces]


def _parts(text: str, names: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """A text in parts: names of tokens and a language's code, which are pieces, and the rest."""
    at = 0
    for name in names.finditer(text) if names else ():
        yield from _after_language(text[at : name.start()])
        yield name[0], True
        at = name.end()
    yield from _after_language(text[at:])


def _after_language(text: str) -> Iterator[tuple[str, bool]]:
    language = LANGUAGE.match(text)
    if language:
        yield language[0], True
    yield text[language.end() if language else 0 :].replace(MARK, OTHER_MARK), False
