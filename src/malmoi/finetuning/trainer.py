"""Fine-tuning: epochs of labelled rows; the last weights, their mean, or the best ones."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.evaluation.features import Outcome, TrainingItem
from malmoi.finetuning.batches import epoch_batches, plan_batches
from malmoi.finetuning.config import FinetuneConfig
from malmoi.kernels.cuda_graphs import record_graph
from malmoi.messages import msg, plural
from malmoi.metrics import is_better
from malmoi.model import Network
from malmoi.system.progress import Progress
from malmoi.training.data.background import prefetched
from malmoi.training.device import choose_execution
from malmoi.training.feed import MicroBatch, Tensors
from malmoi.training.loop import Loop, Losses, StepBatch
from malmoi.training.loss_module import LossModule
from malmoi.training.parallel import ProcessGroup

MAX_GRAPHS = 64  # captured shapes; batches of further shapes run eagerly
MIN_CURVE_POINTS = 3
MAX_CURVE_POINTS = 10  # evaluations of a run that selects nothing
LIMITED_EVALUATIONS = 0.1  # share of a limit in seconds between two evaluations, and for all
# share of a limit before the clock moves the schedule: a run that fits does not depend on it
UNCLOCKED = 0.05
MORE_TIME = 5  # times a limit: what is proposed after it
SURE_STEPS = 5  # after which the usual time of one is known
BEST_PREFIX = "best."  # of the best weights' names


class FinetuneTrainer(Loop):
    """Trains on items; `score` evaluates the network on held-out rows, if there are any.

    The result is the last weights, or their mean over the end of the run. With `patience` it is
    the epoch whose `measure` is best on the held-out rows.
    """

    verb = "finetune"
    seconds_between_saves = 60.0

    def __init__(
        self,
        loss_module: LossModule,
        items: Sequence[TrainingItem],
        settings: FinetuneConfig,
        out: Path,
        score: Callable[[], Outcome] | None,
        measure: str,
    ) -> None:
        network = loss_module.network
        device = network.device
        self.items = items
        self.settings = settings
        self.score = score
        self.measure = measure
        self.per_epoch = len(plan_batches([1] * len(items), settings.batch, 0))
        self.steps = settings.steps or max(1, round(self.per_epoch * settings.epochs))
        self.selects = settings.patience > 0 and score is not None
        self.every = max(1, self.per_epoch // settings.evaluations)
        if not self.selects:  # a curve has some points, and not too many
            self.every = min(self.every, max(1, self.steps // MIN_CURVE_POINTS))
            self.every = max(self.every, -(-self.steps // MAX_CURVE_POINTS))
        config = settings.training(self.steps)
        gpu = device.type == "cuda"
        execution = choose_execution(device, config)
        group = ProcessGroup(device=device)
        super().__init__(loss_module, config, execution, out, group, capturable=gpu)
        _layered(self.optimizers, network, settings.layer_decay)
        # an LSTM reads the lengths of its rows on the processor, which a captured step cannot
        if gpu and network.reader is None and not network.config.is_lstm:
            self.learn = StepReplay(self.learn_eagerly, device)
        self.best_weights: dict[str, Tensor] = {}
        # seconds after which it ends, its schedule with it; 0: none
        self.limit = 60 * settings.max_minutes
        self.next_evaluation = self.limit * LIMITED_EVALUATIONS
        self._evaluated_at = -1  # the step of the last evaluation

    @property
    def progress(self) -> float:
        seconds = self.state.seconds
        if self.settings.minutes:
            return min(1.0, seconds / (60 * self.settings.minutes))
        late = seconds / self.limit if self.limit else 0.0
        done = self.state.step / self.steps
        return min(1.0, max(done, (late - UNCLOCKED) / (1 - UNCLOCKED)))

    @property
    def expected(self) -> int:
        return self.steps

    @property
    def timed(self) -> bool:
        return bool(self.limit)

    def dropout_seed(self) -> int:
        return self.settings.seed * 1_000_003 + self.state.step

    # ------------------------------------------------------------------ steps

    def batches(self) -> Generator[StepBatch]:
        while self.progress < 1:  # again after an out-of-memory
            with prefetched(self._epochs(self.state.step), ahead=4) as stream:
                for batch in stream:
                    step = self.state.step
                    yield batch
                    if self.state.step == step:
                        break

    def _epochs(self, step: int) -> Iterator[StepBatch]:
        s = self.settings
        epoch, start = divmod(step, self.per_epoch)
        sizes = (s.batch, self.micro)
        while True:
            seed = s.seed * 1000 + epoch
            for parts in epoch_batches(
                self.items, sizes, seed, self.network.config, lm=s.lm > 0, start=start
            ):
                micros = [MicroBatch(self._sent(part), part["tokens"].numel()) for part in parts]
                yield StepBatch(0, s.batch, micros)
            epoch += 1
            start = 0

    def _sent(self, batch: Mapping[str, Tensor]) -> Tensors:
        """Moves a batch to pinned memory, from which captured steps copy it, or to the device."""
        if isinstance(self.learn, StepReplay):
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        device = self.group.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def event(self, loss: float, phase: int) -> Progress:
        s = self.state
        total = 60 * self.settings.minutes or self.limit
        time_left = total - s.seconds
        left = (self.steps - s.step) * self.clock.usual_step
        sure = self.settings.minutes or self.clock.taken >= SURE_STEPS
        if not total or not sure or (not self.settings.minutes and left < time_left):
            return Progress(self.verb, s.step, self.steps, "steps", {"loss": loss}, left)
        metrics = {"step": s.step, "loss": loss}
        return Progress(self.verb, s.seconds, total, "seconds", metrics, time_left)

    def recover(self, loss: float, phase: int) -> None:
        raise MalmoiError(
            "The fine-tuning diverged: at step {step:,} the loss or a weight is no longer a "
            "number. A lower lr usually helps.",
            step=self.state.step,
        )

    # ------------------------------------------------------------------ held-out rows

    def evaluation_is_due(self) -> bool:
        """Every so many steps; where the clock may end the run, as rarely as time allows."""
        if self.score is None:
            return False
        if self.selects or not self.limit:
            return self.state.step % self.every == 0
        return self.state.seconds >= self.next_evaluation

    def evaluate(self) -> None:
        if self.score is not None:
            with self.averaged():
                self._keep_if_best(self._evaluated(self.score, "held out"))

    def is_enough(self) -> bool:
        return self.selects and self.state.evaluations_since >= self.settings.patience

    def finish(self) -> None:
        if self._evaluated_at != self.state.step:
            self.evaluate()
        self.settle()

    def settle(self) -> None:
        """Ends with the best weights if they were selected, else with the last or their mean."""
        self.learn = self.learn_eagerly  # drops the captured graphs and frees their memory
        if self.best_weights:
            self.network.load_state_dict(self.best_weights)
        else:
            self.keep_average()
        self.network.eval()

    def judge(self, score: Callable[[], Outcome], rows: str = "judged") -> Outcome:
        """Evaluates the resulting network on these rows, and closes the log."""
        outcome = self._evaluated(score, rows)
        self.log.close()
        return outcome

    def outcome(self, score: Callable[[], Outcome]) -> Outcome:
        """Evaluates the current network."""
        training = self.network.training
        self.network.eval()
        # loading torch's compiler takes seconds, so it is imported only when used
        compiled = self.execution.compiled
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with self.execution.computing(), eager:
            outcome = score()
        self.network.train(training)
        return outcome

    def _evaluated(self, score: Callable[[], Outcome], rows: str) -> Outcome:
        """Evaluates the network and logs the metrics with the name of their rows."""
        began = time.monotonic()
        outcome = self.outcome(score)
        judging = round(time.monotonic() - began, 3)
        pause = max(LIMITED_EVALUATIONS * self.limit, judging / LIMITED_EVALUATIONS)
        self._evaluated_at = self.state.step
        seconds = self.state.seconds + judging
        self.next_evaluation = seconds + pause
        columns = dict(seconds=round(seconds, 3), judging_seconds=judging, rows=rows)
        words = self.log_metrics(outcome.metrics, **columns)
        shown = msg("evaluation rows" if rows == "judged" else rows)
        self.log.line(
            msg("step {step:,}, {shown}: {words}", step=self.state.step, shown=shown, words=words)
        )
        return outcome

    def _keep_if_best(self, outcome: Outcome) -> None:
        if not self.selects:
            return
        s = self.state
        value = outcome.metrics[self.measure]
        if s.best is not None and not is_better(self.measure, value, s.best):
            s.evaluations_since += 1
            return
        s.best = value
        s.evaluations_since = 0
        self.best_weights = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.network.state_dict().items()
        }

    def explain_limit(self) -> None:
        """Says what more time would hold, if a default limit ended the run."""
        minutes = self.settings.max_minutes
        if minutes and self.progress >= 1 and self.state.step < self.steps:
            epochs = self.state.step / self.per_epoch
            total = self.steps / self.per_epoch
            more = min(total, MORE_TIME * epochs)
            self.log.line(
                msg(
                    "{minutes} ended it after {epochs:.2g} of {total:.2g} epochs; --minutes "
                    "{more_time:g} (minutes={more_time:g}): about {more:.2g} epochs.",
                    minutes=plural(minutes, "minute"),
                    epochs=epochs,
                    total=total,
                    more_time=MORE_TIME * minutes,
                    more=more,
                )
            )

    # ------------------------------------------------------------------ saving and resuming

    def own_tensors(self) -> Mapping[str, Tensor]:
        return {f"{BEST_PREFIX}{name}": tensor for name, tensor in self.best_weights.items()}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        self.best_weights = {
            name.removeprefix(BEST_PREFIX): tensor
            for name, tensor in tensors.items()
            if name.startswith(BEST_PREFIX)
        }
        # states of earlier versions do not have the metric of the best
        if self.best_weights and self.state.best is None and self.score is not None:
            self.network.load_state_dict(self.best_weights)
            self.state.best = self.outcome(self.score).metrics[self.measure]


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
    capturable. Batches may be in pinned memory; the returned losses are copies.
    """

    def __init__(self, step: Callable[[list[Tensors]], Losses], device: torch.device) -> None:
        self.step = step
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensors], Losses] | None] = {}

    def __call__(self, micros: list[Tensors]) -> Losses:
        shape = tuple(
            (name, tensor.shape) for micro in micros for name, tensor in sorted(micro.items())
        )
        first = shape not in self.recorded
        if first or (self.recorded[shape] is None and len(self.recorded) > MAX_GRAPHS):
            self.recorded.setdefault(shape, None)
            return self._run(micros)
        recorded = self.recorded[shape] or self._record(micros)
        self.recorded[shape] = recorded
        graph, inputs, losses = recorded
        for here, micro in zip(inputs, micros, strict=True):
            for name, tensor in micro.items():
                here[name].copy_(tensor, non_blocking=True)
        graph.replay()
        # replaying the next graph may overwrite its memory
        return {name: loss.clone() for name, loss in losses.items()}

    def _run(self, micros: list[Tensors]) -> Losses:
        """Runs eagerly on the capture stream, so that per-stream kernel state is initialized."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            losses = self.step(self._sent(micros))
        torch.cuda.current_stream().wait_stream(self.stream)
        return losses

    def _record(self, micros: list[Tensors]) -> tuple[torch.cuda.CUDAGraph, list[Tensors], Losses]:
        inputs = self._sent(micros)
        pool = next((found[0].pool() for found in self.recorded.values() if found), None)
        with record_graph(self.stream, pool) as graph:
            losses = self.step(inputs)
        return graph, inputs, losses

    def _sent(self, micros: list[Tensors]) -> list[Tensors]:
        return [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro.items()}
            for micro in micros
        ]
