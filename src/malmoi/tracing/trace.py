"""Where a model learnt a text: its longest matches in the training text, and what is new in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from malmoi.errors import require_that
from malmoi.inference.score import ScoredRow, token_logprobs
from malmoi.messages import logger, msg
from malmoi.system.result import Result
from malmoi.tracing.index import Lengths, Passage, TextIndex, TokenArray
from malmoi.training.data.store import Store
from malmoi.training.pretrain import write_report
from malmoi.training.recipe import read_recipe

if TYPE_CHECKING:
    from malmoi.inference import Model
    from malmoi.inference.embed import Float32Array

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
        size = max((size for size in self.novelty if size <= 8), default=0)
        return msg(
            "{share:.0%} of its {size}-grams are not in the training text ({tokens:,} tokens).",
            share=self.novelty.get(size, 0),
            size=size,
            tokens=self.indexed,
        )

    def tables(self) -> list[Table]:
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
    require_that(marked >= 0, "The words {words!r} are not in the text.", words=words)
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
    return Trace(text, len(query.tokens), tuple(matches), novelty(query.lengths), index.size)


def novelty(lengths: Lengths) -> dict[int, float]:
    """The share of n-grams that the training text does not have, by n (GPT-2 §4)."""
    return {
        size: float((lengths[: len(lengths) - size + 1] < size).mean())
        for size in NGRAMS
        if size <= len(lengths)
    }


# ------------------------------------------------------------------ nearest sentences


SENTENCES = 2000  # drawn evenly and read once by the model


class NearestSentences:
    """Evenly drawn sentences and the means of their last hidden states."""

    def __init__(self, model: "Model", index: TextIndex) -> None:
        self.model = model
        drawn = [
            part.passage(index.tokenizer, int(place), 1)
            for part in index.parts
            for place in np.linspace(0, len(part.places) - 1, SENTENCES // len(index.parts))
        ]
        self.passages = list({one.text: one for one in drawn if one.text.strip()}.values())
        logger.info("Reading {count:,} sentences of training text …", count=len(self.passages))
        vectors = model.embed([one.text for one in self.passages], truncate=True)
        # hidden states share a direction, without which the others are seen
        self.centre = vectors.mean(0)
        self.directions = _unit(vectors - self.centre)

    def near(self, text: str, top: int) -> tuple[NearPassage, ...]:
        similar = self.directions @ _unit(self.model.embed(text, truncate=True) - self.centre)
        chosen = [(self.passages[i], similar[i]) for i in np.argsort(-similar)[:top]]
        return tuple(NearPassage(one.text, one.document, float(share)) for one, share in chosen)


def _unit(vectors: "Float32Array") -> "Float32Array":
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    found: Float32Array = vectors / np.maximum(lengths, 1e-12)
    return found


# ------------------------------------------------------------------ a whole run

SAMPLES = 64  # texts written, and passages of the training text and the held-out text
LENGTH = 64  # tokens of each: half of them are given where the rest is to be completed
COPIES = 5  # of the longest ones that are shown


@dataclass(frozen=True, repr=False)
class Memorisation(Result):
    """Novelty by n of what the model writes and of held-out text, and what it knows by heart.

    A GPT knows a passage if its most likely continuation of one half is the other, token by token
    (Carlini et al. 2023); a BERT knows a hidden word if it is its first guess.
    """

    written: dict[int, float]
    held_out: dict[int, float]
    known: float  # share of passages of the training text
    known_held_out: float
    copies: tuple[Match, ...]  # the longest pieces of the training text in what it wrote
    indexed: int  # tokens of the training text

    def describe(self) -> str:
        return msg(
            "The model knows {known:.1%} of the passages of its training text by heart, and "
            "{held_out:.1%} of held-out ones.",
            known=self.known,
            held_out=self.known_held_out,
        )

    def tables(self) -> list[Table]:
        shares = [
            (size, f"{self.written[size]:.1%}" if size in self.written else "–", f"{share:.1%}")
            for size, share in self.held_out.items()
        ]
        copies = [(one.tokens, one.count, one.text) for one in self.copies]
        return [
            (("new n-grams, n", "in what it writes", "in held-out text"), shares),
            (("tokens", "times", "longest copies"), copies),
        ]


def report_memorisation(model: "Model", index: TextIndex) -> Memorisation:
    """Measures it on texts drawn evenly, and adds it to the page of the run."""
    training = _windows([part.store for part in index.parts], model.config.context)
    stores = [Store.open(part.store.folder.parent / "valid") for part in index.parts]
    held_out = _windows(stores, model.config.context)
    traces = [trace_text(index, text, "", 1, 1) for text in _written(model, held_out)]
    copies = [match for trace in traces for match in trace.matches]
    found = Memorisation(
        _mean([trace.novelty for trace in traces]),
        _mean([novelty(index.longest(index.array(window))) for window in held_out]),
        _known(model, training),
        _known(model, held_out),
        tuple(sorted(copies, key=lambda match: -match.tokens)[:COPIES]),
        index.size,
    )
    run = model.checkpoint.source
    if run is not None and index.parts[0].store.folder.is_relative_to(run):
        write_report(run, read_recipe(run / "recipe.json"), found)
    return found


def _windows(stores: Sequence[Store], context: int) -> list[list[int]]:
    """Passages drawn evenly from the text, each of one document."""
    size = min(LENGTH, context // 2)  # there is room for [CLS] and [SEP]
    found = []
    for store in (some for some in stores if len(some)):
        places = np.linspace(0, len(store.tokens) - 1, SAMPLES // len(stores)).astype(int)
        ends = store.documents[np.searchsorted(store.documents, places, "right")]
        ends = ends - (store.end is not None)
        found += [
            store.tokens[place : min(place + size, end)].tolist()
            for place, end in zip(places, ends, strict=True)
            if end - place >= size // 4
        ]
    return found


def _mean(found: Sequence[dict[int, float]]) -> dict[int, float]:
    sizes = sorted({size for one in found for size in one})
    return {size: float(np.mean([one[size] for one in found if size in one])) for size in sizes}


def _written(model: "Model", held_out: list[list[int]]) -> list[str]:
    """Continuations of the beginnings of held-out passages, drawn as the model gives them."""
    if "generate" not in model.abilities:
        return []
    prompts = [model.tokenizer.decode(window[: len(window) // 8]) for window in held_out]
    texts = model.generate(prompts, max_new_tokens=LENGTH, temperature=1.0, seed=0)
    return [text for text in texts if text.strip()]


def _known(model: "Model", windows: list[list[int]]) -> float:
    if not windows:
        return 0.0
    if "generate" in model.abilities:
        rows = [ScoredRow(window, len(window) // 2) for window in windows]
        return float(np.mean([greedy for _, greedy in token_logprobs(model.network, rows)]))
    return float(np.mean([_guessed(model, window) for window in windows]))


def _guessed(model: "Model", window: list[int]) -> bool:
    """Whether the token in the middle is what a BERT fills in for it."""
    words = model.tokenizer
    middle = len(window) // 2
    before, hidden, after = map(
        words.decode, (window[:middle], window[middle : middle + 1], window[middle + 1 :])
    )
    guess = model.fill(f"{before} {words.token(words.specials.mask or 0)} {after}", top=1)[0]
    return guess.token.strip() == hidden.strip()
