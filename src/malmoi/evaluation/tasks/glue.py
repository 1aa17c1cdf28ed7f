"""GLUE (Wang et al. 2018) in its own file formats, and related data sets: SICK, IMDB.

Korean ones: NSMC (film reviews), KorSTS (Ham et al. 2020), KLUE-NLI (Park et al. 2021).
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from malmoi.text.rows import BrokenRow, DataRow, json_line_rows, table_rows

SCITAIL_COLUMNS = ("premise", "hypothesis", "label")

cola_rows = partial(table_rows, header=("source", "label", "mark", "sentence"))


def snli_rows(path: Path) -> Iterator[DataRow]:
    """Reads SNLI's .jsonl or .txt."""
    yield from json_line_rows(path) if ".jsonl" in path.suffixes else table_rows(path)


def scitail_rows(path: Path) -> Iterator[DataRow]:
    """Reads SciTail's tsv_format, which has no header, or its snli_format, JSON in a .txt file."""
    if ".tsv" in path.suffixes:
        yield from table_rows(path, SCITAIL_COLUMNS)
        return
    for row in json_line_rows(path):
        if isinstance(row, BrokenRow):
            yield row
            continue
        label = {"entailment": "entails"}.get(row["gold_label"], row["gold_label"])
        values = (row["sentence1"], row["sentence2"], label)
        yield DataRow(dict(zip(SCITAIL_COLUMNS, values, strict=True)), row.place)
