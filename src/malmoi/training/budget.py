"""What a run costs: estimated before it starts, and its pace while it runs."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from malmoi.config import ModelConfig
from malmoi.messages import joined, msg, plural
from malmoi.model import Network, count_parameters
from malmoi.system.machine import per_device, pick_device
from malmoi.training.device import choose_execution, first_micro, flops_per_token, measured_flops
from malmoi.training.losses import objective
from malmoi.training.losses.base import MAX_LOGITS
from malmoi.training.recipe import BUDGETS, Recipe, TrainConfig
from malmoi.training.recipes import SIZED
from malmoi.training.state import RunState

LOOK_SECONDS = 1.0  # between reads of a GPU's loss, so that progress is visible
RECENT = 32  # recent laps of a kind that define a usual one
ABSURD = 10.0  # times a usual lap, and …
ABSURD_SECONDS = 5.0  # … at least this much longer: the machine slept, or the process was paused

USEFUL_UPDATES = 300  # with fewer, a smaller batch learns more than the recipe's
LEARNT = 0.03  # a drop below this share of the guessing loss means almost nothing was learned
FEW_UPDATES = 100  # with fewer, little is learned with any batch size
SMALLEST_BATCH = 8  # sequences

# objective → the recipe that learns in few minutes
SMALLER_RECIPES = {"lm": "gpt", "both": "both", "translation": "transformer-tiny"}


@dataclass(frozen=True)
class Budget:
    """The length of a run: steps, tokens or seconds."""

    steps: int  # of the run; an estimate if the budget is in tokens, 0 if it is in seconds
    seconds: float = 0.0
    tokens: int = 0
    samples: float = math.inf  # that end a budget in seconds early

    @classmethod
    def of(cls, recipe: Recipe, epoch: float = 0.0) -> "Budget":
        """The budget of a recipe; `epoch` is the samples of one, for a budget in epochs."""
        c = recipe.train
        if c.minutes:
            return cls(0, seconds=c.minutes * 60, samples=c.max_epochs * epoch or math.inf)
        if c.steps:
            return cls(c.steps)
        samples = c.epochs * epoch if c.epochs else c.tokens / recipe.mean_length
        return cls(max(1, math.ceil(steps_per_sample(c) * samples)), tokens=c.tokens)

    def progress(self, state: RunState) -> float:
        if self.tokens:
            return min(1.0, state.tokens / self.tokens)
        if self.steps:
            return min(1.0, state.step / self.steps)
        return min(1.0, max(sum(state.samples_seen) / self.samples, state.seconds / self.seconds))


def steps_per_sample(c: TrainConfig) -> float:
    """Steps per sample over a run whose batch grows linearly with the samples seen."""
    start = c.batch_start or c.batch
    if start == c.batch:
        return 1 / c.batch
    growing = math.log(c.batch / start) / (c.batch - start)
    return c.batch_ramp * growing + (1 - c.batch_ramp) / c.batch


class WorkClock:
    """Seconds of work that count against a budget in minutes; `share` is how much of each counts.

    The first step is free: it compiles and fills caches. A lap absurdly longer than others of its
    kind counts as a usual one, because nothing was computed while the machine slept.
    """

    def __init__(
        self,
        worked: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.training = 0.0  # seconds of steps only, including the first, to compute the speed
        self.taken = 0  # steps in `training`
        self._worked = worked
        self._now = now
        self._share = share
        self._since = now()
        self._steps = 0  # since the last lap
        self._first: float | None = None  # seconds of this process's first step
        self._recent: dict[str, deque[float]] = {}

    @property
    def started(self) -> bool:
        return self._first is not None

    @property
    def seconds(self) -> float:
        """Work so far; steps in flight on a GPU count by the time since the last lap."""
        if not self.started or not self._steps:
            return self._worked
        elapsed = self._plausible("step", self._now() - self._since, self._steps)
        return self._worked + elapsed * self._share()

    @property
    def usual_step(self) -> float:
        """Seconds of a typical step, as far as known."""
        return median(self._recent["step"]) if "step" in self._recent else self._first or 0.0

    def step(self) -> None:
        """Counts a step that was taken, or at least submitted to the device."""
        self._steps += 1

    def skip(self) -> None:
        """Discards the time since the last lap, when nothing was trained."""
        self._since = self._now()

    def lap(self, kind: str = "step") -> None:
        """Counts the time since the last lap; the device must have caught up."""
        count = self._steps if kind == "step" else 1
        elapsed = self._now() - self._since
        self._since = self._now()
        self._steps = 0
        self.taken += count if kind == "step" else 0
        if kind == "step" and not self.started:
            self._first = elapsed / max(1, count)
            self.training += elapsed
            return
        counted = self._plausible(kind, elapsed, count)
        self._worked += counted * self._share()
        self.training += counted if kind == "step" else 0.0
        self._recent.setdefault(kind, deque(maxlen=RECENT)).append(elapsed / max(1, count))

    def _plausible(self, kind: str, elapsed: float, count: int) -> float:
        if kind not in self._recent:
            return elapsed
        usual = median(self._recent[kind]) * max(1, count)
        return usual if elapsed > max(ABSURD * usual, usual + ABSURD_SECONDS) else elapsed


@dataclass(frozen=True)
class Pace:
    """What a budget in minutes holds on this machine, from a measured step."""

    optimizer: float  # seconds of one update of the weights
    sequence: float  # seconds of one sequence of the first phase, forward and backward
    recipe: Recipe
    budget: Budget  # it ends after its samples, even if time is left
    world: int = 1  # processes that share a batch

    def updates(self, batch: int) -> int:
        """Updates of `batch` sequences until the time or the text is used up."""
        return math.ceil(min(self.budget.samples / batch, self._timed_updates(batch)))

    def seconds_of(self, batch: int) -> float:
        """Seconds of an update of `batch` sequences of the first phase."""
        return self.optimizer + batch / self.world * self.sequence

    def _timed_updates(self, batch: int) -> int:
        return max(1, round(self._exact_updates(batch)))

    def _exact_updates(self, batch: int) -> float:
        """Updates of `batch` sequences that fit into the time, given the phases' lengths."""
        first = self.recipe.phases[0][0]
        here = batch / self.world * self.sequence
        took = {length: self.optimizer + here * length / first for length, _ in self.recipe.phases}
        seconds = self.budget.seconds
        return sum(share * seconds / max(took[n], 1e-9) for n, share in self.recipe.phases)

    def fitting(self, batch: int) -> int:
        """The largest of batch, batch / 2, batch / 4… with enough updates, or the smallest."""
        while self.updates(batch) < USEFUL_UPDATES:
            half = batch // 2
            if half < smallest_batch(self.recipe) or half % self.world:
                break
            batch = half
        return batch

    @property
    def _minutes(self) -> str:
        return plural(self.budget.seconds / 60, "minute")

    def _limit(self, batch: int) -> str:
        """What ends a run with this batch."""
        if self.updates(batch) < self._timed_updates(batch):
            return msg("until the text is used up")
        return msg("in your {minutes}", minutes=self._minutes)

    def expectation(self, batch: int) -> str:
        """Formats the pace: "1.7 s per step: about 105 steps in your 3 minutes"."""
        return msg(
            "{took} s per step: about {steps} {limit}.",
            took=f"{self.budget.seconds / self._timed_updates(batch):.2g}",
            steps=plural(self.updates(batch), "step"),
            limit=self._limit(batch),
        )

    def sentence(self, requested: int, chosen: int) -> str:
        """Says what to expect, and what to do if the budget holds few updates."""
        message = self.expectation(chosen)
        now = self.updates(chosen)
        if chosen < requested:
            message = msg(
                "{name}'s batch of {requested} would give {before} {limit}; using {chosen}: about "
                "{now:,}.",
                name=self.recipe.name,
                requested=requested,
                before=plural(self.updates(requested), "update"),
                limit=self._limit(chosen),
                chosen=chosen,
                now=now,
            )
        elif now >= USEFUL_UPDATES:
            return message
        smaller = self.fitting(chosen)
        if smaller < chosen and self.recipe.name not in SIZED:
            return msg(
                "{message} A batch of {batch} (--set train.batch={batch}): about {more:,}.",
                message=message,
                batch=smaller,
                more=self.updates(smaller),
            )
        if now >= FEW_UPDATES or now < self._timed_updates(chosen):
            return message
        return joined(" ", (message, self._advice(chosen)))

    def _advice(self, batch: int) -> str:
        """What to do where the time holds too few updates."""
        enough = math.ceil(self.budget.seconds / 60 * USEFUL_UPDATES / self._exact_updates(batch))
        advice = msg("That is too few to learn much: use --minutes {enough}", enough=enough)
        smaller = SMALLER_RECIPES.get(self.recipe.samples, "bert")
        if self.recipe.name == smaller:
            return advice + "."
        return msg(
            "{advice}, or let `malmoi pretrain {name}` choose a size that can learn in {minutes}."
            if smaller in SIZED
            else "{advice}, or the smaller recipe {name}.",
            advice=advice,
            name=smaller,
            minutes=self._minutes,
        )


