"""The cells of BERT's, GPT-1's and GPT-2's tables, and of GPT-3's contaminated test set."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any

import torch

from malmoi.evaluation.examples import load_examples
from malmoi.messages import plural
from malmoi.model import Network
from malmoi.planning.flops import flops, keys_seen
from malmoi.report.chart import Line, chart, standalone_svg
from malmoi.studies.data import write_rows
from malmoi.studies.report import StudyResults, best_rows, curve_figure, lower_is_better, number
from malmoi.studies.study import (
    BITS_CHARACTERS,
    Cell,
    JudgedModel,
    StudyPlan,
    Words,
    clean_and_dirty,
    held_out_bits,
    millions,
    minimal_pairs,
    mlm_perplexity,
    picked_summaries,
    snapshot_scores,
    speed,
    text_perplexity,
    zero_shot,
)
from malmoi.training.recipe import Recipe, read_recipe

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
COPIES = 8  # of a leaked item (every second one), as web pages are often duplicated


# ------------------------------------------------------------------ BERT


def bert_masking_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    for mask, same, other in MASKS:
        row = f"{mask}% [MASK], {same}% same, {other}% random"
        shares = {"data.mask_token": mask / 100, "data.mask_random": other / 100}
        recipe = plan.scale.recipe("bert", seed, **shares)
        yield from plan.tuned(row, recipe, plan.tasks("pair", "tokens"))
        features = plan.scale.feature_tuning(seed)
        yield from plan.tuned(row, recipe, plan.tasks("tokens"), "{}, features", **features)


def bert_features_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    recipe = plan.scale.recipe("bert", seed)
    yield from plan.tuned("fine-tuned", recipe, plan.tasks("tokens"))
    for row, layers in FEATURES.items():
        options = plan.scale.feature_tuning(seed, layers)
        yield from plan.tuned(row, recipe, plan.tasks("tokens"), **options)


def bert_objectives_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    bert, ltr = (plan.scale.recipe(kind, seed) for kind in ("bert", "ltr"))
    left_to_right = "left to right, no NSP"
    rows = {"BERT": bert, "no NSP": bert.override({"objective": "mlm"}), left_to_right: ltr}
    for row, recipe in rows.items():
        yield from plan.tuned(row, recipe, plan.tasks("sentence", "pair", "tokens", "span"), lm=0.0)
    row = f"{left_to_right}, + BiLSTM"
    yield from plan.tuned(row, ltr, plan.tasks("tokens"), lm=0.0, **plan.scale.bilstm)


def bert_size_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    base = plan.scale.recipe("bert", seed)
    depth = max(MIN_DEPTH, base.model.depth)
    for row, (deep, wide, many) in SHAPES.items():
        recipe = base.override(
            {
                "model.depth": round(deep * depth),
                "model.width": round(wide * base.model.width),
                "model.heads": max(1, round(many * base.model.heads)),
                "model.hidden": 0,  # four times the width again
            }
        )
        yield plan.cell(row, recipe, mlm_perplexity)
        yield from plan.tuned(row, recipe, plan.tasks("pair", "sentence"))


# ------------------------------------------------------------------ GPT-1


def gpt1_transfer_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    base = plan.scale.recipe("gpt", seed)
    depth = max(MIN_DEPTH, base.model.depth)
    recipe = base.override({"model.depth": depth})
    rows: dict[str, dict[str, Any]] = {
        "nothing transferred": {"from_scratch": True},
        **{
            f"embeddings + {plural(n, 'layer')}": {"layers_transferred": n}
            for n in range(depth + 1)
        },
    }
    for task in plan.tasks("sentence", "pair"):
        for row, options in rows.items():
            yield from plan.tuned(row, recipe, [task], **options)


gpt1_transfer_figure = partial(
    curve_figure,
    across="layers transferred",
    x=lambda row: float(row.split()[2]) if row.startswith("embeddings") else None,
    up="score, %",
)


def gpt1_ablation_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    gpt, lstm = (plan.scale.recipe(kind, seed) for kind in ("gpt", "lstm"))
    rows: tuple[tuple[str, Recipe, dict[str, Any]], ...] = (
        ("Transformer, auxiliary LM", gpt, {}),
        ("no auxiliary LM", gpt, {"lm": 0.0}),
        ("no pre-training", gpt, {"from_scratch": True}),
        ("LSTM, auxiliary LM", lstm, {}),
    )
    for task in plan.tasks("sentence", "pair"):
        sizes = [round(share * task.train_rows) for share in SHARES] if task.train_rows else [0]
        for size in sizes:
            some = replace(task, train_rows=size)
            column = f"{{}}, {size:,} rows" if size else ""
            for row, recipe, options in rows:
                yield from plan.tuned(row, recipe, [some], column, **options)


def gpt1_zeroshot_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    roles = ("acceptability", "minimal pairs", "last word")
    tasks = [
        # CoLA by the likelihood of a sentence alone, as in GPT-1 §5
        replace(task, task="cola-likelihood") if task.task == "cola" else task
        for task in plan.data.of(*roles, dev_rows=plan.scale.dev_rows)
    ]
    recipe = plan.scale.recipe("gpt", seed, **{"train.snapshots": True})
    updates = recipe.train.steps or MOST_UPDATES
    steps = {plural(4**power, "update"): 4**power for power in range(12) if 4**power < updates}
    end = plural(recipe.train.steps, "update") if recipe.train.steps else "the end"
    for row, step in (steps | {end: 0}).items():
        options = dict(step=step, tasks=tasks, text=plan.data.held_out)
        yield plan.cell(row, recipe, snapshot_scores, **options)


# scores in percent only: bits per byte would need another axis
gpt1_zeroshot_figure = partial(
    curve_figure,
    across="updates of pre-training",
    x=lambda row: None if row == "the end" else float(row.split()[0].replace(",", "")),
    up="score without tuning, %",
    even=True,
    only=True,
)


# ------------------------------------------------------------------ GPT-2 and GPT-3


def sized_gpt(plan: StudyPlan, size: str, seed: int) -> Recipe:
    """Recipe of one of the four sizes: narrower or wider, with heads of the same width."""
    base = plan.scale.recipe("gpt", seed)
    heads = max(1, round(WIDTHS[size] * base.model.heads))
    width = heads * (base.model.width // base.model.heads)
    return base.override({"model.width": width, "model.heads": heads, "model.hidden": 0})


def gpt2_zeroshot_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    texts = [(column, task, plan.data.file(pattern)) for column, task, pattern in TEXTS]
    for size in WIDTHS:
        recipe = sized_gpt(plan, size, seed)
        yield plan.cell(size, recipe, millions)
        yield plan.cell(size, recipe, held_out_bits, text=plan.data.held_out)
        yield from plan.each(size, recipe, zero_shot, plan.tasks("last word"))
        for column, task, path in texts:
            if path is not None:
                options = dict(task=task, path=path, column=column)
                yield plan.cell(size, recipe, text_perplexity, **options)


def gpt3_contamination_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    recipe = plan.scale.recipe("gpt", seed)
    leaked = plan.data.held_out.parent / "leaked.jsonl"
    for task in plan.tasks("minimal pairs"):
        items = load_examples(task.load(), task.dev).rows[::2]
        write_rows(leaked, [{"text": item.text} for item in items] * COPIES)
        cell = plan.cell("clean text", recipe, clean_and_dirty, task=task, leaked=leaked)
        yield cell
        more = (*plan.data.text, str(leaked))
        yield replace(cell, row="half of the items in the text", text=more)


def gpt3_contamination_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    row = "half of the items in the text"
    clean, every = (results.at(row, column) for column in ("clean", "all"))
    if clean is None or every is None:
        return []
    return [note.format(gap=clean.mean - every.mean) for note in notes]


# ------------------------------------------------------------------ GPT-3's power law

# steps as a share of the scale's: larger models get more text, as on the frontier of the figure
STEPS = {"S": 1 / 8, "M": 1 / 4, "L": 1 / 2, "XL": 1}
COMPUTE = "GFLOPs"
LOSS = "held-out loss"
PF_DAY = 1e15 * 86_400 / 1e9  # in GFLOPs
RESAMPLES = 1000
LONGER = 4  # times the scale's context with fewer rows: sparsity saves nothing on short texts
STRIDE = 8  # a context has this many strides
SUMMARY = 4  # a stride has this many summary columns (Child et al. 2019: c of 8 to 32 for l of 128)


@dataclass(frozen=True)
class PowerLaw:
    """L = (C / C₀)^−α: α, its bootstrap standard error, and C₀."""

    exponent: float
    error: float
    scale: float

    def __str__(self) -> str:
        return f"α = {self.exponent:.3f} ± {self.error:.3f}"

    def loss(self, compute: float) -> float:
        return float((compute / self.scale) ** -self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Least squares of log L over log C; the error is the spread over resampled points."""
    logs = [(math.log(c), math.log(loss)) for c, loss in points]
    slope, offset = linear_regression(*zip(*logs, strict=True))
    rng = random.Random(0)
    draws = [rng.choices(logs, k=len(logs)) for _ in range(RESAMPLES)]
    slopes = [
        linear_regression(*zip(*some, strict=True)).slope
        for some in draws
        if len({c for c, _ in some}) > 1  # a slope needs two values of compute
    ]
    return PowerLaw(-slope, stdev(slopes), math.exp(-offset / slope))


