"""The log of a run: metrics.jsonl, log records, progress events and experiment trackers."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from malmoi.errors import MalmoiError, ensure, require_known
from malmoi.messages import logger, msg
from malmoi.system.files import write_text
from malmoi.system.progress import Progress, report_progress
from malmoi.system.run_folder import read_metrics
from malmoi.training.recipe import TrainConfig

# Trackers are libraries of their own, imported only if asked for; where their servers are, and
# whether they work offline, are their own settings (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR…).
PROJECT = "malmoi"  # the project or experiment that runs belong to
OFFLINE = {"wandb": "WANDB_MODE=offline", "mlflow": "MLFLOW_TRACKING_URI=sqlite:///mlflow.db"}

Values = Mapping[str, float]
Settings = Mapping[str, Any]


class Tracker(NamedTuple):
    """Where the metrics of a run go, besides metrics.jsonl."""

    log: Callable[[Values, int], object]  # the values of a step
    close: Callable[[], object]


def tensorboard(out: Path, settings: Settings) -> Tracker:
    """Event files in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(out / "tensorboard"))

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def wandb(out: Path, settings: Settings) -> Tracker:
    """A Weights & Biases run named as the folder; a resumed run is the same one."""
    import wandb

    about: dict[str, Any] = dict(name=out.name, id=run_id(out), dir=str(out), config=dict(settings))
    run: Any = wandb.init(project=PROJECT, resume="allow", **about)
    return Tracker(lambda values, step: run.log(dict(values), step=step), run.finish)


def mlflow(out: Path, settings: Settings) -> Tracker:
    """An MLflow run named as the folder, in the experiment of this name."""
    import mlflow

    mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=out.name, tags={"folder": str(out.absolute())})
    mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})
    return Tracker(lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def trackio(out: Path, settings: Settings) -> Tracker:
    """A Trackio run named as the folder."""
    import trackio

    trackio.init(project=PROJECT, name=out.name, config=dict(settings), resume="allow")
    return Tracker(lambda values, step: trackio.log(dict(values), step=step), trackio.finish)


TRACKERS = {make.__name__: make for make in (tensorboard, wandb, mlflow, trackio)}


def run_id(out: Path) -> str:
    """A name for the run that depends on its folder alone."""
    return sha256(str(out.absolute()).encode()).hexdigest()[:12]


def check_trackers(names: Sequence[str]) -> None:
    """Raises an error for a tracker that is unknown or not installed."""
    for name in names:
        require_known(name, TRACKERS, "There is no tracker {name!r}.{hint}")
        ensure(find_spec(name), "--track {name} needs its library: pip install {name}.", name=name)


def open_trackers(names: Sequence[str], out: Path, settings: Settings) -> list[Tracker]:
    """The trackers of a run, each once."""
    check_trackers(names)
    return [_open(name, out, settings) for name in dict.fromkeys(names)]


def close_trackers(trackers: Sequence[Tracker]) -> None:
    with redirect_stdout(sys.stderr):
        for tracker in trackers:
            tracker.close()


def _open(name: str, out: Path, settings: Settings) -> Tracker:
    try:
        with redirect_stdout(sys.stderr):  # only results go to stdout
            return TRACKERS[name](out, settings)
    except Exception as error:  # each library has its own errors: no login, no server…
        said = str(error).strip().rstrip(".")
        why = msg("--track {name} cannot start: {error}.", name=name, error=said)
        if name in OFFLINE:
            why += msg(" Without its server: {offline}.", offline=OFFLINE[name])
        raise MalmoiError(why) from error


# ------------------------------------------------------------------ metrics.jsonl and the console


class RunLog:
    """Metrics rows, status lines and progress events. Only the first process reports."""

    def __init__(self, out: Path, c: TrainConfig, *, first: bool) -> None:
        self.path = out / "metrics.jsonl"
        self.first = first
        self._trackers: list[Tracker] = []
        self._there: set[tuple[int, bool]] = set()  # rows of the step that a run resumes from
        self._written = False
        if first and c.trackers:
            self._trackers = open_trackers(c.trackers, out, c.to_dict())

    def resume(self, step: int) -> None:
        """Drops rows that a killed run wrote after its last saved step."""
        if not self.first or not self.path.is_file():
            return
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) != len(rows) or self.path.read_bytes()[-1:] not in (b"\n", b""):
            write_text(self.path, "".join(_line(row) for row in kept))
        self._there = {_kind(row) for row in kept if row["step"] == step}

    def require_folder(self) -> None:
        """Stops a run whose folder was removed: what it would write there, nobody could resume."""
        gone = self._written and not self.path.is_file()
        ensure(
            not self.first or (not gone and self.path.parent.is_dir()),
            "{parent} was removed while the run was writing to it; start the run again.",
            parent=self.path.parent,
        )

    def write_row(self, **values: Any) -> None:
        """Adds a row, unless the run had written it before it was interrupted."""
        if not self.first or _kind(values) in self._there:
            return
        self.require_folder()
        self._written = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(values))
        step = values.pop("step")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def line(self, sentence: str, /, **values: object) -> None:
        """Logs a line of status."""
        if self.first:
            logger.info(sentence, **values)

    def progress(self, event: Progress) -> None:
        if self.first:
            report_progress(event)

    def close(self) -> None:
        close_trackers(self._trackers)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _kind(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Identifies a row by its step and whether it is from validation."""
    return row["step"], "loss" in row