def smallest_batch(recipe: Recipe) -> int:
    """Sequences of the smallest useful batch; of a translation, units of some thirty pairs."""
    return 1 if recipe.objective == "translation" else SMALLEST_BATCH


def verdict(
    recipe: Recipe,
    steps: int,
    loss: float,
    guessing: float,
    training: float = math.inf,
    epochs: float = 1.0,
) -> str:
    """A sentence about a run that learned almost nothing, and what to do; otherwise empty.

    `training` is the loss on the text that it learned from, `epochs` how often it read that.
    """
    learnt = (1 - LEARNT) * guessing
    if not guessing or loss < learnt:
        return ""
    losses = dict(training=training, loss=loss, guessing=guessing)
    if training < learnt:
        return msg(
            "This model has memorised its text (loss {training:.2f}) and predicts other text no "
            "better than token frequency does (loss {loss:.2f}, {guessing:.2f}). More text would "
            "help; more training would not.",
            **losses,
        )
    did, advice = _remedy(recipe, steps, epochs)
    return msg(
        "{did}: this model has learnt next to nothing (loss {loss:.2f}; guessing by token "
        "frequency gives {guessing:.2f}). {advice}",
        did=did,
        advice=advice,
        **losses,
    )


def _remedy(recipe: Recipe, steps: int, epochs: float) -> tuple[str, str]:
    """What a run that learnt nothing did, and what to do instead."""
    c = recipe.train
    updates = plural(steps, "update")
    did = msg("After {updates}", updates=updates)
    if steps >= USEFUL_UPDATES and epochs < 1:
        budget = next(name for name in BUDGETS if getattr(c, name))
        more = f"--{budget} {4 * getattr(c, budget):.10g}"
        did = msg("After {updates} on {epochs:.1%} of the text", updates=updates, epochs=epochs)
        return did, msg("Train for longer ({more}), or use a smaller model.", more=more)
    if steps >= USEFUL_UPDATES:
        return did, msg("More training, a lower train.lr or more text may help.")
    if not c.minutes:
        return did, msg("Train for more: --steps {steps} or more.", steps=USEFUL_UPDATES)
    minutes = plural(c.minutes, "minute")
    did = msg("Only {updates} fitted into {minutes}", updates=updates, minutes=minutes)
    enough = math.ceil(c.minutes * USEFUL_UPDATES / max(1, steps))
    sentence = "Use --minutes {enough} or a smaller recipe."
    if recipe.name in SIZED:  # size and batch were chosen for the minutes
        sentence = "Use --minutes {enough}."
    elif c.batch > smallest_batch(recipe):
        sentence = "Use --minutes {enough} or a smaller batch (--set train.batch={batch})."
    return did, msg(sentence, enough=enough, batch=smallest_batch(recipe))


