"""Accuracy by the number of examples in context, for models of several sizes (GPT-3 figure 1.2).

Small GPTs are pre-trained on text and on documents of hidden rules; then they are asked rules on words that no
document had, after 0, 1, 2 … examples. Every part leaves a file behind and is not done twice, so that several
processes can do one size each in the same folder.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malmoi.config import Config
from malmoi.corpus import read
from malmoi.disk import alone, write_text
from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.incontext import Asking, evaluate
from malmoi.infer import Model, load
from malmoi.model import parameters
from malmoi.run_folder import RunFolder
from malmoi.study.curves import Cell, Found, picture, summary
from malmoi.study.documents import Items, halves
from malmoi.study.questions import questions
from malmoi.study.report import report
from malmoi.study.rules import RULES, UNSEEN, Rule
from malmoi.study.sequences import write_documents
from malmoi.study.sizes import SIZES, recipe
from malmoi.tokenizer import train as learn
from malmoi.train import pretrain
from malmoi.train.log import Voice, read_rows

FREE = {"out", "sizes", "minutes", "tokens", "device", "processes"}  # settings that may change between two calls


@dataclass(frozen=True, kw_only=True)
class Plan(Config):
    """What is studied. `minutes` is for the largest size; the others then see as many tokens as it did."""

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
    draws: int = 3  # parameters of each rule that are asked
    limit: int = 32  # questions of each parameter
    processes: int = 0  # that make documents; 0: one a core

    def check(self) -> "Plan":
        """The plan itself, if all its names are known."""
        for given, known, kind in ((self.sizes, list(SIZES), "size"), (self.rules, [r.name for r in RULES], "rule")):
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
    def known(self) -> list[Rule]:
        """The rules that documents are about."""
        return [rule for rule in RULES if not self.rules or rule.name in self.rules]

    @property
    def asked(self) -> list[Rule]:
        """Those, and what is composed of them."""
        names = {rule.name for rule in self.known}
        return [*self.known, *(rule for rule in UNSEEN if names.issuperset(rule.name.split("+")))]


def study(plan: Plan) -> dict[str, Any]:
    """Does what is not done yet, the largest size first, and draws what there is."""
    plan.check()
    asked = _ready(plan)
    for size in sorted(plan.sizes, key=list(SIZES).index, reverse=True):
        if not (plan.folder / size / "asked.json").is_file():
            _pretrained(plan, size)
            _ask(plan, size, asked)
    with alone(plan.folder, wait=True):
        return _drawn(plan)


# ------------------------------------------------------------------ text


def _ready(plan: Plan) -> Items:
    """The documents and the vocabulary in the study's folder, made once; the items of the questions."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for_training, for_questions = halves(plan.data)
    if (count := len(for_questions.words)) <= max(plan.shots):
        raise MalmoiError(
            f"{', '.join(plan.data)} leaves {count} words for questions, too few to show {max(plan.shots)} examples: "
            "name more text, or fewer examples with --set shots=0,1,2."
        )
    with alone(plan.folder, wait=True):
        RunFolder(plan.folder, "plan.json", "study").begin(plan.to_dict(), free=FREE)
        path = plan.folder / "documents.jsonl"
        if not path.is_file():
            Voice().say(f"Writing {plan.documents:,} documents of {len(plan.known)} hidden rules…")
            names = [rule.name for rule in plan.known]
            write_documents(path, for_training, plan.documents, seed=plan.seed, rules=names, processes=plan.processes)
        if not (plan.folder / "tokenizer.json").is_file():
            texts = (document.text for document in read([*plan.data, path]))
            learn(texts, kind="char", vocab=256).save(plan.folder)
    return for_questions


# ------------------------------------------------------------------ models


def _pretrained(plan: Plan, size: str) -> None:
    """The size's model in its folder, trained to the end of its budget."""
    tokens = plan.tokens or _seen(plan)
    budget: dict[str, Any] = {"tokens": tokens} if tokens else {"minutes": plan.minutes}
    sources = [*plan.data, str(plan.folder / "documents.jsonl")]
    chosen = recipe(size, texts=len(plan.data), seed=plan.seed)
    out = plan.folder / size
    pretrain(chosen, data=sources, out=out, tokenizer=plan.folder, device=plan.device, batch=plan.batch, **budget)


def _seen(plan: Plan) -> int:
    """Tokens that the largest size has seen, where it is trained; GPT-3's sizes all saw as many (table 2.1)."""
    largest = next((size for size in reversed(SIZES) if (plan.folder / size / "asked.json").is_file()), None)
    return int(read_rows(plan.folder / largest / "metrics.jsonl")[-1]["tokens"]) if largest else 0


def _ask(plan: Plan, size: str, items: Items) -> None:
    """Puts every question to a model, and keeps how many it got right."""
    model, voice = load(plan.folder / size, device=plan.device), Voice()
    cells: list[Cell] = []
    for rule in plan.asked:
        voice.progress(f"{size}: asking {rule.name}")
        cells += _cells(plan, model, rule, items)
    voice.close()
    rows = read_rows(plan.folder / size / "metrics.jsonl")
    judged = [row["valid_loss"] for row in rows if "valid_loss" in row]
    facts = {"parameters": parameters(model.network), "tokens": rows[-1]["tokens"], "seconds": rows[-1]["seconds"]}
    facts["valid_loss"] = judged[-1] if judged else None
    write_text(
        plan.folder / size / "asked.json",
        json.dumps({**facts, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n",
    )


def _cells(plan: Plan, model: Model, rule: Rule, items: Items) -> Iterator[Cell]:
    asking = Asking(shots=",".join(map(str, plan.shots)), seed=plan.seed, limit=plan.limit)
    for number in range(plan.draws):
        for instructed in (False, True):
            task = questions(rule, items, number, instructed=instructed)
            for shots, result in zip(plan.shots, evaluate(model, task, None, asking), strict=True):
                match, count = result.verdict.measures["match"], len(result.questions)
                yield Cell(rule.name, instructed, shots, round(match.mean * count), count)


# ------------------------------------------------------------------ results


def _drawn(plan: Plan) -> dict[str, Any]:
    """study.json, curve.svg and report.md of every size that is done."""
    found: dict[str, Found] = {}
    for size in SIZES:
        path = plan.folder / size / "asked.json"
        if path.is_file():
            kept = json.loads(path.read_text("utf-8"))
            found[size] = Found(kept, [Cell(**cell) for cell in kept.pop("cells")])
    facts = {
        "study": "in-context",
        "plan": plan.to_dict(),
        "sizes": {name: summary(one) for name, one in found.items()},
    }
    write_text(plan.folder / "study.json", json.dumps(facts, indent=1) + "\n")
    write_text(plan.folder / "curve.svg", picture(found))
    write_text(plan.folder / "report.md", report(found))
    return facts