def loss_by_compute(judged: JudgedModel, text: Path) -> dict[str, float]:
    """The loss per token of held-out text, and the FLOPs of the training."""
    model = judged.load()
    each = flops(model.network, read_recipe(judged.folder / "recipe.json")).exact
    loss = math.log(model.perplexity(text.read_text("utf-8")[:BITS_CHARACTERS]))
    return {LOSS: loss, COMPUTE: each * judged.facts()["tokens"] / 1e9}


def gpt3_scaling_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    for size, share in STEPS.items():
        recipe = sized_gpt(plan, size, seed)
        recipe = recipe.override({"train.steps": max(1, round(share * recipe.train.steps))})
        yield plan.cell(size, recipe, loss_by_compute, text=plan.data.held_out)


def _points(results: StudyResults) -> list[tuple[float, float]]:
    return sorted((r["values"][COMPUTE], r["values"][LOSS]) for r in results.records)


def gpt3_scaling_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    if len(results.rows) < 2:
        return []
    law = fit_power_law(_points(results))
    return [note.format(law=law, days=law.scale / PF_DAY) for note in notes]


def gpt3_scaling_figure(results: StudyResults) -> str:
    """log₁₀ L over log₁₀ C: a power law is a line."""
    lines: dict[str, Line] = {}
    points = _points(results)
    if len(results.rows) > 1:
        law = fit_power_law(points)
        ends = (points[0][0], points[-1][0])
        lines[str(law)] = Line([(math.log10(c), math.log10(law.loss(c))) for c in ends])
    for row in results.rows:
        loss, compute = results.at(row, LOSS), results.at(row, COMPUTE)
        assert loss is not None
        assert compute is not None
        error = loss.deviation / loss.mean / math.log(10)
        lines[row] = Line([(math.log10(compute.mean), math.log10(loss.mean))], [error])
    across = "log₁₀ of training GFLOPs"
    return standalone_svg(chart(lines, across, "log₁₀ of loss", size=(820, 340)))


