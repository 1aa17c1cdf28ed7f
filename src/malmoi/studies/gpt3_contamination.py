"""GPT-3 §4: scores on clean and dirty items when a test set leaked into the training text."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from malmoi.corpus.contamination import find_overlaps
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.tasks import metric_names
from malmoi.inference import load
from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.system.files import write_text

CLEAN = "clean text"
LEAKED = "half of the items in the text"
COPIES = 8  # of a leaked item, as web pages are often duplicated


def clean_and_dirty(judged: JudgedModel, task: StudyTask, leaked: Path) -> dict[str, float]:
    """The task's first metric on all, clean and dirty items, as in `evaluate --contamination`.

    For both models the dirty items are those that the second one could have seen.
    """
    found = task.load()
    model = load(judged.folder, device=judged.device)

    def overlaps(items: object) -> object:
        return find_overlaps(items, [str(leaked)])  # type: ignore[arg-type]

    facts = evaluate_model(model, found, task.dev, contamination=overlaps)
    scores = facts["contamination"]["scores"][metric_names(found)[0]]
    return {part: 100 * scores[part] for part in ("all", "clean", "dirty") if part in scores}


def write_leaked(task: StudyTask, path: Path) -> Path:
    """Writes every second test item several times as documents."""
    texts = [example.text for example in load_examples(task.load(), task.dev).rows[::2]]
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    write_text(path, "".join(lines) * COPIES)
    return path


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for task in plan.tasks("minimal pairs"):
        leaked = write_leaked(task, plan.data.held_out.parent / "leaked.jsonl")
        judge = partial(clean_and_dirty, task=task, leaked=leaked)
        texts = {CLEAN: plan.data.text, LEAKED: (*plan.data.text, str(leaked))}
        for seed in plan.seeds:
            recipe = plan.scale.recipe("gpt", seed)
            for row, text in texts.items():
                yield Cell(row, seed, judge, recipe, text)


def _claims(results: StudyResults) -> list[Claim]:
    return [
        Claim(
            Words("Items seen in training score higher", "학습에서 읽은 문항은 점수가 높다"),
            LEAKED,
            CLEAN,
            "dirty",
        )
    ]


def _notes(results: StudyResults) -> list[Words]:
    clean, every = (results.at(LEAKED, column) for column in ("clean", "all"))
    if clean is None or every is None:
        return []
    gap = clean.mean - every.mean
    return [
        Words(
            f"With the items in the text, the score on clean items differs from the score on all "
            f"by {gap:+.1f} points: what §4 reports as the effect of contamination. Most of the "
            "paper's benchmarks show a difference near zero.",
            f"문항이 텍스트에 있을 때 깨끗한 문항의 점수는 전체 점수와 {gap:+.1f}점 다르다. 논문 "
            "4절이 오염의 영향으로 보고하는 값이며, 논문의 과제 대부분은 0에 가깝다.",
        )
    ]


STUDY = Study(
    "gpt3-contamination",
    Words(
        "the score on clean and dirty items of a test set", "깨끗한 문항과 오염된 문항의 점수 차이"
    ),
    "Brown et al. 2020, §4 and figure 4.2",
    _cells,
    _claims,
    caption=Words(
        "Accuracy on all items, on those without and with n-grams of the leaked text; bars are one "
        "standard deviation over seeds.",
        "전체 문항, 유출된 텍스트와 n-그램이 겹치지 않는 문항과 겹치는 문항의 정확도. 막대는 "
        "시드에 따른 표준편차 하나.",
    ),
    notes=_notes,
)
