"""BERT or GPT? Five models compared at equal size, text and training time."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from malmoi.studies.measures import held_out_bits, minimal_pairs, speed, zero_shot
from malmoi.studies.report import StudyResults, best_rows, lower_is_better, number
from malmoi.studies.study import Cell, StudyPlan, Words

MODELS = {
    "BERT": "bert",
    "GPT": "gpt",
    "both at once": "both",
    "ELECTRA": "electra",
    "LSTM": "lstm",
}
WRITERS = ("GPT", "both at once", "LSTM")  # models that predict the next token
TUNED = ("sentence", "acceptability", "pair", "similarity", "tokens", "span")


def bert_vs_gpt_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    minutes = {"train.steps": 0, "train.minutes": plan.scale.minutes, "train.snapshots": False}
    text = plan.data.held_out
    for row, kind in MODELS.items():
        recipe = plan.scale.recipe(kind, seed, **({} if plan.scale.faithful else minutes))
        if row == "BERT":
            recipe = recipe.override({"objective": "mlm"})
        yield from plan.tuned(row, recipe, plan.tasks(*TUNED))
        if row != "ELECTRA":  # whose head gives no token likelihoods
            for task in plan.data.of("minimal pairs", dev_rows=4 * plan.scale.dev_rows):
                yield plan.cell(row, recipe, minimal_pairs, task=task)
            for task in plan.tasks("sentence"):
                if task.task == "sst2":
                    column = f"{task.name}, examples in context"
                    options = dict(column=column, shots="max", train=task.train)
                    yield plan.cell(row, recipe, zero_shot, task=task, **options)
            for task in plan.tasks("last word"):
                yield plan.cell(row, recipe, zero_shot, task=task)
        if row in WRITERS:
            yield plan.cell(row, recipe, held_out_bits, text=text)
        yield plan.cell(row, recipe, speed, text=text, writes=row in WRITERS)


def _notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
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
    listed = ", ".join(f"{row} {number(means[row])}" for row in order)
    writers = ", ".join(row for row in results.rows if row in WRITERS)
    facts = dict(count=len(shared), columns=", ".join(shared), means=listed, writers=writers)
    yield note.format(**facts)


SHOWN = {("bert-vs-gpt", "notes"): _notes}
