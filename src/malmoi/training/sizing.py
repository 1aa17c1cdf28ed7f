"""Model size for a given text, time and machine, as used by `pretrain gpt|bert|both`.

The rule is `choose_size`: of shapes from small to large, the first that sees neither too many
tokens per weight nor the text too often. The limits were measured: `MEASURED` has the runs,
docs/lab.md the tables they come from. N weights, D tokens a run processes, T tokens of the text, C
floating-point operations of the budget.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, takewhile
from typing import Any, Literal, cast

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model import count_parameters, preset
from malmoi.system.language import plural
from malmoi.system.machine import this_machine
from malmoi.text.documents import DocumentReader
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.device import choose_execution, flops_per_token, known_flops, thread_count
from malmoi.training.estimate import meta_network
from malmoi.training.pace import FEW_UPDATES
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe, TrainConfig
from malmoi.training.recipes import MODERN_BERT, MODERN_GPT

logger = logging.getLogger(__name__)

Kind = Literal["gpt", "bert", "both"]

HEAD_WIDTH = 64  # half of it if the width is not a multiple
WIDTHS = (*range(64, 256, 32), *range(256, 4097, 64))
MAX_WEIGHTS_PER_TOKEN = 20.0  # N/T of the largest runs of NanoGPT Slowrun (2.7B on 100M tokens)
MIN_TEXT_BYTES = 10_000
LITTLE_TEXT_BYTES = 300_000
READ_BYTES = 256 << 20  # of text that is counted; the rest is extrapolated
VALID_BYTES = 50_000  # held out at least, up to a tenth: a small text is needed for training
SAMPLE_CHARACTERS = 1_000_000  # of text that tokens per byte are measured on
SLOW_CORE = 2e10  # FLOP/s, assumed if nothing can be measured


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


# Runs limited by compute, not by text: their D/N is interpolated in log C.
MEASURED = (
    MeasuredRun(3e12, 0.92e6, 0.68e6, "two slow cores, 12 MB of speeches: 2 × 128, not 3 × 64"),
    MeasuredRun(9.6e16, 32.5e6, 500e6, "H100, 5 minutes of fresh text: 9 × 512 (autoresearch)"),
)
# Runs limited by text did best at the size that reads it at most this often
# (H200: 9 × 512 for 70 s of 7.7M tokens, 10 × 640 for 290 s of 23.5M). A BERT's validation loss
# still fell at 28 epochs. Of both, twice a GPT's: 11 × 640 with 19 epochs learnt both objectives as
# well as two models did (docs/lab.md).
MAX_EPOCHS: dict[Kind, float] = {"gpt": 9.0, "bert": 30.0, "both": 18.0}
MAX_BERT_DROPOUT = 0.05
# After these the validation loss rises, on 20 to 50 kB of text (docs/lab.md); BERT's is a guess.
USABLE_EPOCHS: dict[Kind, float] = {"gpt": 18.0, "bert": 120.0, "both": 36.0}
# The share of a matrix product's speed that a step reaches: width / (width + …). On a GPU from
# 655,000 tokens/s of 11 × 640 on an H200, on a processor from five widths, Muon's update counted
# (docs/lab.md). In bf16, two cores with AMX at 4 × 192, without it.
GPU_HALF_SPEED_WIDTH = 1250
CPU_HALF_SPEED_WIDTH = 90
CPU_BF16_UTILISATION = 0.16
# Together they gain 0.025 bits per byte on 55 MB of text (docs/lab.md).
SMALL_TEXT_GPT = MODERN_GPT | dict(embed_norm=True, embedding_residual=True, skip_connections=True)


@dataclass(frozen=True)
class TextSize:
    """The size of the text, and a sample of it."""

    bytes: int
    documents: int
    sample: tuple[str, ...]
    exact: bool = True

    def tokens(self, tokenizer: Tokenizer) -> int:
        """Estimates the tokens of the text from the sample."""
        sampled = sum(len(text.encode()) for text in self.sample)
        ids = sum(map(len, tokenizer.ids(list(self.sample))))
        return max(1, round(self.bytes * ids / max(1, sampled)))

    def row_tokens(self, tokenizer: Tokenizer, context: int) -> int:
        """Tokens of a BERT's row on average: a row does not go on into the next document."""
        lengths = [n for n in map(len, tokenizer.ids(list(self.sample))) if n]
        rows = sum(math.ceil(n / context) for n in lengths)
        return min(context, max(1, round(sum(lengths) / max(1, rows))))


@dataclass(frozen=True)
class Speed:
    """The measured speed of the machine."""

    flops: float  # of a large matrix product, per second
    device: str  # cpu, cuda, mps
    half: bool
    name: str
    measured: bool = True

    def reached(self, width: int) -> float:
        """FLOP/s that a training step of this width reaches."""
        if self.device == "cpu" and self.half:
            return self.flops * CPU_BF16_UTILISATION
        half_speed = CPU_HALF_SPEED_WIDTH if self.device == "cpu" else GPU_HALF_SPEED_WIDTH
        return self.flops * width / (width + half_speed)


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


