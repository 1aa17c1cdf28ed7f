"""Records: tracks with a fixed text, budget and metric, and the best runs so far (records.toml)."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from malmoi import __version__
from malmoi.errors import require_known, require_that, required
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.finetuning.finetune import run_finetuning
from malmoi.inference import Model, load
from malmoi.messages import logger, msg, plural
from malmoi.settings import Config
from malmoi.studies.data import json_lines
from malmoi.system.files import write_text
from malmoi.system.machine import pick_device, this_machine
from malmoi.system.packages import read_toml
from malmoi.text.documents import read_documents, require_documents
from malmoi.training.pretrain import run_pretraining
from malmoi.training.recipes import names_budget

HELD_OUT_EACH = 110  # one document in this many
VALID_SHARE = 0.01  # of the training text, besides what the track holds out
GLUE = {"SST-2": "sst2", "CoLA": "cola", "RTE": "rte", "STS-B": "stsb"}  # folder → task
BLIMP_FILE = "blimp.jsonl.xz"


@dataclass(frozen=True, kw_only=True)
class Track(Config):
    """The fixed conditions of a benchmark: text, budget and metric."""

    about: str
    minutes: float
    held_out: Literal["nothing", "last tenth", "1 document in 110"]
    judge: Literal["nats per character", "bits per byte", "BERT", "BLiMP both ways"]
    recipe: str  # the default

    @property
    def lower_is_better(self) -> bool:
        return self.judge in ("nats per character", "bits per byte")


@dataclass(frozen=True, kw_only=True)
class RecordEntry(Config):
    """One run on a track."""

    track: str
    recipe: str
    machine: str
    figure: float
    date: str
    commit: str
    settings: dict[str, Any] = field(default_factory=dict)  # changes to the recipe
    figures: dict[str, float] = field(default_factory=dict)  # components of the score


def read_ladder() -> tuple[dict[str, Track], list[RecordEntry]]:
    """Every track by name, and the entries, each track's best first."""
    found = read_toml("malmoi.studies", "records.toml")
    tracks = {name: Track.from_dict(values) for name, values in found["tracks"].items()}
    entries = [RecordEntry.from_dict(values) for values in found.get("entries", ())]

    def rank(entry: RecordEntry) -> tuple[int, float]:
        sign = 1 if tracks[entry.track].lower_is_better else -1
        return list(tracks).index(entry.track), sign * entry.figure

    return tracks, sorted(entries, key=rank)


def named_track(name: str) -> Track:
    tracks, _ = read_ladder()
    require_known(name, tracks, "There is no track {name!r}.{hint} `malmoi records` lists them.")
    return tracks[name]


def run_record(
    name: str,
    data: list[str],
    out: Path,
    *,
    recipe: str | None = None,
    judge_data: Path | None = None,
    device: str | None = None,
    **overrides: Any,
) -> RecordEntry:
    """Trains for the track's minutes, evaluates and returns the entry; the same call resumes."""
    track = named_track(name)
    judge = JUDGES[track.judge]
    if judge in (judge_bert, judge_both):
        check_judge_data(name, judge_data, glue=judge is judge_bert)
    if names_budget(overrides):
        logger.warning(
            "The track {name} is for {minutes}: with another budget this run is no entry.",
            name=name,
            minutes=plural(track.minutes, "minute"),
        )
    train, held_out = split_text(track, data, out / "text")
    chosen = recipe or track.recipe
    changes = {"train.minutes": track.minutes, "data.valid": VALID_SHARE, **overrides}
    run_pretraining(chosen, data=train, out=out / "model", device=device, **changes)
    figures = judge(load(out / "model", device=device), held_out, judge_data, out / "judged")
    entry = RecordEntry(
        track=name,
        recipe=chosen,
        machine=machine_of(device),
        figure=next(iter(figures.values())),
        date=datetime.now(UTC).date().isoformat(),
        commit=__version__,
        settings={key: str(value) for key, value in overrides.items()},
        figures=figures,
    )
    write_text(out / "entry.toml", entry_toml(entry))
    return entry


def check_judge_data(name: str, data: Path | None, *, glue: bool) -> None:
    """Refuses a track whose rows are missing before minutes are spent on its training."""
    data = required(
        data,
        "The track {name} is evaluated on rows: --judge-data needs {file} and glue/.",
        name=name,
        file=BLIMP_FILE,
    )
    _blimp(data)
    for folder in GLUE if glue else ():
        require_that(
            (data / "glue" / folder).is_dir(),
            "There is no glue/{folder} in {data}.",
            folder=folder,
            data=data,
        )


