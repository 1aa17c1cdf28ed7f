"""Fine-tuning: epochs of labelled rows; the last weights, their mean, or the best ones."""

import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError
from malmoi.evaluation.features import AnswerItem, Outcome, TrainingItem
from malmoi.finetuning.config import FinetuneConfig
from malmoi.kernels.cuda_graphs import StepReplay, sent_to
from malmoi.messages import msg, plural
from malmoi.metrics import is_better
from malmoi.model import Network
from malmoi.system.groups import grouped
from malmoi.system.progress import Progress
from malmoi.tokenizer.padding import Ids, pad_to_width
from malmoi.training.data.background import prefetched
from malmoi.training.device import choose_execution
from malmoi.training.feed import MicroBatch
from malmoi.training.loop import Loop, StepBatch
from malmoi.training.loss_module import LossModule
from malmoi.training.losses import IGNORE_LABEL
from malmoi.training.parallel import ProcessGroup

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
        self.items = items
        self.settings = settings
        self.score = score
        self.measure = measure
        self.per_epoch = -(-len(items) // settings.batch)
        self.steps = settings.steps or max(1, round(self.per_epoch * settings.epochs))
        self.selects = settings.patience > 0 and score is not None
        self.every = max(1, self.per_epoch // settings.evaluations)
        if not self.selects:  # a curve has some points, and not too many
            self.every = min(self.every, max(1, self.steps // MIN_CURVE_POINTS))
            self.every = max(self.every, -(-self.steps // MAX_CURVE_POINTS))
        config = settings.training(self.steps)
        group = ProcessGroup(device=network.device)
        gpu = group.device.type == "cuda"
        execution = choose_execution(group.device, config)
        super().__init__(loss_module, config, execution, out, group, capturable=gpu)
        _layered(self.optimizers, network, settings.layer_decay)
        # an LSTM reads the lengths of its rows on the processor, which a captured step cannot
        if gpu and network.reader is None and not network.config.is_lstm:
            self.learn = StepReplay(self.learn_eagerly, group.device)
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
        lengths = [item.length for item in self.items]
        while True:
            for group in plan_batches(lengths, s.batch, s.seed * 1000 + epoch)[start:]:
                parts = (group[i : i + self.micro] for i in range(0, len(group), self.micro))
                yield StepBatch(0, s.batch, [self._micro_batch(part) for part in parts])
            epoch += 1
            start = 0

    def _micro_batch(self, places: Sequence[int]) -> MicroBatch:
        """A batch in pinned memory, from which captured steps copy it, or on the device."""
        items = [self.items[i] for i in places]
        batch = collate(items, self.network.config, lm=self.settings.lm > 0)
        if isinstance(self.learn, StepReplay):
            sent = {name: tensor.pin_memory() for name, tensor in batch.items()}
        else:
            sent = sent_to(self.group.device, batch)
        return MicroBatch(sent, batch["tokens"].numel())

    def event(self, loss: float, phase: int) -> Progress:
        s = self.state
        timed = self.settings.minutes > 0
        total = 60 * self.settings.minutes or self.limit
        time_left = total - s.seconds
        left = (self.steps - s.step) * self.clock.usual_step
        if not timed and (not total or self.clock.taken < SURE_STEPS or left < time_left):
            return Progress(self.verb, s.step, self.steps, "steps", {"loss": loss}, left)
        metrics = {"step": s.step, "loss": loss}
        return Progress(self.verb, s.seconds, total, "seconds", metrics, time_left)

    def recover(self, loss: float, phase: int) -> None:
        raise MalmoiError(
            "The fine-tuning diverged at step {step:,}: a lower lr usually helps.",
            step=self.state.step,
        )

    # ------------------------------------------------------------------ held-out rows

    def evaluation_is_due(self) -> bool:
        """Every so many steps; where the clock may end the run, as rarely as time allows."""
        if self.score is None:
            return False
        stepwise = self.selects or not self.limit
        late = self.state.seconds >= self.next_evaluation
        return self.state.step % self.every == 0 if stepwise else late

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
        seconds = self.state.seconds + judging
        self._evaluated_at = self.state.step
        self.next_evaluation = seconds + max(
            LIMITED_EVALUATIONS * self.limit, judging / LIMITED_EVALUATIONS
        )
        columns = dict(seconds=round(seconds, 3), judging_seconds=judging, rows=rows)
        words = self.log_metrics(outcome.metrics, **columns)
        if outcome.metrics:
            shown = msg("evaluation rows" if rows == "judged" else rows)
            step = self.state.step
            self.log.line("step {step:,}, {shown}: {words}", step=step, shown=shown, words=words)
        return outcome

    def _keep_if_best(self, outcome: Outcome) -> None:
        if not self.selects:
            return
        s = self.state
        value = outcome.metrics[self.measure]
        s.evaluations_since += 1
        if s.best is not None and not is_better(self.measure, value, s.best):
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
            self.log.line(
                "{minutes} ended it after {epochs:.2g} of {total:.2g} epochs; --minutes "
                "{more_time:.3g} (minutes={more_time:.3g}): about {more:.2g} epochs.",
                minutes=plural(minutes, "minute"),
                epochs=epochs,
                total=total,
                more_time=MORE_TIME * minutes,
                more=min(total, MORE_TIME * epochs),
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
            by_depth = grouped((depth.get(id(p), 0), p) for p in group["params"])
            for below, params in by_depth.items():
                optimizer.param_groups.append(
                    {**group, "params": params, "lr": group["lr"] * decay**below}
                )


# ------------------------------------------------------------------ batches of similar length

BATCHES_PER_POOL = 50  # batches whose items are sorted by length together
# short rows are padded to a multiple of 8, others to one of 32: few distinct shapes
SHORT_TOKENS = 128
FINE_MULTIPLE = 8
COARSE_MULTIPLE = 32
SLOT_MULTIPLE = 64  # an answer's labels are padded to a multiple of this
# GPT-1's auxiliary loss is the mean over texts of the mean over their tokens (the authors' code):
# each next token weighs 1 / the tokens of its text
LM_WEIGHTS = "lm_weights"
MAX_SHARED_TOKENS = 512  # wider rows hold one conversation each: their mask would be large


def plan_batches(lengths: Sequence[int], batch: int, seed: int) -> list[list[int]]:
    """One epoch's batches as indices: shuffled, sorted by length within pools, shuffled again."""
    order = list(range(len(lengths)))
    chance = random.Random(seed)
    chance.shuffle(order)
    batches = []
    for start in range(0, len(order), BATCHES_PER_POOL * batch):
        pool = sorted(order[start : start + BATCHES_PER_POOL * batch], key=lambda i: lengths[i])
        batches += [pool[i : i + batch] for i in range(0, len(pool), batch)]
    chance.shuffle(batches)
    return batches


def collate(
    items: Sequence[TrainingItem], config: ModelConfig, *, lm: bool = False
) -> dict[str, Tensor]:
    """Tensors of one batch: tokens, segments, keep, labels; `places` for multi-row examples."""
    if isinstance(items[0], AnswerItem):
        apart = config.mixer == "attention"  # a recurrent model cannot keep texts of a row apart
        return pack_answers(items, config.context, lm=lm, sharing=apart)
    rows = [row for item in items for row in item.rows]
    tensors = {"tokens": _padded([row.tokens for row in rows], 0, config.context)}
    width = tensors["tokens"].size(1)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    keep = torch.arange(width)[None] < lengths[:, None]
    if not bool(keep.all()):
        tensors["keep"] = keep
    if config.segments:
        tensors["segments"] = _padded([row.segments for row in rows], 0, config.context)
    if len(rows) > len(items):
        tensors["places"] = _places(items)
    tensors["labels"] = _labels(items, config.context)
    if lm:  # GPT-1 eq. 5: auxiliary language-model loss
        tensors["lm_labels"] = (
            tensors["tokens"].roll(-1, 1).masked_fill(~keep.roll(-1, 1), IGNORE_LABEL)
        )
        tensors["lm_labels"][:, -1] = IGNORE_LABEL
        real = tensors["lm_labels"] != IGNORE_LABEL
        tensors[LM_WEIGHTS] = real / real.sum(1, keepdim=True).clamp(min=1)
    return tensors


def pack_answers(
    items: Sequence[TrainingItem], context: int, *, lm: bool = False, sharing: bool = True
) -> dict[str, Tensor]:
    """Conversations [R, T]; short ones share a row without seeing each other.

    `labels` are only the answers' tokens, and `slots` the positions that predict them.
    """
    width = _width(max(item.length for item in items), context)
    sharing = sharing and width <= MAX_SHARED_TOKENS
    rows = _shared_rows(items, width) if sharing else [[item] for item in items]
    shape = (len(rows), width)
    tokens, positions = (np.zeros(shape, np.int64) for _ in range(2))
    # padding after the last conversation counts as another one
    documents = np.full(shape, len(items))
    labels = np.full(shape, IGNORE_LABEL)
    every = np.full(shape, IGNORE_LABEL)
    shares = np.zeros(shape, np.float32)
    for row, some in enumerate(rows):
        at = 0
        for number, item in enumerate(some):
            here = slice(at, at + item.length)
            found = item.rows[0].tokens
            tokens[row, here] = found
            positions[row, here] = np.arange(item.length)
            documents[row, here] = number
            labels[row, here] = item.label
            every[row, at : at + item.length - 1] = found[1:]
            shares[row, at : at + item.length - 1] = 1 / max(1, item.length - 1)
            at += item.length
    tensors = {"tokens": torch.from_numpy(tokens), **_slots(labels.reshape(-1))}
    if len(rows) < len(items):  # else a causal row needs no mask: padding comes after it
        tensors |= {
            "positions": torch.from_numpy(positions),
            "documents": torch.from_numpy(documents),
        }
    texts = {"lm_labels": torch.from_numpy(every), LM_WEIGHTS: torch.from_numpy(shares)}
    return tensors | (texts if lm else {})


def _shared_rows(items: Sequence[TrainingItem], width: int) -> list[list[TrainingItem]]:
    """First-fit decreasing bin packing: at most 11/9 of the optimal number of rows."""
    rows: list[list[TrainingItem]] = []
    free = [width] * len(items)
    for item in sorted(items, key=lambda item: -item.length):
        row = next(i for i, room in enumerate(free) if room >= item.length)
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        free[row] -= item.length
    return rows


def _slots(labels: NDArray[Any]) -> dict[str, Tensor]:
    """Positions and values of labels, padded to few distinct lengths."""
    slots = np.flatnonzero(labels != IGNORE_LABEL)
    room = (0, -len(slots) % SLOT_MULTIPLE)
    wanted = np.pad(labels[slots], room, constant_values=IGNORE_LABEL)
    return {"slots": torch.from_numpy(np.pad(slots, room)), "labels": torch.from_numpy(wanted)}


def _padded(rows: Sequence[Ids], fill: int, cap: int) -> Tensor:
    return torch.from_numpy(pad_to_width(rows, _width(max(map(len, rows)), cap), fill))


def _width(longest: int, cap: int) -> int:
    step = FINE_MULTIPLE if longest <= SHORT_TOKENS else COARSE_MULTIPLE
    return max(longest, min(cap, -(-longest // step) * step))


def _places(items: Sequence[TrainingItem]) -> Tensor:
    """The rows of each example [B, K]; −1 where it has fewer than the others."""
    sizes = torch.tensor([len(item.rows) for item in items])[:, None]
    steps = torch.arange(int(sizes.max()))
    return (sizes.cumsum(0) - sizes + steps).masked_fill(steps >= sizes, -1)


def _labels(items: Sequence[TrainingItem], cap: int) -> Tensor:
    labels: list[Any] = [item.label for item in items]
    return (
        _padded(labels, IGNORE_LABEL, cap) if isinstance(labels[0], list) else torch.tensor(labels)
    )
