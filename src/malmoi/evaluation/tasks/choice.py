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

from malmoi.evaluation.task import Example, Task
from malmoi.evaluation.tasks.glue import YES_NO
from malmoi.messages import msg
from malmoi.text.records import Commas
from malmoi.text.rows import (
    BadRow,
    BrokenRow,
    DataRow,
    any_rows,
    json_line_rows,
    table_rows,
    text_lines,
)

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
    row.require(
        letter is None or letter in "ABCDEFGH",
        "the answer must be a letter such as A, not {letter!r}",
        letter=letter,
    )
    right = None if letter is None else "ABCDEFGH".index(letter)
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
    row.require(right in (1, 2, None), "AnswerRightEnding must be 1 or 2, not {right}", right=right)
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
    given = question["choices"] if nested else row["choices"]
    pairs = (
        [(c["label"], c["text"]) for c in given]
        if nested
        else list(zip(given["label"], given["text"], strict=True))
    )
    key = row.label("answerKey")
    marks = [mark for mark, _ in pairs]
    row.require(
        key is None or key in marks,
        "the answer {key!r} is not one of {marks}",
        key=key,
        marks=", ".join(marks),
    )
    prefix = question["stem"] if nested else row.text("question")
    return Example(
        prefix,
        label=None if key is None else marks.index(key),
        id=str(row.values.get("id", "")),
        choices=tuple(text for _, text in pairs),
    )


def winograd(row: DataRow) -> Example:
    """Pronoun resolution: contexts with a continuation, or a gap _ with two options."""
    if "sentence" in row.values:
        before, gap, after = row.text("sentence").partition("_")
        row.require(gap, "the sentence has no gap _")
        right = row.whole("answer")
        choices = (row.text("option1"), row.text("option2"))
        return Example(
            before.strip(), f"_{after}", None if right is None else right - 1, choices=choices
        )
    contexts = [str(context).split() for context in row["context_options"]]
    shared = sum(
        1
        for _ in takewhile(
            lambda some: len(set(some)) == 1, zip(*(c[:-1] for c in contexts), strict=False)
        )
    )
    fills = tuple(" ".join(context[shared:]) for context in contexts)
    rest = f"_ {row.text('continuation').strip()}"
    return Example(" ".join(contexts[0][:shared]), rest, row.whole("gold"), choices=fills)


def hellaswag(row: DataRow) -> Example:
    """A scene and its possible endings: ctx, four endings, label (Zellers et al. 2019)."""
    return Example(
        row.text("ctx"),
        label=row.whole("label"),
        id=str(row.values.get("ind", "")),
        choices=tuple(map(str, row["endings"])),
    )


def boolq(row: DataRow) -> Example:
    """A passage and a yes/no question; the label is true or false, or 1 or 0."""
    found = row.label("label", "answer")
    known = {"true": "1", "false": "0", "1": "1", "0": "0", "yes": "1", "no": "0"}
    row.require(
        found is None or found.lower() in known,
        "the answer must be true or false, not {found!r}",
        found=found,
    )
    return Example(row.text("passage"), row.text("question"), found and known[found.lower()])


def cbt_rows(path: Path) -> Iterator[DataRow]:
    """Reads 20 lines of a story; the 21st has a gap XXXXX and ten candidates (Hill et al. 2016)."""
    lines: list[str] = []
    for number, line in text_lines(path):
        mark, _, text = line.partition(" ")
        if mark.isdigit() and mark != "21":
            lines.append(text)
        elif mark == "21":
            question, *rest = (part.strip() for part in text.split("\t"))
            story = " ".join(lines)
            lines = []
            options = rest[-1].split("|") if rest else []
            answer = rest[0] if rest else ""
            yield DataRow(
                {"story": story, "question": question, "answer": answer, "options": options},
                f"{path}:{number}",
            )


def cbt(row: DataRow) -> Example:
    options = tuple(row["options"])
    row.require(
        "XXXXX" in row["question"] and row["answer"] in options,
        "there must be a gap XXXXX, and its word among the candidates",
    )
    question = row.text("question").replace("_", " ").replace("XXXXX", "_", 1)
    return Example(row.text("story"), question, options.index(row["answer"]), choices=options)


QUESTION_PROMPT = "Question: {text}\nAnswer:"
PIQA = Task(
    "piqa", "choice", any_rows, piqa, about="how is a goal reached?", prompt=QUESTION_PROMPT
)
ARC = Task("arc", "choice", any_rows, arc, about="school science questions", prompt=QUESTION_PROMPT)
HELLASWAG = Task(
    "hellaswag",
    "choice",
    any_rows,
    hellaswag,
    about="how does a scene continue?",
    files=("*train*", "*val*"),
)
WINOGRAD = Task(
    "winograd", "choice", any_rows, winograd, about="whom does a pronoun refer to?", gap="rest"
)
WINOGRANDE = Task(
    "winogrande", "choice", any_rows, winograd, about="which of two words fits a gap?", gap="rest"
)
CBT = Task(
    "cbt", "choice", cbt_rows, cbt, about="which word is missing in a children's book?", gap="fill"
)
BOOLQ = Task(
    "boolq",
    "classification",
    any_rows,
    boolq,
    about="yes-or-no questions about a passage",
    metrics=("accuracy",),
    labels=("0", "1"),
    prompt="{text}\nQuestion: {pair}?\nAnswer:",
    answers=YES_NO,
)
QUERIES = Task(
    "prompts", "choice", any_rows, query_example, about="any JSON lines with query, choices, gold"
)

TASKS = (
    SWAG, RACE, COPA, STORY_CLOZE, PIQA, ARC, HELLASWAG, WINOGRAD, WINOGRANDE, CBT, BOOLQ, QUERIES,
)  # fmt: skip