def machine_of(device: str | None) -> str:
    """The GPU, or the processor's cores and its matrix units."""
    kind = pick_device(device).type
    machine = this_machine()
    found = next((a for a in machine.accelerators if a.kind == kind), None)
    if found is not None:
        return msg("one {found}", found=found.name)
    units = " with AMX" if machine.fast_bf16("cpu") else ""
    return f"{machine.cores} cores, {machine.architecture}{units}"


def entry_toml(entry: RecordEntry) -> str:
    """The lines to add to records.toml."""
    values = {name: value for name, value in entry.to_dict().items() if value not in ({}, "")}
    lines = (f"{name} = {_toml(value)}" for name, value in values.items())
    return "\n".join(("[[entries]]", *lines)) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, float):
        return f"{value:.4f}"
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------ held-out text


def split_text(track: Track, data: list[str], folder: Path) -> tuple[list[str], Path | None]:
    """The training text and the held-out file; both are written once."""
    if track.held_out == "nothing":
        return data, None
    held_out = folder / "held-out.txt"
    train = folder / ("train.txt" if track.held_out == "last tenth" else "train.jsonl")
    if not held_out.is_file():
        texts = [document.text for document in require_documents([read_documents(data)])]
        split = _last_tenth if track.held_out == "last tenth" else _some_documents
        kept, judged = split(texts)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(train, kept)
        write_text(held_out, judged)
    return [str(train)], held_out


def _last_tenth(texts: list[str]) -> tuple[str, str]:
    """nanoGPT's split of tiny Shakespeare: the first nine tenths of the characters."""
    text = "\n".join(texts)
    cut = int(0.9 * len(text))
    return text[:cut], text[cut:]


def _some_documents(texts: list[str]) -> tuple[str, str]:
    rest = [{"text": text} for i, text in enumerate(texts) if i % HELD_OUT_EACH]
    return json_lines(rest), "\n\n".join(texts[::HELD_OUT_EACH])


# ------------------------------------------------------------------ metrics


def judge_bits(model: Model, text: Path | None, data: Path | None, out: Path) -> dict[str, float]:
    """Bits per byte of the held-out text, in windows of which half is context."""
    return {"bits_per_byte": model.bits_per_byte(_text(text))}


def judge_nats(model: Model, text: Path | None, data: Path | None, out: Path) -> dict[str, float]:
    held_out = _text(text)
    bits = model.bits_per_byte(held_out) * len(held_out.encode()) / len(held_out)
    return {"nats_per_character": bits * math.log(2)}


def _text(path: Path | None) -> str:
    return required(path, "This track has no held-out text.").read_text("utf-8")


def judge_bert(model: Model, text: Path | None, data: Path | None, out: Path) -> dict[str, float]:
    """The mean of SST-2, CoLA, RTE and STS-B, each fine-tuned three times, and of BLiMP."""
    scores = dict(_glue(model, Path(data or "."), out))
    scores["blimp"] = 100 * evaluate_model(model, "blimp", _blimp(data))["accuracy"]
    return {"mean": sum(scores.values()) / len(scores), **scores}


def _glue(model: Model, data: Path, out: Path) -> Iterator[tuple[str, float]]:
    options: dict[str, Any] = dict(seeds=3, max_minutes=0.0)  # no result depends on the clock
    for folder, task in GLUE.items():
        found = run_finetuning(model, task, data / "glue" / folder, out / task, **options)
        metric = next(iter(found.metrics))
        yield task, 100 * sum(run[metric] for run in found.runs) / len(found.runs)


def judge_both(model: Model, text: Path | None, data: Path | None, out: Path) -> dict[str, float]:
    """BLiMP by causal and by masked scoring; the lower one counts."""
    pairs, readings = _blimp(data), ("causal", "masked")
    found = [evaluate_model(model, "blimp", pairs, reading=one)["accuracy"] for one in readings]
    return {"lower": 100 * min(found), "causal": 100 * found[0], "masked": 100 * found[1]}


def _blimp(data: Path | None) -> Path:
    found = sorted(Path(data or ".").rglob(BLIMP_FILE))
    require_that(found, "There is no {blimp_file} in {data}.", blimp_file=BLIMP_FILE, data=data)
    return found[0]


Judge = Callable[[Model, Path | None, Path | None, Path], dict[str, float]]
JUDGES: dict[str, Judge] = {
    "nats per character": judge_nats,
    "bits per byte": judge_bits,
    "BERT": judge_bert,
    "BLiMP both ways": judge_both,
}
