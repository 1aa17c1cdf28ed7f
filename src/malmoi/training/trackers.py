"""Experiment trackers: a run's metrics in TensorBoard, Weights & Biases, MLflow or Trackio.

Each is its own library, imported only if it is asked for; where its server is, and whether it works
offline, is that library's own setting (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR…).
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from malmoi.errors import MalmoiError, UsageError, nearest

PROJECT = "malmoi"  # the project or experiment that runs belong to

Values = Mapping[str, float]
Settings = Mapping[str, Any]


class Tracker(Protocol):
    """Where the metrics of a run go, besides metrics.jsonl."""

    def log(self, values: Values, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run's folder."""

    def __init__(self, out: Path, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(out / "tensorboard"))

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """A Weights & Biases run named as the folder; a resumed run is the same one."""

    def __init__(self, out: Path, settings: Settings) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=PROJECT,
            name=out.name,
            id=run_id(out),
            dir=str(out),
            config=dict(settings),
            resume="allow",
        )

    def log(self, values: Values, step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowTracker:
    """An MLflow run named as the folder, in the experiment of this name."""

    def __init__(self, out: Path, settings: Settings) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        mlflow.set_experiment(PROJECT)
        mlflow.start_run(run_name=out.name, tags={"folder": str(out.absolute())})
        mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, values: Values, step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class TrackioTracker:
    """A Trackio run named as the folder."""

    def __init__(self, out: Path, settings: Settings) -> None:
        import trackio

        self.trackio: Any = trackio
        trackio.init(project=PROJECT, name=out.name, config=dict(settings), resume="allow")

    def log(self, values: Values, step: int) -> None:
        self.trackio.log(dict(values), step=step)

    def close(self) -> None:
        self.trackio.finish()


TRACKERS: dict[str, Callable[[Path, Settings], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def run_id(out: Path) -> str:
    """A name for the run that depends on its folder alone."""
    from hashlib import sha256

    return sha256(str(out.absolute()).encode()).hexdigest()[:12]


def check_trackers(names: Sequence[str]) -> None:
    """Raises an error for a tracker that is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"There is no tracker {name!r}; take one of {', '.join(TRACKERS)}."
                f"{nearest(name, TRACKERS)}"
            )
        if find_spec(name) is None:
            raise MalmoiError(f"--track {name} needs its library: pip install {name}.")


def open_trackers(names: Sequence[str], out: Path, settings: Settings) -> list[Tracker]:
    """The trackers of a run, each once."""
    check_trackers(names)
    return [TRACKERS[name](out, settings) for name in dict.fromkeys(names)]
