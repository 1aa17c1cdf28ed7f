"""Probes of each layer, and replay of a training run."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from pydantic import Field

from malmoi.demo.texts import BUILT_IN
from malmoi.errors import UsageError, require_that
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.task import Example
from malmoi.evaluation.tasks.language_modelling import BLIMP, KONTRAST
from malmoi.inference import Model, load
from malmoi.inference.pseudo_likelihood import sentence_logprobs
from malmoi.interpret.probe import Probe, ProbeRow, conllu_rows, probe_model
from malmoi.server.api.requests import NameField
from malmoi.studio.attention_view import attention_view, layer_guesses
from malmoi.studio.endpoint import Index, RunsFolder, ShortText, StudioRequest, model_view, router
from malmoi.studio.routes import known_languages
from malmoi.studio.run_curves import list_runs
from malmoi.system.run_folder import read_metrics
from malmoi.text.rows import any_rows

Language = Literal["en", "ko"]
Lines = Annotated[str, Field(max_length=3_000_000)]
CONLLU_TABS = 9
MAX_PROBED = 3000  # words or texts
MIN_PROBED = 30  # lines: a fifth of fewer is no test
BUILT_IN_ROWS = 400  # sentences, half of them with their words shuffled
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


# ------------------------------------------------------------------ probes


@model_view("/probe")
def probe_view(
    model: Model, lines: Lines, label: NameField = "upos", language: Language = "en"
) -> Probe:
    """A probe on labelled lines: CoNLL-U with a column as label, or a text, a tab and its label.

    Without lines, on the built-in sentences of a language.
    """
    return probe_model(model, probe_rows(lines, label, language), max_examples=MAX_PROBED)


def probe_rows(text: str, label: str, language: str) -> list[ProbeRow]:
    """The rows of pasted lines, of either kind."""
    lines = text.splitlines()
    given = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if any(line.count("\t") == CONLLU_TABS for _, line in islice(given, 50)):
        return list(conllu_rows(lines, label))
    if not given:
        return list(order_rows(language))
    require_that(
        len(given) >= MIN_PROBED,
        "{lines} lines are too few for a probe: a fifth of them is its test. Give {least} or "
        "more, or none for the built-in sentences.",
        lines=len(given),
        least=MIN_PROBED,
    )
    return list(tab_labelled(given))


@lru_cache(maxsize=2)
def order_rows(language: str) -> tuple[tuple[str, str], ...]:
    """Sentences of the built-in text, half of them with their words shuffled."""
    documents = BUILT_IN[language].documents()
    each = -(-BUILT_IN_ROWS // len(documents))
    return tuple(row for one in documents for row in one.rows[:each])[:BUILT_IN_ROWS]


def tab_labelled(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """The text and the label of each numbered line, which a tab separates."""
    for number, line in numbered:
        text, tab, label = line.rpartition("\t")
        require_that(tab, "Line {number}: write the text, a tab and its label.", number=number)
        yield text.strip(), label.strip()


# ------------------------------------------------------------------ replay


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
    if found is None:
        raise UsageError(
            "There is no snapshot of {name!r} after step {step}.", name=name, step=step
        )
    with _loading:
        yield opened(found)


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
    task = KONTRAST if first is not None and "gold_label" in first.values else BLIMP
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in load_examples(task, source).rows:
        groups[example.group].append(example)
    limit = max(1, MAX_PAIRS // len(groups))
    return tuple(pair for some in groups.values() for pair in _spread(some, limit))


def _spread(pairs: list[Example], limit: int) -> list[Example]:
    """At most `limit` of them, evenly spread: paradigms follow one another in a file."""
    count = min(len(pairs), limit)
    return [pairs[i * len(pairs) // count] for i in range(count)]


def score_examples(model: Model, pairs: tuple[Example, ...]) -> dict[str, Any]:
    """How often the right sentence is more likely; a tie is wrong (Warstadt et al. 2020 §4)."""
    texts = [text for pair in pairs for text in pair.choices]
    found = sentence_logprobs(model.network, model.tokenizer, texts)
    scored = []
    right: dict[str, list[bool]] = defaultdict(list)
    for pair, both in zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True):
        good, bad = pair.label, 1 - pair.label
        margin = both[good] - both[bad]  # log p(good) − log p(bad)
        shown = {"good": pair.choices[good], "bad": pair.choices[bad]}
        scored.append({"phenomenon": pair.group, **shown, "margin": margin})
        right[pair.group].append(margin > 0)
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
