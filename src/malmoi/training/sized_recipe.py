"""The recipe of `pretrain gpt|bert|both`: its size, the settings that follow, and the reasons."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from malmoi.errors import UsageError
from malmoi.messages import msg, plural
from malmoi.model import count_parameters
from malmoi.text.documents import DocumentReader
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.estimate import meta_network
from malmoi.training.feed import kind_counts
from malmoi.training.measuring import Speed, TextSize, measure_speed, measure_text
from malmoi.training.pace import FEW_UPDATES
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe
from malmoi.training.sizing import (
    USABLE_EPOCHS,
    Kind,
    SizeChoice,
    batch_tokens,
    choose_size,
    dropout_for,
    muon_decay_for,
    vocabulary_size,
)

logger = logging.getLogger(__name__)

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
            "model.context={context} is longer than the text to learn from, about "
            "{share:,.0f} tokens: use more text or a shorter context.",
            context=fixed["context"],
            share=share * tokens,
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


def encoded_fraction(share: float) -> float:
    """The part of the text to encode for a run that reads this share of it, or more."""
    return 1.0 if share > MOST else round(share, 4)


def held_out_share(text: TextSize) -> float:
    """The share of the text to validate on."""
    return round(min(0.1, max(0.01, VALID_BYTES / text.bytes)), 4)


def check_enough_text(text: TextSize) -> None:
    kilobytes = text.bytes / 1000
    if text.bytes < MIN_TEXT_BYTES:
        raise UsageError(
            "There are {kilobytes:.1f} kB of text, too little to learn a language from: use "
            "{least} kB or more; fluent sentences take about 10 MB. To watch a model memorise "
            "a small text: malmoi pretrain gpt-char.",
            kilobytes=kilobytes,
            least=MIN_TEXT_BYTES // 1000,
        )
    if text.bytes < LITTLE_TEXT_BYTES:
        logger.warning(
            msg(
                "There are only {kilobytes:.0f} kB of text: the model will memorise much of "
                "it and generalise little.",
                kilobytes=kilobytes,
            )
        )


def _settings(kind: Kind, size: SizeChoice, text: TextSize, device: str) -> dict[str, Any]:
    """The settings that follow from the size, by name."""
    batch = max(4, int(2 ** round(math.log2(batch_tokens(size.tokens, device) / size.row))))
    steps = max(1, size.tokens // (batch * size.row))
    model = {f"model.{name}": value for name, value in size.model.to_dict().items()}
    settings = {
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
    }
    return model | settings | _packing(size, device)


def _packing(size: SizeChoice, device: str) -> dict[str, Any]:
    """On a processor rows are padded, unless most of each would be padding (docs/lab.md)."""
    if device != "cpu" or 2 * size.row > size.model.context:
        return {}
    return {"data.packed": True, "train.micro": max(1, PACKED_PASS // size.row)}


def _short_rows(size: SizeChoice) -> bool:
    """Whether most texts end before a row is full."""
    return size.row < 0.9 * size.model.context


def _masked_length(kind: Kind, context: int) -> int:
    """Tokens of the masked rows of `both`, which divide the context: short ones teach more.

    docs/lab.md has 128 next to the whole context of 512.
    """
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
    about = "" if text.exact else "about "
    yield msg(
        "Text: {about}{bytes} in {about}{documents}, so a vocabulary of {vocab:,}: about "
        "{count} tokens.",
        about=about,
        bytes=_bytes(text.bytes),
        documents=plural(text.documents, "document"),
        vocab=recipe.tokenizer.vocab,
        count=_count(tokens),
    )
    if recipe.data.fraction < 1:
        part = _bytes(recipe.data.fraction * text.bytes)
        yield msg(
            "Encoding: {part} of {bytes}, drawn evenly: {minutes} can read no more.",
            part=part,
            bytes=_bytes(text.bytes),
            minutes=plural(c.minutes, "minute"),
        )
    kind = "bf16" if speed.half else "fp32"
    flops = size.minutes * 60 * speed.reached(m.width)
    peak = f"{speed.flops / 1e9:,.0f}"
    known = (
        msg("{peak} GFLOP/s measured in {kind}", peak=peak, kind=kind)
        if speed.measured
        else msg("{peak} GFLOP/s assumed", peak=peak)
    )
    yield msg(
        "Machine: {speed}, {known}: about {flops:.1e} FLOPs in {minutes} of training.",
        speed=speed.name,
        known=known,
        flops=flops,
        minutes=plural(size.minutes, "minute"),
    )
    weights = count_parameters(meta_network(recipe))  # size.weights leaves out norms and gates
    yield msg(
        "Size: {depth} layers × {width}, {count} weights: {reason}.",
        depth=m.depth,
        width=m.width,
        count=_count(weights),
        reason=msg(size.reason),
    )
    regular = msg(
        "dropout {dropout:g} and a cautious Muon decay of {muon_decay:g}",
        dropout=m.dropout,
        muon_decay=c.muon_decay,
    )
    yield msg(
        "Epochs: {count} tokens, {epochs:.3g} epochs: so {regular}.",
        count=_count(size.tokens),
        epochs=size.epochs,
        regular=regular,
    )
    steps = size.tokens // (c.batch * size.row)
    if _short_rows(size):
        yield msg(
            "Batch: {batch} texts of {row} tokens on average (at most {context}), about {steps}.",
            batch=c.batch,
            row=size.row,
            context=m.context,
            steps=plural(steps, "step"),
        )
    else:
        yield msg(
            "Batch: {batch} × {row} tokens, about {steps}.",
            batch=c.batch,
            row=size.row,
            steps=plural(steps, "step"),
        )
    if recipe.objective == "both":
        d = recipe.data
        causal, _ = kind_counts((d.causal_share, 1 - d.causal_share), c.batch)
        yield msg(
            "Rows: {causal} of {batch} are read from left to right, the others with "
            "masks, {length} tokens at a time.",
            causal=causal,
            batch=c.batch,
            length=d.masked_length or m.context,
        )
    if steps < FEW_UPDATES:
        yield "Steps: too few to learn much; more minutes or a smaller model would help."
    yield msg(
        "Rate: Muon {muon_lr:g}, Adam {lr:g}; constant, then decaying over the last "
        "{cooldown:.0%}; the weights of the last {ema:.0%} are averaged.",
        muon_lr=c.muon_lr,
        lr=c.lr,
        cooldown=c.cooldown,
        ema=c.ema,
    )
    yield msg("Validation: on {valid:.1%} of the text, which is held out.", valid=recipe.data.valid)
    if size.minutes < c.minutes:
        yield msg(
            "Time: the run ends after about {minutes} of the {minutes2:g}, when the text "
            "has been read {most:g} times: more would only memorise it. More text would "
            "use the rest.",
            minutes=plural(size.minutes, "minute"),
            minutes2=c.minutes,
            most=c.max_epochs,
        )
    own = ", ".join(sorted(given - {"train.minutes"}))
    if own:
        yield msg("Given: {own}; the rest follows from it.", own=own)
    else:
        yield "Change any of it with --set, e.g. --set model.width=512; the rest adapts."


def _bytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
