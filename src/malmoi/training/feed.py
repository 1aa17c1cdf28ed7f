"""The data of each step: a pure function of the step and the samples used, prefetched."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from malmoi.errors import MalmoiError, required
from malmoi.messages import logger
from malmoi.model import Bounds
from malmoi.tokenizer import Tokenizer
from malmoi.training.data.background import prefetched
from malmoi.training.data.captions import CaptionBatches, feature_rows, open_features
from malmoi.training.data.encode import Stores
from malmoi.training.data.loader import (
    IGNORE_LABEL,
    PACKED_MULTIPLE,
    ArrayBatch,
    BertBatches,
    LMBatches,
    MaskedWindows,
    Masking,
)
from malmoi.training.data.pairs import LanguageRows, Pairs, PairUnits, TranslationBatches
from malmoi.training.data.store import Store
from malmoi.training.data.windows import Mixture, Stretches, Windows
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe, TrainConfig

Tensors = dict[str, Any]  # inputs and labels of one pass


class MicroBatch(NamedTuple):
    """The tensors of one pass, and how many of their tokens are not padding."""

    tensors: Tensors
    tokens: int


class Stretch(NamedTuple):
    """Where a batch of a contiguous text lies: its first row, and the number of its segment."""

    row: int
    segment: int


class Samples(Protocol):
    """Batches by the number of their first sample."""

    def at(self, first: int, size: int) -> ArrayBatch: ...


@dataclass(frozen=True)
class PhaseFeed:
    """The samples of one phase; `length` is the tokens of a full sample."""

    samples: Samples
    length: int
    epoch: int  # samples in an epoch
    # for steps that mix kinds of batches: the share of each
    kinds: tuple[tuple[float, Samples], ...] = ()
    rows: int = 0  # of contiguous batches, which have no other size

    def micro(self, first: int, size: int, device: torch.device) -> MicroBatch:
        return self._micro(self.samples, first, size, device)

    def of_each_kind(self, first: int, size: int, device: torch.device) -> list[MicroBatch]:
        """Returns the same samples as a batch of each kind."""
        kinds = [samples for _, samples in self.kinds] or [self.samples]
        return [self._micro(samples, first, size, device) for samples in kinds]

    def _micro(self, samples: Samples, first: int, size: int, device: torch.device) -> MicroBatch:
        batch = samples.at(first, size)
        return MicroBatch(_tensors(batch, self.length, device), _real_tokens(batch))

    def _step(self, first: int, size: int, micro: int, device: torch.device) -> list[MicroBatch]:
        """Splits `size` sequences from sample `first` on into passes of one kind, up to `micro`."""
        kinds = self.kinds or ((1.0, self.samples),)
        counts = kind_counts([share for share, _ in kinds], size)
        passes = []
        for count, (_, samples) in zip(counts, kinds, strict=True):
            end = first + count
            starts = range(first, end, micro)
            passes += [self._micro(samples, at, min(micro, end - at), device) for at in starts]
            first = end
        return passes

    def stream(
        self, position: int, sizes: Iterator[int], micro: int, group: ProcessGroup
    ) -> AbstractContextManager[Iterator[tuple[int, list[MicroBatch]]]]:
        """Yields each step from sample `position` on: its sequences, and the passes made here."""

        def steps() -> Iterator[tuple[int, list[MicroBatch]]]:
            first = position
            for size in sizes:
                part = size // group.parts
                yield size, self._step(first + group.part * part, part, micro, group.device)
                first += size

        return prefetched(steps(), ahead=4)


def kind_counts(shares: Sequence[float], size: int) -> list[int]:
    """Sequences of each kind in a step, by share; one at least if there is room."""
    counts: list[int] = []
    for left, share in zip(reversed(range(len(shares))), shares, strict=True):
        room = size - sum(counts)
        counts.append(max(0, min(max(1, round(share * size)), room - left)) if left else room)
    return counts


def _real_tokens(batch: ArrayBatch) -> int:
    if "lm_labels" in batch:
        return int((batch["lm_labels"] != IGNORE_LABEL).sum())
    if "keep" in batch:
        return int(batch["keep"].sum())
    if "bounds" in batch:
        return int(batch["bounds"][len(batch["firsts"])])
    rows, width = batch["tokens"].shape
    return int(rows * (width - ("mlm_labels" not in batch)))


def _tensors(batch: ArrayBatch, length: int, device: torch.device) -> Tensors:
    """Moves arrays to the device; a language model's labels are its tokens shifted by one."""
    cuda = device.type == "cuda"
    tensors: Tensors = {}
    for name, array in batch.items():
        source = torch.from_numpy(array)
        tensors[name] = (source.pin_memory() if cuda else source).to(device, non_blocking=cuda)
    if "mlm_labels" not in tensors and "lm_labels" not in tensors:
        whole: Tensor = tensors["tokens"]
        tensors |= {"tokens": whole[:, :-1].contiguous(), "lm_labels": whole[:, 1:].contiguous()}
        if "documents" in tensors:
            tensors["documents"] = tensors["documents"][:, :-1].contiguous()
    if "stretch" in batch:
        tensors["stretch"] = Stretch(*batch["stretch"].tolist())
    if "bounds" in tensors:
        tensors["bounds"] = Bounds(tensors["bounds"], max(length, PACKED_MULTIPLE))
    return tensors


