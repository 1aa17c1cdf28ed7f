"""The loop of fine-tuning: batches of like length, one update each, the best on the development set kept."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.data.background import Background
from malmoi.errors import MalmoiError
from malmoi.metrics import better
from malmoi.model import Network
from malmoi.objectives import Objective
from malmoi.tasks.batch import batches, labels_a_batch, plan
from malmoi.tasks.features import Item
from malmoi.train.device import choose_execution, compile_for, thread_count
from malmoi.train.judge import Judge
from malmoi.train.log import Log, bar, clock
from malmoi.train.optim import make_optimizers, set_rate
from malmoi.train.pace import LOOK_SECONDS, WorkClock
from malmoi.train.replay import Replay
from malmoi.train.schedule import rate
from malmoi.train.stop import StopSignals
from malmoi.tune.evaluate import Outcome
from malmoi.tune.resume import keep, recorded_threads, restore
from malmoi.tune.settings import FinetuneConfig

LOG_EVERY = 10  # steps
KEEP_EVERY = 60.0  # seconds between two states on the disk: so much is lost at most


@dataclass
class Best:
    """The best state so far, by the measure that decides."""

    name: str
    outcome: Outcome | None = None
    step: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    since: int = 0  # evaluations without a better one

    def offer(self, outcome: Outcome, step: int, network: Network) -> None:
        now = outcome.metrics[self.name]
        if self.outcome is not None and not better(self.name, now, self.outcome.metrics[self.name]):
            self.since += 1
            return
        self.outcome, self.step, self.since = outcome, step, 0
        self.state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in network.state_dict().items()}


class Tuner:
    """One run over some items. `evaluate` judges the network as it stands, by `measure` first of all."""

    def __init__(
        self,
        network: Network,
        objective: Objective,
        settings: FinetuneConfig,
        out: Path,
        evaluate: Callable[[], Outcome],
        measure: str,
    ) -> None:
        self.network, self.objective, self.settings, self.evaluate = network, objective, settings, evaluate
        self.device = network.trunk.embed.token.weight.device
        self.judge = Judge(network, objective)
        self.best = Best(measure)
        self.out = out
        self.step = self.tokens = self.stopped = 0  # stopped: by which signal, before the end

    def fit(self, items: Sequence[Item]) -> Outcome:
        """Trains through the epochs or the minutes; the network ends with the best weights, which are judged so."""
        s = self.settings
        self.per_epoch = len(plan([1] * len(items), s.batch, 0))
        self.steps = s.steps or max(1, round(self.per_epoch * s.epochs))
        self.every = max(1, self.per_epoch // s.evaluations)
        self.config = s.training(self.steps)
        self.execution = choose_execution(self.device, self.config)
        self.counts = {name: torch.tensor(n, device=self.device) for name, n in labels_a_batch(items, s.batch).items()}
        gpu = self.device.type == "cuda"
        self.optimizers = make_optimizers(self.network, self.config, capturable=gpu)
        _layered(self.optimizers, self.network, s.layer_decay)
        compile_for(self.execution, self.judge, dynamic=True)
        self.learn = Replay(self._learn, self.device) if gpu and self.network.reader is None else self._learn
        self.log = Log(self.out, self.config, first=True)
        self.clock, self.pending = WorkClock(), list[Tensor]()
        with thread_count(self.device, recorded_threads(self), self.log.say):
            restore(self)
            self.log.resume(self.step)
            self._steps_through(items)
        self.learn = self._learn  # what was recorded goes, and its memory with it
        self.network.load_state_dict(self.best.state)
        self.network.eval()
        self.log.close()
        if self.best.outcome is None:
            raise MalmoiError("Nothing was learnt: there was no step to judge.")
        return self.best.outcome

    def _steps_through(self, items: Sequence[Item]) -> None:
        self.clock, self.kept, self.looked = WorkClock(self.clock.seconds), time.monotonic(), 0.0
        self.network.train()
        self.log.progress("Taking the first step …", now=True)
        with StopSignals() as stop, Background(self._batches(items), ahead=4) as stream:
            for batch in stream:
                self._update(batch)
                if self._done(stop.number):
                    break

    def _batches(self, items: Sequence[Item]) -> Iterator[dict[str, Tensor]]:
        (epoch, start), s = divmod(self.step, self.per_epoch), self.settings
        while True:
            seed = s.seed * 1000 + epoch
            for batch in batches(items, s.batch, seed, self.network.config, s.lm > 0, start):
                yield self._sent(batch)
            epoch, start = epoch + 1, 0

    def _sent(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In pinned memory, from which a recorded step fetches it, or where the network is."""
        if isinstance(self.learn, Replay):
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    @property
    def progress(self) -> float:
        minutes = self.settings.minutes
        return min(1.0, self.clock.seconds / (60 * minutes) if minutes else self.step / self.steps)

    def _update(self, batch: Mapping[str, Tensor]) -> None:
        torch.manual_seed(self.settings.seed * 1_000_003 + self.step)  # dropout is a function of the step
        set_rate(self.optimizers, rate(self.step, self.progress, self.config))
        self.pending.append(self.learn(batch))
        self.step += 1
        self.clock.step()
        self.tokens += batch["tokens"].numel()

    def _learn(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One update, and the loss it was made by."""
        with self.execution.computing():
            loss, _ = self.judge(batch, self.counts)
        loss.backward()
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _done(self, asked: int) -> bool:
        """After a step: write, judge, keep the state where that is due; whether this was the last, or is for now."""
        over = self.progress >= 1
        self._look(over=over)
        if self.step % self.every == 0 or over:
            self._judge()
            self.clock.lap("judging")
        if over or (self.settings.patience and self.best.since >= self.settings.patience):
            return True
        if asked or time.monotonic() - self.kept > KEEP_EVERY:
            keep(self)
            self.kept = time.monotonic()
        if asked and self.best.outcome is None:  # so that there is a model to look at; the state knows nothing of it
            self._judge()
        self.stopped = asked
        return bool(asked)

    def _look(self, *, over: bool) -> None:
        """Reads the loss, from a GPU only now and then; a row where one is due, and something moves on the screen."""
        first, row = not self.clock.started, self.step % LOG_EVERY == 0 or over
        if self.device.type != "cpu" and not (first or row or self.clock.seconds - self.looked >= LOOK_SECONDS):
            return
        loss = float(self.pending[-1])
        self.clock.lap()
        self.looked = self.clock.seconds
        left = (self.steps - self.step) * self.clock.usual_step
        if self.settings.minutes:
            left = 60 * self.settings.minutes - self.clock.seconds
        shown = f"{bar(self.progress, 16)} {self.progress:4.0%}  {clock(left)} left"
        self.log.progress(f"{shown}  step {self.step:,}  loss {loss:.3f}", now=first or over)
        if row:
            self._row()

    def _row(self) -> None:
        loss = float(torch.stack(self.pending).mean())
        self.pending = []
        if loss != loss:
            raise MalmoiError(f"The loss is no number any more at step {self.step}; a lower lr usually helps.")
        seconds, speed = round(self.clock.seconds, 3), self.clock.steps_per_second * self.tokens / self.step
        learning = self.config.lr * rate(self.step, self.progress, self.config)
        row = dict(step=self.step, tokens=self.tokens, seconds=seconds, loss=round(loss, 5), lr=learning)
        self.log.row(**row, tokens_per_second=round(speed, 1))

    def outcome(self) -> Outcome:
        """What the network is worth as it stands."""
        self.network.eval()
        with self.execution.computing(), torch.compiler.set_stance("force_eager"):
            found = self.evaluate()
        self.network.train()
        return found

    def _judge(self) -> None:
        """The measures on the development set; the best so far is kept."""
        began = time.monotonic()
        outcome = self.outcome()
        judging = round(time.monotonic() - began, 3)
        self.best.offer(outcome, self.step, self.network)
        rounded = {name: round(value, 5) for name, value in outcome.metrics.items()}
        seconds = round(self.clock.seconds + judging, 3)
        self.log.row(step=self.step, tokens=self.tokens, seconds=seconds, judging_seconds=judging, **rounded)
        words = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in rounded.items())
        self.log.say(f"step {self.step:,}: {words}" + ("" if self.best.since else "  (the best so far)"))


def _layered(optimizers: list[torch.optim.Optimizer], network: Network, decay: float) -> None:
    """Layer-wise rates: a layer n below the top learns at decay^n of the rate (Howard & Ruder 2018)."""
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
                optimizer.param_groups.append({**group, "params": params, "lr": group["lr"] * decay**below})
