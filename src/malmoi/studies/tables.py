"""The cells of BERT's, GPT-1's and GPT-2's tables, and of GPT-3's contaminated test set."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.evaluation.examples import load_examples
from malmoi.messages import plural
from malmoi.studies.data import StudyTask
from malmoi.studies.measures import (
    clean_and_dirty,
    held_out_bits,
    millions,
    mlm_perplexity,
    snapshot_scores,
    text_perplexity,
    zero_shot,
)
from malmoi.studies.report import StudyResults, curve_figure, lower_is_better
from malmoi.studies.study import Cell, StudyPlan, Words
from malmoi.system.files import write_text
from malmoi.training.recipe import Recipe

Cells = Iterator[Cell]
MIN_DEPTH = 4  # so that a quarter of the layers is one, and a curve over layers has points
# of the chosen tokens: % of [MASK], % of the token itself, % of random ones (BERT table 8)
MASKS = ((80, 10, 10), (100, 0, 0), (80, 0, 20), (80, 20, 0), (0, 20, 80), (0, 0, 100))
FEATURES = {  # BERT table 7
    "embeddings": "embeddings",
    "second-to-last layer": "second-to-last",
    "last layer": "last",
    "weighted sum of the last four": "weighted-last4",
    "concatenation of the last four": "last4",
    "weighted sum of all layers": "weighted-all",
}
SHAPES = {  # depth, width and heads as shares of the base's (BERT table 6)
    "¼ of the layers": (1 / 4, 1, 1),
    "½ of the layers, ¼ of the heads": (1 / 2, 1, 1 / 4),
    "½ of the layers": (1 / 2, 1, 1),
    "base": (1, 1, 1),
    "⁴⁄₃ wider": (1, 4 / 3, 4 / 3),
    "⁴⁄₃ wider, twice the layers": (2, 4 / 3, 4 / 3),
}
WIDTHS = {"S": 1 / 3, "M": 2 / 3, "L": 1, "XL": 5 / 3}  # shares of the scale's (GPT-2 table 3)
# (column, task, pattern of its file)
TEXTS = (
    ("WikiText perplexity", "wikitext", "*wikitext*test*"),
    ("PTB perplexity", "ptb", "*ptb*test*"),
)
SHARES = (1 / 16, 1)  # of the training rows: the auxiliary LM helps only large sets (GPT-1 table 5)
MOST_UPDATES = 2**17  # of GPT-1's 100 epochs, that are evaluated
COPIES = 8  # of a leaked item, as web pages are often duplicated


# ------------------------------------------------------------------ BERT


def bert_masking_cells(plan: StudyPlan, seed: int) -> Cells:
    for mask, same, other in MASKS:
        row = f"{mask}% [MASK], {same}% same, {other}% random"
        shares = {"data.mask_token": mask / 100, "data.mask_random": other / 100}
        recipe = plan.scale.recipe("bert", seed, **shares)
        yield from plan.tuned(row, recipe, plan.tasks("pair", "tokens"))
        features = plan.scale.feature_tuning(seed)
        yield from plan.tuned(row, recipe, plan.tasks("tokens"), "{}, features", **features)


def bert_features_cells(plan: StudyPlan, seed: int) -> Cells:
    recipe = plan.scale.recipe("bert", seed)
    yield from plan.tuned("fine-tuned", recipe, plan.tasks("tokens"))
    for row, layers in FEATURES.items():
        options = plan.scale.feature_tuning(seed, layers)
        yield from plan.tuned(row, recipe, plan.tasks("tokens"), **options)


def bert_objectives_cells(plan: StudyPlan, seed: int) -> Cells:
    bert, ltr = (plan.scale.recipe(kind, seed) for kind in ("bert", "ltr"))
    left_to_right = "left to right, no NSP"
    rows = {"BERT": bert, "no NSP": bert.override({"objective": "mlm"}), left_to_right: ltr}
    for row, recipe in rows.items():
        tasks = plan.tasks("sentence", "pair", "tokens", "span")
        yield from plan.tuned(row, recipe, tasks, lm=0.0)
    row = f"{left_to_right}, + BiLSTM"
    yield from plan.tuned(row, ltr, plan.tasks("tokens"), lm=0.0, **plan.scale.bilstm)


def bert_size_cells(plan: StudyPlan, seed: int) -> Cells:
    base = plan.scale.recipe("bert", seed)
    depth = max(MIN_DEPTH, base.model.depth)
    for row, (deep, wide, many) in SHAPES.items():
        shape = {
            "model.depth": round(deep * depth),
            "model.width": round(wide * base.model.width),
            "model.heads": max(1, round(many * base.model.heads)),
            "model.hidden": 0,  # four times the width again
        }
        recipe = base.override(shape)
        yield plan.cell(row, recipe, mlm_perplexity)
        yield from plan.tuned(row, recipe, plan.tasks("pair", "sentence"))


# ------------------------------------------------------------------ GPT-1


def gpt1_transfer_cells(plan: StudyPlan, seed: int) -> Cells:
    base = plan.scale.recipe("gpt", seed)
    depth = max(MIN_DEPTH, base.model.depth)
    recipe = base.override({"model.depth": depth})
    rows: dict[str, dict[str, Any]] = {"nothing transferred": {"from_scratch": True}}
    for layers in range(depth + 1):
        rows[f"embeddings + {plural(layers, 'layer')}"] = {"layers_transferred": layers}
    for task in plan.tasks("sentence", "pair"):
        for row, options in rows.items():
            yield from plan.tuned(row, recipe, [task], **options)


def _layers(row: str) -> float | None:
    return float(row.split()[2]) if row.startswith("embeddings") else None


def gpt1_ablation_cells(plan: StudyPlan, seed: int) -> Cells:
    gpt, lstm = (plan.scale.recipe(kind, seed) for kind in ("gpt", "lstm"))
    rows: Mapping[str, tuple[Recipe, dict[str, Any]]] = {
        "Transformer, auxiliary LM": (gpt, {}),
        "no auxiliary LM": (gpt, {"lm": 0.0}),
        "no pre-training": (gpt, {"from_scratch": True}),
        "LSTM, auxiliary LM": (lstm, {}),
    }
    for task in plan.tasks("sentence", "pair"):
        sizes = [round(share * task.train_rows) for share in SHARES] if task.train_rows else [0]
        for size in sizes:
            some = replace(task, train_rows=size)
            column = f"{{}}, {size:,} rows" if size else ""
            for row, (recipe, options) in rows.items():
                yield from plan.tuned(row, recipe, [some], column, **options)


def gpt1_zeroshot_cells(plan: StudyPlan, seed: int) -> Cells:
    roles = ("acceptability", "minimal pairs", "last word")
    tasks = [_by_likelihood(t) for t in plan.data.of(*roles, dev_rows=plan.scale.dev_rows)]
    recipe = plan.scale.recipe("gpt", seed, **{"train.snapshots": True})
    updates = recipe.train.steps or MOST_UPDATES
    steps = {plural(4**power, "update"): 4**power for power in range(12) if 4**power < updates}
    end = plural(recipe.train.steps, "update") if recipe.train.steps else "the end"
    for row, step in (steps | {end: 0}).items():
        options = dict(step=step, tasks=tasks, text=plan.data.held_out)
        yield plan.cell(row, recipe, snapshot_scores, **options)


def _by_likelihood(task: StudyTask) -> StudyTask:
    """CoLA by the likelihood of a sentence alone, as in GPT-1 §5."""
    return replace(task, task="cola-likelihood") if task.task == "cola" else task


def _zero_shot_figure(results: StudyResults) -> str:
    """Plots scores in percent only: bits per byte would need another axis."""
    shares = [
        {**record, "values": {c: v for c, v in record["values"].items() if not lower_is_better(c)}}
        for record in results.records
    ]
    about = dict(across="updates of pre-training", up="score without tuning, %")
    return curve_figure(StudyResults(shares), x=_updates, even=True, **about)


def _updates(row: str) -> float | None:
    return None if row == "the end" else float(row.split()[0].replace(",", ""))


# ------------------------------------------------------------------ GPT-2 and GPT-3


def sized_gpt(plan: StudyPlan, size: str, seed: int) -> Recipe:
    """Recipe of one of the four sizes: narrower or wider, with heads of the same width."""
    base = plan.scale.recipe("gpt", seed)
    heads = max(1, round(WIDTHS[size] * base.model.heads))
    width = heads * (base.model.width // base.model.heads)
    return base.override({"model.width": width, "model.heads": heads, "model.hidden": 0})


def gpt2_zeroshot_cells(plan: StudyPlan, seed: int) -> Cells:
    texts = [(column, task, plan.data.file(pattern)) for column, task, pattern in TEXTS]
    for size in WIDTHS:
        recipe = sized_gpt(plan, size, seed)
        yield plan.cell(size, recipe, millions)
        yield plan.cell(size, recipe, held_out_bits, text=plan.data.held_out)
        for word in plan.tasks("last word"):
            yield plan.cell(size, recipe, zero_shot, task=word)
        for column, task, path in texts:
            if path is not None:
                options = dict(task=task, path=path, column=column)
                yield plan.cell(size, recipe, text_perplexity, **options)


def gpt3_contamination_cells(plan: StudyPlan, seed: int) -> Cells:
    recipe = plan.scale.recipe("gpt", seed)
    for task in plan.tasks("minimal pairs"):
        leaked = write_leaked(task, plan.data.held_out.parent / "leaked.jsonl")
        cell = plan.cell("clean text", recipe, clean_and_dirty, task=task, leaked=leaked)
        yield cell
        more = (*plan.data.text, str(leaked))
        yield replace(cell, row="half of the items in the text", text=more)


def write_leaked(task: StudyTask, path: Path) -> Path:
    """Writes every second test item several times as documents."""
    texts = [example.text for example in load_examples(task.load(), task.dev).rows[::2]]
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    write_text(path, "".join(lines) * COPIES)
    return path


def _contamination_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    row = "half of the items in the text"
    clean, every = (results.at(row, column) for column in ("clean", "all"))
    if clean is None or every is None:
        return []
    return [note.format(gap=clean.mean - every.mean) for note in notes]


SHOWN = {
    ("gpt1-transfer", "figure"): partial(
        curve_figure, across="layers transferred", x=_layers, up="score, %"
    ),
    ("gpt1-zeroshot", "figure"): _zero_shot_figure,
    ("gpt3-contamination", "notes"): _contamination_notes,
}
