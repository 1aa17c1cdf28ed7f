"""Accuracy by the number of examples in context, for models of several sizes (GPT-3 figure 1.2).

Small GPTs are pre-trained on text and on documents of hidden rules, then asked about words that no
document contained, after 0, 1, 2 … examples. Every part writes a file and is not repeated, so that
several processes can each do one size in the same folder.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from malmoi.config import Config
from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.evaluation.in_context.run import InContextConfig, evaluate_in_context
from malmoi.evaluation.tasks import Example, Task
from malmoi.inference import Model, load
from malmoi.model import count_parameters
from malmoi.studies.in_context.curves import Cell, SizeResults, accuracy_chart, size_summary
from malmoi.studies.in_context.documents import RuleItems, halves
from malmoi.studies.in_context.report import report
from malmoi.studies.in_context.rules import HIDDEN_RULES, UNSEEN_RULES, HiddenRule
from malmoi.studies.in_context.sequences import write_rule_documents
from malmoi.studies.in_context.sizes import SIZES, size_recipe
from malmoi.system.files import folder_lock, write_text
from malmoi.system.progress import Progress, report_progress
from malmoi.system.run_folder import RunFolder
from malmoi.text.documents import read_documents
from malmoi.text.rows import DataRow, any_rows
from malmoi.tokenizer import train_tokenizer
from malmoi.training.log import read_metrics
from malmoi.training.pretrain import run_pretraining

logger = logging.getLogger(__name__)

# The questions: tasks of held-out words, one per rule and parameter, with and without instruction

ROWS_PER_TASK = 64  # questions of a task, and the pool of their examples
# a space, seven letters doubled, the end of the line
MAX_ANSWER_CHARACTERS = 16


def rule_task(rule: HiddenRule, items: RuleItems, number: int, *, instructed: bool) -> Task:
    """A rule with the parameter drawn from this number, with or without the instruction."""
    return Task(
        f"{rule.name}/{number}",
        "writing",
        any_rows,
        _example,
        prompt="{text} =",
        separator="\n",
        metrics=("match",),
        max_answer_tokens=MAX_ANSWER_CHARACTERS,
        intro=f"{rule.instruction}\n" if instructed else "",
        generated=partial(_rows, rule, items),
    )


def _rows(rule: HiddenRule, items: RuleItems, rng: Random) -> Iterator[DataRow]:
    hidden = items.hidden(rule, rng)
    some = items.of(rule)
    for number, one in enumerate(rng.sample(some, min(ROWS_PER_TASK, len(some))), start=1):
        x, y = rule.pair(one, hidden, rng)
        yield DataRow({"x": x, "y": y}, f"{rule.name}:{number}")


def _example(row: DataRow) -> Example:
    return Example(row.text("x"), label=(row.text("y"),))


# settings that may change between two calls
RESUMABLE_SETTINGS = {"out", "sizes", "minutes", "tokens", "device", "processes"}


@dataclass(frozen=True, kw_only=True)
class InContextStudyConfig(Config):
    """Settings. `minutes` is for the largest size; the others then train on as many tokens."""

    data: tuple[str, ...]
    out: str
    sizes: tuple[str, ...] = tuple(SIZES)
    minutes: float = 3.0
    tokens: int = 0  # of every size; 0: by minutes
    seed: int = 0
    device: str | None = None
    rules: tuple[str, ...] = ()  # none: all
    documents: int = 150_000  # of hidden rules, about 350 characters each
    batch: int = 64  # sequences a step
    shots: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    draws: int = 3  # parameters asked about per rule
    limit: int = 32  # questions per parameter
    processes: int = 0  # to make documents; 0: one per core

    def check(self) -> "InContextStudyConfig":
        """Returns the config itself if all its names are known, otherwise raises."""
        for given, known, kind in (
            (self.sizes, list(SIZES), "size"),
            (self.rules, [r.name for r in HIDDEN_RULES], "rule"),
        ):
            for name in given:
                if name not in known:
                    raise UsageError(f"There is no {kind} {name!r}.{nearest(name, known)}")
        if not self.data or not self.sizes:
            raise UsageError("A study needs text (--data) and at least one size (--sizes).")
        return self

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def known(self) -> list[HiddenRule]:
        """The rules that the documents are about."""
        return [rule for rule in HIDDEN_RULES if not self.rules or rule.name in self.rules]

    @property
    def asked(self) -> list[HiddenRule]:
        """The rules of the documents, and their compositions."""
        names = {rule.name for rule in self.known}
        return [
            *self.known,
            *(rule for rule in UNSEEN_RULES if names.issuperset(rule.name.split("+"))),
        ]


def run_in_context_study(plan: InContextStudyConfig) -> dict[str, Any]:
    """Completes what is missing, the largest size first, and reports the results."""
    plan.check()
    asked = _ready(plan)
    for size in sorted(plan.sizes, key=list(SIZES).index, reverse=True):
        if not (plan.folder / size / "asked.json").is_file():
            _pretrained(plan, size)
            _ask(plan, size, asked)
    with folder_lock(plan.folder, wait=True):
        return _drawn(plan)


# ------------------------------------------------------------------ text


def _ready(plan: InContextStudyConfig) -> RuleItems:
    """Creates the study's documents and vocabulary once; returns the items of the questions."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for_training, for_questions = halves(plan.data)
    if (count := len(for_questions.words)) <= max(plan.shots):
        raise MalmoiError(
            f"{', '.join(plan.data)} leaves {count} words for questions, too few to show "
            f"{max(plan.shots)} examples: give more text, or use fewer examples with --set "
            "shots=0,1,2."
        )
    with folder_lock(plan.folder, wait=True):
        RunFolder(plan.folder, "plan.json", "study").begin(plan.to_dict(), free=RESUMABLE_SETTINGS)
        path = plan.folder / "documents.jsonl"
        if not path.is_file():
            logger.info(f"Writing {plan.documents:,} documents of {len(plan.known)} hidden rules…")
            names = [rule.name for rule in plan.known]
            write_rule_documents(
                path,
                for_training,
                plan.documents,
                seed=plan.seed,
                rules=names,
                processes=plan.processes,
            )
        if not (plan.folder / "tokenizer.json").is_file():
            texts = (document.text for document in read_documents([*plan.data, path]))
            train_tokenizer(texts, kind="char", vocab=256).save(plan.folder)
    return for_questions


