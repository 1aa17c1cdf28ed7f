"""Detects the text and label columns of a table and the kind of task.

`malmoi finetune data.csv` prints the detected columns, and an option overrides each.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, pstdev
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.text.dialect import unnamed_columns
from malmoi.text.rows import BadRow, RowSource, as_list, label_name, rows_of, source_name

logger = logging.getLogger(__name__)

READ_ROWS = 5000  # rows used for detection
MAX_LABELS = 200  # more are ids or free text
LABEL_SEPARATORS = "|;,"
MIN_JOINED = 0.05  # share of the rows with several labels
MAX_NAME = 40  # maximum characters of a label in a joined cell
MOSTLY = 0.95  # share of numbers in a column of scores
MANY_NUMBERS = 12  # distinct whole numbers above which they are a scale, not classes
# common names of such columns, most likely first; compared in lower case
LABEL_NAMES = (
    "label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "kind",
    "type", "tag", "tags", "emotion", "stars", "rating", "score", "gold_label", "y", "answer",
    "라벨", "레이블", "분류", "범주", "감정", "감성", "점수", "평점",
)  # fmt: skip
TEXT_NAMES = (
    "text", "sentence", "sentence1", "premise", "question", "review", "document", "content",
    "comment", "body", "message", "utterance", "query", "title",
    "본문", "문장", "텍스트", "내용", "리뷰", "댓글", "질문", "제목",
)  # fmt: skip
PAIRS = {
    "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2",
    "text1": "text2", "question": "context", "sentence_a": "sentence_b", "문장1": "문장2",
}  # fmt: skip

CHAT_COLUMNS = ("messages", "conversations", "conversation")
# column names of prompts and answers in public data sets, most likely first
PROMPT_COLUMNS = (
    ("prompt", "answer"), ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"),
    ("source", "target"), ("document", "summary"), ("article", "highlights"),
    ("dialogue", "summary"), ("text", "summary"), ("input", "output"),
    ("질문", "답변"), ("원문", "번역"), ("본문", "요약"),
)  # fmt: skip
SECOND_COLUMNS = {"instruction": "input"}  # Alpaca: the input of an instruction


@dataclass(frozen=True)
class GuessedColumns:
    """The detected columns and kind of task of a table."""

    kind: str
    text: str
    # several: 0/1 columns; none: a conversation includes its answers
    label: str | tuple[str, ...] | None
    pair: str | None = None
    labels: tuple[str, ...] = ()  # the most frequent first
    baseline: float = 0.0  # the share of the most frequent label; of numbers, their deviation
    separator: str | None = None  # between the labels of a row
    negatives: tuple[str, ...] = ()  # texts that do not belong to the first

    def describe(self) -> str:
        """text = review, label = stars (2 labels), baseline 51% (always 'good')"""
        columns = self.label if isinstance(self.label, str) else ",".join(self.label or ())
        others = [f"pair = {self.pair}"] * bool(self.pair) + [f"label = {columns}"] * bool(columns)
        others += [f"negatives = {', '.join(self.negatives)}"] * bool(self.negatives)
        description = f"{self.kind}: text = {', '.join([self.text, *others])}"
        if self.kind == "regression":
            return f"{description}, standard deviation {self.baseline:.3g}"
        if len(self.labels) < 2:
            return description
        if self.separator:
            return f"{description} ({len(self.labels)} labels, separated by {self.separator!r})"
        if self.kind == "multilabel":
            return f"{description} ({len(self.labels)} columns of 0 and 1)"
        always = f"baseline {self.baseline:.0%} (always {self.labels[0]!r})"
        return f"{description} ({len(self.labels)} labels), {always}"


def guess_columns(
    data: RowSource,
    *,
    kind: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> GuessedColumns:
    """Detects the columns that were not given from the first rows of a table."""
    rows = first_rows(data)
    where = source_name(data)
    names = list(rows[0])
    note_missing_header(names, where)
    written = _writing(names, text, pair, label)
    if kind == "writing":
        if written is None:
            raise MalmoiError(
                f"No columns of {where} look like prompts and answers ({', '.join(names)}): name "
                "them with --text COLUMN --label COLUMN."
            )
        return written
    if kind is None and not (text or label) and written and _answers(rows, written):
        return written
    several = kind in (None, "multilabel")
    if several and label is None and (flags := _flags(rows, names)):
        text = text or text_column(rows, [name for name in names if name not in flags], where)
        return GuessedColumns("multilabel", text, flags, pair, labels=flags)
    label = label or _label(rows, [name for name in names if name not in (text, pair)], where)
    text = text or text_column(rows, [name for name in names if name not in (label, pair)], where)
    partner = PAIRS.get(text.lower())
    by_lower = {name.lower(): name for name in names}
    pair = pair or (by_lower.get(partner) if partner else None)
    values = [as_list(row.get(label)) for row in rows]
    if several and pair is None and (separator := _separator(values)):
        found = Counter(one for value in values for one in split_labels(value, separator))
        known = tuple(name for name, _ in found.most_common())
        return GuessedColumns("multilabel", text, label, pair, known, separator=separator)
    kind = kind or _kind(values, [row.get(text) for row in rows], pair)
    if kind == "regression":
        numbers = [float(str(value)) for value in values if _is_number(value)]
        return GuessedColumns(kind, text, label, pair, baseline=pstdev(numbers) if numbers else 0)
    if kind != "classification" or label not in rows[0]:
        return GuessedColumns(kind, text, label, pair)
    given = [name for value in values if value is not None and (name := label_name(value))]
    counts = Counter(given).most_common()
    if not counts:
        return GuessedColumns(kind, text, label, pair)
    ordered = tuple(name for name, _ in counts)
    return GuessedColumns(kind, text, label, pair, ordered, counts[0][1] / len(values))


def _writing(
    names: Sequence[str], text: str | None, pair: str | None, label: str | None
) -> GuessedColumns | None:
    """Detects columns of prompts and answers, or conversations, by their names."""
    known = {name.lower(): name for name in names}
    chat = next((known[name] for name in CHAT_COLUMNS if name in known), None)
    if (text or chat or "").lower() in CHAT_COLUMNS:
        return GuessedColumns("writing", text or str(chat), None)
    found = next((pair for pair in PROMPT_COLUMNS if set(pair) <= set(known)), None)
    prompt = text or (known[found[0]] if found else None)
    answer = label or (known[found[1]] if found else None)
    if prompt is None or answer is None:
        return None
    second = known.get(SECOND_COLUMNS.get(prompt.lower(), ""))
    return GuessedColumns("writing", prompt, answer, pair or second)


def _answers(rows: Sequence[Mapping[str, Any]], found: GuessedColumns) -> bool:
    """Whether a column holds answers rather than labels or passages, which repeat."""
    if "context" in rows[0]:
        return False
    column = found.label
    if not isinstance(column, str):
        return True
    return 2 * len({str(row.get(column)) for row in rows}) > len(rows)


def first_rows(data: RowSource) -> list[Mapping[str, Any]]:
    """The first valid rows of a table."""
    try:
        read = list(islice(rows_of(data), READ_ROWS))
        rows = [row.values for row in read if row.values]
        if read and not rows:
            _ = read[0].checked  # says what is wrong with it
    except BadRow as error:
        raise MalmoiError(f"{error}.") from error
    if not rows:
        raise MalmoiError(f"There are no examples in {source_name(data)}.")
    return rows


def column_named(known: Sequence[str], names: Sequence[str]) -> str | None:
    """The column with the likeliest of the known names."""
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[one] for one in known if one in by_lower), None)


def _flags(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[str, ...]:
    """Several 0/1 columns, one per label of a multilabel task."""
    if column_named(LABEL_NAMES, names):
        return ()
    flags = [name for name in names if {str(row.get(name)).strip() for row in rows} <= {"0", "1"}]
    return tuple(flags) if len(flags) > 1 else ()


def _label(rows: Sequence[Mapping[str, Any]], names: Sequence[str], where: str) -> str:
    named = column_named(LABEL_NAMES, names)
    if named is not None:
        return named
    few = {
        name: len({str(row.get(name)) for row in rows})
        for name in names
        if all(len(str(row.get(name, ""))) <= 60 for row in rows)
    }
    classes = [n for n, count in few.items() if 2 <= count <= min(MAX_LABELS, len(rows) // 2)]
    if not classes:
        raise MalmoiError(
            f"No column of {where} looks like labels ({', '.join(names)}): name it with --label "
            "COLUMN."
        )
    # a table usually ends with its label
    return min(reversed(classes), key=lambda name: few[name])


def note_missing_header(names: Sequence[str], where: str) -> None:
    """Warns if the columns of a table had to be numbered."""
    if list(names) == unnamed_columns(len(names)):
        logger.warning(
            f"{where} has no header: its first line is a row, and its columns are called "
            f"{', '.join(names[:3])}{' …' * (len(names) > 3)}."
        )


def text_column(rows: Sequence[Mapping[str, Any]], names: Sequence[str], where: str) -> str:
    """The column of the text: by its name, else the one with the longest values."""
    named = column_named(TEXT_NAMES, names)
    if named is not None:
        return named
    lengths = {
        name: fmean(len(str(row.get(name, ""))) for row in rows)
        for name in names
        if not all(_is_number(row.get(name)) for row in rows)
    }
    if not lengths:
        raise MalmoiError(f"No column of {where} looks like text: name it with --text COLUMN.")
    return max(lengths, key=lambda name: lengths[name])


def _kind(values: Sequence[Any], texts: Sequence[Any], pair: str | None) -> str:
    if all(isinstance(value, list) for value in values):
        tagged = all(
            len(value) == len(text if isinstance(text, list) else str(text).split())
            for value, text in zip(values, texts, strict=True)
        )
        return "tagging" if tagged else "multilabel"
    if pair is not None and pair.lower() == "context":
        return "answer"
    numbers = [float(value) for value in values if _is_number(value)]
    scale = any(n != int(n) for n in numbers) or len(set(numbers)) > MANY_NUMBERS
    mostly = len(numbers) >= MOSTLY * len(values)  # the others are reported with their rows
    return "regression" if mostly and scale else "classification"


def _separator(values: Sequence[Any]) -> str | None:
    """The separator of joined labels: splitting by it leaves only a few distinct labels."""
    if not all(isinstance(value, str) for value in values):
        return None
    for separator in LABEL_SEPARATORS:
        joined = sum(separator in value for value in values)
        parts = {one for value in values for one in split_labels(value, separator)}
        few = 1 < len(parts) < len(set(values)) and max(map(len, parts)) <= MAX_NAME
        decimals = separator == "," and all(part.isdigit() for part in parts)
        if joined >= max(1, MIN_JOINED * len(values)) and few and not decimals:
            return separator
    return None


def split_labels(value: str, separator: str) -> list[str]:
    """The labels in a cell that has several."""
    return [name for part in value.split(separator) if (name := label_name(part))]


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
