"""Where a model learnt a text: its longest matches in the training text, and what is new in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from malmoi.errors import UsageError
from malmoi.messages import msg
from malmoi.system.result import Result
from malmoi.tracing.index import Lengths, Passage, TextIndex
from malmoi.tracing.suffixes import TokenArray

Table = tuple[Sequence[str], Sequence[Sequence[object]]]  # columns, and rows
NGRAMS = (2, 4, 6, 8, 13)  # GPT-2 §4 counts 8-grams, GPT-3 §C 13-grams


@dataclass(frozen=True, repr=False)
class Match(Result):
    """Words that the training text has too, as long a run of them as it has."""

    text: str
    start: int  # of its characters in the traced text
    end: int
    tokens: int
    count: int  # how often the training text has them
    documents: int  # in how many of its documents
    passages: tuple[Passage, ...]


@dataclass(frozen=True, repr=False)
class NearPassage(Result):
    """A sentence of the training text whose hidden states are like the text's."""

    text: str
    document: int
    similarity: float  # cosine, after the mean of all sentences is subtracted


@dataclass(frozen=True, repr=False)
class Trace(Result):
    """What of a text is in the training text, longest first.

    `novelty` is the share of a text's n-grams, by n, that the training text does not have; an
    n-gram is n tokens.
    """

    text: str
    tokens: int
    matches: tuple[Match, ...]
    novelty: dict[int, float]
    indexed: int  # tokens of the training text
    nearest: tuple[NearPassage, ...] = ()

    def describe(self) -> str:
        """The novelty in a sentence."""
        size = max((size for size in self.novelty if size <= 8), default=0)
        return msg(
            "{share:.0%} of its {size}-grams are not in the training text ({tokens:,} tokens).",
            share=self.novelty.get(size, 0),
            size=size,
            tokens=self.indexed,
        )

    def tables(self) -> list[Table]:
        """The sentences of each match, and the nearest ones."""
        rows = [
            (match.tokens, match.count, match.text, passage.marked())
            for match in self.matches
            for passage in match.passages
        ]
        near = [(f"{one.similarity:.2f}", one.text) for one in self.nearest]
        return [
            (("tokens", "times", "words", "sentence"), rows),
            (("similarity", "sentence"), near),
        ]


@dataclass(frozen=True)
class _Query:
    """A text as the training text is encoded, and how much of it that has from each token on."""

    text: str
    tokens: TokenArray
    offsets: list[tuple[int, int]]
    lengths: Lengths

    @classmethod
    def of(cls, index: TextIndex, text: str, before: str = "") -> "_Query":
        """`before` is put before the text, where it changes how the first word is encoded."""
        encoding = index.tokenizer.encode(before + text, specials=False)
        tokens = index.array(encoding.tokens)
        shift = len(before)
        offsets = [(max(0, start - shift), max(0, end - shift)) for start, end in encoding.offsets]
        return cls(text, tokens, offsets, index.longest(tokens))

    def longest(self) -> list[tuple[int, int]]:
        """First and last token of each match that no other one contains, the longest first."""
        stops = [0, *(self.lengths + range(len(self.lengths))).tolist()]
        maximal = [
            self._whole(first, stop)
            for first, (before, stop) in enumerate(pairwise(stops))
            if stop > max(before, first)
        ]
        whole = [(first, stop) for first, stop in maximal if first < stop]
        return sorted(whole, key=lambda span: span[0] - span[1])

    def _whole(self, first: int, stop: int) -> tuple[int, int]:
        """A match without pieces of characters at its ends, which bytes may be."""
        edges = [0, *(end for _, end in self.offsets)]
        starts = [*(start for start, _ in self.offsets), len(self.text)]
        while first < stop and starts[first] < edges[first]:
            first += 1
        while stop > first and starts[stop] < edges[stop]:
            stop -= 1
        return first, stop

    def characters(self, first: int, stop: int) -> tuple[int, int]:
        """Where tokens are in the text, without the spaces around them."""
        start, end = self.offsets[first][0], self.offsets[stop - 1][1]
        piece = self.text[start:end]
        return end - len(piece.lstrip()), start + len(piece.rstrip())


def trace_text(
    index: TextIndex, text: str, words: str = "", top: int = 5, sentences: int = 3
) -> Trace:
    """Finds the longest pieces of a text in the training text.

    With `words`, a part of the text, only matches that have some of them: of their last place.
    """
    marked = text.rfind(words) if words else 0
    if marked < 0:
        raise UsageError("The words {words!r} are not in the text.", words=words)
    queries = [_Query.of(index, text)]
    if index.tokenizer.tokens_have_spaces:  # marked words usually followed others
        queries.insert(0, _Query.of(index, text, " "))
    query = max(queries, key=lambda one: int(one.lengths.sum()))
    until = marked + len(words or text)
    matches: list[Match] = []
    for span in query.longest():
        start, end = query.characters(*span)
        if len(matches) < top and start < min(end, until) and end > marked:
            tokens = query.tokens[slice(*span)]
            forms = index.forms(tokens, text[start:end])
            counts = len(tokens), index.count(*forms), index.documents(*forms)
            passages = tuple(index.passages(*forms, most=sentences))
            matches.append(Match(text[start:end], start, end, *counts, passages))
    new = novelty(query.lengths)
    return Trace(text, len(query.tokens), tuple(matches), new, index.size)


def novelty(lengths: Lengths) -> dict[int, float]:
    """The share of n-grams that the training text does not have, by n (GPT-2 §4)."""
    return {
        size: float((lengths[: len(lengths) - size + 1] < size).mean())
        for size in NGRAMS
        if size <= len(lengths)
    }
