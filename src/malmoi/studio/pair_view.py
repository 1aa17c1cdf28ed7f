"""Minimal pairs along a run: which phenomena of grammar each snapshot has learnt."""

import json
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

from fastapi import Request
from pydantic import BaseModel, Field

from malmoi.errors import UsageError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.task import Example
from malmoi.evaluation.tasks.language_modelling import BLIMP, KONTRAST
from malmoi.inference import Model
from malmoi.inference.pseudo_likelihood import sentence_logprobs
from malmoi.server.api.requests import NameField
from malmoi.studio.endpoint import StudioRequest, router, runs_folder
from malmoi.studio.probing import reading_snapshot
from malmoi.text.rows import any_rows

BUILT_IN = Path(__file__).with_name("minimal_pairs.json")  # language → phenomenon → [good, bad]
MAX_PAIRS = 520  # 40 of each of BLiMP's phenomena: a snapshot is scored in seconds


class PairsRequest(StudioRequest):
    """A run's snapshot, and the set of pairs that it is scored on."""

    run: NameField
    step: int = Field(ge=0)
    pairs: NameField


class PairSet(BaseModel):
    name: str
    pairs: int
    phenomena: list[str]


class PairSets(BaseModel):
    sets: list[PairSet]


class ScoredPair(BaseModel):
    phenomenon: str
    good: str
    bad: str
    margin: float  # log p(good) − log p(bad)


class PairScores(BaseModel):
    accuracy: dict[str, float]  # by phenomenon
    pairs: list[ScoredPair]


@lru_cache(maxsize=16)
def pair_examples(source: Path | str) -> tuple[Example, ...]:
    """The pairs of a language that are built in, or of a file of BLiMP's or Kontrast's columns."""
    if isinstance(source, str):
        phenomena = json.loads(BUILT_IN.read_text("utf-8"))[source]
        return tuple(
            Example(good, label=0, choices=(good, bad), group=name)
            for name, pairs in phenomena.items()
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


def score_examples(model: Model, pairs: tuple[Example, ...]) -> PairScores:
    """How often the right sentence is more likely; a tie is wrong (Warstadt et al. 2020 §4)."""
    texts = [text for pair in pairs for text in pair.choices]
    found = sentence_logprobs(model.network, model.tokenizer, texts)
    scored = [
        ScoredPair(
            phenomenon=pair.group,
            good=pair.choices[pair.label],
            bad=pair.choices[1 - pair.label],
            margin=both[pair.label] - both[1 - pair.label],
        )
        for pair, both in zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True)
    ]
    right: dict[str, list[bool]] = defaultdict(list)
    for one in scored:
        right[one.phenomenon].append(one.margin > 0)
    accuracy = {name: sum(some) / len(some) for name, some in right.items()}
    return PairScores(accuracy=accuracy, pairs=scored)


def _sources(request: Request) -> dict[str, Path | str]:
    files: tuple[Path, ...] = request.app.state.settings.pairs
    return {"en": "en", "ko": "ko"} | {path.name: path for path in files}


@router.get("/pairs")
def show_pair_sets(request: Request) -> PairSets:
    """The sets of minimal pairs: those built in, and the files given to --pairs."""
    found = {name: pair_examples(source) for name, source in _sources(request).items()}
    return PairSets(
        sets=[
            PairSet(
                name=name,
                pairs=len(pairs),
                phenomena=list(dict.fromkeys(pair.group for pair in pairs)),
            )
            for name, pairs in found.items()
        ]
    )


@router.post("/pairs")
def show_pair_scores(request: Request, body: PairsRequest) -> PairScores:
    """A snapshot's accuracy on minimal pairs, by phenomenon."""
    sources = _sources(request)
    if body.pairs not in sources:
        raise UsageError(
            "There are no pairs {pairs!r}. Known: {sources}.",
            pairs=body.pairs,
            sources=", ".join(sources),
        )
    pairs = pair_examples(sources[body.pairs])
    with reading_snapshot(runs_folder(request), body.run, body.step) as model:
        return score_examples(model, pairs)
