"""Minimal pairs for GPT and BERT, zero-shot: BLiMP (Warstadt et al. 2020), Kontrast (Korean)."""

from malmoi.evaluation.task import Example, Task
from malmoi.text.rows import BadRow, DataRow, any_rows


def blimp(row: DataRow) -> Example:
    """A BLiMP row, with the authors' column names or shorter ones."""
    published = "sentence_good" in row.values
    good = row.text("sentence_good" if published else "good")
    bad = row.text("sentence_bad" if published else "bad")
    group = row.text("linguistics_term" if published else "phenomenon")
    return Example(good, label=0, choices=(good, bad), group=group)


def kontrast(row: DataRow) -> Example:
    """Sentences A and B, and which of them speakers accept."""
    right = row.label("gold_label")
    if right not in ("A", "B"):
        raise BadRow(row.place, "gold_label is A or B, not {right!r}", right=right)
    choices = (row.text("sentence_A"), row.text("sentence_B"))
    label = "AB".index(right)
    return Example(choices[label], label=label, choices=choices)


BLIMP = Task(
    "blimp",
    "pairs",
    any_rows,
    blimp,
    about="which of two sentences is English? 67 paradigms of grammar",
)
KONTRAST = Task(
    "kontrast", "pairs", any_rows, kontrast, "which of two sentences is natural Korean?"
)
TASKS = (BLIMP, KONTRAST)
