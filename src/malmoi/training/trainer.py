"""Pre-training: phases of a token store, a budget, validation, and a way back after a spike."""

import math
import shutil
from collections.abc import Callable, Generator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from malmoi.checkpoint import write_checkpoint
from malmoi.errors import ensure, is_out_of_memory
from malmoi.kernels.cuda_graphs import Losses, StepReplay
from malmoi.messages import msg, plural
from malmoi.model import count_parameters
from malmoi.system.files import make_folder, scratch_folder, write_text
from malmoi.system.machine import this_machine
from malmoi.system.progress import Progress
from malmoi.training.budget import Budget, Pace, steps_per_sample, verdict
from malmoi.training.device import (
    COMPILED_PAYS,
    choose_execution,
    first_micro,
    flops_per_token,
    known_flops,
    release_compiled,
    step_seconds,
    uncompiled,
)
from malmoi.training.feed import Tensors, batch_sizes, regrouped, samples_per_epoch
from malmoi.training.loop import BadLoss, Loop, StepBatch
from malmoi.training.loss_module import LossModule, guessing_loss, validate
from malmoi.training.losses import Objective, objective
from malmoi.training.losses.distil import TAUGHT, Distillation, own_teacher_loss
from malmoi.training.optim import WeightAverage
from malmoi.training.prepare import TrainingRun
from malmoi.training.recipe import BUDGETS, Recipe, TrainConfig
from malmoi.training.saver import with_weights
from malmoi.training.state import RunState, StateParts

MAX_ROLLBACKS = 3  # after this many spikes the run stops, …
ROLLBACK_FORGIVEN_STEPS = 1000  # … unless it came this many steps further than the last one
# one graph compiles 20 s longer and saves 4 % of the time (docs/lab.md)
MIN_SECONDS_FOR_ONE_GRAPH = 600.0
# deeper models are wide enough to keep a GPU busy block by block, and compile for minutes as one
MAX_DEPTH_OF_ONE_GRAPH = 16
# the mean of the own weights teaches after this share of the budget, …
OWN_TEACHER_FROM = 0.4
OWN_TEACHER_REACH = 0.05  # … and reaches back so far


