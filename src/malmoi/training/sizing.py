"""Model size for a given text, time and machine: the rule of `pretrain gpt|bert|both`.

`choose_size` takes, of shapes from small to large, the first that sees neither too many tokens per
weight nor the text too often. The limits were measured: `MEASURED` has the runs, docs/lab.md the
tables they come from. N weights, D tokens a run processes, T tokens of the text, C floating-point
operations of the budget.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.messages import msg
from malmoi.model import preset
from malmoi.training.device import flops_per_token
from malmoi.training.measuring import Speed
from malmoi.training.recipes import MODERN_BERT, MODERN_GPT

Kind = Literal["gpt", "bert", "both"]

HEAD_WIDTH = 64  # half of it if the width is not a multiple
WIDTHS = (*range(64, 256, 32), *range(256, 4097, 64))
MAX_WEIGHTS_PER_TOKEN = 20.0  # N/T of the largest runs of NanoGPT Slowrun (2.7B on 100M tokens)


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was the best, or on a par with the best, of the sizes tried at its budget."""

    flops: float  # C
    weights: float  # N
    tokens: float  # D
    about: str

    @property
    def tokens_per_weight(self) -> float:
        return self.tokens / self.weights


# Runs limited by compute, not by text: their D/N is interpolated in log C. A BERT predicts a
# quarter of its tokens, and wants more of them a weight.
SMALL_GPT = MeasuredRun(3e12, 0.92e6, 0.68e6, "two slow cores, 12 MB of speeches: 2 × 128")
SMALL_BERT = MeasuredRun(5.5e12, 0.63e6, 1.92e6, "the same cores and speeches: 2 × 96, not 3 × 128")
LARGE = MeasuredRun(9.6e16, 32.5e6, 500e6, "H100, 5 minutes of fresh text: 9 × 512 (autoresearch)")
# Runs limited by text did best at the size that reads it at most this often
# (H200: 9 × 512 for 70 s of 7.7M tokens, 10 × 640 for 290 s of 23.5M). A BERT's validation loss
# still fell at 28 epochs. Of both, twice a GPT's: 11 × 640 with 19 epochs (docs/lab.md).
MAX_EPOCHS: dict[Kind, float] = {"gpt": 9.0, "bert": 30.0, "both": 18.0}
MAX_BERT_DROPOUT = 0.05
# After these the validation loss rises, on 20 to 50 kB of text (docs/lab.md); BERT's is a guess.
USABLE_EPOCHS: dict[Kind, float] = {"gpt": 18.0, "bert": 120.0, "both": 36.0}
# Together they gain 0.025 bits per byte on 55 MB of text (docs/lab.md).
SMALL_TEXT_GPT = MODERN_GPT | dict(embed_norm=True, embedding_residual=True, skip_connections=True)


@dataclass(frozen=True)
class SizeChoice:
    """A model size, and the run that follows from it."""

    model: ModelConfig
    weights: int  # N
    tokens: int  # D, that the run processes
    epochs: float
    minutes: float  # of training that the text supports
    row: int  # tokens of a row, on average
    reason: str


def tokens_per_weight(kind: Kind, flops: float) -> float:
    """The best tokens per weight for this compute, log-linear through two measured runs."""
    low, high = SMALL_BERT if kind == "bert" else SMALL_GPT, LARGE
    ratio = high.tokens_per_weight / low.tokens_per_weight
    slope = math.log(ratio) / math.log(high.flops / low.flops)
    return low.tokens_per_weight * float((flops / low.flops) ** slope)


