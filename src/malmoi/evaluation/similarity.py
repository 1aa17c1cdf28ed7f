"""Tasks of sentence encoders: similarity of two texts, and retrieval."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from malmoi.errors import UsageError
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.task import Columns, Example, ExampleMaker, Task, numbers
from malmoi.inference.embed import sentence_vectors
from malmoi.inference.predict import Predictor
from malmoi.text.columns import GuessedColumns, first_rows
from malmoi.text.records import column_named
from malmoi.text.rows import BadRow, DataRow, RowSource, file_list, is_files, text_lines

# common names of such columns, most likely first
ANCHOR_NAMES = ("anchor", "query", "question", "sentence1", "sentence_a", "premise", "text")
POSITIVE_NAMES = ("positive", "pos", "pair", "sentence2", "sentence_b", "hypothesis", "answer")
NEGATIVE_NAMES = ("negative", "neg")
SCORE_NAMES = ("score", "similarity", "similarity_score", "label")
QUERIES_AT_ONCE = 1024  # rows of the table of cosines held in memory


def similarity_columns(by: Columns) -> ExampleMaker:
    """Two texts and their score."""
    return numbers(by.text, by.pair or "pair", by.one_label)


def retrieval_columns(by: Columns) -> ExampleMaker:
    """An anchor and the text that belongs to it; others that do not, in the columns of choices.

    Without a second column a text belongs to itself.
    """

    def example(row: DataRow) -> Example:
        anchor = row.text(by.text)
        positive = row.text(by.pair) if by.pair else anchor
        negatives = tuple(row.text(name) for name in by.choices if row.values.get(name))
        if not anchor.strip() or not positive.strip():
            raise BadRow(row.place, "a text is empty")
        return Example(anchor, positive, 0, choices=negatives)

    return example


def line_rows(path: Path) -> Iterator[DataRow]:
    """Every line of a text file that is not blank."""
    for number, line in text_lines(path):
        if line.strip():
            yield DataRow({"text": line.strip()}, f"{path}:{number}")


# ------------------------------------------------------------------ features


def similarity_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Scores are mapped to 0…1, from the lowest to the highest of the rows."""
    scores = [float(e.label) for e in examples]
    low = min(scores, default=0.0)
    width = max(scores, default=1.0) - low or 1.0
    yield from _items(examples, view, [(score - low) / width for score in scores])


def retrieval_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """The label numbers the distinct positives, so that equal ones do not repel each other."""
    numbers = {text: i for i, text in enumerate(dict.fromkeys(e.pair for e in examples))}
    yield from _items(examples, view, [numbers[e.pair] for e in examples])


def _items(
    examples: Sequence[Example], view: FeatureView, labels: Sequence[Any]
) -> Iterator[TrainingItem]:
    texts = [(e.text, e.pair or "", *e.choices) for e in examples]
    flat = [text for some in texts for text in some]
    rows = iter(view.tokenizer.rows(flat, max_tokens=view.length))
    for some, label in zip(texts, labels, strict=True):
        yield TrainingItem(tuple(next(rows) for _ in some), label)


# ------------------------------------------------------------------ predictions


def rank_pairs(reading: Predictor, examples: Sequence[Example]) -> list[tuple[int, float]]:
    """The rank of each anchor's text among all texts of the rows, from 1, and its cosine.

    A text that belongs to itself is searched for by every second word of it.
    """
    itself = all(e.pair == e.text for e in examples)
    queries = [" ".join(e.text.split()[::2]) if itself else e.text for e in examples]
    pool = list(dict.fromkeys(text for e in examples for text in (e.pair or "", *e.choices)))
    places = {text: i for i, text in enumerate(pool)}
    targets = sentence_vectors(reading, pool)
    wanted = torch.tensor([places[e.pair or ""] for e in examples], dtype=torch.long)
    found = []
    for group, own in zip(
        sentence_vectors(reading, queries).split(QUERIES_AT_ONCE),
        wanted.split(QUERIES_AT_ONCE),
        strict=True,
    ):
        cosines = group @ targets.T
        right = cosines.gather(1, own[:, None])
        ranks = 1 + (cosines > right).sum(1)
        found += list(zip(ranks.tolist(), right[:, 0].tolist(), strict=True))
    return found


# ------------------------------------------------------------------ the task of some files


def similarity_columns_of(
    data: RowSource, *, ranked: bool = False, **columns: Any
) -> GuessedColumns:
    """The kind of these rows, similarity or retrieval, and their columns.

    A score makes it a similarity unless `ranked`; plain text is a retrieval of every text by
    itself.
    """
    given = {name: value for name, value in columns.items() if value is not None}
    if _is_plain_text(data):
        return GuessedColumns("retrieval", "text", None)
    chosen = (given.get(name) for name in ("text", "pair", "label"))
    names = list(first_rows(data, chosen)[0])

    def named(role: str, known: Sequence[str]) -> str | None:
        return given.get(role, column_named(known, names))

    text = named("text", ANCHOR_NAMES)
    pair = named("pair", POSITIVE_NAMES)
    if text is None or (pair is None and len(names) > 1 and "text" not in given):
        raise UsageError(
            "similarity needs the columns of two texts, --text and --pair, and either a "
            "score, --label, or negatives, --choices; the rows have: {names}.",
            names=", ".join(names)[:200],
        )
    label = None if ranked else named("label", SCORE_NAMES)
    if pair is not None and label is not None and "choices" not in given:
        return GuessedColumns("similarity", text, label, pair).among(names)
    negative = named("negative", NEGATIVE_NAMES)
    choices = tuple(given.get("choices", (negative,) if negative else ()))
    return GuessedColumns("retrieval", text, None, pair, negatives=choices).among(names)


def with_line_rows(task: Task, data: RowSource) -> Task:
    """The task on the lines of plain text files."""
    return replace(task, rows=line_rows) if _is_plain_text(data) else task


def _is_plain_text(data: RowSource) -> bool:
    """Whether the data are text files whose first line has no columns."""
    return is_files(data) and all(
        ".txt" in path.suffixes and "\t" not in next(text_lines(path), (0, ""))[1]
        for path in file_list(data)
    )
