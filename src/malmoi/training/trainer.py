"""The trainer: `fit` runs through the budget, `step` is one update; the rest logs and saves."""

import math
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.errors import MalmoiError, is_out_of_memory
from malmoi.messages import measured, msg
from malmoi.model import count_parameters
from malmoi.system.files import write_text
from malmoi.system.machine import this_machine
from malmoi.system.progress import VALIDATE, Progress, stop_requested
from malmoi.system.run_folder import read_metrics
from malmoi.system.threads import ThreadTuner
from malmoi.training.device import (
    COMPILED_PAYS,
    StepTimer,
    choose_execution,
    compile_for,
    first_micro,
    flops_per_token,
    known_flops,
    release_compiled,
    seed_dropout,
    thread_count,
)
from malmoi.training.feed import MicroBatch, Tensors, batch_sizes, samples_per_epoch
from malmoi.training.log import RunLog
from malmoi.training.loss_module import LossModule, guessing_loss
from malmoi.training.losses import Objective, count_labels, objective
from malmoi.training.losses.distil import Distillation
from malmoi.training.optim import WeightAverage, make_optimizers, set_rate
from malmoi.training.pace import (
    LOOK_SECONDS,
    Budget,
    Pace,
    WorkClock,
    smallest_batch,
    steps_per_sample,
    verdict,
)
from malmoi.training.parallel import gradient_sync, wrap_model
from malmoi.training.recipe import Recipe
from malmoi.training.run import TrainingRun
from malmoi.training.samples import regrouped
from malmoi.training.schedule import rate_at
from malmoi.training.signals import EARLY_STOP, Stopped, StopSignals
from malmoi.training.state import (
    Position,
    latest_state,
    load_state,
    other_tensors,
    prune_states,
    save_state,
    tensors_of,
    weights_are_finite,
)
from malmoi.training.validate import validate

MAX_ROLLBACKS = 3  # after this many spikes the run stops, …
ROLLBACK_FORGIVEN_STEPS = 1000  # … unless it came this many steps further than the last one
MAX_SECONDS_BETWEEN_SAVES = 300.0  # upper limit for save_every
# one graph compiles 20 s longer and saves a fifth of the time
MIN_SECONDS_FOR_ONE_GRAPH = 120.0
# deeper models are wide enough to keep a GPU busy block by block, and compile for minutes as one
MAX_DEPTH_OF_ONE_GRAPH = 16
# objective → the recipe that learns in few minutes
SMALLER_RECIPES = {"lm": "gpt", "both": "both", "translation": "transformer-tiny"}
MIN_METRIC_ROWS = 20  # of metrics.jsonl, however short the run


