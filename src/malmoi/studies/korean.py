"""Korean tokenizers compared at equal training time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

from malmoi.errors import require_that
from malmoi.evaluation.tasks import named_task
from malmoi.studies.data import TASKS, StudyTask, public_tasks
from malmoi.studies.report import StudyResults
from malmoi.studies.study import BITS_CHARACTERS, Cell, JudgedModel, StudyPlan, Words, zero_shot
from malmoi.system.files import write_text

BYTES = "byte-level BPE"
MORPHEMES = "morphemes (byte-level BPE)"
VOCABULARIES: dict[str, dict[str, str]] = {
    "WordPiece": {"kind": "wordpiece"},
    "BPE": {"kind": "bpe"},
    BYTES: {"kind": "byte-bpe"},
    "characters": {"kind": "char"},
    MORPHEMES: {"kind": "byte-bpe", "morphemes": "kiwi"},
}
HELD_OUT_EACH = 20  # reviews
UNKNOWN = "unknown, %"


def korean_tasks(plan: StudyPlan) -> list[StudyTask]:
    """The data sets that the folders have; each once."""
    found: dict[str, StudyTask] = {}
    for task in public_tasks(plan.data.folders, TASKS["korean"]):
        found.setdefault(task.name, plan.cut(task))
    return list(found.values())


def write_reviews(plan: StudyPlan, task: StudyTask) -> tuple[Path, Path]:
    """Writes NSMC's training reviews without labels, one per line, and a held-out part."""
    assert task.train is not None
    rows = (row.text("document").strip() for row in named_task(task.task).rows(task.train))
    texts = [" ".join(text.split()) for text in rows if text]
    limit = plan.scale.characters or sum(map(len, texts))
    begins = accumulate(map(len, texts), initial=0)
    kept = [text for text, begin in zip(texts, begins, strict=False) if begin < limit]
    train, dev = (plan.data.held_out.parent / f"reviews.{part}.txt" for part in ("train", "dev"))
    write_text(train, "".join(f"{t}\n" for i, t in enumerate(kept) if i % HELD_OUT_EACH))
    write_text(dev, "".join(f"{text}\n" for text in kept[::HELD_OUT_EACH]))
    return train, dev


def vocabulary_scores(judged: JudgedModel, text: Path) -> dict[str, float]:
    """Bits per byte, comparable only without unknown tokens, which cost few bits and hide text."""
    model = judged.load()
    # each line was a document in training, so that no model has seen a line break
    held_out = " ".join(text.read_text("utf-8").split())[:BITS_CHARACTERS]
    tokenizer = model.checkpoint.required_tokenizer
    ids = tokenizer.ids([held_out])[0]
    # a byte-level BPE uses its end-of-text token as the unknown token, which text never produces
    return {
        "bits per byte": model.bits_per_byte(held_out),
        "tokens per character": len(ids) / len(held_out),
        UNKNOWN: 100 * sum(id == tokenizer.specials.unk for id in ids) / len(ids),
    }


def korean_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    tasks = korean_tasks(plan)
    require_that(
        tasks and tasks[0].name == "NSMC",
        "The study korean needs --data, a folder with ratings_train.txt and ratings_test.txt.",
    )
    text, held_out = write_reviews(plan, tasks[0])
    reviews = StudyPlan(plan.scale, replace(plan.data, text=(str(text),)))
    minutes = {"train.steps": 0, "train.minutes": plan.scale.minutes}
    same = {"data.documents": "line"} | ({} if plan.scale.faithful else minutes)
    for row, words in VOCABULARIES.items():
        if row == MORPHEMES and not find_spec("kiwipiepy"):
            continue
        named = {f"tokenizer.{name}": value for name, value in words.items()}
        recipe = plan.scale.recipe("gpt", seed, **same, **named)
        yield reviews.cell(row, recipe, vocabulary_scores, text=held_out)
        for task in tasks:
            if task.train is not None:
                yield from reviews.tuned(row, recipe, [task])
            elif words["kind"] == "byte-bpe":
                # a likelihood needs a token to start from, which only these have
                yield reviews.cell(row, recipe, zero_shot, task=task)


def korean_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    hidden, left_out = notes
    unknown = {row: results.at(row, UNKNOWN) for row in results.rows}
    lossy = [row for row, share in unknown.items() if share is not None and share.mean > 0.1]
    shown = [hidden.format(rows=", ".join(lossy))] if lossy else []
    return shown if MORPHEMES in results.rows else [*shown, left_out]