# ------------------------------------------------------------------ models


def _pretrained(plan: InContextStudyConfig, size: str) -> None:
    """Pre-trains the model of a size to the end of its budget."""
    tokens = plan.tokens or _seen(plan)
    budget: dict[str, Any] = {"tokens": tokens} if tokens else {"minutes": plan.minutes}
    sources = [*plan.data, str(plan.folder / "documents.jsonl")]
    chosen = size_recipe(size, texts=len(plan.data), seed=plan.seed)
    out = plan.folder / size
    run_pretraining(
        chosen,
        data=sources,
        out=out,
        tokenizer=plan.folder,
        device=plan.device,
        batch=plan.batch,
        **budget,
    )


def _seen(plan: InContextStudyConfig) -> int:
    """Tokens the largest size trained on, if it did; GPT-3's sizes saw equally many (table 2.1)."""
    largest = next(
        (size for size in reversed(SIZES) if (plan.folder / size / "asked.json").is_file()), None
    )
    return (
        int(read_metrics(plan.folder / largest / "metrics.jsonl")[-1]["tokens"]) if largest else 0
    )


def _ask(plan: InContextStudyConfig, size: str, items: RuleItems) -> None:
    """Asks a model every question and saves how many it answered correctly."""
    model = load(plan.folder / size, device=plan.device)
    cells: list[Cell] = []
    for done, rule in enumerate(plan.asked, 1):
        cells += _cells(plan, model, rule, items)
        report_progress(Progress(f"study {size}", done, len(plan.asked), "rules"))
    rows = read_metrics(plan.folder / size / "metrics.jsonl")
    judged = [row["valid_loss"] for row in rows if "valid_loss" in row]
    facts = {
        "parameters": count_parameters(model.network),
        "tokens": rows[-1]["tokens"],
        "seconds": rows[-1]["seconds"],
    }
    facts["valid_loss"] = judged[-1] if judged else None
    write_text(
        plan.folder / size / "asked.json",
        json.dumps({**facts, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n",
    )


def _cells(
    plan: InContextStudyConfig, model: Model, rule: HiddenRule, items: RuleItems
) -> Iterator[Cell]:
    asking = InContextConfig(shots=",".join(map(str, plan.shots)), seed=plan.seed, limit=plan.limit)
    for number in range(plan.draws):
        for instructed in (False, True):
            task = rule_task(rule, items, number, instructed=instructed)
            for shots, result in zip(
                plan.shots, evaluate_in_context(model, task, None, asking), strict=True
            ):
                match = result.verdict.measures["match"]
                count = len(result.questions)
                yield Cell(rule.name, instructed, shots, round(match.mean * count), count)


# ------------------------------------------------------------------ results


def _drawn(plan: InContextStudyConfig) -> dict[str, Any]:
    """Writes study.json, curve.svg and report.md for the sizes that are done."""
    found: dict[str, SizeResults] = {}
    for size in SIZES:
        path = plan.folder / size / "asked.json"
        if path.is_file():
            kept = json.loads(path.read_text("utf-8"))
            found[size] = SizeResults(kept, [Cell(**cell) for cell in kept.pop("cells")])
    facts = {
        "study": "in-context",
        "plan": plan.to_dict(),
        "sizes": {name: size_summary(one) for name, one in found.items()},
    }
    write_text(plan.folder / "study.json", json.dumps(facts, indent=1) + "\n")
    write_text(plan.folder / "curve.svg", accuracy_chart(found))
    write_text(plan.folder / "report.md", report(found))
    return facts
