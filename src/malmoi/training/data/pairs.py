"""Samples of two texts: BERT's segments, and translations for a decoder or an MLM (TLM).

BERT's are whole sentences, by the rule of google's create_pretraining_data; starts are sorted, so
lookups are O(log n). Translations come in batches of so many tokens, pairs of similar length
together: an epoch sorts its pairs by length, shuffled among equals, and cuts them into units of at
most `length` tokens a side; batches are runs of `group` units, in random order. Every sample is a
pure function of its number. B samples, T tokens of the longest target, S of the longest source.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.errors import MalmoiError, require_that
from malmoi.tokenizer.core import Specials
from malmoi.training.data.loader import IGNORE_LABEL, WIDTH_MULTIPLE, ArrayBatch, round_up
from malmoi.training.data.permute import (
    Draws,
    Ints,
    permutation_key,
    permute_all,
    permute_epochs,
    permute_grid,
)
from malmoi.training.data.store import Store

Floats = NDArray[np.float64]
Next = Literal["nsp", "sop"] | None


@dataclass
class Pairs:
    """[CLS] A [SEP] B [SEP], or with `next=None` the single [CLS] A [SEP].

    Label 1 of nsp is a B from a random other document, of sop A and B swapped; 0: B follows A.
    Random Bs come from `others` if given, because a validation store may hold a single document.
    """

    store: Store
    context: int
    seed: int
    _: KW_ONLY
    specials: Specials
    next: Next = "nsp"
    short: float = 0.1
    others: Store | None = None

    def __post_init__(self) -> None:
        self._others = self.store if self.others is None else self.others
        self._sentences = _sentences(self.store)
        self._other_sentences = _sentences(self._others)
        self.store.ensure(
            self.next != "nsp" or self._others is not self.store or len(self.store) >= 2,
            "Next-sentence prediction needs two documents, but {folder} has one: separate them by "
            "blank lines (--set data.documents=blank), or train without it (mlm or mlm+sop).",
        )
        self._cls, self._sep = frame_of(self.specials)
        self.room = self.context - (3 if self.next else 2)
        require_that(
            self.room >= 2,
            "A context of {context} leaves no room for text between the special tokens.",
            context=self.context,
        )
        self.count = max(1, len(self.store.tokens) // self.room)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: ArrayLike) -> dict[str, Ints]:
        """Returns tokens [B, T] (0: padding), segments [B, T], lengths [B], labels [B]."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        draws = Draws(self.seed, numbers).random((len(numbers), 7)).T
        # all the room, or for a share of `short` a random length from 2 up
        lengths = 2 + (draws[0] / max(self.short, 1e-9) * (self.room - 1)).astype(np.int64)
        target = np.where(draws[0] < self.short, np.minimum(lengths, self.room), self.room)
        first, last, document = self._chunk(numbers, target)
        if self.next is None:
            start = self._sentences[first]
            a = Spans(start, np.minimum(self._sentences[last], start + self.room))
            return self._assemble(a, None, np.zeros(len(numbers), bool))
        a, b = self._split(first, last, draws[1])
        turned = draws[2] < 0.5
        if self.next == "nsp":
            turned |= b.length == 0  # a document of one token: nothing follows it
            b = b.where(turned, self._random(document, target - a.length, draws[3:5]))
        a, b = truncate(a, b, self.room, draws[5:7])
        if self.next == "sop":
            a, b = a.where(turned, b), b.where(turned, a)
        return self._assemble(a, b, turned)

    def _chunk(self, numbers: Ints, target: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns first sentence, end (exclusive) and document of a chunk of the target length."""
        sentences = self._sentences
        documents = self.store.documents
        grid = permute_grid(numbers, self.count, self.seed, 2, self.room, self.room)
        first = np.searchsorted(sentences, grid) % (len(sentences) - 1)
        document = np.searchsorted(documents, sentences[first], side="right") - 1
        begin, end = (np.searchsorted(sentences, documents[document + more]) for more in (0, 1))
        last = np.maximum(np.searchsorted(sentences, sentences[first] + target), first + 1)
        # a pair needs two sentences: take the next one, or at the end of a document the one before
        if self.next:
            last = np.maximum(last, first + 2)
            first = np.maximum(np.minimum(first, end - 2), begin)
        return first, np.minimum(last, end), document

    def _split(self, first: Ints, last: Ints, draw: Floats) -> tuple["Spans", "Spans"]:
        """Splits A and B at a random sentence boundary; a single sentence is cut in two."""
        start = self._sentences[first]
        stop = self._sentences[last]
        boundary = self._sentences[first + 1 + (draw * (last - first - 1)).astype(np.int64)]
        middle = np.where(last - first > 1, boundary, (start + stop + 1) // 2)
        return Spans(start, middle), Spans(middle, stop)

    def _random(self, document: Ints, room: Ints, draws: Floats) -> "Spans":
        """Spans that start at a random sentence of another document and fill the room A leaves."""
        sentences = self._other_sentences
        documents = self._others.documents
        same = self._others is self.store
        chosen = (draws[0] * (len(self._others) - same)).astype(np.int64)
        chosen += same & (chosen >= document)
        begin, end = (np.searchsorted(sentences, documents[chosen + more]) for more in (0, 1))
        first = begin + (draws[1] * (end - begin)).astype(np.int64)
        last = np.searchsorted(sentences, sentences[first] + np.maximum(room, 1))
        return Spans(sentences[first], sentences[np.clip(last, first + 1, end)])

    def _assemble(
        self, a: "Spans", b: "Spans | None", turned: NDArray[np.bool_]
    ) -> dict[str, Ints]:
        """Adds the special tokens around the spans."""
        lengths = a.length + 2 + (b.length + 1 if b is not None else 0)
        tokens = np.zeros((len(lengths), int(lengths.max())), np.int64)
        segments = np.zeros_like(tokens)
        tokens[:, 0] = self._cls
        ours = self.store.tokens
        others = self._others.tokens
        for row, (start, stop) in enumerate(a):
            tokens[row, 1 : stop - start + 1] = ours[start:stop]
            tokens[row, stop - start + 1] = self._sep
        for row, (start, stop) in enumerate(b or ()):
            source = others if turned[row] and self.next == "nsp" else ours
            at = int(a.length[row]) + 2
            end = at + stop - start
            tokens[row, at:end] = source[start:stop]
            tokens[row, end] = self._sep
            segments[row, at : end + 1] = 1
        labels = turned.astype(np.int64)
        return {"tokens": tokens, "segments": segments, "lengths": lengths, "labels": labels}


@dataclass(frozen=True)
class Spans:
    """One span of a store per sample."""

    start: Ints
    stop: Ints

    @property
    def length(self) -> Ints:
        return self.stop - self.start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.start.tolist(), self.stop.tolist(), strict=True)

    def where(self, condition: NDArray[np.bool_], other: "Spans") -> "Spans":
        """`other` where the condition holds."""
        start = np.where(condition, other.start, self.start)
        return Spans(start, np.where(condition, other.stop, self.stop))


def truncate(a: Spans, b: Spans, room: int, draws: Floats) -> tuple[Spans, Spans]:
    """BERT's truncate_seq_pair in closed form: cuts the longer (B if equal) at either end."""
    excess = np.maximum(a.length + b.length - room, 0)
    first = np.minimum(excess, np.abs(a.length - b.length))
    rest = excess - first
    off_a = np.where(a.length > b.length, first, 0) + rest // 2
    off_b = np.where(b.length > a.length, first, 0) + (rest + 1) // 2
    radius = np.sqrt(-2 * np.log1p(-draws[0]))  # Box–Muller: two normals from two uniforms
    front_a = _coins(off_a, radius * np.cos(2 * np.pi * draws[1]))
    front_b = _coins(off_b, radius * np.sin(2 * np.pi * draws[1]))
    a = Spans(a.start + front_a, a.stop - off_a + front_a)
    return a, Spans(b.start + front_b, b.stop - off_b + front_b)


def _coins(tossed: Ints, normal: Floats) -> Ints:
    """The number of heads among this many coins: a rounded normal (within 2 % for two coins)."""
    heads = np.rint(tossed / 2 + np.sqrt(tossed) / 2 * normal).astype(np.int64)
    return np.clip(heads, 0, tossed)


def _sentences(store: Store) -> Ints:
    starts = store.sentences
    store.ensure(
        starts is not None,
        "{folder} was built without sentences, which pairs need; build it with them.",
    )
    store.ensure(len(store), "{folder} has no document to make samples from: give more text.")
    return cast(Ints, starts)


def frame_of(specials: Specials) -> tuple[int, int]:
    if specials.cls is None or specials.sep is None:
        raise MalmoiError("This tokenizer has no [CLS] and [SEP] for BERT: use a WordPiece one.")
    return specials.cls, specials.sep


def pair_sides(store: Store) -> Ints:
    """Where each pair's source starts, its target starts, and it ends: [N, 3]."""
    starts = store.sentences
    store.ensure(
        starts is not None and len(starts) == 2 * len(store) + 1,
        "{folder} does not hold sentence pairs; remove it to rebuild it.",
    )
    starts = cast(Ints, starts)
    return np.stack((starts[:-1:2], starts[1::2], starts[2::2]), 1)


@dataclass(eq=False)
class PairUnits:
    """The pairs of a store in units of up to `length` padded tokens on the longer side."""

    store: Store
    length: int
    group: int  # units that follow one another in the order of lengths
    seed: int

    def __post_init__(self) -> None:
        sides = pair_sides(self.store)
        # pairs that are longer than a unit are left out
        self.sides = sides[np.diff(sides).max(1, initial=0) < self.length]
        self.left_out = len(sides) - len(self.sides)
        self.store.ensure(
            len(self.sides),
            "{folder} has no pair of at most {length} tokens per side.",
            length=self.length,
        )
        # tokens of each pair's longer side, with the end
        self._longest: Ints = np.diff(self.sides).max(1) + 1
        self._cuts = self._unit_starts()

    def __len__(self) -> int:
        return -(-len(self._cuts) // self.group) * self.group

    def _unit_starts(self) -> Ints:
        """Where units start in the order of lengths: as many pairs as fit, at least one."""
        widths = np.sort(self._longest)
        cuts = []
        start = 0
        while start < len(widths):
            cuts.append(start)
            # widths grow: the n-th pair from here makes n × its own width
            here = widths[start : start + self.length]
            fits = here * np.arange(1, 1 + len(here))
            start += max(1, int(np.searchsorted(fits, self.length, side="right")))
        return np.array(cuts)

    @lru_cache(maxsize=2)  # noqa: B019  # one for each phase of a run, as long as the run
    def _order(self, epoch: int) -> Ints:
        """The pairs of an epoch by length, shuffled among equals."""
        count = len(self._longest)
        draws = Draws(permutation_key(self.seed, epoch, 8), np.arange(count)).random((count, 1))
        return np.lexsort((draws[:, 0], self._longest))

    def pairs(self, first: int, size: int) -> Ints:
        """The numbers of the pairs in `size` units from unit `first` on."""
        return np.concatenate([self._unit(number) for number in range(first, first + size)])

    def _unit(self, number: int) -> Ints:
        epoch, place = divmod(number, len(self))
        batch, within = divmod(place, self.group)
        batches = len(self) // self.group
        batch = int(permute_all([batch], batches, permutation_key(self.seed, epoch, 9))[0])
        unit = (batch * self.group + within) % len(self._cuts)
        start = self._cuts[unit]
        stop = self._cuts[unit + 1] if unit + 1 < len(self._cuts) else None
        return self._order(epoch)[start:stop]


@dataclass(frozen=True)
class TranslationBatches:
    """source [B, S] and tokens [B, T], padded: the target starts with the end token (`end`)."""

    units: PairUnits
    end: int
    pad: int

    def at(self, first: int, size: int) -> ArrayBatch:
        start, middle, stop = self.units.sides[self.units.pairs(first, size)].T
        source, source_keep = self._ended(start, middle - start, self.pad)
        labels, _ = self._ended(middle, stop - middle, IGNORE_LABEL)
        shifted = np.roll(labels, 1, axis=1)
        shifted[:, 0] = self.end
        # the end follows its last label, and padding needs no mask: no token sees a later one
        past = np.arange(labels.shape[1]) > (stop - middle)[:, None]
        return {
            "source": source,
            "source_keep": source_keep,
            "tokens": np.where(past, self.pad, shifted),
            "lm_labels": labels,
        }

    def _ended(self, starts: Ints, lengths: Ints, fill: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Spans of the store with the end after each, and which places hold a token."""
        places = np.arange(round_up(int(lengths.max()) + 1, WIDTH_MULTIPLE))
        tokens = self.units.store.tokens
        found = tokens[np.minimum(starts[:, None] + places, len(tokens) - 1)].astype(np.int64)
        found = np.where(places == lengths[:, None], self.end, found)
        keep = places <= lengths[:, None]
        return np.where(keep, found, fill), keep


@dataclass(eq=False)
class LanguageRows:
    """Rows for a masked language model of two languages (Lample & Conneau 2019 §3).

    A share is a pair, [CLS] A [SEP] [CLS] B [SEP], whose masks the other language can fill (TLM);
    the others are one side. Segments are the languages, and positions start again with B.
    """

    store: Store
    context: int
    seed: int
    specials: Specials
    together: float  # share of the pairs

    def __post_init__(self) -> None:
        self.sides = pair_sides(self.store)
        self.store.ensure(len(self), "{folder} has no sentence pairs.")

    def __len__(self) -> int:
        return len(self.sides)

    def batch(self, indices: ArrayLike) -> dict[str, Ints]:
        """Returns tokens, segments and positions [B, T], lengths [B], and labels [B] of no use."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        both, side = Draws(permutation_key(self.seed, 10), numbers).random((len(numbers), 2)).T
        pair = both < self.together
        pairs = self.sides[permute_epochs(numbers, len(self), self.seed, 11)]
        room = np.where(pair, self.context // 2, self.context)[:, None] - 2
        framed = np.minimum(np.diff(pairs), room) + 2  # tokens of each side with [CLS] and [SEP]
        shown = np.stack((pair | (side < 0.5), pair | (side >= 0.5)), 1)
        first, second = (framed * shown).T
        return self._assemble(pairs, first, second)

    def _assemble(self, pairs: Ints, first: Ints, second: Ints) -> dict[str, Ints]:
        """Rows of sides with these many tokens, their frames included; 0: the side is not there."""
        cls, sep = frame_of(self.specials)
        places = np.arange(int((first + second).max()))
        other = places >= first[:, None]
        positions = places - np.where(other, first[:, None], 0)
        starts = np.where(other, pairs[:, 1:2], pairs[:, :1])
        text = np.minimum(starts + np.maximum(positions - 1, 0), len(self.store.tokens) - 1)
        tokens = self.store.tokens[text].astype(np.int64)
        last = np.where(other, second[:, None], first[:, None]) - 1
        tokens = np.where(positions == last, sep, np.where(positions == 0, cls, tokens))
        keep = places < (first + second)[:, None]
        return {
            "tokens": np.where(keep, tokens, 0),
            "segments": (other & keep).astype(np.int64),
            "positions": np.where(keep, positions, 0),
            "lengths": first + second,
            "labels": np.zeros(len(pairs), np.int64),
        }
