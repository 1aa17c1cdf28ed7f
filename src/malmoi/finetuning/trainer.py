"""The fine-tuning loop: batches of similar length, and the mean of the last weights."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.evaluation.features import TrainingItem
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.batches import epoch_batches, plan_batches
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.run_state import RunState
from malmoi.kernels.cuda_graphs import record_graph
from malmoi.metrics import is_better
from malmoi.model import Network
from malmoi.system.language import plural
from malmoi.system.progress import VALIDATE, Progress, stop_requested
from malmoi.system.threads import ThreadTuner
from malmoi.training.data.background import Background
from malmoi.training.device import choose_execution, compile_for, seed_dropout, thread_count
from malmoi.training.log import RunLog
from malmoi.training.loss_module import LossModule
from malmoi.training.losses.base import count_labels
from malmoi.training.optim import WeightAverage, make_optimizers, set_rate
from malmoi.training.pace import LOOK_SECONDS, WorkClock
from malmoi.training.parallel import ProcessGroup
from malmoi.training.schedule import rate_at
from malmoi.training.signals import StopSignals
from malmoi.training.state import load_state, weights_are_finite

# forward, backward, update: takes a batch, returns its loss
ReplayStep = Callable[[Mapping[str, Tensor]], Tensor]
MAX_GRAPHS = 64  # captured shapes; batches of further shapes run eagerly
LOG_EVERY = 10  # steps
SECONDS_BETWEEN_SAVES = 60.0  # at most this much work is lost
MIN_CURVE_POINTS = 3
MAX_CURVE_POINTS = 10  # evaluations of a run that selects nothing
LIMITED_EVALUATIONS = 0.1  # share of a limit in seconds between two evaluations, and for all
# share of a limit before the clock moves the schedule: a run that fits does not depend on it
UNCLOCKED = 0.05
MORE_TIME = 5  # times a limit: what is proposed after it
SURE_STEPS = 5  # after which the usual time of one is known


class FinetuneTrainer:
    """Trains on items; `evaluate` scores the network on held-out rows, if there are any.

    The result is the last weights, or their mean over the end of the run. With `patience` it is
    the epoch whose `measure` is best on the held-out rows.
    """

    def __init__(
        self,
        loss_module: LossModule,
        items: Sequence[TrainingItem],
        settings: FinetuneConfig,
        out: Path,
        evaluate: Callable[[], Outcome] | None,
        measure: str,
    ) -> None:
        self.loss_module = loss_module
        self.network = loss_module.network
        self.items = items
        self.settings = settings
        self.out = out
        self.evaluate = evaluate
        self.measure = measure
        self.device = self.network.device
        self.per_epoch = len(plan_batches([1] * len(items), settings.batch, 0))
        self.steps = settings.steps or max(1, round(self.per_epoch * settings.epochs))
        self.selects = settings.patience > 0 and evaluate is not None
        self.every = max(1, self.per_epoch // settings.evaluations)
        if not self.selects:  # a curve has some points, and not too many
            self.every = min(self.every, max(1, self.steps // MIN_CURVE_POINTS))
            self.every = max(self.every, -(-self.steps // MAX_CURVE_POINTS))
        self.log_every = min(LOG_EVERY, max(1, self.steps // MAX_CURVE_POINTS))
        self.config = settings.training(self.steps)
        self.execution = choose_execution(self.device, self.config)
        gpu = self.device.type == "cuda"
        self.optimizers = make_optimizers(self.network, self.config, capturable=gpu)
        _layered(self.optimizers, self.network, settings.layer_decay)
        self.learn: ReplayStep = self._train_step
        # an LSTM reads the lengths of its rows on the processor, which a captured step cannot
        if gpu and self.network.reader is None and not self.network.config.is_lstm:
            self.learn = StepReplay(self._train_step, self.device)
        self.log = RunLog(out, self.config, first=True)
        self.clock = WorkClock()
        self.state = RunState()
        self.threads: ThreadTuner
        self.average: WeightAverage | None = None
        self.best: Outcome | None = None
        self.saved = 0.0  # time of the last saved state
        self.looked = 0.0  # seconds of training when the loss was last read
        self.stopped = 0  # the signal that stopped it early
        # seconds after which it ends, its schedule with it; 0: none
        self.limit = 60 * settings.max_minutes
        self.next_evaluation = self.limit * LIMITED_EVALUATIONS

    @property
    def step(self) -> int:
        return self.state.step

    def fit(self) -> None:
        """Trains for the epochs or minutes; ends with the resulting weights in the network."""
        compile_for(self.execution, self.loss_module, dynamic=True)
        self.state = RunState.load(self.out, self.log.line, self.device)
        state = self.state
        threads = thread_count(self.device, state.threads, state.threads_used, self.log.line)
        with threads as self.threads:
            state.threads = self.threads.limit
            self._resume()
            self._steps_through()
            expected = self.steps if self.limit else 0
            if others := self.threads.about_others(self.clock.training, self.step, expected):
                self.log.line(others)
        self.learn = self._train_step  # drops the captured graphs and frees their memory
        if self.state.best_weights:
            self.network.load_state_dict(self.state.best_weights)
        elif self.average is not None:
            self.average.keep()
        if not weights_are_finite(self.network, ProcessGroup(device=self.device)):
            raise self._diverged()
        self.network.eval()

    def judge(self, evaluate: Callable[[], Outcome], rows: str = "judged") -> Outcome:
        """Evaluates the resulting network on these rows, and closes the log."""
        outcome = self._evaluated(evaluate, rows)
        self.log.close()
        return outcome

    def _resume(self) -> None:
        """Continues from the saved state, if any, and re-evaluates the best so far."""
        if self.state.folder is not None:
            if self.state.best_weights and self.evaluate is not None:
                self.network.load_state_dict(self.state.best_weights)
                self.best = self.outcome(self.evaluate)
            if self.state.averaged:
                self.average = WeightAverage(self.network)
                for name, mean in self.average.tensors.items():
                    mean.copy_(self.state.means[name])
            load_state(self.state.folder, self.network, self.optimizers)
            self.log.line(f"Resuming from step {self.step:,}.")
        self.log.resume(self.step)

    def _steps_through(self) -> None:
        self.clock = WorkClock(self.state.seconds)
        self.saved = time.monotonic()
        self.network.train()
        self.log.line("Running the first step …")
        with StopSignals() as stop, Background(self._batches(), ahead=4) as stream:
            for batch in stream:
                self._update(batch)
                if self._done(stop.number):
                    break

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        s = self.settings
        epoch, start = divmod(self.step, self.per_epoch)
        while True:
            seed = s.seed * 1000 + epoch
            for batch in epoch_batches(
                self.items, s.batch, seed, self.network.config, lm=s.lm > 0, start=start
            ):
                yield self._sent(batch)
            epoch = epoch + 1
            start = 0

    def _sent(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Moves a batch to pinned memory, from which captured steps copy it, or to the device."""
        if isinstance(self.learn, StepReplay):
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    @property
    def progress(self) -> float:
        if self.settings.minutes:
            return min(1.0, self.clock.seconds / (60 * self.settings.minutes))
        late = self.clock.seconds / self.limit if self.limit else 0.0
        return min(1.0, max(self.step / self.steps, (late - UNCLOCKED) / (1 - UNCLOCKED)))

    def _update(self, batch: Mapping[str, Tensor]) -> None:
        # dropout depends only on the seed and the step, so that a resumed run is identical
        seed_dropout(self.settings.seed * 1_000_003 + self.step, self.device)
        set_rate(self.optimizers, rate_at(self.step, self.progress, self.config))
        self.state.pending.append(self.learn(batch))
        self.state.step += 1
        self.clock.step()
        self.state.tokens += batch["tokens"].numel()
        self.threads.step(batch["tokens"].numel())
        self.state.threads_used = self.threads.count
        if self.progress > 1 - self.settings.average:
            self._average()

    def _average(self) -> None:
        self.average = self.average or WeightAverage(self.network)
        self.state.means = self.average.tensors
        self.state.averaged += 1
        self.average.add(self.state.averaged)

    def _train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One update; returns its loss."""
        loss: Tensor
        # counted on the device: a captured step cannot wait for a number
        counts = count_labels(self.loss_module.objective, batch)
        with self.execution.computing():
            loss, _ = self.loss_module(batch, {name: n.clamp(min=1) for name, n in counts.items()})
        loss.backward()
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _done(self, signal: int) -> bool:
        """After a step: logs, evaluates and saves when due; returns whether to stop."""
        over = self.progress >= 1
        self._look(over=over)
        over = over or stop_requested()
        if self.evaluate is not None and (over or self._evaluation_due()):
            with self.average.in_place() if self.average else nullcontext():
                self._keep_if_best(self._evaluated(self.evaluate, "held out"))
            self.clock.lap("judging")
        if over or (self.selects and self.state.evaluations_since >= self.settings.patience):
            return True
        if signal or time.monotonic() - self.saved > SECONDS_BETWEEN_SAVES:
            self.log.require_folder()
            self.state.seconds = self.clock.seconds
            self.state.save(self.out, self.network, self.optimizers)
            self.saved = time.monotonic()
        self.stopped = signal
        return bool(signal)

    def _evaluation_due(self) -> bool:
        """Every so many steps; where the clock may end the run, as rarely as time allows."""
        if self.selects or not self.limit:
            return self.step % self.every == 0
        return self.clock.seconds >= self.next_evaluation

    def explain_limit(self) -> None:
        """Says what more time would hold, if a default limit ended the run."""
        minutes = self.settings.max_minutes
        if minutes and self.progress >= 1 and self.step < self.steps:
            epochs = self.step / self.per_epoch
            total = self.steps / self.per_epoch
            more = min(total, MORE_TIME * epochs)
            self.log.line(
                f"{plural(minutes, 'minute')} ended it after {epochs:.2g} of {total:.2g} epochs; "
                f"--minutes {MORE_TIME * minutes:g} (minutes={MORE_TIME * minutes:g}): about "
                f"{more:.2g} epochs."
            )

    def _look(self, *, over: bool) -> None:
        """Reads the loss, on a GPU only occasionally, since it synchronizes; logs progress."""
        first = not self.clock.started
        row = self.step == 1 or self.step % self.log_every == 0 or over
        if self.device.type != "cpu" and not (
            first or row or self.clock.seconds - self.looked >= LOOK_SECONDS
        ):
            return
        loss = float(self.state.pending[-1])
        self.clock.lap()
        self.looked = self.clock.seconds
        self.log.progress(self._event(loss))
        if row:
            self._row()

    def _event(self, loss: float) -> Progress:
        total = 60 * self.settings.minutes or self.limit
        time_left = total - self.clock.seconds
        left = (self.steps - self.step) * self.clock.usual_step
        sure = self.settings.minutes or self.clock.taken >= SURE_STEPS
        if not total or not sure or (not self.settings.minutes and left < time_left):
            return Progress("finetune", self.step, self.steps, "steps", {"loss": loss}, left)
        metrics = {"step": self.step, "loss": loss}
        return Progress("finetune", self.clock.seconds, total, "seconds", metrics, time_left)

    def _diverged(self) -> MalmoiError:
        return MalmoiError(
            f"The fine-tuning diverged: at step {self.step:,} the loss or a weight is no longer a "
            "number. A lower lr usually helps."
        )

    def _row(self) -> None:
        loss = float(torch.stack(self.state.pending).mean())
        self.state.pending = []
        if not math.isfinite(loss):
            raise self._diverged()
        speed = self.clock.steps_per_second * self.state.tokens / self.step
        self.log.write_row(
            step=self.step,
            tokens=self.state.tokens,
            seconds=round(self.clock.seconds, 3),
            loss=round(loss, 5),
            lr=self.config.lr * rate_at(self.step, self.progress, self.config),
            tokens_per_second=round(speed, 1),
        )

    def outcome(self, evaluate: Callable[[], Outcome]) -> Outcome:
        """Evaluates the current network."""
        training = self.network.training
        self.network.eval()
        # loading torch's compiler takes seconds, so it is imported only when used
        compiled = self.execution.compiled
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with self.execution.computing(), eager:
            found = evaluate()
        self.network.train(training)
        return found

    def _evaluated(self, evaluate: Callable[[], Outcome], rows: str) -> Outcome:
        """Evaluates the network and logs the metrics with the name of their rows."""
        began = time.monotonic()
        outcome = self.outcome(evaluate)
        judging = round(time.monotonic() - began, 3)
        pause = max(LIMITED_EVALUATIONS * self.limit, judging / LIMITED_EVALUATIONS)
        self.next_evaluation = self.clock.seconds + judging + pause
        rounded = {name: round(value, 5) for name, value in outcome.metrics.items()}
        self.log.write_row(
            step=self.step,
            tokens=self.state.tokens,
            seconds=round(self.clock.seconds + judging, 3),
            judging_seconds=judging,
            rows=rows,
            **rounded,
        )
        words = ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in rounded.items()
        )
        self.log.progress(Progress(VALIDATE, self.step, unit="steps", metrics=outcome.metrics))
        shown = "evaluation rows" if rows == "judged" else rows
        self.log.line(f"step {self.step:,}, {shown}: {words}")
        return outcome

    def _keep_if_best(self, outcome: Outcome) -> None:
        if not self.selects:
            return
        values = [one.metrics[self.measure] for one in (outcome, self.best) if one is not None]
        if self.best is not None and not is_better(self.measure, *values):
            self.state.evaluations_since += 1
            return
        self.best = outcome
        self.state.best_step = self.step
        self.state.evaluations_since = 0
        self.state.best_weights = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.network.state_dict().items()
        }


def _layered(optimizers: list[torch.optim.Optimizer], network: Network, decay: float) -> None:
    """Layer-wise learning rates: n layers below the top, decay^n (Howard & Ruder 2018)."""
    if decay == 1:
        return
    depth = {id(p): network.config.distinct + 1 for p in network.trunk.embed.parameters()}
    for i, block in enumerate(network.trunk.blocks):
        depth |= {id(p): network.config.distinct - i for p in block.parameters()}
    for optimizer in optimizers:
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for group in groups:
            by_depth: dict[int, list[Any]] = {}
            for p in group["params"]:
                by_depth.setdefault(depth.get(id(p), 0), []).append(p)
            for below, params in by_depth.items():
                optimizer.param_groups.append(
                    {**group, "params": params, "lr": group["lr"] * decay**below}
                )


class StepReplay:
    """CUDA graphs of steps, one per shape, since small networks are bound by Python.

    Runs a shape's first batch eagerly, captures the second, and replays the graph from then on.

    The step must stay on the GPU: it must not return values to Python, and its optimizer must be
    capturable. Batches may be in pinned memory; the returned loss is a copy.
    """

    def __init__(self, step: ReplayStep, device: torch.device) -> None:
        self.step = step
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor] | None] = {}

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        shape = tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))
        first = shape not in self.recorded
        if first or (self.recorded[shape] is None and len(self.recorded) > MAX_GRAPHS):
            self.recorded.setdefault(shape, None)
            return self._run(batch)
        found = self.recorded[shape] or self._record(batch)
        self.recorded[shape] = found
        graph, inputs, loss = found
        for name, tensor in batch.items():
            inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return loss.clone()  # replaying the next graph may overwrite its memory

    def _run(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Runs eagerly on the capture stream, so that per-stream kernel state is initialized."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(self._sent(batch)).detach()
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _record(
        self, batch: Mapping[str, Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        inputs = self._sent(batch)
        pool = next((found[0].pool() for found in self.recorded.values() if found), None)
        with record_graph(self.stream, pool) as graph:
            loss = self.step(inputs).detach()
        return graph, inputs, loss

    def _sent(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
