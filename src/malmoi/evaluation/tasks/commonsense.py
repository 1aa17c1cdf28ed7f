"""Zero-shot tasks of GPT-2 and GPT-3: PIQA, ARC, Winograd, WinoGrande, HellaSwag, BoolQ, CBT.

Each reads its authors' format; multiple-choice tasks also read `query, choices, gold`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from malmoi.evaluation.task import Example, Task
from malmoi.evaluation.tasks.choice import query_example
from malmoi.evaluation.tasks.glue import YES_NO
from malmoi.text.rows import BadRow, DataRow, any_rows, text_lines


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
    if key is not None and key not in marks:
        raise BadRow(
            row.place, "the answer {key!r} is not one of {marks}", key=key, marks=", ".join(marks)
        )
    prefix = question["stem"] if nested else row.text("question")
    choices = tuple(text for _, text in pairs)
    return Example(
        prefix,
        label=None if key is None else marks.index(key),
        id=str(row.values.get("id", "")),
        choices=choices,
    )


def winograd(row: DataRow) -> Example:
    """Pronoun resolution: contexts with a continuation, or a gap _ with two options."""
    if "sentence" in row.values:
        before, gap, after = row.text("sentence").partition("_")
        if not gap:
            raise BadRow(row.place, "the sentence has no gap _")
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
    endings = tuple(map(str, row["endings"]))
    return Example(
        row.text("ctx"),
        label=row.whole("label"),
        id=str(row.values.get("ind", "")),
        choices=endings,
    )


def boolq(row: DataRow) -> Example:
    """A passage and a yes/no question; the label is true or false, or 1 or 0."""
    found = row.label("label", "answer")
    known = {"true": "1", "false": "0", "1": "1", "0": "0", "yes": "1", "no": "0"}
    if found is not None and found.lower() not in known:
        raise BadRow(row.place, "the answer must be true or false, not {found!r}", found=found)
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
    if "XXXXX" not in row["question"] or row["answer"] not in options:
        raise BadRow(row.place, "there must be a gap XXXXX, and its word among the candidates")
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

TASKS = (PIQA, ARC, HELLASWAG, WINOGRAD, WINOGRANDE, CBT, BOOLQ, QUERIES)
