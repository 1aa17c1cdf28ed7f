"""A forward pass as it is: attention, hidden states, the logit lens; and one with interventions.

B batch, L layers, H heads, T tokens, V classes or tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.errors import require_known, require_that
from malmoi.inference.base import LoadedModel
from malmoi.inference.batches import model_inputs
from malmoi.inference.embed import Float32Array
from malmoi.inference.predict import name_of
from malmoi.inference.prompt import check_length, encode_prompt, require_fit
from malmoi.interpret.intervention import (
    Intervention,
    Place,
    Tap,
    chained,
    changed_patterns,
    position_in,
    recorder,
    run_layers,
    view_with_taps,
)
from malmoi.messages import msg
from malmoi.model import Activations, Network
from malmoi.model.heads import HEADS, LABEL_HEADS, POOLED_HEADS, VOCABULARY_HEADS
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding

MAX_ATTENTION_NUMBERS = 4_000_000  # numbers of one attention map
MAX_GUESSES = 1_000_000  # numbers of one lens
HEAD_TOKENS = 128  # positions whose logits are held at the same time
READ_HEADS = [name for name in HEADS if name in LABEL_HEADS | VOCABULARY_HEADS]
Interventions = Sequence[Intervention]
Reading = Literal["causal", "masked"]
AnyModel = TypeVar("AnyModel", bound=LoadedModel)


# ------------------------------------------------------------------ attention and hidden states


@dataclass(frozen=True)
class AttentionMaps:
    """How much each token attends to each other one."""

    tokens: list[str]
    words: list[int | None]  # the word each token belongs to; None: no word, such as [CLS]
    segments: list[int]  # 1 for the second text of a pair
    # [L, H, T, T]: a query's row sums to 1, minus its attention to soft tokens before the text
    weights: Float32Array


def chosen_reader(model: AnyModel, reading: Reading | None) -> AnyModel:
    """A model trained both ways in the reading that was asked for; masked if none was."""
    require_that(
        reading is None or model.config.both_ways,
        "This model reads in one way only: leave `reading` out.",
    )
    return model if reading == "causal" else model.masked


def attention(
    model: LoadedModel, text: str, pair: str | None = None, limit: int = MAX_ATTENTION_NUMBERS
) -> AttentionMaps:
    """The attention of every head while the model reads a text or a pair of texts."""
    model.network.require_attention("The attention view")
    encoding = encode_for_model(model, text, pair)
    size = len(encoding.tokens)
    c = model.config
    longest = int((limit / (c.depth * c.heads)) ** 0.5)
    check_length(size, longest, "the attention map's limit")
    seen = first_rows(_activations(model, encoding, attention=[]).attention or [])
    names = [model.tokenizer.token(token) for token in encoding.tokens]
    return AttentionMaps(names, encoding.words, encoding.segments, seen[:, :, -size:, -size:])


def word_groups(seen: AttentionMaps) -> list[list[int]]:
    """The positions of each word's tokens; a token outside words is a group of its own."""

    def word(i: int) -> tuple[int, int]:
        number = seen.words[i]
        return (seen.segments[i], number) if number is not None else (-1, i)

    return [list(places) for _, places in groupby(range(len(seen.tokens)), key=word)]


def by_words(weights: Float32Array, groups: Sequence[Sequence[int]]) -> Float32Array:
    """Attention *to* a word is summed, *from* it averaged (Clark et al. 2019 §4.1)."""
    columns = np.stack([weights[..., group].sum(-1) for group in groups], -1)
    return np.stack([columns[..., group, :].mean(-2) for group in groups], -2)


def encode_for_model(model: LoadedModel, text: str, pair: str | None = None) -> Encoding:
    """A text or a pair of texts as the model reads it; one that is too long is refused."""
    causal = model.network.trunk.is_causal
    require_that(
        not causal or pair is None, "This model reads one text at a time: join both into one."
    )
    encoding = (
        encode_prompt(model.tokenizer, text)
        if causal
        else model.tokenizer.encode_masked(text, pair)
    )
    return require_fit(encoding, model.config.context)


def hidden_states(model: LoadedModel, text: str, pair: str | None = None) -> Float32Array:
    """Hidden states of a text's tokens [L + 1, T, D]."""
    return first_rows(_activations(model.masked, _plain(model, text, pair)).hidden)


def attention_probabilities(model: LoadedModel, text: str, pair: str | None = None) -> Float32Array:
    """Attention probabilities [L, H, T, T] of each token (row) over the others."""
    seen = _activations(model.masked, _plain(model, text, pair), attention=[])
    return first_rows(seen.attention or [])


def _plain(model: LoadedModel, text: str, pair: str | None) -> Encoding:
    """A text or a pair as the model's tokenizer encodes it, without a look for masks."""
    if pair is None:
        return model.masked._encoded(text, truncate=False)
    return require_fit(model.tokenizer.encode(text, pair), model.config.context)