# of an epoch where no text is known: BooksCorpus, 985M words (Zhu et al. 2015), at 1.2 tokens each
BOOKS_TOKENS = 1_180_000_000
EXPECTED_UTILISATION = 0.4  # of the measured peak: what a typical run reaches


# ------------------------------------------------------------------ before it starts


@dataclass(frozen=True)
class Estimate:
    """Expected cost of a run; bytes and seconds are rough."""

    parameters: int
    steps: int  # 0: as many as the minutes allow
    tokens: int
    seconds: float
    weights: int  # bytes, as are the next three
    gradients: int
    optimizer: int
    activations: int
    ceiling: float  # FLOP/s of a matrix product, measured here

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory}


def estimate_run(
    recipe: Recipe,
    *,
    tokenizer: Path | None = None,
    start: str | Path | None = None,
    device: str | None = None,
) -> tuple[Recipe, Estimate]:
    """Estimates a recipe's cost before the text is read; writes nothing."""
    recipe = resolve_for_estimate(recipe, tokenizer, start)
    network = meta_network(recipe)
    execution = choose_execution(pick_device(device), recipe.train)
    count = count_parameters(network)
    rate = measured_flops(execution)
    per_token = flops_per_token(recipe.model, count, int(recipe.mean_length))
    steps, tokens, seconds = budget_of(recipe, per_token, EXPECTED_UTILISATION * rate)
    longest = max(length for length, _ in recipe.phases)
    c = recipe.train
    micro = c.micro or first_micro(recipe.model, longest, c.batch, execution.device)
    made = Estimate(
        parameters=count,
        steps=steps,
        tokens=tokens,
        seconds=seconds,
        weights=4 * count,
        gradients=4 * count,
        optimizer=optimizer_bytes(network, recipe),
        activations=activation_bytes(
            recipe, micro, half=execution.half, device=execution.device.type
        ),
        ceiling=rate,
    )
    return recipe, made


