"""Detects the text and label columns of a table and the kind of task.

`malmoi finetune data.csv` prints the detected columns, and an option overrides each.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

from malmoi.errors import ensure, explained
from malmoi.messages import joined, logger, msg
from malmoi.text.records import (
    CHAT_COLUMNS,
    LABEL_NAMES,
    PAIRS,
    PROMPT_COLUMNS,
    SECOND_COLUMNS,
    TEXT_NAMES,
    checked_column,
    column_named,
    label_name,
    number_of,
    unnamed_columns,
)
from malmoi.text.rows import BadRow, DataRow, RowSource, as_list, rows_of, source_name

READ_ROWS = 5000  # rows used for detection
READ_CELLS = 2_000_000  # fewer rows of a table with thousands of columns
MAX_LABELS = 200  # more are ids or free text
LABEL_SEPARATORS = "|;,"
MIN_JOINED = 0.05  # share of the rows with several labels
MAX_NAME = 40  # maximum characters of a label in a joined cell
MOSTLY = 0.95  # share of numbers in a column of scores
MANY_NUMBERS = 12  # distinct whole numbers above which they are a scale, not classes
MIN_WORDS = 3  # of a text, at the median; ids, dates and people's names have fewer
LETTERS_PER_WORD = 4  # of a text without spaces
LONG_TEXT = 200  # characters: passages may repeat, labels are shorter
PAIRED_KINDS = ("classification", "multilabel", "regression")
SHOWN_NAMES = 20  # columns that a sentence lists
LETTER = re.compile(r"[^\W\d_]")
TAG = re.compile(r"O|[BIESLU][-_]\S+")  # of a word: the entity that it begins or goes on

Rows = Sequence[Mapping[str, Any]]


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
    unused: tuple[str, ...] = ()  # the other columns
    pair_by_content: bool = False  # not by its name: the user may want one text alone

    def describe(self) -> str:
        """text = review, label = stars (2 labels), baseline 51% of these rows (always 'good')"""
        columns = self.label if isinstance(self.label, str) else ",".join(self.label or ())
        names = [self.text]
        names += [msg("pair = {pair}", pair=self.pair)] if self.pair else []
        names += [msg("label = {columns}", columns=columns)] if columns else []
        negatives = ", ".join(self.negatives)
        names += [msg("negatives = {negatives}", negatives=negatives)] if negatives else []
        found = msg("{kind}: text = {names}", kind=self.kind, names=joined(", ", names))
        return joined("", (found, self._about_labels()))

    def _about_labels(self) -> str:
        """How many labels there are, and how good a constant answer is."""
        n = len(self.labels)
        if self.kind == "regression":
            return msg(", standard deviation {deviation:.3g}", deviation=self.baseline)
        if n < 2:
            return ""
        if self.separator:
            return msg(" ({n} labels, separated by {separator!r})", n=n, separator=self.separator)
        if self.kind == "multilabel":
            return msg(" ({n} columns of 0 and 1)", n=n)
        return msg(
            " ({n} labels), baseline {share:.0%} of these rows (always {label!r})",
            n=n,
            share=self.baseline,
            label=self.labels[0],
        )

    def sentences(self) -> list[str]:
        """The description, what may surprise in it, and the columns that are not read."""
        said = [self.describe()]
        text, names = self.text, shown_names(self.unused)
        if self.pair_by_content:
            said += [
                msg(
                    "Two columns hold texts and are read as a pair; for one alone: --text {text}",
                    text=text,
                )
            ]
        if self.unused:
            said += [msg("Not used: {names}. Choose with --text, --pair and --label.", names=names)]
        return said

    def among(self, names: Iterable[str]) -> "GuessedColumns":
        """The same, with the columns of the table that are not read."""
        labels = (self.label,) if isinstance(self.label, str) else self.label or ()
        used = (self.text, self.pair, *labels, *self.negatives)
        return replace(self, unused=tuple(name for name in names if name not in used))


class Table(NamedTuple):
    """The first rows of a table, its columns and its name."""

    rows: Rows
    names: Sequence[str]
    where: str

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]

    def without(self, *names: str | None) -> "Table":
        return self._replace(names=[name for name in self.names if name not in names])


class GivenColumns(NamedTuple):
    """What the user said of a table; None: to be detected."""

    kind: str | None
    text: str | None
    pair: str | None
    label: str | None


def guess_columns(
    data: RowSource,
    *,
    kind: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> GuessedColumns:
    """Detects the columns that were not given from the first rows of a table."""
    rows = first_rows(data, (text, pair, label))
    table = Table(rows, list(rows[0]), source_name(data))
    note_missing_header(table.names, table.where)
    if label:  # a text is missed where it is read, a label taken for unknown
        checked_column(table.where, label, dict.fromkeys(name for row in rows for name in row))
    given = GivenColumns(kind, text, pair, label)
    guess = _writing(table, given) or _flagged(table, given) or _labelled(table, given)
    return guess.among(table.names)


# ------------------------------------------------------------------ prompts and answers


def _writing(table: Table, given: GivenColumns) -> GuessedColumns | None:
    """Prompts and answers, or conversations, if these are wanted or likely."""
    if given.kind not in (None, "writing"):
        return None
    written = _prompt_columns(table.names, given)
    if given.kind == "writing":
        ensure(
            written,
            "No columns of {where} look like prompts and answers ({names}): name them "
            "with --text COLUMN --label COLUMN.",
            where=table.where,
            names=shown_names(table.names),
        )
        return written
    named = given.text or given.label
    return written if written and not named and _has_answers(table, written) else None


def _prompt_columns(names: Sequence[str], given: GivenColumns) -> GuessedColumns | None:
    """Detects columns of prompts and answers, or conversations, by their names."""
    chat = given.text or column_named(CHAT_COLUMNS, names) or ""
    if chat.lower() in CHAT_COLUMNS:
        return GuessedColumns("writing", chat, None)
    known = {name.lower(): name for name in names if name}
    likely = next((pair for pair in PROMPT_COLUMNS if known.keys() >= set(pair)), ("", ""))
    prompt = given.text or known.get(likely[0])
    answer = given.label or known.get(likely[1])
    if not prompt or not answer:
        return None
    second = known.get(SECOND_COLUMNS.get(prompt.lower(), ""))
    return GuessedColumns("writing", prompt, answer, given.pair or second)


def _has_answers(table: Table, written: GuessedColumns) -> bool:
    """Whether a column holds answers rather than labels or passages, which repeat."""
    if "context" in table.names:
        return False
    if not isinstance(written.label, str):
        return True
    return 2 * len(set(map(str, table.column(written.label)))) > len(table.rows)


# ------------------------------------------------------------------ texts and labels


def _flagged(table: Table, given: GivenColumns) -> GuessedColumns | None:
    """A text and several 0/1 columns, one per label of a multilabel task."""
    named = given.label or column_named(LABEL_NAMES, table.names)
    if given.kind not in (None, "multilabel") or named:
        return None
    flags = tuple(n for n in table.names if {str(v).strip() for v in table.column(n)} <= {"0", "1"})
    if len(flags) < 2:
        return None
    others = table.without(*flags)
    guess = GuessedColumns("multilabel", _text(others, given), flags, given.pair, labels=flags)
    return _with_second_text(others, given, guess)


def _labelled(table: Table, given: GivenColumns) -> GuessedColumns:
    """A text, or two, and the column of their labels."""
    label = given.label or _label(table.without(given.text, given.pair))
    others = table.without(label)
    text = _text(others.without(given.pair), given)
    partner = PAIRS.get(text.lower())
    pair = given.pair or (column_named([partner], table.names) if partner else None)
    values = [as_list(value) for value in table.column(label)]
    separator = _separator(values) if given.kind in (None, "multilabel") and not pair else None
    kind = "multilabel" if separator else given.kind or _kind(values, table.column(text), pair)
    guess = GuessedColumns(kind, text, label, pair, separator=separator)
    if label in table.names:
        guess = _with_labels(guess, values)
    return _with_second_text(others, given, guess)


def _with_labels(guess: GuessedColumns, values: Sequence[Any]) -> GuessedColumns:
    """The labels of the rows, and how good a constant answer is."""
    if guess.kind == "regression":
        numbers = _numbers(values)
        return replace(guess, baseline=pstdev(numbers) if numbers else 0.0)
    if guess.separator:
        counts = Counter(name for value in values for name in split_labels(value, guess.separator))
    elif guess.kind == "classification":
        counts = Counter(label_name(value) for value in values if value is not None)
        del counts[""]
    else:
        return guess
    labels = tuple(name for name, _ in counts.most_common())
    return replace(guess, labels=labels, baseline=max(counts.values(), default=0) / len(values))


def _text(table: Table, given: GivenColumns) -> str:
    return given.text or text_column(*table)


def _with_second_text(table: Table, given: GivenColumns, guess: GuessedColumns) -> GuessedColumns:
    """A pair, if exactly one other column holds texts and the user did not choose a text."""
    if given.text or guess.pair or guess.kind not in PAIRED_KINDS:
        return guess
    others = [n for n in table.without(guess.text).names if _holds_texts(table.column(n))]
    if len(others) != 1:
        return guess
    first, second = sorted((guess.text, others[0]), key=table.names.index)
    return replace(guess, text=first, pair=second, pair_by_content=True)


def _holds_texts(values: Sequence[Any]) -> bool:
    """Whether a column holds texts rather than labels, names, ids, dates or numbers."""
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        return False
    distinct = len(set(texts))
    repeats = 2 * distinct <= len(texts) and distinct <= MAX_LABELS
    if repeats and fmean(map(len, texts)) < LONG_TEXT:
        return False
    return median(map(_words, texts)) >= MIN_WORDS


def _words(text: str) -> float:
    """The words of a text, also of one without spaces between them; none if it is mostly digits."""
    letters = len(LETTER.findall(text))
    if 2 * sum(sign.isdigit() for sign in text) > letters:
        return 0
    words = sum(bool(LETTER.search(word)) for word in text.split())
    return max(words, 0 if text.isascii() else letters / LETTERS_PER_WORD)


def _label(table: Table) -> str:
    named = column_named(LABEL_NAMES, table.names)
    if named is not None:
        return named
    few = {
        name: len(set(map(str, table.column(name))))
        for name in table.names
        if all(len(str(value)) <= 60 for value in table.column(name))
    }
    classes = [name for name, n in few.items() if 2 <= n <= min(MAX_LABELS, len(table.rows) // 2)]
    ensure(
        len(table.names) > 1,
        "{where} has one column ({names}), but labels are needed beside its texts. Texts without "
        "labels are for --unlabelled, with a few labelled rows or --labels.",
        where=table.where,
        names=shown_names(table.names),
    )
    ensure(
        classes,
        "No column of {where} looks like labels ({names}): name it with --label COLUMN.",
        where=table.where,
        names=shown_names(table.names),
    )
    # a table usually ends with its label
    return min(reversed(classes), key=lambda name: few[name])


def first_rows(data: RowSource, named: Iterable[str | None] = ()) -> list[Mapping[str, Any]]:
    """The first valid rows of a table, in which columns of some names are expected."""
    read: list[DataRow] = []
    cells = 0
    with explained(BadRow, "{error}."):
        for row in rows_of(data, list(filter(None, named))):
            read.append(row)
            cells += len(row.values)
            if len(read) == READ_ROWS or cells >= READ_CELLS:
                break
        rows = [row.values for row in read if row.values]
        if read and not rows:
            _ = read[0].checked  # says what is wrong with it
    ensure(rows, "There are no examples in {name}.", name=source_name(data))
    return rows


def note_missing_header(names: Sequence[str], where: str) -> None:
    if list(names) == unnamed_columns(len(names)):
        logger.warning(
            "{where} has no header: its first line is a row, and its columns are called {names}.",
            where=where,
            names=", ".join(names[:3]) + " …" * (len(names) > 3),
        )


def shown_names(names: Sequence[str]) -> str:
    more = msg(" … ({names:,} columns)", names=len(names)) if len(names) > SHOWN_NAMES else ""
    return joined("", (", ".join(names[:SHOWN_NAMES]), more))


def text_column(rows: Sequence[Mapping[str, Any]], names: Sequence[str], where: str) -> str:
    """The column of the text: by its name, else the one with the most words, or else letters."""
    named = column_named(TEXT_NAMES, names)
    if named is not None:
        return named
    sizes = {}
    for name in names:
        texts = [str(row.get(name, "")) for row in rows]
        if len(_numbers([row.get(name) for row in rows])) < len(rows):
            sizes[name] = fmean(map(_words, texts)), fmean(map(len, texts))
    ensure(sizes, "No column of {where} looks like text: name it with --text COLUMN.", where=where)
    return max(sizes, key=lambda name: sizes[name])


def _kind(values: Sequence[Any], texts: Sequence[Any], pair: str | None) -> str:
    if _has_tags(values, texts):
        return "tagging"
    if all(isinstance(value, list) for value in values):
        return "multilabel"
    if pair is not None and pair.lower() == "context":
        return "answer"
    numbers = _numbers(values)
    scale = len(set(numbers)) > MANY_NUMBERS or not all(map(float.is_integer, numbers))
    # values that are no numbers are reported with their rows
    return "regression" if scale and len(numbers) >= MOSTLY * len(values) else "classification"


def _has_tags(values: Sequence[Any], texts: Sequence[Any]) -> bool:
    """Whether there is a tag for each word, in lists or between spaces."""
    tags, words = (
        [one if isinstance(one, list) else str(one).split() for one in map(as_list, column)]
        for column in (values, texts)
    )
    spaced = max(map(len, tags)) > 1 and all(map(TAG.fullmatch, map(str, chain(*tags))))
    return (spaced or all(isinstance(value, list) for value in values)) and (
        list(map(len, tags)) == list(map(len, words))
    )


def _numbers(values: Sequence[Any]) -> list[float]:
    return [
        number for number in map(number_of, values) if number is not None and math.isfinite(number)
    ]


def _separator(values: Sequence[Any]) -> str | None:
    """The separator of joined labels: splitting by it leaves only a few distinct labels."""
    texts = all(isinstance(value, str) for value in values)
    return next((sign for sign in LABEL_SEPARATORS if texts and _separates(sign, values)), None)


def _separates(separator: str, values: Sequence[str]) -> bool:
    joined = sum(separator in value for value in values)
    parts = {one for value in values for one in split_labels(value, separator)}
    if joined < max(1, MIN_JOINED * len(values)) or not 1 < len(parts) < len(set(values)):
        return False
    decimals = separator == "," and all(map(str.isdigit, parts))
    return max(map(len, parts)) <= MAX_NAME and not decimals


def split_labels(value: str, separator: str) -> list[str]:
    return [name for part in value.split(separator) if (name := label_name(part))]
