"""The size of `pretrain gpt|bert|both`: measure the text and the machine, choose, say why.

`choose_size` takes, of shapes from small to large, the first that sees neither too many tokens per
weight nor the text too often. N weights, D tokens of a run, T of the text, C FLOPs of the budget.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, takewhile
from typing import Any, Literal, cast

from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.messages import logger, msg, plural
from malmoi.model import count_parameters, preset
from malmoi.report.chart import short_number
from malmoi.system.machine import this_machine
from malmoi.system.untrusted import format_size
from malmoi.text.documents import DocumentReader, require_documents
from malmoi.text.sentences import split_sentences
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.budget import FEW_UPDATES, meta_network
from malmoi.training.device import choose_execution, flops_per_token, known_flops
from malmoi.training.feed import kind_counts
from malmoi.training.parallel import ProcessGroup
from malmoi.training.prepare import SPECIAL, RunSources, learn_tokenizer
from malmoi.training.recipe import Recipe, TrainConfig
from malmoi.training.recipes import MODERN_BERT, MODERN_GPT, settings_by_path

# ------------------------------------------------------------------ how much text, how fast

READ_BYTES = 256 << 20  # of text that is counted; the rest is extrapolated
SAMPLE_CHARACTERS = 1_000_000  # of text that tokens per byte are measured on
SAMPLED_WHOLE = 3_000_000  # bytes that are: the sample's vocabulary is then the run's
SLOW_CORE = 2e10  # FLOP/s, assumed if nothing can be measured
# The share of a matrix product's speed that a step reaches: width / (width + …). On a GPU from
# 655,000 tokens/s of 11 × 640 on an H200, on a processor from five widths, Muon's update counted
# (docs/lab.md). In bf16, two cores with AMX at 4 × 192, without it.
GPU_HALF_SPEED_WIDTH = 1250
CPU_HALF_SPEED_WIDTH = 90
CPU_BF16_UTILISATION = 0.16


@dataclass(frozen=True)
class TextSize:
    """The size of the text, and a sample of it."""

    bytes: int
    documents: int
    sample: tuple[str, ...]
    weights: tuple[float, ...]  # of each in the sample: its source is so many times as long
    exact: bool = True

    @property
    def is_sampled_whole(self) -> bool:
        return self.exact and all(weight == 1 for weight in self.weights)

    def tokens(self, tokenizer: Tokenizer) -> int:
        """Estimates the tokens of the text from the sample."""
        counts = map(len, tokenizer.ids(list(self.sample)))
        return max(1, round(math.fsum(map(operator.mul, counts, self.weights))))

    def row_tokens(self, tokenizer: Tokenizer, context: int) -> int:
        """Tokens of a BERT's row on average, [CLS] and [SEP] too (`training.data.pairs.Pairs`).

        It begins with the sentence after a token drawn from the whole text, so a sentence counts by
        the length of the one before it, and does not go on into the next document.
        """
        sentences = [split_sentences(text) for text in self.sample]
        counts = iter([len(ids) for ids in tokenizer.ids(list(chain(*sentences)))])
        rows: list[int] = []
        drawn: list[float] = []
        for weight, pieces in zip(self.weights, sentences, strict=True):
            lengths = list(islice(counts, len(pieces)))
            left = list(accumulate(reversed(lengths)))[::-1]
            rows += [min(context, tokens + 2) for tokens in left]
            drawn += [weight * length for length in lengths]
        before = drawn[-1:] + drawn[:-1]
        mean = math.fsum(map(operator.mul, before, rows)) / max(1.0, math.fsum(before))
        return min(context, max(1, round(mean)))


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

    def words(self) -> str:
        return msg(
            "{peak:,.0f} GFLOP/s measured in {kind}"
            if self.measured
            else "{peak:,.0f} GFLOP/s assumed",
            peak=self.flops / 1e9,
            kind="bf16" if self.half else "fp32",
        )


def measure_text(readers: Sequence[DocumentReader]) -> TextSize:
    """Counts the text, all of it or 256 MB, and keeps a sample of every source."""
    sizes = {source.name: source.size for reader in readers for source in reader.sources}
    total = sum(sizes.values())
    each = total if total <= SAMPLED_WHOLE else max(20_000, SAMPLE_CHARACTERS // len(sizes))
    found = Counter[str]()
    taken = Counter[str]()
    sampled = Counter[str]()
    sample: list[tuple[str, str]] = []
    documents = 0
    whole = 0
    for document in require_documents(readers):
        if whole > READ_BYTES:
            break
        size = len(document.text.encode("utf-8", "replace"))
        whole += size
        documents += 1
        found[document.source] += size
        room = each - taken[document.source]
        if room > 0:
            part = document.text[:room]
            sample.append((document.source, part))
            taken[document.source] += len(part)
            sampled[document.source] += len(part.encode("utf-8", "replace"))
    texts = tuple(text for _, text in sample)
    weights = [found[source] / max(1, sampled[source]) for source, _ in sample]
    if whole <= READ_BYTES:
        return TextSize(whole, documents, texts, tuple(weights))
    # the last of them was not read to its end
    done = list(takewhile(lambda name: name in found, sizes))[:-1]
    # of a single large file only the size on disk is known
    ratio = sum(found[n] for n in done) / sum(sizes[n] for n in done) if done else 1.0
    estimate = max(whole, round(sum(sizes.values()) * ratio))
    more = estimate / whole
    weights = [weight * more for weight in weights]
    return TextSize(estimate, round(documents * more), texts, tuple(weights), exact=False)


def measure_speed(group: ProcessGroup, c: TrainConfig) -> Speed:
    """FLOP/s of a matrix product over all devices; of a slow core if none can be measured."""
    execution = choose_execution(group.device, c)
    kind = group.device.type
    names = [one.name for one in this_machine().accelerators if one.kind == kind]
    name = names[0] if names else msg("the processor")
    flops, problem = known_flops(execution)
    if problem:
        logger.warning(
            "The speed of {name} could not be measured ({problem}): the size is chosen for a "
            "slow core. --set model.width=… and model.depth=… choose another.",
            name=name,
            problem=problem,
        )
    return Speed((flops or SLOW_CORE) * group.world, kind, execution.half, name, bool(flops))


# ------------------------------------------------------------------ the size

Kind = Literal["gpt", "bert", "both"]

NOMINAL_WIDTH = 512  # of the step by which budgets are compared
HEAD_WIDTH = 64  # half of it if the width is not a multiple
WIDTHS = (*range(64, 256, 32), *range(256, 4097, 64))
MAX_WEIGHTS_PER_TOKEN = 20.0  # N/T of the largest runs of NanoGPT Slowrun (2.7B on 100M tokens)


# (C, D/N) of runs that were the best, or on a par with the best, of the sizes tried at a budget
# that limited compute, not text: D/N is interpolated in log C. A BERT predicts a quarter of its
# tokens, and wants more of them a weight.
SMALL_GPT = (3e12, 0.68e6 / 0.92e6)  # two slow cores, 12 MB of speeches: 2 × 128
SMALL_BERT = (5.5e12, 1.92e6 / 0.63e6)  # the same cores and speeches: 2 × 96, not 3 × 128
LARGE = (9.6e16, 500e6 / 32.5e6)  # H100, 5 minutes of fresh text: 9 × 512 (autoresearch)
# Runs limited by text did best at the size that reads it at most this often
# (H200: 9 × 512 for 70 s of 7.7M tokens, 10 × 640 for 290 s of 23.5M). A BERT's validation loss
# still fell at 28 epochs. Of both, twice a GPT's: 11 × 640 with 19 epochs (docs/lab.md).
MAX_EPOCHS: dict[Kind, float] = {"gpt": 9.0, "bert": 30.0, "both": 18.0}
MAX_BERT_DROPOUT = 0.05
# After these the validation loss rises, on 20 to 50 kB of text (docs/lab.md); BERT's is a guess.
USABLE_EPOCHS: dict[Kind, float] = {"gpt": 18.0, "bert": 120.0, "both": 36.0}
# Where the text ends before the minutes, a GPT learns from its own mean too: 4 MB read 18 times
# have 0.014 to 0.04 bits per byte less, for half as much time again (docs/lab.md).
OWN_TEACHER = 0.5
OWN_TEACHER_TIME = 1.6
# From here on a BERT that also detects replaced words is the better one, though its step takes half
# as long again. With 2,600 updates instead of 4,200: CoLA 34 → 42, STS-B 70 → 79, RTE 52 → 56,
# SST-2 88.2 → 87.7, but BLiMP 74.5 → 69.4 (docs/lab.md). The mean of its last weights is better.
DETECTING_FLOPS = 1e16
DETECTING_TIME = 1.5
DETECTING: dict[str, Any] = {
    "objective": "mlm+rtd",
    "data.mask_rate": 0.3,
    "model.generator_depth": 2,
    "train.ema": 0.05,
}
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
    small, low = SMALL_BERT if kind == "bert" else SMALL_GPT
    large, high = LARGE
    slope = math.log(high / low) / math.log(large / small)
    return low * float((flops / small) ** slope)


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


def vocabulary_size(text_bytes: int, sample: Iterable[str] = (), each: int = 2) -> int:
    """A power of two that grows with the text: 1,024 for 1 MB, 4,096 for 10 MB, 8,192 for 90.

    Frequent characters beyond a byte's worth need tokens, `each` so many (docs/lab.md).
    """
    wanted = 8192 * (text_bytes / 94e6) ** 0.4 + each * max(0, frequent_characters(sample) - 256)
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
    """The smallest shape that sees few enough tokens per weight, seldom enough, or the largest."""
    best: SizeChoice | None = None
    for depth, width in shapes(given):
        too_large = _block_weights(depth, width) > MAX_WEIGHTS_PER_TOKEN * text_tokens
        if best is not None and too_large:
            reason = "the largest this text supports"
            break
        best = _one_size(kind, (depth, width), (text_tokens, vocab), seconds, speed, given)
        flops = seconds * speed.reached(width)
        if best.epochs > MAX_EPOCHS[kind]:
            reason = "the largest this text supports"
        elif best.tokens > tokens_per_weight(kind, flops) * best.weights:
            reason = "the largest there is"
        else:
            return best
    assert best is not None  # there are shapes
    limit = given.get("max_epochs", USABLE_EPOCHS[kind]) or math.inf
    share = min(1.0, limit / best.epochs)
    return replace(
        best,
        reason=reason,
        epochs=min(limit, best.epochs),
        tokens=int(best.tokens * share),
        minutes=best.minutes * share,
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
    sizes = dict(width=width, depth=depth, heads=heads, hidden=0, vocab=vocab, context=context)
    model = preset("bert-small" if kind == "bert" else "gpt2-small", **base | sizes)
    flops = seconds * speed.reached(width)
    cost = flops_per_token(model, weights, context)
    if speed.device == "cpu" and not speed.half:
        step = max(4 * context, batch_tokens(int(flops / cost), speed.device))
        cost += muon_flops(depth, width) / step
    seen = int(flops / cost)
    epochs = seen / max(1, tokens)
    most = MAX_EPOCHS[kind]
    limit = msg(
        "it reads the text {epochs:.1f} times, of at most {most:g}"
        if epochs > most / 2
        else "{seen:.2g} tokens per weight",
        epochs=epochs,
        most=most,
        seen=seen / weights,
    )
    return SizeChoice(model, weights, seen, epochs, seconds / 60, context, limit)


def muon_flops(depth: int, width: int) -> float:
    """FLOPs of Muon's update of the blocks in fp32: `orthogonal` of w × w, 3 w × w and two 4 w × w.

    With few tokens in a step that is half as much as the step itself.
    """
    return depth * (30 + 48 + 2 * 52) * float(width) ** 3


def dropout_for(kind: Kind, epochs: float) -> float:
    """Dropout by how often the text is read: 0 for once, 0.06 for four epochs, 0.1 for nine.

    At most 0.2; a BERT sees other masks every time: 0.05 at most. For both, epochs count half.
    """
    limit = MAX_EPOCHS["gpt"]
    epochs = epochs / 2 if kind == "both" else epochs
    often = min(1.0, max(0.0, (epochs - limit) / limit))
    rate = 0.1 * min(1.0, math.log(max(1.0, epochs)) / math.log(limit)) + 0.1 * often
    return round(min(rate, MAX_BERT_DROPOUT) if kind == "bert" else rate, 2)


def muon_decay_for(epochs: float) -> float:
    """0.8 (cautious) for text that is read four times or more, 0.1 for text that is read once."""
    return round(0.1 + 0.7 * min(1.0, max(0.0, (epochs - 1) / 3)), 2)


# ------------------------------------------------------------------ the recipe, and why

MIN_TEXT_BYTES = 10_000
LITTLE_TEXT_BYTES = 300_000
MIN_ENCODED_BYTES = 10_000_000  # a vocabulary is learnt from them, in seconds
ENCODED_PER_READ = 4  # the machine may turn out to be faster
MOST = 0.5  # a larger part of the text is not worth leaving the rest out
VALID_BYTES = 50_000  # held out at least, up to a tenth: a small text is needed for training
MASKED_ROW = 128  # tokens of a masked row of `both`
PACKED_PASS = 512  # tokens of a pass of short texts on a processor, which attends to all of them


@dataclass(frozen=True)
class SizedRecipe:
    """The chosen recipe, and the reasons in sentences."""

    recipe: Recipe
    reasons: tuple[str, ...]
    sample: tuple[str, ...]  # of the text, …
    words: Tokenizer  # … and a vocabulary of about its size


def size_recipe(
    requested: Recipe, overrides: Mapping[str, Any], origin: RunSources, group: ProcessGroup
) -> SizedRecipe:
    """The recipe for this text, time and machine; the settings in `overrides` are kept."""
    kind = cast(Kind, requested.name)
    given = frozenset(settings_by_path(requested, overrides))
    require_that(
        "train.minutes" in given,
        "The size of `pretrain {kind}` follows from its time: give --minutes, or a recipe with a "
        "size of its own (malmoi recipes).",
        kind=kind,
    )
    require_that(
        origin.start is None,
        "--start already has a size: give the recipe it was trained with, not {kind}.",
        kind=kind,
    )
    text = measure_text(origin.readers(requested.data))
    check_enough_text(text)
    seconds = requested.train.minutes * 60
    speed = measure_speed(group, requested.train)
    detecting, slower = _detecting(kind, seconds, speed, given)
    words, vocab = _vocabulary(requested, given, origin, text, 4 if detecting else 2)
    valid = requested.data.valid if "data.valid" in given else held_out_share(text)
    tokens = text.tokens(words)
    learnt = (1 - valid) * tokens
    fixed = _fixed_sizes(requested, given)
    context = fixed.get("context", 0)
    require_that(
        context <= learnt,
        "model.context={context} is longer than the text to learn from, about {learnt:,.0f} "
        "tokens: use more text or a shorter context.",
        context=context,
        learnt=learnt,
    )
    size = choose_size(kind, round(learnt), vocab, seconds / slower, speed, fixed)
    size = replace(size, minutes=slower * size.minutes)
    if kind == "bert":
        size = replace(size, row=text.row_tokens(words, size.model.context))
    changes = _settings(kind, size, text, speed.device) | detecting
    longer = OWN_TEACHER_TIME * size.minutes
    if kind == "gpt" and longer <= requested.train.minutes and group.world == 1:
        size = replace(size, minutes=longer)
        changes["train.own_teacher"] = OWN_TEACHER
    if "train.batch" in given:
        del changes["train.fit_batch"]
    changes = {name: value for name, value in changes.items() if name not in given}
    chosen = requested.override(changes).check()
    reasons = tuple(_reasons(chosen, size, text, tokens, speed, given))
    return SizedRecipe(chosen, reasons, text.sample, words)


def _detecting(
    kind: Kind, seconds: float, speed: Speed, given: frozenset[str]
) -> tuple[dict[str, Any], float]:
    """What lets a BERT detect replaced words, too, if that pays, and how much slower it learns."""
    much = seconds * speed.reached(NOMINAL_WIDTH) >= DETECTING_FLOPS
    pays = kind == "bert" and much and "objective" not in given
    return (DETECTING, DETECTING_TIME) if pays else ({}, 1.0)


def _vocabulary(
    requested: Recipe, given: frozenset[str], origin: RunSources, text: TextSize, each: int
) -> tuple[Tokenizer, int]:
    """The given tokenizer, or one of the sample that counts tokens as the run's will; its size.

    Where the sample is the whole text, it is the run's.
    """
    if origin.tokenizer:
        words = Tokenizer.load(origin.tokenizer)
        return words, words.vocab_size
    chosen = "tokenizer.vocab" in given
    vocab = requested.tokenizer.vocab if chosen else vocabulary_size(text.bytes, text.sample, each)
    sized = requested.override({"tokenizer.vocab": vocab})
    if text.is_sampled_whole and "data.fraction" not in given:
        origin.learnt = learn_tokenizer(sized, origin.readers(requested.data))
        return origin.learnt, vocab
    special = SPECIAL.get(requested.samples, "none")
    return train_tokenizer(text.sample, **vars(sized.tokenizer), special=special), vocab


def _fixed_sizes(requested: Recipe, given: frozenset[str]) -> dict[str, float]:
    """The sizes that the user has set."""
    names = [name for name in ("width", "depth", "heads", "context") if f"model.{name}" in given]
    fixed: dict[str, float] = {name: getattr(requested.model, name) for name in names}
    if "train.max_epochs" in given:
        fixed["max_epochs"] = requested.train.max_epochs
    return fixed


def encoded_fraction(share: float) -> float:
    """The part of the text to encode for a run that reads this share of it, or more."""
    return 1.0 if share > MOST else round(share, 4)


def held_out_share(text: TextSize) -> float:
    """The share of the text to validate on."""
    return round(min(0.1, max(0.01, VALID_BYTES / text.bytes)), 4)


def check_enough_text(text: TextSize) -> None:
    kilobytes = text.bytes / 1000
    require_that(
        text.bytes >= MIN_TEXT_BYTES,
        "There are {kilobytes:.1f} kB of text, too little to learn a language from: use 10 kB or "
        "more (fluent sentences take about 10 MB), or malmoi pretrain gpt-char.",
        kilobytes=kilobytes,
    )
    if text.bytes < LITTLE_TEXT_BYTES:
        logger.warning(
            "There are only {kilobytes:.0f} kB of text: the model will memorise much of it.",
            kilobytes=kilobytes,
        )


def _settings(kind: Kind, size: SizeChoice, text: TextSize, device: str) -> dict[str, Any]:
    """The settings that follow from the size, by name."""
    batch = max(4, int(2 ** round(math.log2(batch_tokens(size.tokens, device) / size.row))))
    steps = max(1, size.tokens // (batch * size.row))
    # on a processor rows are padded, unless most of each would be padding (docs/lab.md)
    packed = device == "cpu" and 2 * size.row <= size.model.context
    return {
        **{f"model.{name}": value for name, value in size.model.to_dict().items()},
        "model.dropout": dropout_for(kind, size.epochs),
        "tokenizer.vocab": size.model.vocab,
        "data.valid": held_out_share(text),
        "data.fraction": encoded_fraction(
            max(MIN_ENCODED_BYTES / text.bytes, ENCODED_PER_READ * size.epochs)
        ),
        "data.masked_length": _masked_length(kind, size.model.context),
        "train.max_epochs": USABLE_EPOCHS[kind],
        "train.batch": batch,
        # the trainer times full rows, and few short ones teach a BERT nothing (docs/lab.md)
        "train.fit_batch": not _short_rows(size),
        "train.muon_decay": muon_decay_for(size.epochs),
        "train.valid_every": max(50, steps // 4),
        **({"data.packed": True, "train.micro": max(1, PACKED_PASS // size.row)} if packed else {}),
    }


def _short_rows(size: SizeChoice) -> bool:
    """Whether most texts end before a row is full."""
    return size.row < 0.9 * size.model.context


def _masked_length(kind: Kind, context: int) -> int:
    """Tokens of the masked rows of `both`, which divide the context: short ones teach more."""
    if kind != "both" or context <= MASKED_ROW:
        return 0
    shorter = range(MASKED_ROW, MASKED_ROW // 2 - 1, -1)
    return next((length for length in shorter if context % length == 0), 0)


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
    d = recipe.data
    minutes = plural(size.minutes, "minute")
    yield msg(
        "Text: {about}{bytes} in {about}{documents}, so a vocabulary of {vocab:,}: about {count} "
        "tokens.",
        about="" if text.exact else "about ",
        bytes=format_size(text.bytes),
        documents=plural(text.documents, "document"),
        vocab=recipe.tokenizer.vocab,
        count=short_number(tokens, 3),
    )
    if d.fraction < 1:
        yield msg(
            "Encoding: {part} of the text, drawn evenly: {minutes} can read no more.",
            part=format_size(d.fraction * text.bytes),
            minutes=plural(c.minutes, "minute"),
        )
    yield msg(
        "Machine: {speed}, {known}: about {flops:.1e} FLOPs in {minutes} of training.",
        speed=speed.name,
        known=speed.words(),
        flops=size.minutes * 60 * speed.reached(m.width),
        minutes=minutes,
    )
    yield msg(
        "Size: {depth} layers × {width}, {count} weights: {reason}.",
        # size.weights leaves out norms and gates
        count=short_number(count_parameters(meta_network(recipe)), 3),
        **dict(vars(m), reason=msg(size.reason)),
    )
    yield msg(
        "Epochs: {count} tokens, {epochs:.3g} epochs: so dropout {dropout:g} and a cautious Muon "
        "decay of {muon_decay:g}.",
        **dict(vars(c), count=short_number(size.tokens, 3), epochs=size.epochs, dropout=m.dropout),
    )
    steps = size.tokens // (c.batch * size.row)
    yield msg(
        "Batch: {batch} texts of {row} tokens on average (at most {context}), about {steps}."
        if _short_rows(size)
        else "Batch: {batch} × {row} tokens, about {steps}.",
        batch=c.batch,
        row=size.row,
        context=m.context,
        steps=plural(steps, "step"),
    )
    if recipe.objective == "mlm+rtd":
        yield (
            "Objective: the model fills masks and finds the words that a small generator wrote "
            "into others. It judges and compares texts better so; --set objective=mlm fills better."
        )
    if recipe.objective == "both":
        yield msg(
            "Rows: {causal} of {batch} are read from left to right, the others with masks, "
            "{length} tokens at a time.",
            causal=kind_counts((d.causal_share, 1 - d.causal_share), c.batch)[0],
            batch=c.batch,
            length=d.masked_length or m.context,
        )
    if steps < FEW_UPDATES:
        yield "Steps: too few to learn much; more minutes or a smaller model would help."
    yield msg(
        "Rate: Muon {muon_lr:g}, Adam {lr:g}; constant, then decaying over the last "
        "{cooldown:.0%}.",
        **vars(c),
    )
    yield msg("Validation: on {valid:.1%} of the text, which is held out.", valid=d.valid)
    if c.own_teacher:
        yield (
            "Teacher: the text ends before the minutes, so the mean of the last weights teaches "
            "too; a step takes half as long again."
        )
    if size.minutes < c.minutes:
        yield msg(
            "Time: the run ends after about {most} of the {minutes:g}, when the text has been "
            "read {max_epochs:g} times: more would only memorise it. More text would use the rest.",
            **dict(vars(c), most=minutes),
        )
    if own := ", ".join(sorted(given - {"train.minutes"})):
        yield msg("Given: {own}; the rest follows from it.", own=own)
    else:
        yield "Change any of it with --set, e.g. --set model.width=512; the rest adapts."