@torch.inference_mode()
def _activations(
    model: LoadedModel, encoding: Encoding, attention: list[Tensor] | None = None
) -> Activations:
    found = Activations(attention=attention)
    model.network.trunk(**model_inputs(model.network, [encoding]), activations=found)
    return found


def first_rows(layers: Sequence[Tensor]) -> Float32Array:
    """The first row of each layer's batch, as one array."""
    return torch.stack([layer[0] for layer in layers]).float().cpu().numpy()


# ------------------------------------------------------------------ the logit lens


@dataclass(frozen=True)
class LayerGuess:
    """A token that a layer finds likely at a position."""

    token: str
    probability: float


@dataclass(frozen=True)
class Lens:
    """Each layer's predictions as if it were the last (the logit lens, nostalgebraist 2020)."""

    tokens: list[str]
    # [L + 1][T][top]: the embedding first; a GPT's guesses are about the next token
    guesses: list[list[list[LayerGuess]]]


def likeliest(scores: Tensor, classes: int, top: int) -> Iterator[list[tuple[int, float]]]:
    """The likeliest of the first classes in each row, and their probabilities."""
    chances = scores.softmax(-1)[:, :classes]
    best = chances.topk(min(top, chances.size(-1)))
    for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        yield list(zip(ids, row, strict=True))


@torch.inference_mode()
def lens(model: LoadedModel, text: str, top: int = 5, pause: Callable[[], object] = bool) -> Lens:
    """The likeliest tokens by layer and position: final norm and head on each layer's states.

    `pause` is called between parts, where a server lets others have their turn.
    """
    head = model.network.require_language_head()
    size = model.tokenizer.vocab_size
    require_that(
        1 <= top <= size,
        "top must be between 1 and {vocab_size}, not {top}.",
        vocab_size=size,
        top=top,
    )
    encoding = encode_for_model(model, text)
    places = MAX_GUESSES // (top * (model.config.depth + 1))
    limit = msg("the lens limit with {top} guesses", top=top)
    check_length(len(encoding.tokens), places, limit)
    name = model.tokenizer.token

    def guesses(states: Tensor) -> list[list[LayerGuess]]:
        """One layer's predictions at each position; padding of the vocabulary is left out."""
        found = []
        for part in torch.arange(states.size(1), device=states.device).split(HEAD_TOKENS):
            pause()
            rows = likeliest(model.network.read(head, states, slots=part).float(), size, top)
            found += [[LayerGuess(name(token), p) for token, p in row] for row in rows]
        return found

    # the last layer's states are already normalised
    *before, last = _activations(model, encoding).hidden
    states = [*map(model.network.trunk.norm, before), last]
    return Lens([name(token) for token in encoding.tokens], [guesses(state) for state in states])


# ------------------------------------------------------------------ with interventions


@dataclass(frozen=True, repr=False)
class Guess(Result):
    """A token or a label, and its probability."""

    name: str
    probability: float


@dataclass(frozen=True, repr=False)
class ForwardResult(Result):
    """The result of a forward pass on a text.

    A GPT answers after its last token, a BERT at each mask (at every token without one), a tagger
    at every token, a classifier once, with no position.
    """

    tokens: tuple[str, ...]
    positions: tuple[int, ...]  # positions of the answers
    guesses: tuple[tuple[Guess, ...], ...]  # most likely answers at each position
    logits: Float32Array = field(repr=False)  # [positions, V]
    # [L + 1, T, D], as `hidden_states`
    hidden: Float32Array | None = field(default=None, repr=False)
    # [L, H, T, T]
    attention: Float32Array | None = field(default=None, repr=False)