# ------------------------------------------------------------------ sparse layers at equal compute


def patterns(context: int) -> dict[str, list[str]]:
    """The layers' attention, in a cycle."""
    stride = context // STRIDE
    return {
        "dense": ["causal"],
        "banded": ["causal", f"causal & local:{stride}"],
        "strided": [f"causal & strided:{stride}"],
        "fixed": [f"causal & fixed:{stride},{max(1, stride // SUMMARY)}"],
    }


def training_flops(recipe: Recipe) -> float:
    """FLOPs per token."""
    with torch.device("meta"):
        network = Network(recipe.model, {"lm": 0})
    return flops(network, recipe).exact


def attended(judged: JudgedModel) -> dict[str, float]:
    """Mean number of keys per token, and the number of tokens trained on."""
    c = read_recipe(judged.folder / "recipe.json").model
    seen = [keys_seen(text, c.heads, c.context) for text in c.attention]
    return {"keys seen": sum(seen) / len(seen), "million tokens": judged.facts()["tokens"] / 1e6}


def gpt3_sparse_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    base = plan.scale.recipe("gpt", seed)
    if not plan.scale.faithful:
        longer = {"model.context": LONGER * base.model.context}
        base = base.override(longer | {"train.batch": max(1, base.train.batch // LONGER)})
    dense = training_flops(base)
    for row, attention in patterns(base.model.context).items():
        sparse = base.override({"model.attention": attention})
        steps = round(base.train.steps * dense / training_flops(sparse))
        recipe = sparse.override({"train.steps": steps})
        yield plan.cell(row, recipe, held_out_bits, text=plan.data.held_out)
        yield plan.cell(row, recipe, attended)


# ------------------------------------------------------------------ BERT or GPT?

MODELS = {
    "BERT": "bert",
    "GPT": "gpt",
    "both at once": "both",
    "ELECTRA": "electra",
    "ELMo": "elmo",
    "LSTM": "lstm",
}
WRITERS = ("GPT", "both at once", "LSTM")  # models that predict the next token
TUNED = ("sentence", "acceptability", "pair", "similarity", "tokens")


def bert_vs_gpt_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    minutes = {"train.steps": 0, "train.minutes": plan.scale.minutes, "train.snapshots": False}
    text = plan.data.held_out
    for row, kind in MODELS.items():
        recipe = plan.scale.recipe(kind, seed, **({} if plan.scale.faithful else minutes))
        if row == "BERT":
            recipe = recipe.override({"objective": "mlm"})
        # as in its paper, ELMo's layers stay frozen; spans need all of the model
        frozen = row == "ELMo"
        if frozen:
            yield from plan.tuned(row, recipe, plan.every_task(*TUNED), features="mix")
        else:
            yield from plan.tuned(row, recipe, plan.every_task(*TUNED, "span"))
        options = plan.scale.tuning(seed) | ({"freeze": True} if frozen else {})
        yield from plan.each(row, recipe, picked_summaries, plan.tasks("summary"), options=options)
        if row not in ("ELECTRA", "ELMo"):  # whose heads give no token likelihoods
            yield from likelihood_cells(plan, row, recipe)
        if row in WRITERS:
            yield from plan.tuned(row, recipe, plan.tasks("summary"), "{}, written")
            yield plan.cell(row, recipe, held_out_bits, text=text)
        yield plan.cell(row, recipe, speed, text=text, writes=row in WRITERS)


def likelihood_cells(plan: StudyPlan, row: str, recipe: Recipe) -> Iterator[Cell]:
    """What a model answers without fine-tuning."""
    pairs = plan.data.of("minimal pairs", dev_rows=4 * plan.scale.dev_rows)
    yield from plan.each(row, recipe, minimal_pairs, pairs)
    for task in plan.tasks("sentence"):
        if task.task == "sst2":
            column = f"{task.name}, examples in context"
            options = dict(column=column, shots="max", train=task.train)
            yield plan.cell(row, recipe, zero_shot, task=task, **options)
    yield from plan.each(row, recipe, zero_shot, plan.tasks("last word"))


def bert_vs_gpt_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    """The best model of each column, those within the error of it, and the means over tasks."""
    head, alone, noisy, means = notes
    lines = [head]
    for column in results.columns:
        best, *also = best_rows(results, column) or [""]
        if best:
            values = dict(column=column, row=best, figure=results.shown(best, column))
            lines.append((noisy if also else alone).format(also=", ".join(also), **values))
    listed = Words(*("\n".join(texts) for texts in zip(*lines, strict=True)))
    return [listed, *_overall(results, means)]


def _overall(results: StudyResults, note: Words) -> Iterator[Words]:
    """The mean over tasks after fine-tuning, and the models that can generate text."""
    values = {
        column: {row: value.mean for row in results.rows if (value := results.at(row, column))}
        for column in results.columns
        if not lower_is_better(column)
    }
    shared = {column: rows for column, rows in values.items() if len(rows) == len(results.rows)}
    if not shared:
        return
    means = {row: fmean(rows[row] for rows in shared.values()) for row in results.rows}
    order = sorted(means, key=lambda row: -means[row])
    yield note.format(
        count=len(shared),
        columns=", ".join(shared),
        means=", ".join(f"{row} {number(means[row])}" for row in order),
        writers=", ".join(row for row in results.rows if row in WRITERS),
    )
