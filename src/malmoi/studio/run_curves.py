"""The training runs under a folder: their losses and samples."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from malmoi.errors import MalmoiError
from malmoi.report.chart import ChartPoints, smooth_points, thin_points
from malmoi.studio.endpoint import RunsFolder, router
from malmoi.system.run_folder import read_metrics
from malmoi.system.untrusted import read_object

MAX_RUNS = 50  # runs that are shown, the latest first
MAX_FOLDER_DEPTH = 3  # folders below the one that is named
MAX_SAMPLES = 6
MAX_EARLY_POINTS = 100
# the other columns of an evaluated row
Axis = Literal["tokens", "step", "seconds"]
NO_MEASURE = ("step", "tokens", "seconds", "judging_seconds", "rows", "loss", "lr")


@router.get("/runs")
def list_runs(folder: RunsFolder, axis: Axis = "tokens") -> dict[str, list[dict[str, Any]]]:
    """The training runs under the server's --runs folder, most recently updated first."""
    files = sorted(_files(folder, "metrics.jsonl"), key=lambda file: -file.stat().st_mtime_ns)
    reports = sorted(_files(folder, "report.json"))
    tests = (_test_scores(file, folder, file.stat().st_mtime_ns) for file in reports)
    return {
        "runs": [_fresh(file, folder, axis) for file in files[:MAX_RUNS]],
        "tests": list(islice(filter(None, tests), MAX_RUNS)),
    }


def _files(folder: Path, name: str) -> Iterator[Path]:
    for depth in range(MAX_FOLDER_DEPTH + 1):
        yield from folder.glob("/".join(["*"] * depth + [name]))


def _name(folder: Path, below: Path) -> str:
    return below.resolve().name if folder == below else folder.relative_to(below).as_posix()


@lru_cache(maxsize=6 * MAX_RUNS)
def _test_scores(file: Path, folder: Path, changed: int) -> dict[str, Any] | None:
    """The accuracy of a fine-tuning's runs on the test rows, beside two that need no network.

    None if it reports no accuracy of labels.
    """
    try:
        report = read_object(file)
        runs = report.list_of("runs", dict)
        support = [label["support"] for label in report.map_of("labels", dict).values()]
        return {
            "name": _name(file.parent, folder),
            "scores": [float(run["accuracy"]) for run in runs],  # seeds differ
            "majority": max(support) / sum(support),  # of always the most frequent label
            # of counting words
            "words": report.number("word_baseline", default=None),
        }
    except (MalmoiError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _fresh(file: Path, folder: Path, axis: Axis) -> dict[str, Any]:
    state = file.stat()
    return _run(file, folder, axis, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=6 * MAX_RUNS)  # an unchanged run is not read again
def _run(file: Path, folder: Path, axis: Axis, changed: int, size: int) -> dict[str, Any]:
    """One run: points are (x, loss); x is the step where a run does not count tokens."""
    rows = read_metrics(file)
    last: dict[str, Any] = rows[-1] if rows else {}
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    samples = [
        {"step": row["step"], "text": str(row["sample"])} for row in rows if row.get("sample")
    ]
    objective = _objective(file.parent)
    return {
        "name": _name(file.parent, folder),
        "objective": objective,  # of pre-training; None: a fine-tuning, which is evaluated instead
        "metrics": {} if objective else _measures(rows, axis),
        "step": int(last.get("step", 0)),
        "seconds": float(last.get("seconds", 0.0)),
        "tokens_per_second": speeds[-1] if speeds else None,
        "loss": _thin(smooth_points(_line(rows, "loss", axis))),
        "valid": _thin(_line(rows, "valid_loss", axis)),
        "samples": samples[-MAX_SAMPLES:],
    }


def _objective(folder: Path) -> str | None:
    """The objective in the run's recipe; fine-tuning has no recipe."""
    recipe = folder / "recipe.json"
    try:
        return read_object(recipe).text("objective", default=None) if recipe.is_file() else None
    except MalmoiError:  # incomplete, or not a run of Malmoi
        return None


def _measures(rows: Sequence[dict[str, Any]], axis: Axis) -> dict[str, ChartPoints]:
    """Every measure of the rows that were evaluated, by name."""
    judged = [row for row in rows if "rows" in row]
    # the final evaluation is on other rows than those held out, and would look like a fall
    judged = [row for row in judged if row["rows"] == "held out"] or judged
    names = dict.fromkeys(name for row in judged for name in row if name not in NO_MEASURE)
    found = {name: _thin(_line(judged, name, axis)) for name in names}
    return {name: points for name, points in found.items() if points}


def _line(rows: Sequence[dict[str, Any]], key: str, axis: Axis) -> ChartPoints:
    """The finite values: a run that diverged has logged NaN."""
    return [
        (float(row.get(axis, row["step"])), float(row[key]))
        for row in rows
        if _drawable(row.get(key)) and (axis in row or axis == "tokens")
    ]


def _thin(points: ChartPoints) -> ChartPoints:
    """Few enough to draw, and enough at the beginning for a logarithmic axis."""
    kept = {int(i) for i, _ in thin_points([(float(i), 0.0) for i in range(len(points))])}
    if points:
        kept |= {round(len(points) ** (i / MAX_EARLY_POINTS)) - 1 for i in range(MAX_EARLY_POINTS)}
    return [points[i] for i in sorted(kept)]


def _drawable(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
