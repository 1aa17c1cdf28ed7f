"""Multiple choice: SWAG (Zellers et al. 2018), RACE (Lai et al. 2017), COPA (Roemmele 2011),
Story Cloze (Mostafazadeh et al. 2016); zero-shot tasks of GPT-2 and GPT-3: PIQA, ARC, Winograd,
WinoGrande, HellaSwag, BoolQ, CBT.

Each reads its authors' format; most also read `query, choices, gold`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from malmoi.evaluation.task import Example
from malmoi.messages import msg
from malmoi.text.records import Commas
from malmoi.text.rows import BrokenRow, DataRow, json_line_rows, table_rows, text_lines

LETTERS = "ABCDEFGH"  # of RACE's options
swag_rows = partial(table_rows, dialect=Commas)  # some releases have an unnamed first column


def swag(row: DataRow) -> Example:
    """A scene, the beginning of the next one, and four possible endings."""
    endings = tuple(row.text(f"ending{i}") for i in range(4))
    return Example(row.text("sent1"), row.text("sent2"), row.whole("label"), choices=endings)


def race_rows(path: Path) -> Iterator[DataRow]:
    """Reads one article per line; each of its questions becomes a row."""
    names = ("article", "questions", "options", "answers")
    for row in json_line_rows(path):
        missing = [name for name in names if name not in row.values]
        counts = {len(row.values.get(name, ())) for name in names[1:]}
        if isinstance(row, BrokenRow):
            yield row
        elif missing:
            yield BrokenRow({}, row.place, msg("there is no {missing!r}", missing=missing[0]))
        elif len(counts) > 1:
            yield BrokenRow({}, row.place, msg("questions, options and answers differ in number"))
        else:
            for question, options, answer in zip(*(row[name] for name in names[1:]), strict=True):
                one = {"question": question, "options": options, "answer": answer}
                yield DataRow({"article": row["article"], **one}, row.place)


def race(row: DataRow) -> Example:
    """An article, a question (possibly with a gap _), four options; the answer is a letter."""
    given = row.label("answer")
    known = given is None or given in LETTERS
    row.require(known, "the answer must be a letter such as A, not {given!r}", given=given)
    right = None if given is None else LETTERS.index(given)
    return Example(row.text("article"), row.text("question"), right, choices=tuple(row["options"]))


def query_example(row: DataRow) -> Example:
    """A query, its choices, and the number of the right one."""
    choices = tuple(map(str, row["choices"]))
    row.require(len(choices) >= 2, "there are fewer than two choices")
    return Example(row.text("query"), label=row.whole("gold"), choices=choices)


def copa(row: DataRow) -> Example:
    """SuperGLUE's columns (premise, cause or effect, choice1, choice2), or query, choices, gold."""
    if "query" in row.values:
        return query_example(row)
    asked = row.text("question")
    link = {"cause": "because", "effect": "so"}.get(asked)
    row.require(link, "the question must be cause or effect, not {asked!r}", asked=asked)
    return Example(
        f"{row.text('premise').rstrip('.')} {link}",
        label=row.whole("label"),
        choices=(row.text("choice1"), row.text("choice2")),
    )


def story_cloze(row: DataRow) -> Example:
    """Four sentences and two endings; AnswerRightEnding is 1 or 2, or missing in a test file."""
    story = " ".join(row.text(f"InputSentence{i}") for i in range(1, 5))
    endings = tuple(row.text(f"RandomFifthSentenceQuiz{i}") for i in (1, 2))
    right = row.whole("AnswerRightEnding") if "AnswerRightEnding" in row.values else None
    row.require(right in (1, 2, None), "AnswerRightEnding must be 1 or 2, not {right}", right=right)
    label = None if right is None else right - 1
    return Example(story, label=label, id=str(row.values.get("InputStoryid", "")), choices=endings)


# ------------------------------------------------------------------ zero-shot


