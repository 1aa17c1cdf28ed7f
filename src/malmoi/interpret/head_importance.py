"""Importance of heads, attention and MLPs, and activation patching between two sentences.

N rows, V variants of a batch, B batch, T tokens, D width, L layers, H heads, E head width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import UsageError, require_known
from malmoi.inference.embed import Float32Array
from malmoi.inference.prompt import mask_token
from malmoi.interpret.forward_pass import Subject
from malmoi.interpret.intervention import Place, Site, Tap, recorder, run_layers, view_with_taps
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.system.progress import tracked
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding
from malmoi.tokenizer.padding import forward_limits, length_batches

Method = Literal["ablation", "gradient"]
Metric = Literal["loss", "accuracy"]
Row = str | tuple[str, str]  # a text, or a text and its label
MASKED_SHARE = 0.15  # of a BERT's tokens (Devlin et al. 2019 §3.1)
VARIANT_TOKENS = 2048  # tokens of the variants in one batch
SCORED_TOKENS = 1024  # tokens whose scores over the vocabulary are held at the same time
SWITCHED_SITES: tuple[Site, ...] = ("head", "attention", "mlp")
PATCHED_SITES: tuple[Site, ...] = ("residual", "attention", "mlp")


@dataclass(frozen=True, repr=False)
class Importance(Result):
    """Importance of each part: loss (or accuracy) without it − with it.

    With `method="gradient"` this is a first-order estimate.
    """

    method: Method
    metric: Metric
    baseline: float  # the loss or accuracy of the whole model
    predictions: int  # number of predicted tokens or labels
    heads: Float32Array = field(repr=False)  # [L, H]
    attention: Float32Array = field(repr=False)  # [L]
    mlp: Float32Array = field(repr=False)  # [L]


@dataclass(frozen=True, repr=False)
class PatchingMap(Result):
    """log p of an answer when one position of a layer is copied from another sentence."""

    tokens: tuple[str, ...]  # of the sentence that is patched
    source_tokens: tuple[str, ...]
    answer: str
    source_logprob: float  # log p of the answer for the source without patches
    logprob: float  # log p of the answer for the text without patches
    logprobs: Float32Array = field(repr=False)  # [L, T]

    @property
    def recovered(self) -> Float32Array:
        """The share of the difference that each patch recovers: 0 is none, 1 is all."""
        return (self.logprobs - self.logprob) / np.float32(self.source_logprob - self.logprob)


@dataclass(frozen=True)
class Batch:
    """Rows with the positions and targets of their predictions."""

    inputs: Mapping[str, Tensor | None]
    slots: Tensor  # [P] flat positions; of a classifier, rows
    targets: Tensor  # [P]

    @property
    def size(self) -> tuple[int, int]:
        rows, length = cast(Tensor, self.inputs["tokens"]).shape
        return rows, length

    def repeated(self, times: int) -> dict[str, Tensor | None]:
        return {
            name: None if value is None else value.repeat(times, 1)
            for name, value in self.inputs.items()
        }


# ------------------------------------------------------------------ heads, attention, MLPs


def importance(subject: Subject, rows: Sequence[Row], method: Method, metric: Metric) -> Importance:
    """The change of the mean loss or accuracy over all predictions of the rows."""
    known = {"ablation": _ablated, "gradient": _estimated}
    require_known(method, known, "There is no method {name!r}.{hint}")
    if metric not in ("loss", "accuracy") or (method == "gradient" and metric != "loss"):
        raise UsageError("The metric is loss or accuracy, and only loss with method='gradient'.")
    subject.require_answer()
    c = subject.network.config
    totals = torch.zeros(c.depth, c.heads + 2, dtype=torch.float64)
    whole = 0.0
    count = 0
    for batch in _batches(subject, rows):
        base, changes = known[method](subject, batch, metric)
        totals += changes
        whole += base
        count += len(batch.targets)
    means = (totals / count).float().numpy()
    return Importance(
        method, metric, whole / count, count, means[:, :-2], means[:, -2], means[:, -1]
    )


def _batches(subject: Subject, rows: Sequence[Row]) -> Iterator[Batch]:
    judged = [_judged(subject, row, i) for i, row in enumerate(rows)]
    judged = [(encoding, targets) for encoding, targets in judged if targets]
    if not judged:
        raise UsageError("There is nothing to predict in these rows; give longer texts.")
    lengths = [len(encoding.tokens) for encoding, _ in judged]
    groups = length_batches(lengths, forward_limits(subject.network.device))
    for group in tracked(groups, "importance", len(judged)):
        some = [judged[i] for i in group]
        inputs = subject.inputs([encoding for encoding, _ in some])
        width = cast(Tensor, inputs["tokens"]).size(1)
        step = 1 if subject.labels_texts else width
        at = [(i * step + place, t) for i, (_, ts) in enumerate(some) for place, t in ts.items()]
        slots, targets = torch.tensor(at, device=subject.network.device).T
        yield Batch(inputs, slots, targets)


def _judged(subject: Subject, row: Row, number: int) -> tuple[Encoding, dict[int, int]]:
    """An encoded row with its target tokens and positions; a BERT's row is masked."""
    labelled = subject.labels_texts
    if labelled == isinstance(row, str):
        wanted = "a text with its label" if labelled else "a text"
        raise UsageError(
            "Row {number}: this model needs {wanted}, not {row!r:.60}.",
            number=number + 1,
            wanted=msg(wanted),
            row=row,
        )
    text = row if isinstance(row, str) else row[0]
    encoding = subject.encode(text)
    if labelled:
        if row[1] not in subject.labels:
            raise UsageError(
                "Row {number}: this model has no label {row!r}; its labels are {labels}.",
                number=number + 1,
                row=row[1],
                labels=", ".join(subject.labels),
            )
        return encoding, {0: subject.labels.index(row[1])}
    tokens = encoding.tokens
    if subject.head == "lm":
        return encoding, dict(enumerate(tokens[1:]))
    plain = [i for i, special in enumerate(encoding.specials) if not special]
    chooser = torch.Generator().manual_seed(number)
    chosen = torch.randperm(len(plain), generator=chooser)
    count = max(1, round(MASKED_SHARE * len(plain)))
    targets = {plain[i]: tokens[plain[i]] for i in sorted(chosen[:count].tolist())}
    mask = mask_token(subject.tokenizer)
    masked = [mask if i in targets else token for i, token in enumerate(tokens)]
    return replace(encoding, tokens=masked), targets