# ------------------------------------------------------------------ the rule


def tokens_per_weight(flops: float) -> float:
    """The best tokens per weight for this compute, log-linear through the two measured runs."""
    low, high = MEASURED
    ratio = high.tokens_per_weight / low.tokens_per_weight
    slope = math.log(ratio) / math.log(high.flops / low.flops)
    return low.tokens_per_weight * float((flops / low.flops) ** slope)


def shapes(given: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(depth, width) from small to large, about 64 of width per layer; given values are fixed."""
    found = []
    heads = max(1, int(given.get("heads", 1)))
    divisible = [width for width in WIDTHS if width % heads == 0]
    for width in [int(given["width"])] if "width" in given else divisible:
        depths = range(max(2, width // 64 - 1), max(2, width // 64) + 2)
        found += [(d, width) for d in ([int(given["depth"])] if "depth" in given else depths)]
    return sorted(found, key=lambda shape: _block_weights(*shape))


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
        elif best.tokens > tokens_per_weight(flops) * best.weights:
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
        f"it reads the text {epochs:.1f} times, of at most {MAX_EPOCHS[kind]:g}"
        if epochs > MAX_EPOCHS[kind] / 2
        else f"{seen / weights:.2g} tokens per weight"
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


# ------------------------------------------------------------------ measuring text and machine


def measure_text(readers: Sequence[DocumentReader]) -> TextSize:
    """Counts the text, all of it or 256 MB, and keeps a sample of every source."""
    sizes = {source.name: source.size for reader in readers for source in reader.sources}
    each = max(20_000, SAMPLE_CHARACTERS // max(1, len(sizes)))
    found = Counter[str]()
    taken = Counter[str]()
    sample: list[str] = []
    documents = 0
    whole = 0
    for document in (document for reader in readers for document in reader):
        if whole > READ_BYTES:
            break
        size = len(document.text.encode("utf-8", "replace"))
        whole += size
        documents += 1
        found[document.source] += size
        room = each - taken[document.source]
        if room > 0:
            sample.append(document.text[:room])
            taken[document.source] += len(sample[-1])
    if whole <= READ_BYTES:
        return TextSize(whole, documents, tuple(sample))
    # the last of them was not read to its end
    done = list(takewhile(lambda name: name in found, sizes))[:-1]
    # of a single large file only the size on disk is known
    ratio = sum(found[n] for n in done) / sum(sizes[n] for n in done) if done else 1.0
    estimate = max(whole, round(sum(sizes.values()) * ratio))
    return TextSize(estimate, documents * estimate // whole, tuple(sample), exact=False)


def measure_speed(group: ProcessGroup, c: TrainConfig) -> Speed:
    """FLOP/s of a matrix product over all devices of the run.

    If nothing can be measured, those of a slow core, with a warning.
    """
    execution = choose_execution(group.device, c)
    kind = group.device.type
    name = next((a.name for a in this_machine().accelerators if a.kind == kind), "the processor")
    with thread_count(group.device, 0, logger.info):
        flops, problem = known_flops(execution)
    if problem:
        logger.warning(
            f"The speed of {name} could not be measured ({problem}): the size is chosen for "
            f"{SLOW_CORE / 1e9:.0f} GFLOP/s, a slow core. --set model.width=… and model.depth=… "
            "choose another."
        )
    return Speed((flops or SLOW_CORE) * group.world, kind, execution.half, name, bool(flops))


# ------------------------------------------------------------------ the recipe


@dataclass(frozen=True)
class SizedRecipe:
    """The chosen recipe, and the reasons in sentences."""

    recipe: Recipe
    reasons: tuple[str, ...]


def size_recipe(
    requested: Recipe,
    given: frozenset[str],
    readers: Sequence[DocumentReader],
    group: ProcessGroup,
    tokenizer: Tokenizer | None = None,
) -> SizedRecipe:
    """The recipe for this text, these minutes and this machine.

    `requested` has the user's settings, named in `given`: they are kept, and the others follow from
    them.
    """
    kind = cast(Kind, requested.name)
    text = measure_text(readers)
    check_enough_text(text)
    named = "tokenizer.vocab" in given
    vocab = requested.tokenizer.vocab if named else vocabulary_size(text.bytes, text.sample)
    if tokenizer is not None:
        vocab = tokenizer.vocab_size
    words = tokenizer or train_tokenizer(
        text.sample, **vars(requested.tokenizer) | {"vocab": vocab}
    )
    speed = measure_speed(group, requested.train)
    sizes = [name for name in ("width", "depth", "heads", "context") if f"model.{name}" in given]
    fixed: dict[str, float] = {name: getattr(requested.model, name) for name in sizes}
    if "train.max_epochs" in given:
        fixed["max_epochs"] = requested.train.max_epochs
    share = 1 - (requested.data.valid if "data.valid" in given else held_out_share(text))
    tokens = text.tokens(words)
    seconds = requested.train.minutes * 60
    if fixed.get("context", 0) > share * tokens:
        raise UsageError(
            f"model.context={fixed['context']} is longer than the text to learn from, about "
            f"{share * tokens:,.0f} tokens: use more text or a shorter context."
        )
    size = choose_size(kind, round(share * tokens), vocab, seconds, speed, fixed)
    if kind == "bert":
        size = replace(size, row=text.row_tokens(words, size.model.context))
    changes = _settings(kind, size, text, speed.device)
    if "train.batch" in given:
        del changes["train.fit_batch"]
    changes = {name: value for name, value in changes.items() if name not in given}
    chosen = requested.override(changes).check()
    return SizedRecipe(chosen, tuple(_reasons(chosen, size, text, tokens, speed, given)))


def held_out_share(text: TextSize) -> float:
    """The share of the text to validate on."""
    return round(min(0.1, max(0.01, VALID_BYTES / text.bytes)), 4)


def check_enough_text(text: TextSize) -> None:
    kilobytes = text.bytes / 1000
    if not text.bytes:
        raise UsageError("There is no text to learn from: every source is empty.")
    if text.bytes < MIN_TEXT_BYTES:
        raise UsageError(
            f"There are {kilobytes:.1f} kB of text, too little to learn a language from: use "
            f"{MIN_TEXT_BYTES // 1000} kB or more; fluent sentences take about 10 MB. To watch a "
            "model memorise a small text: malmoi pretrain gpt-char."
        )
    if text.bytes < LITTLE_TEXT_BYTES:
        logger.warning(
            f"There are only {kilobytes:.0f} kB of text: the model will memorise much of it and "
            "generalise little."
        )


def _settings(kind: Kind, size: SizeChoice, text: TextSize, device: str) -> dict[str, Any]:
    """The settings that follow from the size, by name."""
    batch = max(4, int(2 ** round(math.log2(batch_tokens(size.tokens, device) / size.row))))
    steps = max(1, size.tokens // (batch * size.row))
    model = {f"model.{name}": value for name, value in size.model.to_dict().items()}
    return model | {
        "model.dropout": dropout_for(kind, size.epochs),
        "tokenizer.vocab": size.model.vocab,
        "data.valid": held_out_share(text),
        "train.max_epochs": USABLE_EPOCHS[kind],
        "train.batch": batch,
        # the trainer times full rows, and few short ones teach a BERT nothing (docs/lab.md)
        "train.fit_batch": size.row == size.model.context,
        "train.muon_decay": muon_decay_for(size.epochs),
        "train.valid_every": max(50, steps // 4),
    }


def _reasons(
    recipe: Recipe,
    size: SizeChoice,
    text: TextSize,
    tokens: int,
    speed: Speed,
    given: frozenset[str],
) -> Iterator[str]:
    c = recipe.train
    m = recipe.model
    about = "" if text.exact else "about "
    yield (
        f"Text: {about}{_bytes(text.bytes)} in {about}{plural(text.documents, 'document')}, "
        f"so a vocabulary of {recipe.tokenizer.vocab:,}: about {_count(tokens)} tokens."
    )
    kind = "bf16" if speed.half else "fp32"
    flops = size.minutes * 60 * speed.reached(m.width)
    peak = f"{speed.flops / 1e9:,.0f}"
    known = f"{peak} GFLOP/s measured in {kind}" if speed.measured else f"{peak} GFLOP/s assumed"
    yield (
        f"Machine: {speed.name}, {known}: about {flops:.1e} FLOPs in "
        f"{plural(size.minutes, 'minute')} of training."
    )
    weights = count_parameters(meta_network(recipe))  # size.weights leaves out norms and gates
    yield f"Size: {m.depth} layers × {m.width}, {_count(weights)} weights: {size.reason}."
    regular = f"dropout {m.dropout:g} and a cautious Muon decay of {c.muon_decay:g}"
    yield f"Epochs: {_count(size.tokens)} tokens, {size.epochs:.3g} epochs: so {regular}."
    steps = size.tokens // (c.batch * size.row)
    if size.row < m.context:
        yield (
            f"Batch: {c.batch} texts of {size.row} tokens on average (at most {m.context}), about "
            f"{plural(steps, 'step')}."
        )
    else:
        yield f"Batch: {c.batch} × {size.row} tokens, about {plural(steps, 'step')}."
    if steps < FEW_UPDATES:
        yield "Steps: too few to learn much; more minutes or a smaller model would help."
    yield (
        f"Rate: Muon {c.muon_lr:g}, Adam {c.lr:g}; constant, then decaying over the last "
        f"{c.cooldown:.0%}; the weights of the last {c.ema:.0%} are averaged."
    )
    yield f"Validation: on {recipe.data.valid:.1%} of the text, which is held out."
    if size.minutes < c.minutes:
        yield (
            f"Time: the run ends after about {plural(size.minutes, 'minute')} of the "
            f"{c.minutes:g}, when the text has been read {c.max_epochs:g} times: more would "
            "only memorise it. More text would use the rest."
        )
    own = ", ".join(sorted(given - {"train.minutes"}))
    if own:
        yield f"Given: {own}; the rest follows from it."
    else:
        yield "Change any of it with --set, e.g. --set model.width=512; the rest adapts."


def _bytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