class Trainer:
    """Trains one run in its folder."""

    def __init__(self, run: TrainingRun, distillation: Distillation | None = None) -> None:
        self.run = run
        self.recipe = recipe = run.recipe
        self.config = recipe.train
        self.network = network = run.network
        self.group = group = run.group
        self.out = run.out
        self.feeds = run.feeds
        self.budget = Budget.of(recipe, samples_per_epoch(recipe, run.feeds))
        execution = choose_execution(group.device, self.config)
        self.execution = replace(execution, varied=recipe.data.pairs)
        self.objective = _objective(recipe, distillation)
        self._guessing = 0.0 if distillation else guessing_loss(self.objective, run.frequency_loss)
        self.loss_module = LossModule(network.to(group.device), self.objective)
        network.trunk.gradient_checkpointing = self.config.gradient_checkpointing
        self._compile()
        self.call = wrap_model(self.loss_module, network.blocks, group, self.config.parallel)
        self.optimizers = make_optimizers(network, self.config)
        self.average = WeightAverage(network) if self.config.ema else None
        self.position = Position(samples_seen=[0] * len(run.feeds))
        self.log = RunLog(run.out, self.config, first=group.first)
        self.micro = self._first_micro()
        self.clock = WorkClock()
        self.threads: ThreadTuner
        self._stop = StopSignals()
        self._saved_at = 0.0  # by time.monotonic
        self._compiled = False  # whether a pass was compiled
        self._looked = 0.0  # seconds of work when losses were last read
        # losses not yet read, with their phase
        self._pending: list[tuple[int, dict[str, Tensor]]] = []
        self._mark = (0, 0.0)  # tokens and seconds at the last row, for the speed
        self._weights = count_parameters(network)

    def _first_micro(self) -> int:
        share = max(1, self.config.batch // self.group.world)
        longest = max(feed.length for feed in self.feeds)
        fits = first_micro(self.network.config, longest, share, self.group.device)
        return self.config.micro or self.group.min(fits)  # all processes must make the same passes

    @property
    def state_root(self) -> Path:
        return self.out / "train_state"

    @property
    def expected(self) -> int:
        """Updates of the whole run: known, or estimated if the budget is in minutes."""
        return self.budget.steps or self.position.expected

    @property
    def _log_every(self) -> int:
        return min(self.config.log_every, max(1, self.expected // MIN_METRIC_ROWS))

    # ------------------------------------------------------------------ the loop

    def fit(self) -> dict[str, float]:
        """Trains until the budget is used and returns the last validation; a signal saves first."""
        with self._stop:
            self._resume()
            p = self.position
            threads = thread_count(self.group.device, p.threads, p.threads_used, self.log.line)
            with threads as self.threads, closing(self._planned_steps()) as planned:
                self._start()
                for phase, size, micros in planned:
                    try:
                        losses = self.step([micro.tensors for micro in micros])
                    except RuntimeError as error:
                        if not is_out_of_memory(error):
                            raise
                        self._shrink()
                        continue
                    self._count_step(micros, phase, size)
                    self._pending.append((phase, losses))
                    if self._watch(phase):
                        break
                metrics = self._finish()
        release_compiled(self.loss_module)
        self.log.close()
        return metrics

    def _start(self) -> None:
        """Calibrates and starts the clocks."""
        self._calibrate()
        self.position.threads = self.threads.limit
        self.clock = WorkClock(self.position.seconds, share=self._share)
        self._saved_at = time.monotonic()
        self._mark = (self.position.tokens, 0.0)
        if self.budget.progress(self.position) < 1:
            self._announce("Running the first step …")

    def _share(self) -> float:
        """How much of a second counts: all of it, or less while other programs take their share."""
        return max(1 / self.config.stretch, 1 - self.threads.others)

    def _finish(self) -> dict[str, float]:
        """Validates and saves for the last time; averaged weights stay in place."""
        metrics = self._validate()
        if not math.isfinite(loss := metrics.get("valid_loss", 0.0)):
            raise MalmoiError(
                "The run diverged: its validation loss is {loss:g} at step {step:,}. Its last "
                "good state is in {state_root}; start again with a lower train.lr.",
                loss=loss,
                step=self.position.step,
                state_root=self.state_root,
            )
        self.save()
        if self.average is not None and self.position.averaged:
            self.average.keep()
        if not metrics and (warning := self._verdict(self.position.mean)):
            self.log.line(warning)
        expected = self.expected if self.budget.seconds else 0
        others = self.threads.about_others(self.clock.training, self.position.step, expected)
        if others and self.group.world == 1:
            self.log.line(others)
        return metrics

    # ------------------------------------------------------------------ steps

    def _planned_steps(self) -> Generator[tuple[int, int, list[MicroBatch]]]:
        """Yields phase, sequences and passes of each remaining step.

        Starts again from the current position after a rollback or an out-of-memory.
        """
        while self.budget.progress(self.position) < 1:
            phase = self._phase_number()
            samples = self.expected / steps_per_sample(self.config)
            seen = self.position.samples_seen
            sizes = batch_sizes(self.config, sum(seen), samples, self.group.world)
            with self.feeds[phase].stream(seen[phase], sizes, self.micro, self.group) as stream:
                for size, micros in stream:
                    step = self.position.step
                    yield phase, size, micros
                    ended = self.budget.progress(self.position) >= 1
                    if ended or self._phase_number() != phase or self.position.step <= step:
                        break

    def _count_step(self, micros: list[MicroBatch], phase: int, size: int) -> None:
        self.clock.step()
        p = self.position
        p.step += 1
        p.samples_seen[phase] += size
        tokens = sum(micro.tokens for micro in micros) * self.group.world
        p.tokens += tokens
        if self.group.world == 1:  # the processes of a run are no strangers to one another
            self.threads.step(tokens)
            p.threads_used = self.threads.count

    def step(self, micros: list[Tensors]) -> dict[str, Tensor]:
        """One update: gradients of all micro-batches, weighted, clipped and applied."""
        c = self.config
        p = self.position
        # seeded by the step, so that dropout is the same after a resume
        seed_dropout(_mix(c.seed, p.step, self.group.rank), self.group.device)
        set_rate(self.optimizers, rate_at(p.step, self.budget.progress(p), c, self.expected))
        counts = self._counts(micros)
        total: dict[str, Tensor] = {}
        for i, micro in enumerate(micros, 1):
            with gradient_sync(self.call, last=i == len(micros)):
                with self.execution.computing():
                    loss, means = self.call(micro, counts)
                loss.backward()
            for name, value in {"loss": loss.detach(), **means}.items():
                total[name] = total[name] + value if name in total else value
        self._apply_gradients()
        self.network.zero_grad()
        if self.average is not None:
            averaging = self.budget.progress(p) >= 1 - c.ema
            p.averaged = p.averaged + 1 if averaging else 0
            if averaging:
                self.average.add(p.averaged)
        return total

    def _apply_gradients(self) -> None:
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()

    def _counts(self, micros: list[Tensors]) -> dict[str, Tensor]:
        """Labels of the whole step per process, since gradients are averaged over processes."""
        totals: dict[str, Tensor] = {}
        for micro in micros:
            for name, count in count_labels(self.objective, micro).items():
                totals[name] = totals[name] + count if name in totals else count
        summed = self.group.sum(torch.stack(list(totals.values())).float()) / self.group.world
        return dict(zip(totals, summed.clamp(min=1), strict=True))

    def _shrink(self) -> None:
        """Out of memory: halves the micro-batch, unless there are several processes."""
        if self.micro == 1:
            raise MalmoiError(
                "One sequence does not fit into the GPU's memory: set "
                "train.gradient_checkpointing=true."
            )
        if self.group.world > 1:
            raise MalmoiError(
                "{micro} sequences in one pass do not fit into the memory of process {rank}'s "
                "GPU: set train.micro={micro2} or train.gradient_checkpointing=true.",
                micro=self.micro,
                rank=self.group.rank,
                micro2=self.micro // 2,
            )
        self.micro = max(1, self.micro // 2)
        self.network.zero_grad()
        self.execution.free_cache()
        self.log.line(
            msg(
                "The batch does not fit into memory; using micro-batches of {micro} sequences.",
                micro=self.micro,
            )
        )

    def _phase_number(self) -> int:
        progress = self.budget.progress(self.position)
        edge = 0.0
        for i, (_, share) in enumerate(self.recipe.phases):
            edge += share
            if progress < edge - 1e-12:
                return i
        return len(self.feeds) - 1

    # ------------------------------------------------------------------ before the first step

    def _calibrate(self) -> None:
        """Measures a step to decide whether compiling pays and how many updates the minutes hold.

        Its effects are undone by reloading the saved state; a resumed run keeps the earlier
        decisions.
        """
        p = self.position
        cpu = self.group.device.type == "cpu"
        free = cpu and self.config.compile is None
        if free and p.compiled is not None:
            self._compile_or_not(compiled=p.compiled)
        probing = free and p.compiled is None and self.execution.compiled
        timing = bool(self.budget.seconds) and not p.expected
        if self.budget.progress(p) < 1 and (probing or timing):
            pace = self._measured_pace(probing=probing)
            self._restore()
            if timing:
                self._fit_batch(pace)
        self.position.compiled = self.execution.compiled if cpu else None

    def _measured_pace(self, *, probing: bool) -> Pace:
        """Measures a step, compiled if that pays."""
        if not probing:
            self._announce("Measuring a step …")
            return self._measure(compiled=self.execution.compiled)
        self.log.line("Measuring a step …")
        eager = self._measure(compiled=False)
        steps = self.budget.steps
        seconds = steps * eager.seconds_of(self.config.batch) if steps else self.budget.seconds
        if not this_machine().compile_pays("cpu", seconds):
            self._compile_or_not(compiled=False)
            return eager
        self._announce("Measuring whether it helps …")
        compiled = self._measure(compiled=True)
        pays = compiled.sequence < COMPILED_PAYS * eager.sequence
        self._compile_or_not(compiled=pays)
        return compiled if pays else eager

    def _announce(self, what: str) -> None:
        """Announces slow work before it starts: the first pass compiles."""
        compiling = self.execution.compiled and not self._compiled
        self._compiled = self.execution.compiled
        seconds = 40 if self._one_graph else 20
        also = "Compiling (once, about {seconds} s) and " + what[0].lower() + what[1:]
        self.log.line(msg(also, seconds=seconds) if compiling else what)

    def _compile_or_not(self, *, compiled: bool) -> None:
        execution = replace(self.execution, compiled=compiled)
        if execution != self.execution:
            release_compiled(self.loss_module)
            self.execution = execution
            self._compile()

    @property
    def _one_graph(self) -> bool:
        """Whether all blocks are compiled as one graph.

        That suits windows of text, which have one shape; FSDP2 needs the blocks apart.
        """
        long = not self.budget.seconds or self.budget.seconds >= MIN_SECONDS_FOR_ONE_GRAPH
        pays = long and self.network.config.depth <= MAX_DEPTH_OF_ONE_GRAPH
        sharded = self.group.world > 1 and self.config.parallel == "fsdp"
        return self.group.device.type == "cuda" and self.recipe.causal and pays and not sharded

    def _compile(self) -> None:
        dynamic = not self.recipe.causal
        compile_for(self.execution, self.loss_module, dynamic=dynamic, whole=self._one_graph)

    def _measure(self, *, compiled: bool) -> Pace:
        """Times a pass and an update with as few sequences as possible."""
        timer = StepTimer(self.execution, self._probe, self._apply_gradients, self.threads)
        try:
            update, sequence = timer.measure(self.micro, compiled=compiled)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._shrink()
            return self._measure(compiled=compiled)
        self.network.zero_grad()
        slowest = self.group.max(torch.tensor([update, sequence], device=self.group.device))
        update, sequence = slowest.tolist()
        return Pace(
            update,
            sequence,
            self.budget.seconds,
            self.recipe.phases,
            world=self.group.world,
            sized=SMALLER_RECIPES.get(self.recipe.samples, "bert"),
            smallest=smallest_batch(self.recipe),
            samples=self.budget.samples,
        )

    def _probe(self, size: int) -> None:
        """Forward and backward pass for timing only; the gradients are discarded."""
        tensors = self.feeds[0].micro(self.group.rank * size, size, self.group.device).tensors
        with self.execution.computing():
            loss, _ = self.call(tensors, self._counts([tensors]))
        loss.backward()

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
        self.position.expected = pace.updates(batch)
        self.log.line(pace.sentence(self.recipe.name, requested, batch))

    # ------------------------------------------------------------------ watching

    def _watch(self, phase: int) -> bool:
        """After a step: checks the loss, logs, validates and saves when due.

        A signal stops the run here; returns whether a callback asked to end it.
        """
        c = self.config
        p = self.position
        signal = self._agree()
        early = signal == EARLY_STOP
        done = self.budget.progress(p) >= 1 or early
        saving = done or signal or self._save_is_due()
        validating = bool(c.valid_every) and p.step % c.valid_every == 0 and not done
        snapping = c.snapshots and is_snapshot_step(p.step)
        looking = saving or validating or snapping or self._look_is_due()
        if looking and not self._read_losses(phase):
            return False
        # the loss of this step was computed before its update
        if (saving or snapping) and not weights_are_finite(self.network, self.group):
            self._roll_back(math.nan, phase)
            return False
        if snapping:
            self.log.require_folder()
            with self._averaged():
                self.run.save_snapshot(p.step)
            self.clock.lap("save")
        if validating:
            loss = self._validate().get("valid_loss", 0.0)
            self.clock.lap("validation")
            if not math.isfinite(loss):
                self._roll_back(loss, phase)
                return False
        if saving and not done:
            self.save()
            self.clock.lap("save")
        if signal and not done:
            self.log.line(
                msg(
                    "Stopped at step {step:,} and saved; run the same command to resume.",
                    step=p.step,
                )
            )
            self.log.close()
            raise Stopped(signal)
        return early

    def _look_is_due(self) -> bool:
        """Whether to read the losses: on a GPU only now and then, because reading waits for it."""
        if self.group.device.type == "cpu" or not self.clock.started:
            return True
        waited = self.position.seconds - self._looked
        return self.position.step % self._log_every == 0 or waited >= LOOK_SECONDS

    def _save_is_due(self) -> bool:
        c = self.config
        p = self.position
        late = time.monotonic() - self._saved_at > MAX_SECONDS_BETWEEN_SAVES
        return p.step % c.save_every == 0 or (
            p.step % c.log_every == 0 and bool(self.group.broadcast(int(late)))
        )

    def _agree(self) -> int:
        """Synchronises the clock; returns the signal that stops any process, EARLY_STOP, or 0."""
        seconds = self.clock.seconds
        number = self._stop.number or (EARLY_STOP if stop_requested() else 0)
        if self.group.world > 1:
            here = [seconds if self.group.first else 0.0, number]
            totals = torch.tensor(here, device=self.group.device).double()
            seconds, number = self.group.max(totals).tolist()
        self.position.seconds = seconds
        return int(number)

    def _read_losses(self, phase: int) -> bool:
        """Reads the losses since the last read; returns False if a spike caused a rollback."""
        phases = [number for number, _ in self._pending]
        pending = [{k: v.float() for k, v in losses.items()} for _, losses in self._pending]
        stacked = {name: torch.stack([losses[name] for losses in pending]) for name in pending[0]}
        table = torch.stack(list(stacked.values()))
        rows = (self.group.sum(table) / self.group.world).tolist()
        first = not self.clock.started
        self.clock.lap()
        self._looked = self.position.seconds
        self._pending = []
        for number, loss in zip(phases, rows[0], strict=True):
            if self.position.is_spike(loss, number):
                self._roll_back(loss, phase)
                return False
        done = self.budget.progress(self.position) >= 1
        self.log.progress(self._event(rows[0][-1], phase))
        if first:
            self.clock.skip()  # `_event` measured the peak speed first
        if self.position.step % self._log_every == 0 or done:
            self._row({name: sum(row) / len(row) for name, row in zip(stacked, rows, strict=True)})
        return True

    def _roll_back(self, loss: float, phase: int) -> None:
        """Restores the last good state; the samples since then are skipped."""
        p = self.position
        rollbacks = p.rollbacks + 1 if p.step - p.spiked <= ROLLBACK_FORGIVEN_STEPS else 1
        if rollbacks > MAX_ROLLBACKS:
            raise MalmoiError(
                "The loss reached {loss:g} at step {step:,}, for the {rollbacks}th time "
                "without {steps:,} good steps in between: the run was stopped; its last good "
                "state is in {state_root}. A lower train.lr usually helps.",
                loss=loss,
                step=p.step,
                rollbacks=rollbacks,
                steps=ROLLBACK_FORGIVEN_STEPS,
                state_root=self.state_root,
            )
        self._restore()
        self.log.resume(self.position.step)
        self.position.samples_seen[phase] = p.samples_seen[phase]
        names = ("seconds", "expected", "compiled", "threads", "threads_used")
        kept = {name: getattr(p, name) for name in names}
        self.position = replace(self.position, rollbacks=rollbacks, spiked=p.step, **kept)
        back = msg(
            "back to step {step:,}, skipping the data that led there", step=self.position.step
        )
        self.log.line(
            msg(
                "The loss reached {loss:g} at step {step:,}: {back}.",
                loss=loss,
                step=p.step,
                back=back,
            )
        )

    def _row(self, losses: Mapping[str, float]) -> None:
        p = self.position
        speed = self._speed()
        self._mark = (p.tokens, self.clock.training)
        rounded = {name: round(value, 5) for name, value in losses.items()}
        loss = rounded.pop("loss")
        lr = self.config.lr * rate_at(p.step, self.budget.progress(p), self.config, self.expected)
        row = dict(self._progress_row(), loss=loss, lr=lr, tokens_per_second=round(speed, 1))
        self.log.write_row(**row, **(rounded if len(rounded) > 1 else {}))

    def _progress_row(self) -> dict[str, Any]:
        p = self.position
        return {"step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 3)}

    def _speed(self) -> float:
        """Training tokens per second since the last row, without validation and saving."""
        tokens, seconds = self._mark
        return (self.position.tokens - tokens) / max(1e-9, self.clock.training - seconds)

    def _event(self, loss: float, phase: int) -> Progress:
        p = self.position
        speed = self._speed()
        length = self.feeds[phase].length
        flops = flops_per_token(self.network.config, self._weights, length) * speed
        peak = known_flops(self.execution)[0] * self.group.world
        metrics = dict(loss=loss, tokens_per_second=speed)
        if flops <= peak:  # on a busy machine the speed may have been measured too low
            metrics["utilization"] = flops / peak
        if self.budget.steps:
            left = (self.budget.steps - p.step) * self.clock.usual_step
            return Progress("pretrain", p.step, self.budget.steps, "steps", metrics, left)
        # the text may be used up before the time is
        total = p.seconds / self.budget.progress(p) if p.seconds else self.budget.seconds
        metrics = {"step": p.step} | metrics
        return Progress("pretrain", p.seconds, total, "seconds", metrics, total - p.seconds)

    def _validate(self) -> dict[str, float]:
        """Validates the phase on the same batches every time, and generates a sample.

        Uses the averaged weights if there are any, and then reports the loss of the others too.
        """
        if not self.run.valid:
            return {}
        self.network.eval()
        feed = self.run.valid[self._phase_number()]
        own = validate(self.loss_module, feed, self.config, self.execution)
        with self._averaged():
            metrics = own
            if self.position.averaged:
                metrics = validate(self.loss_module, feed, self.config, self.execution)
                metrics["valid_loss_without_ema"] = own["valid_loss"]
            self.position.valid_loss = metrics["valid_loss"]
            if math.isfinite(metrics["valid_loss"]):  # else there is nothing to show
                self._log_validation(metrics)
        self.network.train()
        return metrics

    def _verdict(self, loss: float) -> str:
        """A warning if the loss hardly moved, so that the run does not end like a success."""
        p = self.position
        done = self.budget.progress(p) >= 1
        if not done:
            return ""
        return verdict(self.recipe, p.step, loss, self._guessing, p.mean, self._epochs)

    @property
    def _epochs(self) -> float:
        """How often the text was read, of which only a fraction may be encoded."""
        encoded = sum(self.position.samples_seen) / samples_per_epoch(self.recipe, self.feeds)
        return encoded * self.recipe.data.fraction

    def _log_validation(self, metrics: Mapping[str, float]) -> None:
        p = self.position
        rounded = {name: round(value, 5) for name, value in metrics.items()}
        warning = self._verdict(metrics["valid_loss"])
        if warning:
            rounded["guessing_loss"] = round(self._guessing, 5)
            rounded["epochs"] = round(self._epochs, 5)
        with torch.compiler.set_stance("force_eager"):
            text = self.run.sample() if self.group.first and self.config.parallel != "fsdp" else ""
        self.log.write_row(**self._progress_row(), **rounded, **({"sample": text} if text else {}))
        self.log.progress(Progress(VALIDATE, p.step, unit="steps", metrics=metrics))
        self.log.line(
            msg("step {step:,}: {words}", step=p.step, words=measured(rounded))
            + (f"\n  » {text}" if text else "")
        )
        if warning:
            self.log.line(warning)

    # ------------------------------------------------------------------ saving and resuming

    def save(self) -> None:
        """Saves the training state, then the checkpoint; removes old states but the best."""
        self.log.require_folder()
        if self.group.world == 1:
            self.position.seconds = self.clock.seconds
        self._save_state()
        self.position.valid_loss = None  # it belonged to this state only
        if self.group.first:
            prune_states(self.state_root, self.config.keep)
        with self._averaged():
            self.run.save()
        self.group.barrier()  # the writing process would fail if another left early
        self._saved_at = time.monotonic()

    def _save_state(self) -> Path:
        tensors = tensors_of(self.network, self.optimizers)
        if self.average is not None and self.position.averaged:
            tensors |= self.average.tensors
        if self.group.world == 1:  # several processes begin with an empty memory again
            tensors |= self.loss_module.memory_tensors()
        return save_state(self.state_root, self.position, tensors, self.group)

    def _averaged(self) -> AbstractContextManager[None]:
        """Swaps in the averaged weights within the context, if there are any."""
        if self.average is None or not self.position.averaged:
            return nullcontext()
        return self.average.in_place()

    def _resume(self) -> None:
        """Resumes from the newest intact state in the folder, or starts with initial weights."""
        self._restore()
        rows = read_metrics(self.log.path)
        self.log.resume(self.position.step)
        if self.position.step:
            self.log.line(msg("Resuming from step {step:,}.", step=self.position.step))
        elif rows:
            self.log.line(
                msg(
                    "There is no complete state in {state_root}: the run starts over.",
                    state_root=self.state_root,
                )
            )

    def _restore(self) -> None:
        folder = latest_state(self.state_root, self.log.line, self.group)
        self._pending = []
        if folder is None:  # from now on there is always a state to roll back to
            folder = self._save_state()
        mean = self.average.tensors if self.average is not None else None
        self.position = load_state(folder, self.network, self.optimizers, mean)
        single = self.network.config.memory and self.group.world == 1
        self.loss_module.load_memory(other_tensors(folder) if single else {})
        phases = len(self.feeds)
        if len(self.position.samples_seen) != phases or not 0 <= self.position.phase < phases:
            raise MalmoiError(
                "{folder} was saved with other phases than the {phases} of this run; it is "
                "damaged: remove it to resume from the state before it.",
                folder=folder,
                phases=phases,
            )
        if self.config.snapshots:
            self.run.drop_snapshots_after(self.position.step)
        self._mark = (self.position.tokens, self.clock.training)
        self.network.train()


def is_snapshot_step(step: int) -> bool:
    """Whether a step is a power of √2, rounded: 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64…"""
    halves = round(2 * math.log2(step))
    return round(2 ** (halves / 2)) == step


def _objective(recipe: Recipe, distillation: Distillation | None) -> Objective:
    smoothing = recipe.train.label_smoothing
    settings = {"both": recipe.data.causal_share, "translation": smoothing, "span": smoothing}
    given = [settings[recipe.objective]] if recipe.objective in settings else []
    hard = objective(recipe.objective, *given)
    return hard if distillation is None else distillation.add_to_text(hard)


def _mix(*numbers: int) -> int:
    """Mixes several numbers into one seed."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed ^= number + 0x9E3779B97F4A7C15 + (seed << 6) + (seed >> 2)
        seed &= 0x7FFFFFFFFFFFFFFF
    return seed
