"""A forward pass with interventions, and its answer. B batch, T tokens, V classes or tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, require_known
from malmoi.inference.base import LoadedModel
from malmoi.inference.batches import model_inputs
from malmoi.inference.embed import Float32Array
from malmoi.inference.predict import Predictor, name_of
from malmoi.inference.prompt import encode_prompt, require_fit
from malmoi.interpret.intervention import (
    Intervention,
    Place,
    changed_patterns,
    combined,
    position_in,
    recorder,
    run_layers,
    view_with_taps,
)
from malmoi.model import Activations, Network
from malmoi.model.heads import HEADS, LABEL_HEADS, POOLED_HEADS, VOCABULARY_HEADS
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding, Tokenizer

Interventions = Sequence[Intervention]
AnyModel = TypeVar("AnyModel", bound=LoadedModel)
READ_HEADS = [name for name in HEADS if name in LABEL_HEADS | VOCABULARY_HEADS]


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
    # [layers + 1, T, D], as `hidden_states`
    hidden: Float32Array | None = field(default=None, repr=False)
    # [layers, H, T, T]
    attention: Float32Array | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RunOptions:
    """Which outputs a forward pass returns."""

    positions: Sequence[int] | None = None  # None: where the model answers
    top: int = 5
    hidden: bool = False
    attention: bool = False


class Subject:
    """A model to intervene on: its encoding, its head, and its last clean pass."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.network.reader is not None:
            raise UsageError("Interventions do not support a feature model on frozen layers.")
        self.network: Network = checkpoint.network
        self.tokenizer: Tokenizer = checkpoint.required_tokenizer
        self.labels = checkpoint.labels
        self.length = Predictor.of(checkpoint).max_tokens  # a classifier's texts are truncated
        self._clean: tuple[Encoding, list[Tensor]] | None = None

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
        if not self.labels_texts and self.head not in VOCABULARY_HEADS:
            raise UsageError(
                "This needs a model with a language head, a masked one, or a classifier."
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
            encoding = self.tokenizer.encode(text, max_tokens=self.length)
        return require_fit(encoding, self.network.config.context)

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
        """The head's scores [positions, V] at positions of a single text."""
        if not self.head:
            return hidden.new_empty(0, 0)
        if self.labels_texts:
            return network.read(self.head, hidden)
        if self.head in LABEL_HEADS:
            return network.read(self.head, hidden)[0, list(at)]
        return network.read(self.head, hidden, slots=torch.tensor(at, device=hidden.device))

    def name(self, i: int) -> str:
        """The name of a class of the head."""
        if self.head in LABEL_HEADS:
            return name_of(self.labels, i)
        return self.tokenizer.token(i)

    def clean_states(self, encoding: Encoding) -> list[Tensor]:
        """Block inputs and outputs of a pass without interventions; cached for the last text."""
        if self._clean is None or self._clean[0] != encoding:
            states = run_layers(self.network.trunk, self.inputs([encoding]))
            self._clean = (encoding, states)
        return self._clean[1]


def network_with(subject: Subject, interventions: Interventions) -> Network:
    """A view of the network with interventions; sources are computed without them."""
    network = subject.network
    c = network.config
    if not interventions:
        return network
    recorded = {text: _record(subject, text, places) for text, places in _sources(c, interventions)}
    taps = []
    bypassed: dict[int, tuple[int, ...] | None] = {}
    for one in interventions:
        for place in one.places(c):
            if one.site == "layer":
                bypassed[place[1]] = one.positions
                continue
            source = None if one.source is None else recorded[one.source][place]
            taps.append((place, one.tap(c, source)))
    return view_with_taps(network, combined(taps), bypassed, changed_patterns(c, interventions))


def _sources(c: ModelConfig, interventions: Interventions) -> Iterable[tuple[str, list[Place]]]:
    found: dict[str, list[Place]] = {}
    for one in interventions:
        if one.source is not None:
            found.setdefault(one.source, []).extend(one.places(c))
    return found.items()


def _record(subject: Subject, text: str, places: Sequence[Place]) -> Mapping[Place, Tensor]:
    """The activations at these sites for a text."""
    found: dict[Place, Tensor] = {}
    view = view_with_taps(subject.network, {place: recorder(found, place) for place in places})
    run_layers(view.trunk, subject.inputs([subject.encode(text)]))
    return found


def first_changed(subject: Subject, interventions: Interventions) -> int:
    """The first layer that interventions change; −1: the embedding."""
    c = subject.network.config
    starts = [-1 if one.site == "embedding" else one.layers(c)[0] for one in interventions]
    return min(starts, default=c.depth)


@torch.inference_mode()
def run_text(
    subject: Subject, text: str, interventions: Interventions, options: RunOptions
) -> ForwardResult:
    """One forward pass; layers below the first change are taken from the last clean pass."""
    if options.top < 1:
        raise UsageError("top must be 1 or more, not {top}.", top=options.top)
    encoding = subject.encode(text)
    network = network_with(subject, interventions)
    start = first_changed(subject, interventions)
    attention: list[Tensor] | None = [] if options.attention else None
    states: list[Tensor] = []
    if start >= 0 and attention is None:
        states = subject.clean_states(encoding)[: start + 1]
    if interventions or not states:
        states = run_layers(network.trunk, subject.inputs([encoding]), states, attention)
    last = network.trunk.norm(states[-1])
    at = (
        [*subject.answer_positions(encoding)] if options.positions is None else [*options.positions]
    )
    at = [position_in(i, len(encoding.tokens)) for i in at]
    scores = subject.scores(network, last, at).float()
    return ForwardResult(
        tokens=tuple(map(subject.tokenizer.token, encoding.tokens)),
        positions=tuple(at),
        guesses=_guesses(subject, scores, options.top),
        logits=scores.cpu().numpy(),
        hidden=first_rows([*states[:-1], last]) if options.hidden else None,
        attention=first_rows(attention) if attention else None,
    )


def _guesses(subject: Subject, scores: Tensor, top: int) -> tuple[tuple[Guess, ...], ...]:
    labelled = subject.head in LABEL_HEADS
    # padding of the vocabulary is left out
    known = len(subject.labels) if labelled else subject.tokenizer.vocab_size
    chances = scores.softmax(-1)[:, : known or None]
    best = chances.topk(min(top, chances.size(-1)))
    return tuple(
        tuple(Guess(subject.name(i), p) for i, p in zip(ids, row, strict=True))
        for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )


def model_with(model: AnyModel, subject: Subject, interventions: Interventions) -> AnyModel:
    """A model whose methods all run under interventions that hold for any text."""
    for one in interventions:
        if one.needs_one_text:
            raise UsageError(
                "{one!r} depends on the positions of one text: give it to run(text, […]).", one=one
            )
    view = network_with(subject, interventions)
    causal = model.network.trunk.is_causal
    if causal and not view.trunk.is_causal:
        raise UsageError(
            "A GPT whose mask shows later tokens cannot generate: use run(text, […]) for one "
            "forward pass."
        )
    changed = type(model)(replace(model.checkpoint, network=view))
    changed.__dict__["_causal"] = causal  # a text is encoded as the model was trained to read it
    return changed


def hidden_states(model: LoadedModel, text: str, pair: str | None = None) -> Float32Array:
    """Hidden states of a text's tokens [layers + 1, T, D]."""
    return first_rows(_activations(model, text, pair, Activations()).hidden)


def attention_probabilities(model: LoadedModel, text: str, pair: str | None = None) -> Float32Array:
    """Attention probabilities [layers, heads, T, T] of each token (row) over the others."""
    return first_rows(_activations(model, text, pair, Activations(attention=[])).attention or [])


@torch.inference_mode()
def _activations(
    model: LoadedModel, text: str, pair: str | None, found: Activations
) -> Activations:
    reader = model.masked
    encoding = (
        reader._encoded(text, truncate=False)
        if pair is None
        else require_fit(model.tokenizer.encode(text, pair), reader.config.context)
    )
    reader.network.trunk(**model_inputs(reader.network, [encoding]), activations=found)
    return found


def first_rows(layers: Sequence[Tensor]) -> Float32Array:
    """The first row of each layer's batch, as one array."""
    return torch.stack([layer[0] for layer in layers]).float().cpu().numpy()