class Trainer(Loop):
    """Pre-trains one run in its folder."""

    verb = "pretrain"
    seconds_between_saves = 300.0
    keeps_initial = True

    def __init__(self, run: TrainingRun, distillation: Distillation | None = None) -> None:
        self.run = run
        self.recipe = recipe = run.recipe
        self.feeds = run.feeds
        self.budget = Budget.of(recipe, samples_per_epoch(recipe, run.feeds))
        self.varied_shapes = not recipe.causal
        self.compiles_whole = self._one_graph()
        network = run.network.to(run.group.device)
        for teacher in distillation.teachers if distillation else ():
            teacher.to(run.group.device)
        network.trunk.gradient_checkpointing = recipe.train.gradient_checkpointing
        network.trunk.checkpointing_keeps = recipe.train.checkpointing_keeps
        goal = _objective(recipe, distillation)
        self.mean: WeightAverage | None = None  # of the last weights, which teaches
        if recipe.train.own_teacher:
            self.mean = WeightAverage(network)
            self.mean.fill(teacher := deepcopy(network))
            goal += recipe.train.own_teacher * own_teacher_loss(teacher)
        loss_module = LossModule(network, goal)
        execution = choose_execution(run.group.device, recipe.train)
        execution = replace(execution, varied=recipe.data.pairs)
        self.replays = execution.compiled and self._one_shape() and distillation is None
        super().__init__(
            loss_module, recipe.train, execution, run.out, run.group, capturable=self.replays
        )
        self._guessing = (
            0.0 if distillation else guessing_loss(loss_module.objective, run.frequency_loss)
        )
        self._weights = count_parameters(network)
        self.state.samples_seen = [0] * len(run.feeds)
        self.micro = self._first_micro()
        self._compiled = run.rehearsed

    def _first_micro(self) -> int:
        share = max(1, self.config.batch // self.group.parts)
        longest = max(feed.length for feed in self.feeds)
        fits = first_micro(self.network.config, longest, share, self.group.device)
        return self.config.micro or self.group.min(fits)  # all processes must make the same passes

    def _one_graph(self) -> bool:
        """Whether all blocks are one graph: windows have one shape; FSDP2 needs them apart."""
        cuda = self.run.group.device.type == "cuda"
        long = (self.budget.seconds or math.inf) >= MIN_SECONDS_FOR_ONE_GRAPH
        pays = long and self.recipe.model.depth <= MAX_DEPTH_OF_ONE_GRAPH
        return cuda and self.recipe.causal and pays and not self.run.sharded

    def _one_shape(self) -> bool:
        """Whether steps are alike, and may be CUDA graphs: no kernel waits for the processor."""
        c, m = self.recipe.train, self.recipe.model
        alone = self.run.group.device.type == "cuda" and self.run.group.world == 1
        alike = self.recipe.objective in ("lm", "both") and not (m.memory or m.feature_count)
        return alone and alike and c.batch_start in (0, c.batch) and not c.gradient_checkpointing

    @property
    def progress(self) -> float:
        return self.budget.progress(self.state)

    @property
    def expected(self) -> int:
        return self.budget.steps or self.state.expected

    @property
    def timed(self) -> bool:
        return bool(self.budget.seconds)

    def dropout_seed(self) -> int:
        return _mix(self.config.seed, self.state.step, self.group.part)

    # ------------------------------------------------------------------ steps

    def step(self, micros: list[Tensors]) -> Losses:
        if self.mean is not None:
            if self.progress >= OWN_TEACHER_FROM:
                micros = [{**micro, TAUGHT: micro["lm_labels"]} for micro in micros]
            reach = max(1, round(OWN_TEACHER_REACH * self.expected))
            self.mean.add(min(self.state.step + 1, reach))
        return super().step(micros)

    def batches(self) -> Generator[StepBatch]:
        """The steps of each phase; again from the state after a rollback or an out-of-memory."""
        while self.progress < 1:
            phase = self._phase_number()
            samples = self.expected / steps_per_sample(self.config)
            seen = self.state.samples_seen
            sizes = batch_sizes(self.config, sum(seen), samples, self.group.parts)
            with self.feeds[phase].stream(seen[phase], sizes, self.micro, self.group) as stream:
                for size, micros in stream:
                    step = self.state.step
                    yield StepBatch(phase, size, micros)
                    ended = self.progress >= 1
                    if ended or self._phase_number() != phase or self.state.step <= step:
                        break

    def _phase_number(self) -> int:
        progress = self.progress
        ends = enumerate(accumulate(share for _, share in self.recipe.phases))
        return next((i for i, end in ends if progress < end - 1e-12), len(self.feeds) - 1)

    def shrink(self, error: RuntimeError) -> None:
        ensure(
            self.micro > 1,
            "One sequence does not fit into memory: set train.gradient_checkpointing=true.",
        )
        ensure(
            self.group.world == 1,
            "{micro} sequences in one pass do not fit into the memory of process {rank}'s GPU: set "
            "train.micro={micro2} or train.gradient_checkpointing=true.",
            micro=self.micro,
            rank=self.group.rank,
            micro2=self.micro // 2,
        )
        super().shrink(error)

    def event(self, loss: float, phase: int) -> Progress:
        s = self.state
        speed = self.speed
        flops = (
            flops_per_token(self.network.config, self._weights, self.feeds[phase].length) * speed
        )
        peak = known_flops(self.execution)[0] * self.group.world
        metrics = dict(loss=loss, tokens_per_second=speed)
        if flops <= peak:  # on a busy machine the speed may have been measured too low
            metrics["utilization"] = flops / peak
        if steps := self.budget.steps:
            left = (steps - s.step) * self.clock.usual_step
            return Progress(self.verb, s.step, steps, "steps", metrics, left)
        # the text may be used up before the time is
        total = s.seconds / self.progress if s.seconds else self.budget.seconds
        metrics = {"step": s.step} | metrics
        return Progress(self.verb, s.seconds, total, "seconds", metrics, total - s.seconds)

    # ------------------------------------------------------------------ before the first step

    def prepare(self) -> None:
        """Measures a step to decide whether compiling pays and how many updates the minutes hold.

        The saved state undoes its effects; a resumed run keeps the earlier decisions.
        """
        s = self.state
        if self.progress >= 1:
            self.log.line(_why_it_ended(self.config, s, self.budget))
        cpu = self.group.device.type == "cpu"
        free = cpu and self.config.compile is None
        if free and s.compiled is not None:
            self._compile_or_not(compiled=s.compiled)
        probing = free and s.compiled is None and self.execution.compiled
        timing = self.timed and not s.expected
        if self.progress < 1 and (probing or timing):
            pace = self._measured_pace(probing=probing)
            self.restore()
            if timing:
                self._fit_batch(pace)
        self.state.compiled = self.execution.compiled if cpu else None

    def _measured_pace(self, *, probing: bool) -> Pace:
        """Measures a step, compiled if that pays."""
        if not probing:
            self.announce("Measuring a step …")
            return self._measure(compiled=self.execution.compiled)
        self.log.line("Measuring a step …")
        eager = self._measure(compiled=False)
        steps = self.budget.steps
        seconds = steps * eager.seconds_of(self.config.batch) if steps else self.budget.seconds
        if not this_machine().compile_pays("cpu", seconds):
            self._compile_or_not(compiled=False)
            return eager
        self.announce("Measuring whether compiling helps …")
        compiled = self._measure(compiled=True)
        pays = compiled.sequence < COMPILED_PAYS * eager.sequence
        self._compile_or_not(compiled=pays)
        return compiled if pays else eager

    def _compile_or_not(self, *, compiled: bool) -> None:
        execution = replace(self.execution, compiled=compiled)
        if execution != self.execution:
            release_compiled(self.network)
            self.execution = execution
            self.compile()

    def _measure(self, *, compiled: bool) -> Pace:
        """Times a pass and an update with as few sequences as possible."""
        try:
            update, sequence = step_seconds(
                self._probe, self._probe_update, self.micro, self.threads, compiled=compiled
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.shrink(error)
            return self._measure(compiled=compiled)
        self.network.zero_grad()
        slowest = self.group.max(torch.tensor([update, sequence], device=self.group.device))
        update, sequence = slowest.tolist()
        return Pace(update, sequence, self.recipe, self.budget, self.group.parts)

    def _probe(self, size: int) -> None:
        """Forward and backward pass for timing only; the gradients are discarded."""
        tensors = self.feeds[0].micro(self.group.part * size, size, self.group.device).tensors
        with self.execution.computing():
            loss, _ = self.call(tensors, self.count_labels([tensors]))
        loss.backward()
        self.execution.synchronize()

    def _probe_update(self) -> None:
        self.apply_gradients()
        self.execution.synchronize()

    def _fit_batch(self, pace: Pace) -> None:
        """Takes a smaller batch if the minutes would hold too few updates, unless one was set."""
        requested = self.config.batch
        batch = pace.fitting(requested) if self.config.fit_batch else requested
        if batch != requested:
            start = min(self.config.batch_start, batch)
            self.config = replace(self.config, batch=batch, batch_start=start)
            self.recipe = replace(self.recipe, train=self.config)
            self.micro = self._first_micro()
            self.feeds = [regrouped(feed, batch) for feed in self.feeds]
            if self.group.first:
                write_text(self.out / "recipe.json", self.recipe.to_json())
        self.state.expected = pace.updates(batch)
        self.log.line(pace.sentence(requested, batch))

    # ------------------------------------------------------------------ losses that go wrong

    def is_bad(self, loss: float, phase: int) -> bool:
        return self.state.is_spike(loss, phase)

    def recover(self, loss: float, phase: int) -> None:
        """Restores the last good state; the samples since then are skipped."""
        s = self.state
        rollbacks = s.rollbacks + 1 if s.step - s.spiked <= ROLLBACK_FORGIVEN_STEPS else 1
        ensure(
            rollbacks <= MAX_ROLLBACKS,
            "The loss reached {loss:g} at step {step:,}, for the {rollbacks}th time: the run was "
            "stopped; its last good state is in {state_root}. A lower train.lr usually helps.",
            loss=loss,
            step=s.step,
            rollbacks=rollbacks,
            state_root=self.state_root,
        )
        self.restore()
        self.log.resume(self.state.step)
        self.state.samples_seen[phase] = s.samples_seen[phase]
        names = ("seconds", "expected", "compiled", "threads", "threads_used")
        kept = {name: getattr(s, name) for name in names}
        self.state = replace(self.state, rollbacks=rollbacks, spiked=s.step, **kept)
        self.log.line(
            "The loss reached {loss:g} at step {step:,}: back to step {back:,}, skipping it.",
            loss=loss,
            step=s.step,
            back=self.state.step,
        )

    # ------------------------------------------------------------------ validation

    def evaluation_is_due(self) -> bool:
        every = self.config.valid_every
        return bool(every) and self.state.step % every == 0

    def evaluate(self) -> None:
        loss = self._validate().get("valid_loss", 0.0)
        if not math.isfinite(loss):
            raise BadLoss(loss)

    def finish(self) -> None:
        """Validates and saves for the last time; averaged weights stay in place."""
        metrics = self._validate()
        loss = metrics.get("valid_loss", 0.0)
        ensure(
            math.isfinite(loss),
            "The run diverged: its validation loss is {loss:g} at step {step:,}. Its last good "
            "state is in {state_root}; start again with a lower train.lr.",
            loss=loss,
            step=self.state.step,
            state_root=self.state_root,
        )
        self.save()
        self.keep_average()
        if not metrics and (warning := self._verdict(self.state.mean)):
            self.log.line(warning)

    def _validate(self) -> dict[str, float]:
        """Validates the averaged weights, or the network's, on the same batches; samples."""
        if not self.run.valid:
            return {}
        self.network.eval()
        feed = self.run.valid[self._phase_number()]
        own = validate(self.loss_module, feed, self.config, self.execution)
        with self.averaged():
            metrics = own
            if self.state.averaged:
                metrics = validate(self.loss_module, feed, self.config, self.execution)
                metrics["valid_loss_without_ema"] = own["valid_loss"]
            self.state.valid_loss = metrics["valid_loss"]
            if math.isfinite(metrics["valid_loss"]):  # else there is nothing to show
                self._log_validation(metrics)
        self.network.train()
        return metrics

    def _log_validation(self, metrics: dict[str, float]) -> None:
        warning = self._verdict(metrics["valid_loss"])
        if warning:
            metrics = metrics | {"guessing_loss": self._guessing, "epochs": self._epochs}
        with uncompiled():
            text = self.run.sample() if self.group.first and not self.run.sharded else ""
        words = self.log_metrics(metrics, **({"sample": text} if text else {}))
        said = msg("step {step:,}: {words}", step=self.state.step, words=words)
        self.log.line(said + (f"\n  » {text}" if text else ""))
        if warning:
            self.log.line(warning)

    def _verdict(self, loss: float) -> str:
        """A warning if the loss hardly moved, so that the run does not end like a success."""
        if self.progress < 1:
            return ""
        s = self.state
        return verdict(self.recipe, s.step, loss, self._guessing, s.mean, self._epochs)

    @property
    def _epochs(self) -> float:
        """How often the text was read, of which only a fraction may be encoded."""
        encoded = sum(self.state.samples_seen) / samples_per_epoch(self.recipe, self.feeds)
        return encoded * self.recipe.data.fraction

    # ------------------------------------------------------------------ saving and resuming

    def model_writer(self, parts: StateParts) -> Callable[[], object]:
        """Writes the checkpoint at the top of the run folder."""
        if self.run.sharded:
            with self.averaged():
                checkpoint = self.run.gathered()
        elif self.group.first:
            kind = "weights" if self.average is None else "average"
            checkpoint = replace(
                self.run.checkpoint, network=with_weights(self.network, parts, kind)
            )
        if self.group.first:
            return partial(write_checkpoint, checkpoint, self.out)
        return super().model_writer(parts)

    def save_snapshot(self) -> None:
        """Writes the model after this step to its own folder, atomically."""
        checkpoint = self.run.gathered()
        if not self.group.first:
            return
        folder = self.out / "snapshots" / f"{self.state.step:06d}"
        make_folder(folder.parent)
        with scratch_folder(folder.parent) as scratch:
            write_checkpoint(checkpoint, scratch / folder.name)
            shutil.rmtree(folder, ignore_errors=True)
            (scratch / folder.name).replace(folder)

    def own_tensors(self) -> Mapping[str, Tensor]:
        means = {f"teacher.{n}": m for n, m in self.mean.tensors.items()} if self.mean else {}
        return {**self.loss_module.memory_tensors(), **means}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the memory of earlier segments; several processes begin with an empty one."""
        self.loss_module.load_memory(tensors)
        for name, mean in self.mean.tensors.items() if self.mean else ():
            mean.copy_(tensors[f"teacher.{name}"])

    def restore(self) -> None:
        super().restore()
        if self.replays:  # graphs of before would write to the moments of before
            self.learn = StepReplay(self.learn_eagerly, self.group.device)
        s = self.state
        phases = len(self.feeds)
        folder = self.state_root / f"step-{s.step}"
        ensure(
            len(s.samples_seen) == phases and s.phase in range(phases),
            "{folder} has other phases than this run: remove it to resume from one before.",
            folder=folder,
        )
        # a resumed or rolled back run has not reached later snapshots yet
        drops = self.config.snapshots and self.group.first
        for folder in (self.out / "snapshots").glob("[0-9]*") if drops else ():
            if folder.name.isdecimal() and int(folder.name) > s.step:
                shutil.rmtree(folder)


def _objective(recipe: Recipe, distillation: Distillation | None) -> Objective:
    settings = {"both": recipe.data.causal_share, "translation": recipe.train.label_smoothing}
    given = [settings[recipe.objective]] if recipe.objective in settings else []
    hard = objective(recipe.objective, *given)
    return hard if distillation is None else distillation.add_to_text(hard)


def _why_it_ended(c: TrainConfig, s: RunState, budget: Budget) -> str:
    """What a run that is called again has used up, and how it goes on."""
    if s.seconds < budget.seconds:
        return msg(
            "This run ended before its {minutes:g} minutes, as it had read its text {epochs:g} "
            "times: more would only memorise it. It goes on with more text, or with "
            "--set train.max_epochs=0.",
            minutes=c.minutes,
            epochs=c.max_epochs,
        )
    return msg(
        "This run has used its budget ({steps}, {tokens:,} tokens, {minutes:.2g} minutes): it goes "
        "on with a larger --{budget} ({budget}=…), or starts over with --overwrite "
        "(overwrite=True).",
        steps=plural(s.step, "step"),
        tokens=s.tokens,
        minutes=s.seconds / 60,
        budget=next(name for name in BUDGETS if getattr(c, name)),
    )


def _mix(*numbers: int) -> int:
    """Mixes several numbers into one seed."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed ^= number + 0x9E3779B97F4A7C15 + (seed << 6) + (seed >> 2)
        seed &= 0x7FFFFFFFFFFFFFFF
    return seed
