"""The training loop: steps until a budget is used, with a log, evaluations and saved states.

Pre-training, fine-tuning and distillation are a `Loop` each.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from malmoi.errors import is_out_of_memory
from malmoi.kernels.cuda_graphs import Losses
from malmoi.messages import measured
from malmoi.system.progress import VALIDATE, Progress, stop_requested
from malmoi.system.run_folder import read_metrics
from malmoi.system.storage import publish
from malmoi.system.threads import ThreadTuner
from malmoi.training.budget import LOOK_SECONDS, WorkClock
from malmoi.training.device import (
    Execution,
    compile_for,
    release_compiled,
    seed_dropout,
    thread_count,
)
from malmoi.training.feed import MicroBatch, Tensors
from malmoi.training.log import RunLog
from malmoi.training.loss_module import LossModule, add_by_name
from malmoi.training.losses import count_labels
from malmoi.training.optim import WeightAverage, make_optimizers, set_rate
from malmoi.training.parallel import ProcessGroup, clip_shared_gradients, gradient_sync, wrap_model
from malmoi.training.recipe import TrainConfig, rate_at
from malmoi.training.saver import Saver
from malmoi.training.signals import EARLY_STOP, Stopped, StopSignals
from malmoi.training.state import (
    RunState,
    StateParts,
    latest_state,
    load_state,
    other_tensors,
    prune_states,
    read_state,
    save_state,
    tensors_of,
    weights_are_finite,
)

COMPILING = "Compiling once, which takes about {seconds} s …"
MIN_METRIC_ROWS = 20  # of metrics.jsonl, however short the run


class StepBatch(NamedTuple):
    """The data of one step: its phase, its samples over all processes, and the passes made here."""

    phase: int
    samples: int
    micros: list[MicroBatch]


class BadLoss(Exception):
    """A loss or a weight that training cannot continue with; its argument is the loss."""


class Loop(ABC):
    """Trains one network in its folder; the same call on a folder resumes."""

    verb: str  # of its progress events
    seconds_between_saves: float  # at most this much work is lost
    keeps_initial = False  # whether the state before the first step is saved, to return to
    compiles_whole = False  # whether all blocks are compiled as one graph
    varied_shapes = True  # whether batches have many shapes

    def __init__(
        self,
        loss_module: LossModule,
        config: TrainConfig,
        execution: Execution,
        out: Path,
        group: ProcessGroup,
        *,
        capturable: bool = False,
    ) -> None:
        self.loss_module = loss_module
        self.network = loss_module.network
        self.config = config
        self.execution = execution
        self.out = out
        self.group = group
        self.micro = config.batch  # samples in one pass
        self.compile()
        self.call = wrap_model(loss_module, self.network, group, config.parallel)
        self.optimizers = make_optimizers(self.network, config, capturable=capturable)
        # passes and update of a step
        self.learn: Callable[[list[Tensors]], Losses] = self.learn_eagerly
        self.log = RunLog(out, config, first=group.first)
        self.state = RunState(samples_seen=[0])
        self.average: WeightAverage | None = None
        self.clock = WorkClock()
        self.threads: ThreadTuner
        self.saver = Saver(group)
        self._signals = StopSignals()
        self._compiled = False  # whether a pass was compiled
        self._saved_at = 0.0  # by time.monotonic
        self._looked = 0.0  # seconds of work when losses were last read
        self._pending: list[tuple[int, Losses]] = []  # not yet read, with their phase
        self._mark = (0, 0.0)  # tokens and seconds at the last row, for the speed

    # ------------------------------------------------------------------ what a kind of run defines

    @property
    @abstractmethod
    def progress(self) -> float:
        """The used share of the budget."""

    @property
    @abstractmethod
    def expected(self) -> int:
        """Updates of the whole run: known, or estimated."""

    @property
    @abstractmethod
    def timed(self) -> bool:
        """Whether the clock may end the run."""

    @abstractmethod
    def batches(self) -> Generator[StepBatch]:
        """The remaining steps; again from the current state when that has not advanced."""

    @abstractmethod
    def dropout_seed(self) -> int:
        """The seed of this step, so that dropout is the same after a resume."""

    @abstractmethod
    def event(self, loss: float, phase: int) -> Progress:
        """The event that reports the last step."""

    @abstractmethod
    def evaluation_is_due(self) -> bool:
        """Whether the network is evaluated after this step."""

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluates the network between two steps, and logs the metrics."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step: evaluates and saves."""

    @abstractmethod
    def recover(self, loss: float, phase: int) -> None:
        """After a bad loss: returns to a good state, or raises."""

    def prepare(self) -> None:
        """Before the first step, with the threads of the run."""

    def is_bad(self, loss: float, phase: int) -> bool:
        return not math.isfinite(loss)

    def is_enough(self) -> bool:
        """Whether the last evaluations end the run."""
        return False

    def model_writer(self, parts: StateParts) -> Callable[[], object]:
        """What writes the model beside its state, of which these are the parts."""
        return lambda: None

    def save_snapshot(self) -> None:
        """Writes the model after this step."""

    def settle(self) -> None:
        """Puts the resulting weights into the network when the run ends or is stopped."""

    def own_tensors(self) -> Mapping[str, Tensor]:
        """Tensors to be saved besides weights, optimizers and average; of one process alone."""
        return {}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores `own_tensors`."""

    # ------------------------------------------------------------------ the loop

    def fit(self) -> None:
        """Trains until the budget is used; a signal saves and raises `Stopped`."""
        with self._signals, self.saver:
            self._resume()
            used = (self.state.threads, self.state.threads_used)
            threads = thread_count(self.group.device, *used, self.log.line)
            with threads as self.threads, closing(self.batches()) as batches:
                self.prepare()
                self.state.threads = self.threads.limit
                self.clock = WorkClock(self.state.seconds, share=self._share)
                self._saved_at = time.monotonic()
                self._mark = (self.state.tokens, 0.0)
                self.network.train()
                if self.progress < 1:
                    self.announce("Running the first step …")
                self.group.expect_steps()
                self._take_steps(batches)
                self.finish()
                self._mention_others()
        release_compiled(self.network)

    def _share(self) -> float:
        """How much of a second counts: less while other programs take their share."""
        return max(1 / self.config.stretch, 1 - self.threads.others)

    def _take_steps(self, batches: Generator[StepBatch]) -> None:
        for batch in batches:
            try:
                losses = self.step([micro.tensors for micro in batch.micros])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.shrink(error)
                continue
            self._count(batch)
            self._average()
            self._pending.append((batch.phase, losses))
            try:
                if self._watch():
                    return
            except BadLoss as bad:
                self.recover(bad.args[0], batch.phase)

    def _mention_others(self) -> None:
        expected = self.expected if self.timed else 0
        others = self.threads.about_others(self.clock.training, self.state.step, expected)
        if others and self.group.world == 1:
            self.log.line(others)

    def _count(self, batch: StepBatch) -> None:
        self.clock.step()
        s = self.state
        s.step += 1
        s.samples_seen[batch.phase] += batch.samples
        tokens = sum(micro.tokens for micro in batch.micros) * self.group.parts
        s.tokens += tokens
        if self.group.world == 1:  # the processes of a run are no strangers to one another
            s.seconds = self.clock.seconds
            self.threads.step(tokens)
            s.threads_used = self.threads.count

    # ------------------------------------------------------------------ a step

    @property
    def rate(self) -> float:
        """The learning rate as a share of its peak."""
        return rate_at(self.state.step, self.progress, self.config, self.expected)

    def step(self, micros: list[Tensors]) -> Losses:
        """One update: gradients of all micro-batches, weighted, clipped and applied."""
        seed_dropout(self.dropout_seed(), self.group.device)
        set_rate(self.optimizers, self.rate)
        return self.learn(micros)

    def learn_eagerly(self, micros: list[Tensors]) -> Losses:
        """The passes and the update of a step."""
        counts = self.count_labels(micros)
        several = len(self.loss_module.objective.terms) > 1
        total: Losses = {}
        for i, micro in enumerate(micros, 1):
            with gradient_sync(self.call, last=i == len(micros)):
                with self.execution.computing():
                    loss, means = self.call(micro, counts)
                loss.backward()
            add_by_name(total, {"loss": loss.detach(), **(means if several else {})})
        self.apply_gradients()
        self.network.zero_grad()
        return total

    def count_labels(self, micros: list[Tensors]) -> dict[str, Tensor]:
        """Labels of the whole step per process, since gradients are averaged over processes."""
        totals: dict[str, Tensor] = {}
        for micro in micros:
            add_by_name(totals, count_labels(self.loss_module.objective, micro))
        if self.group.world > 1:
            summed = self.group.sum(torch.stack(list(totals.values())).float()) / self.group.world
            totals = dict(zip(totals, summed, strict=True))
        return {name: count.float().clamp(min=1) for name, count in totals.items()}

    def apply_gradients(self) -> None:
        if self.config.clip and self.group.tensor > 1:
            clip_shared_gradients(self.network, self.config.clip, self.group)
        elif self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()

    def _average(self) -> None:
        """Adds the weights to their mean over the last share of the budget."""
        s = self.state
        if not self.config.ema or self.progress <= 1 - self.config.ema:
            s.averaged = 0
            self.average = None
            return
        self.average = self.average or WeightAverage(self.network)
        s.averaged += 1
        self.average.add(s.averaged)

    def averaged(self) -> AbstractContextManager[None]:
        """Swaps in the averaged weights within the context, if there are any."""
        return nullcontext() if self.average is None else self.average.in_place()

    def keep_average(self) -> None:
        """Replaces the weights by their average for good, if there is one."""
        if self.average is not None:
            self.average.keep()

    def shrink(self, error: RuntimeError) -> None:
        """Out of memory: halves the micro-batch, if the objective does not compare its rows."""
        divisible = all(term.divisible for term in self.loss_module.objective.terms)
        if self.micro == 1 or not divisible:
            raise error
        self.micro //= 2
        self.network.zero_grad()
        self.execution.free_cache()
        self.log.line(
            "The batch does not fit into memory; using micro-batches of {micro} sequences.",
            micro=self.micro,
        )

    def compile(self) -> None:
        compile_for(
            self.execution, self.network, dynamic=self.varied_shapes, whole=self.compiles_whole
        )

    def announce(self, work: str) -> None:
        """Announces slow work before it starts: the first pass compiles."""
        if self.execution.compiled and not self._compiled:
            self.log.line(COMPILING, seconds=40 if self.compiles_whole else 20)
        self._compiled = self.execution.compiled
        self.log.line(work)

    # ------------------------------------------------------------------ watching

    def _watch(self) -> bool:
        """After a step: logs, evaluates and saves when due; returns whether it was the last."""
        self.saver.check()
        # on a GPU the losses are read only now and then, because reading waits for it
        waits = self.group.device.type != "cpu" and self.clock.started
        looked = self.state.seconds - self._looked < LOOK_SECONDS
        if not (waits and looked) or self._row_is_due():
            self._read_losses()
        signal, late = self._agree()
        done = self.progress >= 1 or signal == EARLY_STOP
        step = self.state.step
        every = self.config.save_every
        saving = not done and bool(signal or late or (every and step % every == 0))
        snapping = self.config.snapshots and is_snapshot_step(step)
        evaluating = not done and self.evaluation_is_due()
        if done or saving or snapping:
            self._read_losses()
            # the loss of a step was computed before its update, which may have spoilt the weights
            if not weights_are_finite(self.network, self.group):
                raise BadLoss(math.nan)
        self._write(snapping=snapping, evaluating=evaluating, saving=saving)
        if signal and not done:
            self.saver.wait()
            self.settle()
            self.log.line(
                "Stopped at step {step:,} and saved; run the same command to resume.", step=step
            )
            raise Stopped(signal)
        if done and self.state.row_steps:
            self._row()
        return done or self.is_enough()

    def _write(self, *, snapping: bool, evaluating: bool, saving: bool) -> None:
        if snapping:
            self.log.require_folder()
            with self.averaged():
                self.save_snapshot()
            self.clock.lap("save")
        if evaluating:
            self._read_losses()
            self.evaluate()
            self.clock.lap("evaluation")
        if saving:
            self.save()
            self.clock.lap("save")

    def _row_is_due(self) -> bool:
        every = min(self.config.log_every, max(1, self.expected // MIN_METRIC_ROWS))
        return self.state.step == 1 or self.state.step % every == 0

    def _agree(self) -> tuple[int, bool]:
        """Synchronises the clock; a signal of any process, EARLY_STOP or 0; whether to save."""
        late = time.monotonic() - self._saved_at > self.seconds_between_saves
        number = self._signals.number or (EARLY_STOP if stop_requested() else 0)
        if self.group.world == 1:
            self.state.seconds = self.clock.seconds
            return number, late
        first = self.group.first
        here = [self.clock.seconds if first else 0.0, number, late and first]
        agreed = self.group.max(torch.tensor(here, device=self.group.device, dtype=torch.double))
        self.state.seconds, number, late = agreed.tolist()
        return int(number), bool(late)

    def _read_losses(self) -> None:
        """Reads the losses since the last read; raises BadLoss if one of them is."""
        if not self._pending:
            return
        phases = [phase for phase, _ in self._pending]
        names = list(self._pending[0][1])
        flat = torch.stack([losses[name].float() for _, losses in self._pending for name in names])
        rows = (self.group.sum(flat) / self.group.world).view(len(phases), -1).tolist()
        self._pending = []
        first = not self.clock.started
        self.clock.lap()
        self._looked = self.state.seconds
        s = self.state
        for phase, row in zip(phases, rows, strict=True):
            if self.is_bad(row[0], phase):
                raise BadLoss(row[0])
            s.row_steps += 1
            add_by_name(s.row_losses, dict(zip(names, row, strict=True)))
        self.log.progress(self.event(rows[-1][0], phases[-1]))
        if first:
            self.clock.skip()  # the event measured the peak speed first
        if self._row_is_due():
            self._row()

    def _row(self) -> None:
        """Logs the mean losses since the last row."""
        s = self.state
        losses = {name: round(total / s.row_steps, 5) for name, total in s.row_losses.items()}
        s.row_steps = 0
        s.row_losses = {}
        speed = round(self.speed, 1)
        self._mark = (s.tokens, self.clock.training)
        row = self._progress_row() | {"loss": losses.pop("loss"), "lr": self.config.lr * self.rate}
        self.log.write_row(**row, tokens_per_second=speed, **losses)

    def _progress_row(self) -> dict[str, Any]:
        s = self.state
        return {"step": s.step, "tokens": s.tokens, "seconds": round(s.seconds, 3)}

    @property
    def speed(self) -> float:
        """Training tokens per second since the last row, without evaluating and saving."""
        tokens, seconds = self._mark
        return (self.state.tokens - tokens) / max(1e-9, self.clock.training - seconds)

    def log_metrics(self, metrics: Mapping[str, float], **columns: Any) -> str:
        """Logs and reports an evaluation; returns its metrics in words."""
        rounded = {name: round(value, 5) for name, value in metrics.items()}
        self.log.write_row(**(self._progress_row() | rounded | columns))
        self.log.progress(Progress(VALIDATE, self.state.step, unit="steps", metrics=metrics))
        return measured(rounded)

    # ------------------------------------------------------------------ saving and resuming

    @property
    def state_root(self) -> Path:
        return self.out / "train_state"

    def save(self) -> None:
        """Copies the training state and the model, which are written beside the next steps."""
        self.log.require_folder()
        if self.group.world == 1:
            self.state.seconds = self.clock.seconds
        parts = self.saver.copy(self._parts())
        state = deepcopy(self.state)
        self.saver.start(partial(self._write_save, state, parts, self.model_writer(parts)))
        self.state.valid_loss = None  # it belonged to this state only
        self._saved_at = time.monotonic()

    def _write_save(
        self, state: RunState, parts: StateParts, write_model: Callable[[], object]
    ) -> None:
        """Writes the training state, then the model; removes old states but the best."""
        save_state(self.state_root, state, parts, self.saver.group)
        if self.group.first:
            prune_states(self.state_root, self.config.keep)
        write_model()
        self.saver.group.barrier()  # the writing process would fail if another left early
        publish(self.out)

    def _parts(self) -> StateParts:
        tensors = tensors_of(self.network, self.optimizers)
        if self.average is not None:
            tensors |= self.average.tensors
        if self.group.world == 1:
            tensors |= self.own_tensors()
        return StateParts.of(tensors, self.group)

    def _resume(self) -> None:
        """Resumes from the newest intact state in the folder, or starts with initial weights."""
        self.restore()
        begun = any(row["step"] for row in read_metrics(self.log.path))
        self.log.resume(self.state.step)
        if self.state.step:
            self.log.line("Resuming from step {step:,}.", step=self.state.step)
        elif begun:
            self.log.line(
                "There is no complete state in {state_root}: the run starts over.",
                state_root=self.state_root,
            )

    def restore(self) -> None:
        """Restores the newest intact state, if there is one."""
        self.saver.wait()
        folder = latest_state(self.state_root, self.log.line, self.group)
        self._pending = []
        if folder is None:
            if not self.keeps_initial:
                return
            folder = save_state(self.state_root, self.state, self._parts(), self.group)
        self.state = read_state(folder)
        self.load_own(other_tensors(folder) if self.group.world == 1 else {})
        self.average = WeightAverage(self.network) if self.state.averaged else None
        means = self.average.tensors if self.average is not None else {}
        load_state(folder, self.network, self.optimizers, means, self.group.tensor)
        self._mark = (self.state.tokens, self.clock.training)


def is_snapshot_step(step: int) -> bool:
    """Whether a step is a power of √2, rounded: 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64…"""
    return round(2 ** (round(2 * math.log2(step)) / 2)) == step
