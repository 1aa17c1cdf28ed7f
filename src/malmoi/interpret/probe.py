"""Linear probes on each layer (Alain & Bengio 2016; Tenney et al. 2019).

N examples, D width, K labels, T tokens.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from malmoi.errors import MalmoiError, UsageError, explained, require_that
from malmoi.inference.base import LoadedModel
from malmoi.inference.batches import model_batches
from malmoi.model import Activations
from malmoi.system.optimizers import lean
from malmoi.system.progress import tracked
from malmoi.system.result import Result
from malmoi.text.columns import guess_columns
from malmoi.text.conllu import conllu_rows
from malmoi.text.rows import BadRow, any_rows, text_lines
from malmoi.tokenizer import TokenRow
from malmoi.tokenizer.windows import WordPieces, word_pieces

# a text and its label, or the words of a sentence and a label for each
ProbeRow = tuple[str, str] | tuple[Sequence[str], Sequence[str]]
TEST_SHARE = 0.2
MAX_EXAMPLES = 4000  # words or texts that are read, the tested ones included
RIDGE = 1e-3  # × |W|² beside the mean loss, on vectors of unit variance
MAX_ITERATIONS = 100


@dataclass(frozen=True, repr=False)
class LayerScore(Result):
    """Accuracy of the probe on one layer; 0 is the embedding."""

    layer: int
    accuracy: float
    # accuracy with a random label for each word (Hewitt & Liang 2019), which measures how much the
    # probe itself memorises
    control: float


@dataclass(frozen=True, repr=False)
class Probe(Result):
    """Accuracy of a linear probe on every layer, with its baselines."""

    layers: tuple[LayerScore, ...]
    majority: float  # accuracy of the most frequent label
    labels: tuple[str, ...]
    train: int  # training examples
    test: int

    @property
    def best(self) -> LayerScore:
        """The layer with the best accuracy."""
        return max(self.layers, key=lambda one: one.accuracy)


@dataclass(frozen=True)
class LayerVectors:
    """Vectors of every layer [L + 1, N, D] with a label each; equal `keys` are equal words."""

    vectors: Tensor
    labels: list[str]
    keys: list[str]


def probe_model(
    model: LoadedModel,
    rows: Iterable[ProbeRow],
    *,
    test: Iterable[ProbeRow] | None = None,
    max_examples: int = MAX_EXAMPLES,
    seed: int = 0,
) -> Probe:
    """Trains a linear probe on each layer: on a word's last token, or the mean over a text.

    Without `test`, a fifth of the rows is held out.
    """
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    cut = max(1, round(TEST_SHARE * len(shuffled))) if test is None else 0
    held = shuffled[:cut] if test is None else list(test)
    most_tested = max(1, round(TEST_SHARE * max_examples))
    known = read_examples(model, shuffled[cut:], max_examples - most_tested)
    tested = read_examples(model, held, most_tested)
    labels = sorted(set(known.labels))
    require_that(
        len(labels) >= 2 and tested.labels, "A probe needs test rows and at least two labels."
    )
    count = len(known.vectors)
    control = [_with_control(some, known, seed) for some in (known, tested)]
    scores = [
        LayerScore(
            layer,
            _accuracy(known, tested, layer, labels),
            _accuracy(control[0], control[1], layer, labels),
        )
        for (layer,) in tracked(([i] for i in range(count)), "probe", count)
    ]
    usual = Counter(known.labels).most_common(1)[0][0]
    majority = tested.labels.count(usual) / len(tested.labels)
    return Probe(tuple(scores), majority, tuple(labels), len(known.labels), len(tested.labels))


# ------------------------------------------------------------------ vectors


# the tokens that are averaged (first, end), the label, and the key
Labelled = tuple[tuple[int, int], str, str]


def read_examples(model: LoadedModel, rows: Sequence[ProbeRow], limit: int) -> LayerVectors:
    """The vectors of at most this many words or texts."""
    tokens: list[TokenRow] = []
    places: list[list[tuple[int, int]]] = []
    found: list[Labelled] = []
    for row, examples in _encoded(model, rows):
        if len(found) >= limit:
            break
        some = examples[: limit - len(found)]
        tokens.append(row)
        places.append([span for span, _, _ in some])
        found += some
    vectors = _vectors(model, tokens, places)
    return LayerVectors(vectors, [label for _, label, _ in found], [key for *_, key in found])


def _encoded(
    model: LoadedModel, rows: Sequence[ProbeRow]
) -> Iterator[tuple[TokenRow, list[Labelled]]]:
    """Each row as tokens, and its examples: the whole text, or the last token of each word."""
    length = model.config.context
    control = set(model.tokenizer.control_tokens.values())
    for number, (given, labels) in enumerate(rows, 1):
        if isinstance(given, str):
            if not isinstance(labels, str):
                raise UsageError(
                    "Row {number}: a text has one label, not {labels!r:.60}.",
                    number=number,
                    labels=labels,
                )
            (row,) = model.tokenizer.rows([given], None, max_tokens=length)
            yield row, [((0, len(row.tokens)), labels, given)]
            continue
        require_that(
            not isinstance(labels, str) and len(labels) == len(given),
            "Row {number}: there must be a label for each of its words.",
            number=number,
        )
        (pieces,) = word_pieces(model.tokenizer, [list(given)], length)
        for piece in pieces:
            yield piece.row, _word_examples(piece, given, labels, control)


def _word_examples(
    piece: WordPieces, words: Sequence[str], labels: Sequence[str], control: set[int]
) -> list[Labelled]:
    tokens = piece.row.tokens.tolist()
    # the words end at the last token that is no special one
    last = max((i + 1 for i, token in enumerate(tokens) if token not in control), default=0)
    found: list[Labelled] = []
    end = last or len(tokens)
    for at, first in reversed(list(enumerate(piece.firsts, piece.start))):
        if first is not None:
            found.append(((end - 1, end), labels[at], words[at].lower()))
            end = first
    return found[::-1]


@torch.no_grad()
def _vectors(
    model: LoadedModel, rows: Sequence[TokenRow], places: Sequence[Sequence[tuple[int, int]]]
) -> Tensor:
    """The mean hidden state of each span in every layer, in the order of the rows."""
    network = model.masked.network  # as `hidden_states` reads
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for group, given in model_batches(network, rows, "read"):
        seen = Activations()
        network.trunk(**given, activations=seen)
        states = torch.stack([layer.float().cpu() for layer in seen.hidden], 1)
        for i, layers in zip(group, states, strict=True):
            means = [layers[:, start:end].mean(1) for start, end in places[i]]
            found[i] = torch.stack(means, 1) if means else layers[:, :0]
    if not found:
        return torch.empty(model.config.depth + 1, 0, model.config.width)
    return torch.cat(found, 1)


# ------------------------------------------------------------------ the reader


def _accuracy(
    known: LayerVectors, tested: LayerVectors, layer: int, labels: Sequence[str]
) -> float:
    def side(some: LayerVectors) -> tuple[Tensor, Tensor]:
        found = [labels.index(label) if label in labels else -1 for label in some.labels]
        return some.vectors[layer], torch.tensor(found)

    return linear_accuracy(side(known), side(tested), len(labels))


def linear_accuracy(
    known: tuple[Tensor, Tensor], tested: tuple[Tensor, Tensor], classes: int
) -> float:
    """The accuracy on tested vectors [N, D] and labels [N] of a layer trained on known ones."""
    x, y = known
    mean = x.mean(0)
    scale = x.std(0).clamp(min=1e-6)
    weight, bias = fit_linear((x - mean) / scale, y, classes, RIDGE)
    guessed = ((tested[0] - mean) / scale @ weight + bias).argmax(-1)
    return float((guessed == tested[1]).double().mean())


def fit_linear(
    x: Tensor,
    y: Tensor,
    classes: int,
    ridge: float,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Minimises the mean loss + ridge · |W|², by default as logistic regression does.

    Returns the weight [D, K] and the bias [K].
    """
    x = x.detach().clone()
    weight = torch.zeros(x.size(1), classes, dtype=x.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, requires_grad=True)
    solver = lean(torch.optim.LBFGS)(
        [weight, bias], max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        total = loss(x @ weight + bias, y) + ridge * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(closure)
    return weight.detach(), bias.detach()


def _with_control(examples: LayerVectors, known: LayerVectors, seed: int) -> LayerVectors:
    """Assigns each word a random label with the label frequencies of the rows."""

    def drawn(key: str) -> str:
        return random.Random(f"{seed} {key}").choice(known.labels)

    return LayerVectors(examples.vectors, [drawn(key) for key in examples.keys], examples.keys)


# ------------------------------------------------------------------ rows from files


def read_probe_rows(path: Path, label: str | None = None) -> list[ProbeRow]:
    """Rows of a CoNLL-U file (`label`: upos, xpos or deprel), or of a table with text and label."""
    if ".conllu" in path.suffixes:
        return [row[1:] for row in conllu_rows(text_lines(path), label or "upos")]
    found = guess_columns(path, label=label)
    if not isinstance(found.label, str):
        raise MalmoiError(
            "No column of {path} looks like a label; name it with --label COLUMN.", path=path
        )
    with explained(BadRow, "{error}."):
        rows = any_rows(path, (found.text, found.label))
        return [(row.text(found.text), str(row[found.label])) for row in rows]
