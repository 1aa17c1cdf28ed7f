"""Sentences of CoNLL-U files (Universal Dependencies): a line a word, with ten columns."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from malmoi.errors import ensure, require_known

CONLLU_COLUMNS = {"upos": 3, "xpos": 4, "deprel": 7}  # of the ten columns
CONLLU_FIELDS = 10


def conllu_rows(
    numbered: Iterable[tuple[int, str]], column: str = "upos"
) -> Iterator[tuple[int, list[str], list[str]]]:
    """The sentences of numbered lines: the first line's number, the words, and one of their
    columns.
    """
    require_known(
        column,
        CONLLU_COLUMNS,
        "CoNLL-U has no column {name!r} to probe; choose one of {columns}.{hint}",
        columns=", ".join(CONLLU_COLUMNS),
    )
    for ends, some in groupby(numbered, key=lambda one: not one[1].strip()):
        rows = [_conllu_cells(*one) for one in some if not ends and not one[1].startswith("#")]
        # neither ranges of words nor empty nodes
        words = [(number, cells) for number, cells in rows if cells[0].isdigit()]
        if words:
            labels = [cells[CONLLU_COLUMNS[column]] for _, cells in words]
            yield words[0][0], [cells[1].replace(" ", "") for _, cells in words], labels


def _conllu_cells(number: int, line: str) -> tuple[int, list[str]]:
    cells = line.rstrip("\n").split("\t")
    ensure(
        len(cells) == CONLLU_FIELDS,
        "Line {number} is not CoNLL-U: it has {cells} columns instead of {fields}.",
        number=number,
        cells=len(cells),
        fields=CONLLU_FIELDS,
    )
    return number, cells