def _question(row: DataRow) -> Example:
    """A query without its leading "Question:", which the prompt adds."""
    found = query_example(row)
    return replace(found, text=found.text.strip().removeprefix("Question:").strip())


def piqa(row: DataRow) -> Example:
    """A goal and two ways to reach it: goal, sol1, sol2, label (Bisk et al. 2020)."""
    if "query" in row.values:
        return _question(row)
    return Example(
        row.text("goal"), label=row.whole("label"), choices=(row.text("sol1"), row.text("sol2"))
    )


def arc(row: DataRow) -> Example:
    """School science: a question, lettered or numbered choices, answerKey (Clark et al. 2018)."""
    if "query" in row.values:
        return _question(row)
    question = row["question"]
    nested = isinstance(question, dict)
    stem = question["stem"] if nested else row.text("question")
    given = question["choices"] if nested else row["choices"]
    if nested:
        given = {name: [one[name] for one in given] for name in ("label", "text")}
    key, marks = row.label("answerKey"), given["label"]
    known = key is None or key in marks
    row.require(known, "the answer {key!r} is not one of {marks}", key=key, marks=", ".join(marks))
    right = None if key is None else marks.index(key)
    return Example(
        stem, label=right, id=str(row.values.get("id", "")), choices=tuple(given["text"])
    )


def winograd(row: DataRow) -> Example:
    """Pronoun resolution: contexts with a continuation, or a gap _ with two options."""
    if "sentence" in row.values:
        before, gap, after = row.text("sentence").partition("_")
        row.require(gap, "the sentence has no gap _")
        right = row.whole("answer")
        label = None if right is None else right - 1
        return Example(
            before.strip(), f"_{after}", label, choices=(row.text("option1"), row.text("option2"))
        )
    contexts = [str(context).split() for context in row["context_options"]]
    columns = zip(*(context[:-1] for context in contexts), strict=False)
    shared = len(list(takewhile(lambda some: len(set(some)) == 1, columns)))
    fills = tuple(" ".join(context[shared:]) for context in contexts)
    rest = f"_ {row.text('continuation').strip()}"
    return Example(" ".join(contexts[0][:shared]), rest, row.whole("gold"), choices=fills)


def hellaswag(row: DataRow) -> Example:
    """A scene and its possible endings: ctx, four endings, label (Zellers et al. 2019)."""
    endings = tuple(map(str, row["endings"]))
    named = str(row.values.get("ind", ""))
    return Example(row.text("ctx"), label=row.whole("label"), id=named, choices=endings)


def boolq(row: DataRow) -> Example:
    """A passage and a yes/no question; the label is true or false, or 1 or 0."""
    found = row.label("label", "answer")
    labels = {"true": "1", "false": "0", "1": "1", "0": "0", "yes": "1", "no": "0"}
    label = found and labels.get(found.lower())
    known = found is None or label
    row.require(known, "the answer must be true or false, not {found!r}", found=found)
    return Example(row.text("passage"), row.text("question"), label)


def cbt_rows(path: Path) -> Iterator[DataRow]:
    """Reads 20 lines of a story; the 21st has a gap XXXXX and ten candidates (Hill et al. 2016)."""
    lines: list[str] = []
    for number, line in text_lines(path):
        mark, _, text = line.partition(" ")
        if mark.isdigit() and mark != "21":
            lines.append(text)
        elif mark == "21":
            question, *rest = (part.strip() for part in text.split("\t"))
            answer, options = (rest[0], rest[-1].split("|")) if rest else ("", [])
            found = {"question": question, "answer": answer, "options": options}
            yield DataRow({"story": " ".join(lines), **found}, f"{path}:{number}")
            lines = []


def cbt(row: DataRow) -> Example:
    options = tuple(row["options"])
    row.require(
        "XXXXX" in row["question"] and row["answer"] in options,
        "there must be a gap XXXXX, and its word among the candidates",
    )
    question = row.text("question").replace("_", " ").replace("XXXXX", "_", 1)
    return Example(row.text("story"), question, options.index(row["answer"]), choices=options)
