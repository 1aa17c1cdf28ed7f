"""Marian's texts, cut by SentencePiece's own library for a vocabulary that is not the library's.

Source and target have a model each, and one vocab.json numbers the pieces of both. A piece that
one model does not know may be in the vocabulary all the same, so that only the library's cuts give
transformers' ids. A mark is written between the pieces, as between morphemes.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal

from malmoi.errors import MalmoiError
from malmoi.tokenizer.morphemes import MARK
from malmoi.tokenizer.offsets import Offsets
from malmoi.tokenizer.sentencepiece_model import message_fields

LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)  # of the target, at the start of a source
OTHER_MARK = "\U0002fffe"  # for a mark in the text itself; unknown too


@dataclass(frozen=True)
class MarianPieces:
    """Both models, and which of them cuts texts."""

    source: bytes
    target: bytes
    side: Literal["source", "target"] = "source"

    def __post_init__(self) -> None:
        if find_spec("sentencepiece") is None:
            raise MalmoiError(
                "This tokenizer cuts texts with the package sentencepiece: pip install "
                "sentencepiece."
            )

    def of_target(self) -> "MarianPieces":
        return replace(self, side="target")

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
