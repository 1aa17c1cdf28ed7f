"""Training runs under a folder: losses and samples, snapshots read again, and minimal pairs."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from pydantic import Field

from malmoi.errors import MalmoiError, require_that, required
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.task import Example
from malmoi.evaluation.tasks import named_task
from malmoi.inference import Model, load
from malmoi.inference.pseudo_likelihood import sentence_logprobs
from malmoi.report.chart import ChartPoints, smooth_points, thin_points
from malmoi.server.api.requests import NameField
from malmoi.studies.data import evenly
from malmoi.studio.attention_view import attention_view, layer_guesses
from malmoi.studio.endpoint import Index, RunsFolder, ShortText, StudioRequest, router
from malmoi.studio.routes import known_languages
from malmoi.system.groups import grouped
from malmoi.system.run_folder import read_metrics
from malmoi.system.untrusted import read_object
from malmoi.text.rows import any_rows

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
        if isinstance(row.get(key), int | float)
        and math.isfinite(row[key])
        and (axis in row or axis == "tokens")
    ]


def _thin(points: ChartPoints) -> ChartPoints:
    """Few enough to draw, and enough at the beginning for a logarithmic axis."""
    kept = {int(i) for i, _ in thin_points([(float(i), 0.0) for i in range(len(points))])}
    if points:
        kept |= {round(len(points) ** (i / MAX_EARLY_POINTS)) - 1 for i in range(MAX_EARLY_POINTS)}
    return [points[i] for i in sorted(kept)]


# ------------------------------------------------------------------ replay

SAMPLE_TOKENS = 24
REPLAY_GUESSES = 5
_loading = Lock()  # snapshots are opened one at a time


class SnapshotRequest(StudioRequest):
    """A run's snapshot."""

    run: NameField
    step: int = Field(ge=0)


class ReplayRequest(SnapshotRequest):
    """The text that it reads."""

    text: ShortText
    layer: Index = 0
    head: Index = 0


@router.get("/snapshots")
def replay_runs(folder: RunsFolder) -> dict[str, list[dict[str, Any]]]:
    """The runs that kept snapshots."""
    found = ((run, _snapshots(folder, run["name"])) for run in list_runs(folder)["runs"])
    return {"runs": [_replay(run, some) for run, some in found if some and run["loss"]]}


def _snapshots(folder: Path, name: str) -> dict[int, Path]:
    own = folder / name
    home = own if own.is_dir() else folder  # the folder may itself be the run
    files = sorted((home / "snapshots").glob("*/config.json"))
    return {int(file.parent.name): file.parent for file in files if file.parent.name.isdigit()}


def _replay(run: dict[str, Any], snapshots: dict[int, Path]) -> dict[str, Any]:
    first = snapshots[min(snapshots)]
    model = opened(first)
    rows = [row for row in read_metrics(first.parents[1] / "metrics.jsonl") if "loss" in row]
    nearest = [min(rows, key=lambda row: abs(row["step"] - step)) for step in sorted(snapshots)]
    return {
        "name": run["name"],
        "steps": sorted(snapshots),
        "depth": model.config.depth,
        "heads": model.config.heads,
        "knows": known_languages(model.tokenizer),
        # (tokens, loss) of each snapshot
        "places": [(float(row.get("tokens", row["step"])), float(row["loss"])) for row in nearest],
        "loss": run["loss"],
        "valid": run["valid"],
    }


@contextmanager
def reading_snapshot(folder: Path, name: str, step: int) -> Iterator[Model]:
    """A run's snapshot after a step, for one request at a time."""
    known = any(run["name"] == name for run in list_runs(folder)["runs"])
    found = _snapshots(folder, name).get(step) if known else None
    sentence = "There is no snapshot of {name!r} after step {step}."
    with _loading:
        yield opened(required(found, sentence, name=name, step=step))