def samples_per_epoch(recipe: Recipe, feeds: Sequence[PhaseFeed]) -> float:
    """Samples of an epoch, by each phase's share of the budget."""
    return sum(share * feed.epoch for feed, (_, share) in zip(feeds, recipe.phases, strict=True))


def batch_sizes(c: TrainConfig, seen: int, samples: float, world: int) -> Iterator[int]:
    """Sequences of each step; GPT-3's grow with the tokens seen (Brown et al. 2020 appendix B)."""
    start = c.batch_start or c.batch
    ramp = c.batch_ramp * samples
    while True:
        share = 1.0 if seen >= ramp else seen / ramp
        size = max(world, int(start + share * (c.batch - start)) // world * world)
        yield size
        seen += size


VALID_SEGMENTS = 8  # at least this many in a validation row, if the text is long enough
PROMPT_WORDS = 3  # words of the text that prompt a language model's samples
GAP_SENTENCE_TOKENS = range(5, 25)  # lengths of sentences that suit a fill-in sample


def make_feeds(
    recipe: Recipe, stores: list[Stores], words: Tokenizer, *, packed: bool
) -> tuple[list[PhaseFeed], list[PhaseFeed]]:
    """Makes the samples of every phase and its validation (none if the text is too short)."""
    packed = recipe.data.packed if recipe.data.packed is not None else packed
    train = [s.train for s in stores]
    feeds = [_feed(recipe, train, words, length, packed=packed) for length, _ in recipe.phases]
    held = [s.valid for s in stores]
    try:
        return feeds, [
            _feed(recipe, held, words, length, packed=False, others=train)
            for length, _ in recipe.phases
        ]
    except MalmoiError:
        return feeds, []


def _feed(
    recipe: Recipe,
    stores: list[Store],
    words: Tokenizer,
    length: int,
    *,
    packed: bool,
    others: list[Store] | None = None,
) -> PhaseFeed:
    seed = recipe.train.seed
    d = recipe.data
    if d.features:
        return _captions(recipe, stores[0], words, valid=others is not None)
    if recipe.objective == "translation":
        return _translations(recipe, stores[0], words, length)
    if recipe.model.memory:
        return _contiguous(recipe, stores[0], length, valid=others is not None)
    alone: list[Store | None] = [None] * len(stores)
    pairs = zip(stores, others or alone, strict=True)
    parts = [_source(recipe, store, words, length, other) for store, other in pairs]
    source = parts[0] if len(parts) == 1 else Mixture(parts, d.weights, seed)
    if recipe.causal:
        causal = LMBatches(source)
        if recipe.samples != "both":
            return PhaseFeed(causal, length, len(source))
        cuts = length // (d.masked_length or length)
        masked = MaskedWindows(source, Masking.of(words, d), seed, cuts)
        kinds = ((d.causal_share, causal), (1 - d.causal_share, masked))
        return PhaseFeed(causal, length, len(source), kinds)
    own = d.own_masks if recipe.samples == "mlm+rtd" else 0.0
    batches = BertBatches(source, Masking.of(words, d), words.specials.pad or 0, seed, packed, own)
    return PhaseFeed(batches, length, len(source))


def _contiguous(recipe: Recipe, store: Store, length: int, *, valid: bool) -> PhaseFeed:
    rows = recipe.train.batch
    if valid:  # few rows, so that each can remember
        rows = max(1, min(rows, (len(store.tokens) - 1) // (VALID_SEGMENTS * length)))
    source = Stretches(store, length, rows)
    return PhaseFeed(source, length, len(source), rows=rows)


def _captions(recipe: Recipe, store: Store, words: Tokenizer, *, valid: bool) -> PhaseFeed:
    features = open_features(recipe.data.features)
    rows = feature_rows(store, len(features), recipe.data.valid, valid=valid)
    room = recipe.model.context - recipe.model.feature_count
    pad = words.specials.pad or 0
    batches = CaptionBatches(store, rows, features, room, pad, recipe.train.seed)
    return PhaseFeed(batches, recipe.model.context, len(store))


def _translations(recipe: Recipe, store: Store, words: Tokenizer, length: int) -> PhaseFeed:
    end = required(
        words.specials.eos, "This tokenizer has no end-of-text token: a decoder needs one."
    )
    units = PairUnits(store, length, recipe.train.batch, recipe.train.seed)
    if units.left_out:
        logger.warning(
            "{left_out:,} pairs with more than {length} tokens on one side are skipped.",
            left_out=units.left_out,
            length=length - 1,
        )
    return PhaseFeed(TranslationBatches(units, end, words.specials.pad or 0), length, len(units))


def regrouped(feed: PhaseFeed, batch: int) -> PhaseFeed:
    """The same samples for another batch: pairs of similar length come a batch at a time."""
    if not isinstance(feed.samples, TranslationBatches):
        return feed
    units = replace(feed.samples.units, group=batch)
    return replace(feed, samples=replace(feed.samples, units=units), epoch=len(units))


def _source(
    recipe: Recipe, store: Store, words: Tokenizer, length: int, others: Store | None
) -> Any:
    seed = recipe.train.seed
    d = recipe.data
    if d.pairs:
        return LanguageRows(store, length, seed, words.specials, d.together)
    if recipe.causal:
        shuffled = d.shuffle == "documents" and others is None  # validation keeps its order
        return Windows(store, length, seed, documents=d.document_mask, shuffled=shuffled)
    following: Any = {"mlm+nsp": "nsp", "mlm+sop": "sop"}.get(recipe.samples)
    kind = dict(specials=words.specials, next=following, short=d.short, others=others)
    return Pairs(store, length, seed, **kind)


# ------------------------------------------------------------------ sample prompts


def prompt_of(recipe: Recipe, stores: list[Stores], words: Tokenizer) -> str:
    """The prompt to continue or fill: the recipe's, or a piece of the run's text."""
    if recipe.train.prompt:
        return recipe.train.prompt
    store = next((s for one in stores for s in (one.valid, one.train) if len(s.tokens)), None)
    if store is None or recipe.data.features:
        return ""
    if recipe.objective == "translation" and store.sentences is not None:
        return words.decode(store.tokens[: store.sentences[1]].tolist())
    if not recipe.causal:
        return _gap(store, words)
    text = words.decode(store.tokens[:60].tolist()).lstrip()
    return " ".join(text.split(maxsplit=PROMPT_WORDS)[:PROMPT_WORDS])


def _gap(store: Store, words: Tokenizer) -> str:
    """The first sentence of suitable length, with [MASK] for a word in its middle."""
    starts = store.sentences if store.sentences is not None else store.documents
    fair = np.flatnonzero(np.isin(np.diff(starts[:1000]), GAP_SENTENCE_TOKENS))
    if not len(fair) or words.specials.mask is None:
        return ""
    ids = store.tokens[starts[fair[0]] : starts[fair[0] + 1]].tolist()
    whole = [not words.token(i).startswith("##") for i in [*ids, ids[0]]]
    half = len(ids) // 2
    places = (i for i in range(half, len(ids)) if whole[i] and whole[i + 1])
    middle = next((i for i in places if words.token(ids[i]).isalpha()), half)
    before, after = words.decode(ids[:middle]), words.decode(ids[middle + 1 :])
    return " ".join(filter(None, (before, words.token(words.specials.mask), after)))