@torch.inference_mode()
def _ablated(subject: Subject, batch: Batch, metric: Metric) -> tuple[float, Tensor]:
    """The whole model's sum over predictions, and the change without each part [L, H + 2]."""
    network = subject.network
    c = network.config
    states = run_layers(network.trunk, batch.inputs)
    base = float(_sums(subject, network.trunk.norm(states[-1]), batch, metric))
    found = torch.zeros(c.depth, c.heads + 2, dtype=torch.float64)
    rows, length = batch.size
    together = max(1, VARIANT_TOKENS // (rows * length))
    for layer in range(c.depth):
        for some in torch.arange(c.heads + 2).split(together):
            view = view_with_taps(network, _off(layer, some.tolist(), c.heads, c.size_per_head))
            begun = [state.repeat(len(some), 1, 1) for state in states[: layer + 1]]
            last = run_layers(view.trunk, batch.repeated(len(some)), begun)[-1]
            found[layer, some] = _sums(subject, network.trunk.norm(last), batch, metric).cpu()
    change = found - base
    return base, -change if metric == "accuracy" else change


def _off(layer: int, parts: Sequence[int], heads: int, width: int) -> dict[Place, Tap]:
    """Taps that switch off part v (a head, the attention, the MLP) in variant v of a batch."""

    def tap(site: Site) -> Tap:
        def zero(x: Tensor) -> Tensor:
            changed = x.clone().view(len(parts), -1, *x.shape[1:])
            for v, part in enumerate(parts):
                if site == "head" and part < heads:
                    changed[v, ..., part * width : (part + 1) * width] = 0
                elif (site, part) in (("attention", heads), ("mlp", heads + 1)):
                    changed[v] = 0
            return changed.view_as(x)

        return zero

    return {(site, layer): tap(site) for site in SWITCHED_SITES}


def _sums(subject: Subject, hidden: Tensor, batch: Batch, metric: Metric) -> Tensor:
    """The sum of losses or hits of each variant in hidden [V · B, T, D]: [V]."""
    rows, _ = batch.size
    found = []
    for variant in hidden.split(rows):
        losses = [
            _judge(scores, targets, metric) for scores, targets in _scores(subject, variant, batch)
        ]
        found.append(torch.stack(losses).sum())
    return torch.stack(found)


def _scores(subject: Subject, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of the predictions in pieces, each with its targets."""
    network = subject.network
    if subject.labels_texts:
        yield network.read(subject.head, hidden, batch.inputs["keep"]), batch.targets
        return
    for slots, targets in zip(
        batch.slots.split(SCORED_TOKENS), batch.targets.split(SCORED_TOKENS), strict=True
    ):
        yield network.read(subject.head, hidden, slots=slots), targets


def _judge(scores: Tensor, targets: Tensor, metric: Metric) -> Tensor:
    if metric == "accuracy":
        return (scores.argmax(-1) == targets).sum().double()
    return F.cross_entropy(scores.float(), targets, reduction="sum").double()


def _estimated(subject: Subject, batch: Batch, metric: Metric) -> tuple[float, Tensor]:
    """−∂loss/∂gate of each part from one forward and backward pass (Michel et al. 2019)."""
    network = subject.network
    c = network.config
    with torch.enable_grad():
        gates = torch.ones(c.depth, c.heads + 2, device=network.device, requires_grad=True)
        view = view_with_taps(network, _gated(gates, c.heads))
        last = network.trunk.norm(run_layers(view.trunk, batch.inputs)[-1])
        above = last.detach().requires_grad_()
        loss = 0.0
        slope = torch.zeros_like(above)
        for scores, targets in _scores(subject, above, batch):
            part = _judge(scores, targets, metric)
            slope += torch.autograd.grad(part, above)[0]
            loss += float(part.detach())
        (found,) = torch.autograd.grad(last, gates, slope)
    return loss, -found.double().cpu()


def _gated(gates: Tensor, heads: int) -> dict[Place, Tap]:
    def tap(site: Site, layer: int) -> Tap:
        if site == "head":
            gate = gates[layer, :heads, None]
            return lambda x: (x.unflatten(-1, (heads, -1)) * gate).flatten(-2)
        one = gates[layer, heads if site == "attention" else heads + 1]
        return lambda x: x * one

    return {
        (site, layer): tap(site, layer) for layer in range(len(gates)) for site in SWITCHED_SITES
    }


# ------------------------------------------------------------------ patching between two sentences


@torch.inference_mode()
def patching_map(
    subject: Subject, source: str, text: str, site: Site, answer: str | None
) -> PatchingMap:
    """Copies each position of each layer from `source` into `text`, one at a time."""
    if site not in PATCHED_SITES:
        raise UsageError(
            "The site is {sites} or {sites2}.",
            sites=", ".join(PATCHED_SITES[:-1]),
            sites2=PATCHED_SITES[-1],
        )
    network = subject.network
    encodings = [subject.encode(source), subject.encode(text)]
    sizes = [len(encoding.tokens) for encoding in encodings]
    if sizes[0] != sizes[1]:
        raise UsageError(
            "The sentences have {sizes} and {sizes2} tokens: to patch position by position, "
            "choose two of the same length.",
            code="lengths_differ",
            sizes=sizes[0],
            sizes2=sizes[1],
        )
    places = [subject.answer_positions(encoding)[-1:] for encoding in encodings]
    if places[0] != places[1] or subject.head in ("", "tag"):
        raise UsageError("Both sentences need their answer at the same position, such as one mask.")
    recorded: dict[Place, Tensor] = {}
    layers: list[Place] = [(site, i) for i in range(network.config.depth)]
    view = view_with_taps(network, {place: recorder(recorded, place) for place in layers})
    first = _logprobs(subject, run_layers(view.trunk, subject.inputs(encodings[:1])), places[0])
    at = int(first[0].argmax()) if answer is None else _answer_id(subject, answer)
    batch = subject.inputs(encodings[1:])
    states = run_layers(network.trunk, batch)
    found = [_patched(network, batch, states, place, recorded[place]) for place in layers]
    return PatchingMap(
        tuple(map(subject.tokenizer.token, encodings[1].tokens)),
        tuple(map(subject.tokenizer.token, encodings[0].tokens)),
        subject.name(at),
        float(first[0, at]),
        float(_logprobs(subject, states, places[0])[0, at]),
        np.stack([_logprobs(subject, some, places[0])[:, at].cpu().numpy() for some in found]),
    )


def _patched(
    network: Network,
    inputs: Mapping[str, Tensor | None],
    states: Sequence[Tensor],
    place: Place,
    source: Tensor,
) -> list[Tensor]:
    """One variant per position [T, T, D], with that position copied from the source."""
    length = source.size(1)
    each = torch.arange(length, device=source.device)

    def put(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[each, each] = source[0]
        return changed

    site, layer = place
    wide = {name: None if x is None else x.repeat(length, 1) for name, x in inputs.items()}
    begun = [state.repeat(length, 1, 1) for state in states[: layer + 2]]
    if site == "residual":
        return run_layers(network.trunk, wide, [*begun[:-1], put(begun[-1])])
    return run_layers(view_with_taps(network, {place: put}).trunk, wide, begun[:-1])


def _logprobs(subject: Subject, states: Sequence[Tensor], at: Sequence[int]) -> Tensor:
    """log p of each variant at its answer [V, classes]."""
    hidden = subject.network.trunk.norm(states[-1])
    if subject.labels_texts:
        scores = subject.network.read(subject.head, hidden)
    else:
        step = hidden.size(1)
        slots = torch.arange(len(hidden), device=hidden.device) * step + at[0]
        scores = subject.network.read(subject.head, hidden, slots=slots)
    return scores.float().log_softmax(-1)


def _answer_id(subject: Subject, answer: str) -> int:
    if subject.labels_texts:
        return subject.label_index(answer)
    tokens = subject.tokenizer.encode(answer, specials=False).tokens
    if len(tokens) != 1:
        raise UsageError(
            "The answer {answer!r} has {tokens} tokens; give one of a single token.",
            answer=answer,
            tokens=len(tokens),
        )
    return tokens[0]
