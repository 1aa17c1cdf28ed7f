"""Experiment trackers: a run's metrics in TensorBoard, Weights & Biases, MLflow or Trackio.

Each is its own library, imported only if it is asked for; where its server is, and whether it works
offline, is that library's own setting (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR…).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from malmoi.errors import MalmoiError, require_known
from malmoi.messages import msg

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
    from hashlib import sha256

    return sha256(str(out.absolute()).encode()).hexdigest()[:12]


def check_trackers(names: Sequence[str]) -> None:
    """Raises an error for a tracker that is unknown or not installed."""
    for name in names:
        require_known(name, TRACKERS, "There is no tracker {name!r}.{hint}")
        if find_spec(name) is None:
            raise MalmoiError("--track {name} needs its library: pip install {name}.", name=name)


def open_trackers(names: Sequence[str], out: Path, settings: Settings) -> list[Tracker]:
    """The trackers of a run, each once."""
    check_trackers(names)
    return [_open(name, out, settings) for name in dict.fromkeys(names)]


def _open(name: str, out: Path, settings: Settings) -> Tracker:
    try:
        with _off_stdout():
            log, close = TRACKERS[name](out, settings)
    except Exception as error:  # each library has its own errors: no login, no server…
        why = msg(
            "--track {name} cannot start: {error}.", name=name, error=str(error).strip().rstrip(".")
        )
        if name in OFFLINE:
            why += msg(" Without its server: {offline}.", offline=OFFLINE[name])
        raise MalmoiError(why) from error
    return Tracker(log, _off_stdout()(close))


@contextmanager
def _off_stdout() -> Iterator[None]:
    """What a library prints goes to stderr: only results go to stdout."""
    with redirect_stdout(sys.stderr):
        yield