def shapes(given: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(depth, width) from small to large, about 64 of width per layer; given values are fixed."""
    found = []
    for width in [int(given["width"])] if "width" in given else _widths(given.get("heads", 1)):
        depths = range(max(2, width // 64 - 1), max(2, width // 64) + 2)
        found += [(d, width) for d in ([int(given["depth"])] if "depth" in given else depths)]
    return sorted(found, key=lambda shape: _block_weights(*shape))


def _widths(heads: int) -> list[int]:
    """Widths that divide into so many heads of an even width, multiples of 16 among them."""
    unit = 16 * heads
    even = {width for width in WIDTHS if width % (2 * heads) == 0}
    return sorted(even | {unit * max(1, round(width / unit)) for width in WIDTHS})


def _block_weights(depth: int, width: int) -> int:
    """Weights of a block's four attention matrices and two MLP matrices of four times the width."""
    return 12 * depth * width**2


def heads_for(width: int) -> int:
    """Heads of 64, or of 32 if that does not divide the width, or of the next even number."""
    wanted = width // (HEAD_WIDTH if width % HEAD_WIDTH == 0 else HEAD_WIDTH // 2)
    return next((heads for heads in range(wanted, 1, -1) if width % (2 * heads) == 0), 1)


def vocabulary_size(text_bytes: int, sample: Iterable[str] = ()) -> int:
    """A power of two that grows with the text: 1,024 for 1 MB, 4,096 for 10 MB, 8,192 for 90.

    Characters beyond a byte's worth need tokens of their own, inside and at the start of words:
    Korean has twice the vocabulary (docs/lab.md).
    """
    letters = max(0, frequent_characters(sample) - 256)
    wanted = 8192 * (text_bytes / 94e6) ** 0.4 + 2 * letters
    return int(2 ** round(math.log2(min(32_768, max(512, wanted)))))


def frequent_characters(sample: Iterable[str]) -> int:
    """How many different characters make up 99.99 % of a text."""
    counts = Counter(chain.from_iterable(sample))
    rare = 1e-4 * counts.total()
    return sum(below > rare for below in accumulate(sorted(counts.values())))


def context_length(kind: Kind, weights: int, tokens: int) -> int:
    """Tokens per sample: longer for larger models, never more than a hundredth of the text.

    A BERT's is a paragraph, because fine-tuning cannot use truncated text (docs/lab.md).
    """
    steps = ((2e6, 128), (8e6, 256), (300e6, 512), (math.inf, 1024))
    length = 128 if kind == "bert" else next(length for most, length in steps if weights < most)
    while length > 16 and 100 * length > tokens:
        length //= 2
    return length


def batch_tokens(tokens: int, device: str) -> int:
    """Tokens per step, a power of two: 512 for 200,000 tokens in all, 32,768 for 100 million.

    Never below 32,768 on a GPU, where half as many did worse (docs/lab.md).
    """
    minimum = 512 if device == "cpu" else 32_768
    wanted = min(2**19, max(minimum, 32_768 * (tokens / 170e6) ** 0.6))
    return int(2 ** round(math.log2(wanted)))


def choose_size(
    kind: Kind, text_tokens: int, vocab: int, seconds: float, speed: Speed, given: Mapping[str, Any]
) -> SizeChoice:
    """The smallest shape that sees few enough tokens per weight and reads the text seldom enough.

    If none does, the largest that the text supports.
    """
    best: SizeChoice | None = None
    for depth, width in shapes(given):
        too_large = _block_weights(depth, width) > MAX_WEIGHTS_PER_TOKEN * text_tokens
        if best is not None and too_large:
            best = replace(best, reason="the largest this text supports")
            break
        best = _one_size(kind, (depth, width), (text_tokens, vocab), seconds, speed, given)
        flops = seconds * speed.reached(width)
        if best.epochs > MAX_EPOCHS[kind]:
            reason = "the largest this text supports"
        elif best.tokens > tokens_per_weight(kind, flops) * best.weights:
            reason = "the largest there is"
        else:
            return best
        best = replace(best, reason=reason)
    if best is None:
        raise UsageError("There is no size to choose from.")
    limit = given.get("max_epochs", USABLE_EPOCHS[kind])
    if not limit or best.epochs <= limit:
        return best
    share = limit / best.epochs
    return replace(
        best, epochs=limit, tokens=int(best.tokens * share), minutes=best.minutes * share
    )


def _one_size(
    kind: Kind,
    shape: tuple[int, int],
    text: tuple[int, int],
    seconds: float,
    speed: Speed,
    given: Mapping[str, Any],
) -> SizeChoice:
    depth, width = shape
    tokens, vocab = text
    blocks = _block_weights(depth, width)
    weights = blocks + vocab * width
    context = int(given.get("context", context_length(kind, blocks, tokens)))
    base = MODERN_BERT if kind == "bert" else SMALL_TEXT_GPT | {"both_ways": kind == "both"}
    heads = given.get("heads", heads_for(width))
    sizes = dict(width=width, depth=depth, heads=heads, hidden=0)
    name = "bert-small" if kind == "bert" else "gpt2-small"
    model = preset(name, **base | sizes | dict(vocab=vocab, context=context))
    flops = seconds * speed.reached(width)
    cost = flops_per_token(model, weights, context)
    if speed.device == "cpu" and not speed.half:
        step = max(4 * context, batch_tokens(int(flops / cost), speed.device))
        cost += muon_flops(depth, width) / step
    seen = int(flops / cost)
    epochs = seen / max(1, tokens)
    limit = (
        msg(
            "it reads the text {epochs:.1f} times, of at most {most:g}",
            epochs=epochs,
            most=MAX_EPOCHS[kind],
        )
        if epochs > MAX_EPOCHS[kind] / 2
        else msg("{seen:.2g} tokens per weight", seen=seen / weights)
    )
    return SizeChoice(model, weights, seen, epochs, seconds / 60, context, limit)


def muon_flops(depth: int, width: int) -> float:
    """FLOPs of Muon's update of the blocks: five iterations of 4 m²n + 2 m³ for each m × n matrix.

    With few tokens in a step that is as much as the step itself.
    """
    square = 6 * width**3
    wide = (4 * 4 + 2) * width**3  # and tall: the MLP's
    return 5.0 * depth * (4 * square + 2 * wide)


def dropout_for(kind: Kind, epochs: float) -> float:
    """Dropout by how often the text is read: 0 for once, 0.06 for four epochs, 0.1 for nine.

    At most 0.2, for text that is read far too often. A BERT sees other masks every time: 0.05 at
    most (at 28 epochs 0.2 costs it 0.16 nats, docs/lab.md). For both, epochs count half.
    """
    limit = MAX_EPOCHS["gpt"]
    epochs = epochs / 2 if kind == "both" else epochs
    often = min(1.0, max(0.0, (epochs - limit) / limit))
    rate = 0.1 * min(1.0, math.log(max(1.0, epochs)) / math.log(limit)) + 0.1 * often
    return round(min(rate, MAX_BERT_DROPOUT) if kind == "bert" else rate, 2)


def muon_decay_for(epochs: float) -> float:
    """0.8 (cautious) for text that is read four times or more, 0.1 for text that is read once."""
    return round(0.1 + 0.7 * min(1.0, max(0.0, (epochs - 1) / 3)), 2)
