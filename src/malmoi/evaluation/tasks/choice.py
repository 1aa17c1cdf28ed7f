"""Multiple choice: SWAG (Zellers et al. 2018), RACE (Lai et al. 2017), COPA (Roemmele 2011),
Story Cloze (Mostafazadeh et al. 2016).
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from malmoi.evaluation.task import Example, Task
from malmoi.messages import msg
from malmoi.text.records import Commas
from malmoi.text.rows import BadRow, BrokenRow, DataRow, any_rows, json_line_rows, table_rows

swag_rows = partial(table_rows, dialect=Commas)  # some releases have an unnamed first column


def swag(row: DataRow) -> Example:
    """A scene, the beginning of the next one, and four possible endings."""
    endings = tuple(row.text(f"ending{i}") for i in range(4))
    return Example(row.text("sent1"), row.text("sent2"), row.whole("label"), choices=endings)


def race_rows(path: Path) -> Iterator[DataRow]:
    """Reads one article per line; each of its questions becomes a row."""
    for row in json_line_rows(path):
        names = ("article", "questions", "options", "answers")
        missing = [name for name in names if name not in row.values]
        if isinstance(row, BrokenRow):
            yield row
        elif missing:
            yield BrokenRow({}, row.place, msg("there is no {missing!r}", missing=missing[0]))
        else:
            yield from _race_questions(row)


def _race_questions(row: DataRow) -> Iterator[DataRow]:
    parts = [row[name] for name in ("questions", "options", "answers")]
    questions, options, answers = map(len, parts)
    if not questions == options == answers:
        why = msg(
            "{questions} questions, {options} lists of options, {answers} answers",
            questions=questions,
            options=options,
            answers=answers,
        )
        yield BrokenRow({}, row.place, why)
        return
    for values in zip(*parts, strict=True):
        named = dict(zip(("question", "options", "answer"), values, strict=True))
        yield DataRow({"article": row["article"], **named}, row.place)


def race(row: DataRow) -> Example:
    """An article, a question (possibly with a gap _), four options; the answer is a letter."""
    letter = row.label("answer")
    if letter is not None and letter not in "ABCDEFGH":
        raise BadRow(
            row.place, "the answer must be a letter such as A, not {letter!r}", letter=letter
        )
    right = None if letter is None else "ABCDEFGH".index(letter)
    return Example(row.text("article"), row.text("question"), right, choices=tuple(row["options"]))


def query_example(row: DataRow) -> Example:
    """A query, its choices, and the number of the right one."""
    choices = tuple(map(str, row["choices"]))
    if len(choices) < 2:
        raise BadRow(row.place, "there are fewer than two choices")
    return Example(row.text("query"), label=row.whole("gold"), choices=choices)


def copa(row: DataRow) -> Example:
    """SuperGLUE's columns (premise, cause or effect, choice1, choice2), or query, choices, gold."""
    if "query" in row.values:
        return query_example(row)
    link = {"cause": "because", "effect": "so"}.get(row.text("question"))
    if link is None:
        raise BadRow(
            row.place,
            "the question must be cause or effect, not {question!r}",
            question=row["question"],
        )
    choices = (row.text("choice1"), row.text("choice2"))
    return Example(
        f"{row.text('premise').rstrip('.')} {link}", label=row.whole("label"), choices=choices
    )


def story_cloze(row: DataRow) -> Example:
    """Four sentences and two endings; AnswerRightEnding is 1 or 2, or missing in a test file."""
    story = " ".join(row.text(f"InputSentence{i}") for i in range(1, 5))
    endings = tuple(row.text(f"RandomFifthSentenceQuiz{i}") for i in (1, 2))
    right = row.whole("AnswerRightEnding") if "AnswerRightEnding" in row.values else None
    if right not in (1, 2, None):
        raise BadRow(row.place, "AnswerRightEnding must be 1 or 2, not {right}", right=right)
    label = None if right is None else right - 1
    return Example(story, label=label, id=str(row.values.get("InputStoryid", "")), choices=endings)


SWAG = Task(
    "swag",
    "choice",
    swag_rows,
    swag,
    about="what happens next in a scene?",
    files=("train*", "val*"),
    prompt="{text} {pair}",
)
RACE = Task(
    "race",
    "choice",
    race_rows,
    race,
    about="exam questions about an article",
    prompt="{text}\nQuestion: {pair}\nAnswer:",
)
COPA = Task(
    "copa",
    "choice",
    any_rows,
    copa,
    about="which of two is the cause or the effect?",
    files=("train*", "val*"),
)

STORY_CLOZE = Task(
    "story-cloze",
    "choice",
    swag_rows,
    story_cloze,
    about="which of two endings fits a story of four sentences? (Mostafazadeh et al. 2016)",
    files=("*val*", "*test*"),  # its training stories have no wrong endings
)

TASKS = (SWAG, RACE, COPA, STORY_CLOZE)