@router.post("/replay")
def replay_view(folder: RunsFolder, body: ReplayRequest) -> dict[str, Any]:
    """A text as a run's snapshot reads it, and the likeliest continuation of a GPT."""
    text = body.text
    with reading_snapshot(folder, body.run, body.step) as model:
        writes = "generate" in model.abilities
        return {
            "lens": layer_guesses(model, text, REPLAY_GUESSES),
            "attention": attention_view(model, text, layer=body.layer, head=body.head),
            "sample": model.generate(text, max_new_tokens=SAMPLE_TOKENS, temperature=0)
            if writes
            else None,
        }


@lru_cache(maxsize=4)
def opened(folder: Path) -> Model:
    """A snapshot on the CPU; it never changes once it is written."""
    return load(folder, device="cpu")


# ------------------------------------------------------------------ minimal pairs

# language → phenomenon → [good, bad]
MINIMAL_PAIRS = Path(__file__).with_name("minimal_pairs.json")
MAX_PAIRS = 520  # 40 of each of BLiMP's phenomena: a snapshot is scored in seconds


class PairsRequest(SnapshotRequest):
    """The set of pairs that it is scored on."""

    pairs: NameField


@lru_cache(maxsize=16)
def pair_examples(source: Path | str) -> tuple[Example, ...]:
    """The pairs of a language that are built in, or of a file of BLiMP's or Kontrast's columns."""
    if isinstance(source, str):
        return tuple(
            Example(good, label=0, choices=(good, bad), group=name)
            for name, pairs in json.loads(MINIMAL_PAIRS.read_text("utf-8"))[source].items()
            for good, bad in pairs
        )
    first = next(iter(any_rows(source)), None)
    published = first is not None and "gold_label" in first.values
    task = named_task("kontrast" if published else "blimp")
    groups = grouped((example.group, example) for example in load_examples(task, source).rows)
    limit = max(1, MAX_PAIRS // len(groups))
    # evenly spread: paradigms follow one another in a file
    return tuple(pair for some in groups.values() for pair in evenly(some, limit))


def score_examples(model: Model, pairs: tuple[Example, ...]) -> dict[str, Any]:
    """How often the right sentence is more likely; a tie is wrong (Warstadt et al. 2020 §4)."""
    texts = [text for pair in pairs for text in pair.choices]
    found = sentence_logprobs(model.network, model.tokenizer, texts)
    scored = []
    for pair, both in zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True):
        good, bad = pair.label, 1 - pair.label
        margin = both[good] - both[bad]  # log p(good) − log p(bad)
        shown = {"good": pair.choices[good], "bad": pair.choices[bad]}
        scored.append({"phenomenon": pair.group, **shown, "margin": margin})
    right = grouped((one["phenomenon"], one["margin"] > 0) for one in scored)
    accuracy = {name: sum(some) / len(some) for name, some in right.items()}
    return {"accuracy": accuracy, "pairs": scored}  # accuracy by phenomenon


def _sources(request: Request) -> dict[str, Path | str]:
    files: tuple[Path, ...] = request.app.state.settings.pairs
    return {"en": "en", "ko": "ko"} | {path.name: path for path in files}


PairSources = Annotated[dict[str, Path | str], Depends(_sources)]


@router.get("/pairs")
def show_pair_sets(sources: PairSources) -> dict[str, list[dict[str, Any]]]:
    """The sets of minimal pairs: those built in, and the files given to --pairs."""
    sizes = {name: len(pair_examples(source)) for name, source in sources.items()}
    return {"sets": [{"name": name, "pairs": size} for name, size in sizes.items()]}


@router.post("/pairs")
def show_pair_scores(
    folder: RunsFolder, sources: PairSources, body: PairsRequest
) -> dict[str, Any]:
    """A snapshot's accuracy on minimal pairs, by phenomenon."""
    require_that(
        body.pairs in sources,
        "There are no pairs {pairs!r}. Known: {sources}.",
        pairs=body.pairs,
        sources=", ".join(sources),
    )
    pairs = pair_examples(sources[body.pairs])
    with reading_snapshot(folder, body.run, body.step) as model:
        return score_examples(model, pairs)