class Subject(LoadedModel):
    """A model to intervene on: its encoding and its head."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        require_that(
            checkpoint.network.reader is None,
            "Interventions do not support a feature model on frozen layers.",
        )
        super().__init__(checkpoint)

    @cached_property
    def head(self) -> str:
        """The name of the head that answers; "" without one."""
        return next((name for name in READ_HEADS if name in self.network.heads), "")

    @property
    def labels_texts(self) -> bool:
        """Whether the model predicts one label per text."""
        return self.head in LABEL_HEADS & POOLED_HEADS

    def require_answer(self) -> None:
        """Raises an error unless the model predicts tokens or one label per text."""
        require_that(
            self.labels_texts or self.head in VOCABULARY_HEADS,
            "This needs a model with a language head, a masked one, or a classifier.",
        )

    def label_index(self, label: str) -> int:
        require_known(label, self.labels, "This model has no label {name!r}.{hint}")
        return self.labels.index(label)

    def encode(self, text: str) -> Encoding:
        if self.head == "lm" or (not self.head and self.network.trunk.is_causal):
            encoding = encode_prompt(self.tokenizer, text)
        elif self.head == "mlm":
            encoding = self.tokenizer.encode_masked(text)
        else:
            encoding = self.tokenizer.encode(text, max_tokens=self.predictor.max_tokens)
        return require_fit(encoding, self.config.context)

    def inputs(self, encodings: Sequence[Encoding]) -> dict[str, Tensor | None]:
        return model_inputs(self.network, encodings)

    def answer_positions(self, encoding: Encoding) -> list[int]:
        """Where the model answers; none for a classifier, which answers once."""
        if self.labels_texts or not self.head:
            return []
        if self.head == "lm":
            return [len(encoding.tokens) - 1]
        masks = [i for i, t in enumerate(encoding.tokens) if t == self.tokenizer.specials.mask]
        return masks or list(range(len(encoding.tokens)))

    def scores(self, network: Network, hidden: Tensor, at: Sequence[int]) -> Tensor:
        """The head's scores [B · positions, V] at positions of texts of one length [B, T, D]."""
        if not self.head:
            return hidden.new_empty(0, 0)
        if self.labels_texts:
            return network.read(self.head, hidden)
        if self.head in LABEL_HEADS:
            return network.read(self.head, hidden)[:, list(at)].flatten(0, 1)
        rows = torch.arange(len(hidden), device=hidden.device)[:, None] * hidden.size(1)
        slots = (rows + torch.tensor(at, device=hidden.device)).flatten()
        return network.read(self.head, hidden, slots=slots)

    def name(self, i: int) -> str:
        """The name of a class of the head."""
        return name_of(self.labels, i) if self.head in LABEL_HEADS else self.tokenizer.token(i)

    @torch.inference_mode()
    def run(
        self,
        text: str,
        interventions: Interventions = (),
        *,
        positions: Sequence[int] | None = None,
        top: int = 5,
        hidden: bool = False,
        attention: bool = False,
    ) -> ForwardResult:
        """One forward pass; `positions` are those where the model answers unless given."""
        require_that(top >= 1, "top must be 1 or more, not {top}.", top=top)
        encoding = self.encode(text)
        network = network_with(self, interventions)
        seen: list[Tensor] | None = [] if attention else None
        states = run_layers(network.trunk, self.inputs([encoding]), (), seen)
        last = network.trunk.norm(states[-1])
        asked = self.answer_positions(encoding) if positions is None else positions
        at = [position_in(i, len(encoding.tokens)) for i in asked]
        scores = self.scores(network, last, at).float()
        return ForwardResult(
            tokens=tuple(map(self.tokenizer.token, encoding.tokens)),
            positions=tuple(at),
            guesses=self._guesses(scores, top),
            logits=scores.cpu().numpy(),
            hidden=first_rows([*states[:-1], last]) if hidden else None,
            attention=first_rows(seen) if seen else None,
        )

    def _guesses(self, scores: Tensor, top: int) -> tuple[tuple[Guess, ...], ...]:
        # padding of the vocabulary is left out
        known = len(self.labels) if self.head in LABEL_HEADS else self.tokenizer.vocab_size
        rows = likeliest(scores, known or scores.size(-1), top)
        return tuple(tuple(Guess(self.name(i), p) for i, p in row) for row in rows)


def network_with(subject: Subject, interventions: Interventions) -> Network:
    """A view of the network with interventions; sources are read without them."""
    network = subject.network
    c = network.config
    if not interventions:
        return network
    recorded = _recorded(subject, interventions)
    taps: dict[Place, Tap] = {}
    bypassed: dict[int, tuple[int, ...] | None] = {}
    for one in interventions:
        for place in one.places(c):
            if one.site == "layer":
                bypassed[place[1]] = one.positions
                continue
            tap = one.tap(c, None if one.source is None else recorded[one.source][place])
            taps[place] = chained(taps[place], tap) if place in taps else tap
    return view_with_taps(network, taps, bypassed, changed_patterns(c, interventions))


def _recorded(subject: Subject, interventions: Interventions) -> dict[str, dict[Place, Tensor]]:
    """The activations of each source at the places that they are copied to."""
    found: dict[str, dict[Place, Tensor]] = {}
    for one in interventions:
        if one.source is not None and one.source not in found:
            seen = found.setdefault(one.source, {})
            same = [other for other in interventions if other.source == one.source]
            places = [place for other in same for place in other.places(subject.network.config)]
            view = view_with_taps(subject.network, {at: recorder(seen, at) for at in places})
            run_layers(view.trunk, subject.inputs([subject.encode(one.source)]))
    return found


def model_with(model: AnyModel, interventions: Interventions) -> AnyModel:
    """A model whose methods all run under interventions that hold for any text."""
    for one in interventions:
        require_that(
            not one.needs_one_text,
            "{one!r} depends on the positions of one text: give it to run(text, […]).",
            one=one,
        )
    view = network_with(Subject(model.checkpoint), interventions)
    causal = model.network.trunk.is_causal
    require_that(
        not causal or view.trunk.is_causal,
        "A GPT whose mask shows later tokens cannot generate: use run(text, […]).",
    )
    changed = type(model)(replace(model.checkpoint, network=view))
    changed.__dict__["_causal"] = causal  # a text is encoded as the model was trained to read it
    return changed