def resolve_for_estimate(
    recipe: Recipe, tokenizer: Path | None = None, start: str | Path | None = None
) -> Recipe:
    """The recipe with the model of `start`, or with the vocabulary size of its tokenizer."""
    if start is not None:
        from malmoi.checkpoint import read_checkpoint

        return replace(recipe, model=read_checkpoint(start).network.config).check()
    vocab = recipe.tokenizer.vocab
    if tokenizer is not None:
        from malmoi.tokenizer import Tokenizer

        vocab = Tokenizer.load(tokenizer).vocab_size
    return replace(recipe, model=replace(recipe.model, vocab=vocab))


def meta_network(recipe: Recipe) -> Network:
    """Builds the network on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return Network(recipe.model, dict.fromkeys(objective(recipe.objective).heads, 0))


def exact_parameters(c: ModelConfig) -> int:
    """The weights as papers count them: an encoder's without the heads it is pre-trained with."""
    encoder = c.pool != "last"
    with torch.device("meta"):
        network = Network(c, {} if encoder else {"lm": 0}, pooler=encoder and c.pooler == "tanh")
    return count_parameters(network)


def budget_of(recipe: Recipe, per_token: float, speed: float) -> tuple[int, int, float]:
    """Steps, tokens and seconds of the budget at this speed; a budget in minutes has no steps."""
    length = recipe.mean_length
    budget = Budget.of(recipe, BOOKS_TOKENS / length)
    if not budget.steps:
        return 0, int(budget.seconds * speed / per_token), budget.seconds
    tokens = budget.tokens or math.ceil(budget.steps / steps_per_sample(recipe.train) * length)
    return budget.steps, tokens, tokens * per_token / speed


def optimizer_bytes(
    network: Network, recipe: Recipe, size: Callable[[torch.Tensor], int] = torch.Tensor.numel
) -> int:
    """Two fp32 moments per weight, one with Muon; `size` is the share of weights held here."""
    both = 8 * sum(map(size, network.parameters()))
    if recipe.train.optimizer != "muon":
        return both
    return both - 4 * sum(size(p) for p in network.trunk.blocks.parameters() if p.dim() == 2)


def activation_bytes(recipe: Recipe, micro: int, *, half: bool, device: str) -> int:
    """Bytes kept for the backward pass: activations, a chunk of logits, the head's gradient."""
    config = recipe.model
    length = max(length for length, _ in recipe.phases)
    number = 2 if half else 4
    whole = 20 * config.width + 3 * config.mlp_width
    if device == "cuda" and recipe.train.compile is not False:
        # the compiler recomputes what is cheap; fitted to BERT-base and GPT-2 on an H200
        whole = (19 * config.width + 4 * config.mlp_width) // 2
    layers = config.depth * whole
    if recipe.train.gradient_checkpointing:
        products = 6 * config.width + (1 + config.gated) * config.mlp_width
        kept = products if recipe.train.checkpointing_keeps == "products" else 0
        layers = config.depth * (2 * config.width + kept) + whole
    piece = min(per_device(MAX_LOGITS, device), micro * length * config.vocab)
    slope = (4 + number) * config.vocab * config.token_width
    return micro * length * number * (layers + 20 * config.width) + 2 * number * piece + slope
