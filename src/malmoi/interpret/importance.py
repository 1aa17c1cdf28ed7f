"""What an answer depends on: heads, attention and MLPs; positions of a layer; words of the text.

N rows, V variants of a batch, B batch, T tokens, D width, L layers, H heads, E head width.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from malmoi.errors import require_known, require_that, required
from malmoi.inference.embed import Float32Array
from malmoi.inference.predictors import TEXT_HEADS
from malmoi.inference.prompt import mask_token
from malmoi.inference.spans import ScoredSpan
from malmoi.interpret.forward_pass import Subject
from malmoi.interpret.intervention import Place, Site, Tap, recorder, run_layers, view_with_taps
from malmoi.messages import msg
from malmoi.system.progress import tracked
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding
from malmoi.tokenizer.padding import forward_limits, length_batches

Method = Literal["ablation", "gradient"]
Metric = Literal["loss", "accuracy"]
AttributionMethod = Literal["leave-one-out", "gradient"]
Row = str | tuple[str, str]  # a text, or a text and its label
Inputs = Mapping[str, Tensor | None]  # of the network
MASKED_SHARE = 0.15  # of a BERT's tokens (Devlin et al. 2019 §3.1)
VARIANT_TOKENS = 2048  # tokens of the variants in one batch
SCORED_TOKENS = 1024  # tokens whose scores over the vocabulary are held at the same time
PATCHED_SITES: tuple[Site, ...] = ("residual", "attention", "mlp")
WORD = re.compile(r"\S+")


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

    inputs: Inputs
    slots: Tensor  # [P] flat positions; of a classifier, rows
    targets: Tensor  # [P]


@dataclass(frozen=True, repr=False)
class Piece(ScoredSpan):
    """A word or token of a text and its score; `start` and `end` are character offsets."""


@dataclass(frozen=True, repr=False)
class Attribution(Result):
    """The contribution of each word to an answer.

    Leave-one-out: p(target) − p(target without the word). Gradient × input: how log p(target)
    changes, to the first order, with the token's embedding grown by its own size.
    """

    method: AttributionMethod
    target: str  # a label, or a token
    probability: float  # of the target, for the whole text
    pieces: tuple[Piece, ...]


# ------------------------------------------------------------------ heads, attention, MLPs


def importance(subject: Subject, rows: Sequence[Row], method: Method, metric: Metric) -> Importance:
    """The change of the mean loss or accuracy over all predictions of the rows."""
    known = {"ablation": _ablated, "gradient": _estimated}
    require_known(method, known, "There is no method {name!r}.{hint}")
    require_that(
        metric == "loss" or (metric == "accuracy" and method != "gradient"),
        "The metric is loss or accuracy, and only loss with method='gradient'.",
    )
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
    require_that(judged, "There is nothing to predict in these rows; give longer texts.")
    lengths = [len(encoding.tokens) for encoding, _ in judged]
    groups = length_batches(lengths, forward_limits(subject.network.device))
    for group in tracked(groups, "importance", len(judged)):
        some = [judged[i] for i in group]
        inputs = subject.inputs([encoding for encoding, _ in some])
        step = 1 if subject.labels_texts else cast(Tensor, inputs["tokens"]).size(1)
        at = [(i * step + place, t) for i, (_, ts) in enumerate(some) for place, t in ts.items()]
        slots, targets = torch.tensor(at, device=subject.network.device).T
        yield Batch(inputs, slots, targets)


def _judged(subject: Subject, row: Row, number: int) -> tuple[Encoding, dict[int, int]]:
    """An encoded row with its target tokens and positions; a BERT's row is masked."""
    labelled = subject.labels_texts
    require_that(
        labelled != isinstance(row, str),
        "Row {number}: this model needs {wanted}, not {row!r:.60}.",
        number=number + 1,
        wanted=msg("a text with its label" if labelled else "a text"),
        row=row,
    )
    encoding = subject.encode(row if isinstance(row, str) else row[0])
    if labelled:
        require_that(
            row[1] in subject.labels,
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
    chosen = torch.randperm(len(plain), generator=torch.Generator().manual_seed(number))
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
    rows, length = states[0].shape[:2]

    def sums(hidden: Tensor) -> Tensor:
        """The sum of losses or hits of each variant in hidden [V · B, T, D]: [V]."""
        found = []
        for variant in network.trunk.norm(hidden).split(rows):
            judged = [_judge(*some, metric) for some in _scores(subject, variant, batch)]
            found.append(torch.stack(judged).sum())
        return torch.stack(found)

    base = float(sums(states[-1]))
    found = torch.zeros(c.depth, c.heads + 2, dtype=torch.float64)
    together = max(1, VARIANT_TOKENS // (rows * length))
    for layer in range(c.depth):
        for some in torch.arange(c.heads + 2).split(together):
            gates = torch.ones(len(some), c.depth, c.heads + 2, device=network.device)
            gates[torch.arange(len(some)), layer, some] = 0
            view = view_with_taps(network, _gated(gates, [layer]))
            begun = [state.repeat(len(some), 1, 1) for state in states[: layer + 1]]
            last = run_layers(view.trunk, _repeated(batch.inputs, len(some)), begun)[-1]
            found[layer, some] = sums(last).cpu()
    change = found - base
    return base, -change if metric == "accuracy" else change


def _repeated(inputs: Inputs, times: int) -> Inputs:
    return {name: None if x is None else x.repeat(times, 1) for name, x in inputs.items()}


def _gated(gates: Tensor, layers: Iterable[int]) -> dict[Place, Tap]:
    """Taps that multiply heads, attention and MLP of each variant by its gates [V, L, H + 2]."""
    parts: dict[Site, slice] = {
        "head": slice(None, -2),
        "attention": slice(-2, -1),
        "mlp": slice(-1, None),
    }

    def tap(gate: Tensor) -> Tap:
        def scale(x: Tensor) -> Tensor:
            split = x.unflatten(-1, (gate.size(1), -1)).unflatten(0, (len(gate), -1))
            scaled: Tensor = split * gate[:, None, None, :, None].to(x.dtype)
            return scaled.flatten(-2).flatten(0, 1)

        return scale

    return {
        (site, layer): tap(gates[:, layer, part])
        for layer in layers
        for site, part in parts.items()
    }


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
    return nn.functional.cross_entropy(scores.float(), targets, reduction="sum").double()


def _estimated(subject: Subject, batch: Batch, metric: Metric) -> tuple[float, Tensor]:
    """−∂loss/∂gate of each part from one forward and backward pass (Michel et al. 2019)."""
    network = subject.network
    c = network.config
    with torch.enable_grad():
        gates = torch.ones(1, c.depth, c.heads + 2, device=network.device, requires_grad=True)
        view = view_with_taps(network, _gated(gates, range(c.depth)))
        last = network.trunk.norm(run_layers(view.trunk, batch.inputs)[-1])
        above = last.detach().requires_grad_()
        loss = 0.0
        slope = torch.zeros_like(above)
        for scores, targets in _scores(subject, above, batch):
            part = _judge(scores, targets, metric)
            slope += torch.autograd.grad(part, above)[0]
            loss += float(part.detach())
        (found,) = torch.autograd.grad(last, gates, slope)
    return loss, -found[0].double().cpu()


# ------------------------------------------------------------------ patching between two sentences


@torch.inference_mode()
def patching_map(
    subject: Subject, source: str, text: str, site: Site, answer: str | None
) -> PatchingMap:
    """Copies each position of each layer from `source` into `text`, one at a time."""
    require_that(site in PATCHED_SITES, "The site is residual, attention or mlp.")
    network = subject.network
    encodings = [subject.encode(source), subject.encode(text)]
    size, size2 = (len(encoding.tokens) for encoding in encodings)
    require_that(
        size == size2,
        "The sentences have {size} and {size2} tokens: choose two of the same length.",
        code="lengths_differ",
        size=size,
        size2=size2,
    )
    place, other = (subject.answer_positions(encoding)[-1:] for encoding in encodings)
    require_that(
        place == other and subject.head not in ("", "tag"),
        "Both sentences need their answer at the same position, such as one mask.",
    )
    recorded: dict[Place, Tensor] = {}
    layers: list[Place] = [(site, i) for i in range(network.config.depth)]
    view = view_with_taps(network, {layer: recorder(recorded, layer) for layer in layers})

    def logprobs(states: Sequence[Tensor]) -> Tensor:
        """log p of each variant at its answer [V, classes]."""
        hidden = network.trunk.norm(states[-1])
        return subject.scores(network, hidden, place).float().log_softmax(-1)

    first = logprobs(run_layers(view.trunk, subject.inputs(encodings[:1])))
    at = int(first[0].argmax()) if answer is None else _answer_id(subject, answer)
    batch = subject.inputs(encodings[1:])
    states = run_layers(network.trunk, batch)
    found = [_patched(subject, batch, states, layer, recorded[layer]) for layer in layers]
    return PatchingMap(
        tuple(map(subject.tokenizer.token, encodings[1].tokens)),
        tuple(map(subject.tokenizer.token, encodings[0].tokens)),
        subject.name(at),
        float(first[0, at]),
        float(logprobs(states)[0, at]),
        np.stack([logprobs(some)[:, at].cpu().numpy() for some in found]),
    )


def _patched(
    subject: Subject, inputs: Inputs, states: Sequence[Tensor], place: Place, source: Tensor
) -> list[Tensor]:
    """One variant per position [T, T, D], with that position copied from the source."""
    network = subject.network
    length = source.size(1)
    each = torch.arange(length, device=source.device)

    def put(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[each, each] = source[0]
        return changed

    site, layer = place
    wide = _repeated(inputs, length)
    begun = [state.repeat(length, 1, 1) for state in states[: layer + 2]]
    if site == "residual":
        return run_layers(network.trunk, wide, [*begun[:-1], put(begun[-1])])
    return run_layers(view_with_taps(network, {place: put}).trunk, wide, begun[:-1])


def _answer_id(subject: Subject, answer: str) -> int:
    if subject.labels_texts:
        return subject.label_index(answer)
    tokens = subject.tokenizer.encode(answer, specials=False).tokens
    require_that(
        len(tokens) == 1,
        "The answer {answer!r} has {tokens} tokens; give one of a single token.",
        answer=answer,
        tokens=len(tokens),
    )
    return tokens[0]


# ------------------------------------------------------------------ words of the text


def attribution(
    subject: Subject, text: str, target: str | None, method: AttributionMethod
) -> Attribution:
    """Attributes an answer, by default the predicted one, to the words of a text."""
    require_known(method, get_args(AttributionMethod), "There is no method {name!r}.{hint}")
    subject.require_answer()
    return (_slopes if method == "gradient" else _left_out)(subject, text, target)


def _left_out(subject: Subject, text: str, target: str | None) -> Attribution:
    """Predicts the text again without each of its words, except a mask."""
    mask = subject.tokenizer.specials.mask
    fixed = None if mask is None else subject.tokenizer.token(mask)
    words = [m for m in WORD.finditer(text) if fixed is None or fixed not in m.group()]
    texts = [text, *(without_word(text, *m.span()) for m in words)]
    target, (whole, *without) = _chances(subject, texts, target)
    pieces = tuple(
        Piece(m.group(), *m.span(), whole - p) for m, p in zip(words, without, strict=True)
    )
    return Attribution("leave-one-out", target, whole, pieces)


def _chances(subject: Subject, texts: Sequence[str], target: str | None) -> tuple[str, list[float]]:
    """The target, by default the first text's answer, and its probability for each text."""
    if subject.task_head in TEXT_HEADS:
        found = subject.task_head.predict(subject.predictor, texts)
        target = target or max(found[0].scores, key=found[0].scores.__getitem__)
        subject.label_index(target)
        return target, [prediction.scores[target] for prediction in found]
    runs = [subject.run(text, top=1) for text in texts]
    target = target or runs[0].guesses[-1][0].name
    index = target_index(subject, target)
    return target, [float(torch.tensor(run.logits[-1]).softmax(-1)[index]) for run in runs]


def without_word(text: str, start: int, end: int) -> str:
    """A text without one word and one of its adjacent spaces."""
    after = text[end:]
    return text[:start] + after[1:] if after[:1].isspace() else text[:start].rstrip() + after


def _slopes(subject: Subject, text: str, target: str | None) -> Attribution:
    """x · ∂ log p(target) / ∂x for each token's embedding x."""
    encoding = subject.encode(text)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach().requires_grad_())
        return kept[0]

    with torch.enable_grad():
        view = view_with_taps(subject.network, {("embedding", 0): keep})
        last = view.trunk.norm(run_layers(view.trunk, subject.inputs([encoding]))[-1])
        at = subject.answer_positions(encoding)[-1:]
        logs = subject.scores(view, last, at)[0].float().log_softmax(-1)
        index = int(logs.detach().argmax()) if target is None else target_index(subject, target)
        (slope,) = torch.autograd.grad(logs[index], kept[0])
    scores = (kept[0].detach() * slope).sum(-1)[0].tolist()
    pieces = tuple(
        Piece(subject.tokenizer.token(token), *offsets, score)
        for token, offsets, score in zip(encoding.tokens, encoding.offsets, scores, strict=True)
    )
    return Attribution("gradient", subject.name(index), float(logs[index].detach().exp()), pieces)


def target_index(subject: Subject, target: str) -> int:
    """The class of a target: a label or a token."""
    if subject.labels_texts:
        return subject.label_index(target)
    return required(
        subject.tokenizer.id(target),
        "This model's vocabulary has no token {target!r:.60}.",
        target=target,
    )
