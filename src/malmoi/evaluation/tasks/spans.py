"""Spans of a text: SQuAD's answers (Rajpurkar et al. 2016, 2018) and named entities.

CoNLL-2003 (Tjong Kim Sang & De Meulder 2003) and the Korean set klp2016.
"""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.evaluation.task import Example
from malmoi.messages import msg
from malmoi.metrics.labels import entities
from malmoi.text.rows import BadRow, BrokenRow, DataRow, json_value, text_lines


def squad_questions(path: Path) -> Iterator[DataRow]:
    """Yields every question with its paragraph; its place is its number in the file."""
    number = 0
    try:
        for article in json_value(path)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    yield DataRow({**question, "context": paragraph["context"]}, f"{path}:{number}")
    except (KeyError, TypeError) as error:
        raise MalmoiError(
            "{path} is not in SQuAD's format after question {number}: {error} is missing.",
            path=path,
            number=number,
            error=error,
        ) from error


def squad_example(row: DataRow) -> Example:
    given = [] if row.values.get("is_impossible") else row.values.get("answers")
    found = dict.fromkeys(_gold(one, row.place) for one in given or ())
    golds = None if given is None else tuple(found)
    return Example(row.text("question"), row.text("context"), golds, id=str(row["id"]))


def _gold(answer: Any, place: str) -> tuple[str, int]:
    try:
        return str(answer["text"]), int(answer["answer_start"])
    except (KeyError, TypeError, ValueError):
        raise BadRow(
            place,
            "an answer must have a text and an answer_start, not {answer!r:.60}",
            answer=answer,
        ) from None


def squad_pair(row: DataRow) -> Example:
    """A question and its paragraph."""
    return Example(row.text("question"), row.text("context"), 0, id=str(row["id"]))


# ------------------------------------------------------------------ named entities

DOCUMENT_MARK = "-DOCSTART-"


def conll_sentences(path: Path, split: str | None = None, word: int = 0) -> Iterator[DataRow]:
    """Sentences between blank lines, a word a line: its column, and the last for its tag."""
    wide = 0  # the number of columns, set by the first valid line
    for ends, lines in groupby(
        text_lines(path), key=lambda n: not n[1].strip() or n[1].startswith(DOCUMENT_MARK)
    ):
        pairs: list[tuple[str, str]] = []
        broken = ""
        begun = 1
        for number, line in lines if not ends else ():
            if split is not None and line.startswith((";", "$")) and split not in line:
                continue
            begun = begun if pairs else number
            columns = line.split(split)
            if fault := _fault(columns, word, wide, bare=split is None and line[0].isspace()):
                broken = broken or msg(
                    "line {number} {fault}, not {line!r:.40}", number=number, fault=fault, line=line
                )
                continue
            wide = len(columns)
            pairs.append((columns[word].strip(), columns[-1].strip()))
        if broken:
            yield BrokenRow({}, f"{path}:{begun}", broken)
        elif pairs:
            words, tags = map(list, zip(*pairs, strict=True))
            yield DataRow({"words": words, "tags": tags}, f"{path}:{begun}")


# klp2016: number, morpheme, part of speech, tag; the lines ; and $ before them hold the sentence
klp_sentences = partial(conll_sentences, split="\t", word=1)


def _fault(columns: list[str], word: int, wide: int, *, bare: bool) -> str:
    """What is wrong with a line, if anything; `bare`: it starts with the space before a tag."""
    if bare or len(columns) < word + 2 or not columns[word].strip():
        return msg("must hold a word and a tag")
    other = wide not in (0, len(columns))
    return msg("must have {wide} columns like the lines before it", wide=wide) if other else ""


def tagging_example(row: DataRow) -> Example:
    """Words and their tags, converted to IOB2."""
    words = tuple(row["words"])
    return Example(" ".join(words), label=tuple(iob2(row["tags"], row.place)), words=words)


def iob2(tags: list[str], place: str) -> list[str]:
    """Converts IOB1, IOB2, BIOES, B_PS and bare I tags to IOB2 (B- begins, I- continues)."""
    named: list[str] = []
    for tag in tags:
        if tag == "I" and named and named[-1] != "O":  # klp2016 does not repeat the label
            tag = f"I-{named[-1][2:]}"
        if tag != "O" and (tag[:1] not in "BIESLU" or tag[1:2] not in ("-", "_")):
            raise BadRow(place, "{tag!r} is not a tag such as O, B-PER or I-PER", tag=tag)
        named.append(tag)
    marked = ["O"] * len(tags)
    for label, first, last in entities(named):
        marked[first : last + 1] = [f"B-{label}", *[f"I-{label}"] * (last - first)]
    return marked
