"""The trainer: `fit` goes through the budget, `step` is one update; everything else watches, saves and resumes."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.model import Network, parameters
from malmoi.objectives import Objective, count_labels, objective
from malmoi.objectives.distil import Teaching
from malmoi.train.device import Execution, ceiling, choose_execution, compile_for, first_micro, flops_per_token, release
from malmoi.train.feed import Feed, Micro, Tensors, batch_sizes
from malmoi.train.judge import Judge
from malmoi.train.log import Log, bar, clock, read_rows
from malmoi.train.optim import make_optimizers, set_rate
from malmoi.train.parallel import Group, spread, syncing
from malmoi.train.recipe import Recipe
from malmoi.train.schedule import rate
from malmoi.train.state import Position, latest, load_state, prune, save_state, sound, tensors_of
from malmoi.train.stop import Stopped, StopSignals
from malmoi.train.validate import validate

ROLLBACKS = 3  # after so many spikes the run stops, …
FORGIVEN = 1000  # … unless it came so many steps further than the last one
SPIKE = 8.0  # standard deviations above the running mean, and …
SPIKE_NATS = 1.0  # … so much at least
SPIKE_AFTER = 100  # steps: before that the loss falls too fast to judge
MOST_SECONDS = 300.0  # between two saves, whatever save_every says


@dataclass(frozen=True)
class Budget:
    """How long a run is: steps, or seconds."""

    steps: int
    seconds: float

    @classmethod
    def of(cls, recipe: Recipe) -> "Budget":
        c = recipe.train
        if c.minutes:
            return cls(0, c.minutes * 60)
        if not c.tokens:
            return cls(c.steps, 0.0)
        per_step = c.batch * sum(length * share for length, share in recipe.phases)
        grown = 1 - c.batch_ramp * (1 - (c.batch_start or c.batch) / c.batch) / 2
        return cls(max(1, math.ceil(c.tokens / (per_step * grown))), 0.0)

    def progress(self, position: Position) -> float:
        return position.step / self.steps if self.steps else position.seconds / self.seconds


class Trainer:
    """One run of a recipe over its feeds, in a folder. `save` writes the finished checkpoint, `sample` a few words."""

    def __init__(
        self,
        recipe: Recipe,
        network: Network,
        feeds: list[Feed],
        valid: list[Feed],
        out: Path,
        group: Group,
        save: Callable[[], None] = lambda: None,
        sample: Callable[[], str] = lambda: "",
        teaching: Teaching | None = None,
    ) -> None:
        self.recipe, self.config, self.network, self.group, self.out = recipe, recipe.train, network, group, out
        self.feeds, self.valid, self._save_folder, self._sample = feeds, valid, save, sample
        self.budget = Budget.of(recipe)
        self.execution: Execution = choose_execution(group.device, self.config)
        self.objective = _objective(recipe, teaching)
        self.judge = Judge(network.to(group.device), self.objective)
        network.trunk.rematerialise = self.config.rematerialise
        compile_for(self.execution, self.judge, dynamic=recipe.objective != "lm")
        self.call = spread(self.judge, network.trunk.blocks, group, self.config.parallel)
        self.optimizers = make_optimizers(network, self.config)
        self.position = Position(positions=[0] * len(feeds))
        self.log = Log(out, self.config, first=group.first)
        share = max(1, self.config.batch // group.world)
        fits = first_micro(network.config, max(f.length for f in feeds), share, group.device)
        self.micro = self.config.micro or group.least(fits)  # all processes make the same passes
        self._pending: list[tuple[int, dict[str, Tensor]]] = []  # losses not yet looked at, and of which phase
        self._mark = (0, 0.0)  # tokens and time at the last row: the speed is told by them
        self._weights = parameters(network)

    @property
    def state_root(self) -> Path:
        return self.out / "train_state"

    # ------------------------------------------------------------------ the loop

    def fit(self) -> dict[str, float]:
        """Trains until the budget is used; returns the last validation. Stopped by a signal, it saves first."""
        self._resume()
        self._began = time.monotonic() - self.position.seconds
        self._saved_at = time.monotonic()
        with StopSignals() as self._stop:
            while self.budget.progress(self.position) < 1:
                self._phase()
            metrics = self._validate()
            self.save()
        release(self.judge)
        self.log.close()
        return metrics

    def _phase(self) -> None:
        """Steps of one phase, until it ends, the budget ends, or a spike takes the run back."""
        phase = self._phase_number()
        sizes = batch_sizes(self.config, self.position.step, self.budget.steps, self.group.world)
        again = batch_sizes(self.config, self.position.step, self.budget.steps, self.group.world)
        with self.feeds[phase].stream(self.position.positions[phase], sizes, self.micro, self.group) as stream:
            for micros in stream:
                step = self.position.step
                self._one(micros, phase, next(again))
                if self.budget.progress(self.position) >= 1 or self._phase_number() != phase:
                    return
                if self.position.step <= step:  # taken back, or the batch did not fit
                    return

    def _one(self, micros: list[Micro], phase: int, size: int) -> None:
        try:
            losses = self.step([micro.tensors for micro in micros])
        except torch.cuda.OutOfMemoryError:
            self._shrink()
            return
        p = self.position
        p.step += 1
        p.positions[phase] += size
        p.tokens += sum(micro.tokens for micro in micros) * self.group.world
        self._pending.append((phase, losses))
        self._watch(phase)

    def step(self, micros: list[Tensors]) -> dict[str, Tensor]:
        """One update: the gradients of every micro-batch as their share of the whole, clipped, applied."""
        c, p = self.config, self.position
        torch.manual_seed(_mix(c.seed, p.step, self.group.rank))  # dropout is a function of the step
        set_rate(self.optimizers, rate(p.step, self.budget.progress(p), c))
        counts = self._counts(micros)
        total: dict[str, Tensor] = {}
        for i, micro in enumerate(micros, 1):
            with syncing(self.call, last=i == len(micros)):
                with self.execution.computing():
                    loss, means = self.call(micro, counts)
                loss.backward()
            for name, value in {"loss": loss.detach(), **means}.items():
                total[name] = total[name] + value if name in total else value
        if c.clip:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), c.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _counts(self, micros: list[Tensors]) -> dict[str, Tensor]:
        """Labels of the whole step over the number of processes, because gradients are averaged over those."""
        parts = [count_labels(self.objective, micro) for micro in micros]
        names = list(parts[0])
        summed = torch.stack([torch.stack([p[name] for p in parts]).sum() for name in names]).float()
        summed = self.group.sum(summed) / self.group.world
        return {name: summed[i].clamp(min=1) for i, name in enumerate(names)}

    def _shrink(self) -> None:
        """The batch did not fit: take half as many sequences in one pass, which one of several cannot do alone."""
        if self.micro == 1:
            raise MalmoiError("One sequence does not fit into the GPU's memory: set train.rematerialise=true.")
        if self.group.world > 1:
            raise MalmoiError(
                f"{self.micro} sequences in one pass do not fit into the memory of process {self.group.rank}'s GPU: "
                f"set train.micro={self.micro // 2} or train.rematerialise=true."
            )
        self.micro = max(1, self.micro // 2)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.log.say(f"The batch does not fit into memory; taking {self.micro} sequences in one pass.")

    def _phase_number(self) -> int:
        progress, edge = self.budget.progress(self.position), 0.0
        for i, (_, share) in enumerate(self.recipe.phases):
            edge += share
            if progress < edge - 1e-12:
                return i
        return len(self.feeds) - 1

    # ------------------------------------------------------------------ watching

    def _watch(self, phase: int) -> None:
        """After a step: look at the loss, write a row, validate, save, stop; as often as each is due."""
        c, p = self.config, self.position
        asked = self._agree()
        done = self.budget.progress(p) >= 1
        saving = done or asked or self._save_is_due()
        due = saving or p.step % c.log_every == 0 or self.group.device.type == "cpu"
        if due and not self._look(phase):
            return
        if saving and not sound(self.network, self.group):  # the loss of this step came before its update
            self._roll_back(math.nan, phase)
            return
        aside = time.monotonic()
        if c.valid_every and p.step % c.valid_every == 0 and not done:
            self._validate()
        if saving and not done:
            self.save()
        tokens, since = self._mark
        self._mark = (tokens, since + time.monotonic() - aside)  # the speed is that of training alone
        if asked and not done:
            self.log.say(f"Stopped at step {p.step:,} and saved; the same command goes on from here.")
            self.log.close()
            raise Stopped(asked)

    def _save_is_due(self) -> bool:
        c, p = self.config, self.position
        late = time.monotonic() - self._saved_at > MOST_SECONDS
        return p.step % c.save_every == 0 or (p.step % c.log_every == 0 and bool(self.group.agree(int(late))))

    def _agree(self) -> int:
        """One clock for all processes, and the signal that asked any of them to stop, or 0."""
        seconds, number = time.monotonic() - self._began, self._stop.number
        if self.group.world > 1:
            told = torch.tensor([seconds if self.group.first else 0.0, number], device=self.group.device)
            seconds, number = self.group.most(told.double()).tolist()
        self.position.seconds = seconds
        return int(number)

    def _look(self, phase: int) -> bool:
        """Reads the losses since the last look; False where a spike took the run back."""
        phases = [number for number, _ in self._pending]
        pending = [{k: v.float() for k, v in losses.items()} for _, losses in self._pending]
        stacked = {name: torch.stack([losses[name] for losses in pending]) for name in pending[0]}
        table = torch.stack(list(stacked.values()))
        rows = (self.group.sum(table) / self.group.world).tolist()
        self._pending = []
        for number, loss in zip(phases, rows[0], strict=True):
            if self._spiked(loss, number):
                self._roll_back(loss, phase)
                return False
        if self.position.step % self.config.log_every == 0 or self.budget.progress(self.position) >= 1:
            self._row({name: sum(row) / len(row) for name, row in zip(stacked, rows, strict=True)}, phase)
        return True

    def _spiked(self, loss: float, phase: int) -> bool:
        """NaN, infinity, or far above the phase's running mean; otherwise the mean moves on."""
        p = self.position
        if p.phase != phase:  # longer samples are another measure: BERT's loss leaps where it goes from 128 to 512
            p.phase, p.mean, p.spread = phase, 0.0, 0.0
        if not math.isfinite(loss):
            return True
        if p.step > SPIKE_AFTER and p.mean and loss > p.mean + max(SPIKE_NATS, SPIKE * p.spread**0.5):
            return True
        p.spread = 0.98 * p.spread + 0.02 * (loss - p.mean) ** 2 if p.mean else 0.0
        p.mean = 0.98 * p.mean + 0.02 * loss if p.mean else loss
        return False

    def _roll_back(self, loss: float, phase: int) -> None:
        """Back to the last good state; the samples since then are skipped."""
        p = self.position
        rollbacks = p.rollbacks + 1 if p.step - p.spiked <= FORGIVEN else 1
        if rollbacks > ROLLBACKS:
            raise MalmoiError(
                f"The loss went to {loss:g} at step {p.step:,}, for the {rollbacks}th time without {FORGIVEN:,} good "
                f"steps between: the run is stopped, its last good state is in {self.state_root}. A lower train.lr "
                "usually helps."
            )
        self._restore()
        self.log.resume(self.position.step)
        self.position.positions[phase], self.position.seconds = p.positions[phase], p.seconds
        self.position.rollbacks, self.position.spiked = rollbacks, p.step
        back = f"back to step {self.position.step:,}, skipping what led there"
        self.log.say(f"The loss went to {loss:g} at step {p.step:,}: {back}.")

    def _row(self, losses: Mapping[str, float], phase: int) -> None:
        p, progress = self.position, self.budget.progress(self.position)
        now = time.monotonic()
        before_tokens, before = self._mark
        speed = (p.tokens - before_tokens) / (now - before) if now > before else 0.0
        self._mark = (p.tokens, now)
        learning = self.config.lr * rate(p.step, progress, self.config)
        extra = {name: round(value, 5) for name, value in losses.items() if name != "loss" and len(losses) > 2}
        loss = round(losses["loss"], 5)
        row = dict(step=p.step, tokens=p.tokens, seconds=round(p.seconds, 3), loss=loss, lr=learning)
        self.log.row(**row, tokens_per_second=round(speed, 1), **extra)
        self.log.progress(self._line(losses["loss"], speed, phase))

    def _line(self, loss: float, speed: float, phase: int) -> str:
        p, progress = self.position, self.budget.progress(self.position)
        length = self.feeds[phase].length
        used = flops_per_token(self.network.config, self._weights, length) * speed / ceiling(self.execution)
        left = p.seconds / max(progress, 1e-9) * (1 - progress)
        return (
            f"{bar(progress, 16)} {progress:4.0%}  {clock(left)} left  step {p.step:,}  loss {loss:.3f}  "
            f"{speed:,.0f} tok/s  {used / self.group.world:.0%} of the machine"
        )

    def _validate(self) -> dict[str, float]:
        """The phase's validation loss, on the same batches every time, and a sample of what the model says."""
        if not self.valid:
            return {}
        self.network.eval()
        metrics = validate(self.judge, self.valid[self._phase_number()], self.config, self.execution)
        self.position.valid_loss = metrics["valid_loss"]
        self._tell(metrics)
        self.network.train()
        return metrics

    def _tell(self, metrics: Mapping[str, float]) -> None:
        p = self.position
        rounded = {name: round(value, 5) for name, value in metrics.items()}
        with torch.compiler.set_stance("force_eager"):
            text = self._sample() if self.group.first and self.config.parallel != "fsdp" else ""
        row: dict[str, Any] = dict(step=p.step, tokens=p.tokens, seconds=round(p.seconds, 3), **rounded)
        self.log.row(**row, **({"sample": text} if text else {}))
        words = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in rounded.items())
        self.log.say(f"step {p.step:,}: {words}" + (f"\n  » {text}" if text else ""))

    # ------------------------------------------------------------------ saving and going on

    def save(self) -> None:
        """The state of training, then the checkpoint a user opens; old states go, the best stays."""
        self.position.seconds = time.monotonic() - self._began if self.group.world == 1 else self.position.seconds
        save_state(self.state_root, self.position, tensors_of(self.network, self.optimizers), self.group)
        self.position.valid_loss = None  # it was of this state only
        if self.group.first:
            prune(self.state_root, self.config.keep)
        self._save_folder()
        self.group.barrier()  # a process that leaves early would take the one that writes with it
        self._saved_at = time.monotonic()

    def _resume(self) -> None:
        """Goes on from the newest whole state in the folder, or starts from drawn weights."""
        self._restore()
        rows = read_rows(self.log.path)
        self.log.resume(self.position.step)
        if self.position.step:
            self.log.say(f"Going on from step {self.position.step:,}.")
        elif rows:
            self.log.say(f"There is no whole state in {self.state_root}: the run starts anew.")

    def _restore(self) -> None:
        folder = latest(self.state_root, self.log.say, self.group)
        self._pending = []
        if folder is None:  # from now on there is always a state to go back to
            folder = save_state(self.state_root, self.position, tensors_of(self.network, self.optimizers), self.group)
        self.position = load_state(folder, self.network, self.optimizers)
        self._mark = (self.position.tokens, time.monotonic())
        self.network.train()


def _objective(recipe: Recipe, teaching: Teaching | None) -> Objective:
    hard = objective(recipe.objective)
    return hard if teaching is None else teaching.beside(hard, hard.terms[0].head)


def _mix(*numbers: int) -> int:
    """One seed out of several numbers."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed = (seed ^ (number + 0x9E3779B97F4A7C15 + (seed << 6) + (seed >> 2))) & 0x7FFFFFFFFFFFFFFF
    return seed
