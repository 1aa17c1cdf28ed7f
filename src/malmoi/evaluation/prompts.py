"""Prompts of a task: examples as text, with every possible answer, and templates for them."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from malmoi.errors import UsageError, explained, nearest, require_known, require_that, required
from malmoi.evaluation.task import Example, Task
from malmoi.messages import msg
from malmoi.metrics.labels import entities
from malmoi.system.packages import read_toml

NO_ANSWER = "unanswerable"  # the answer if the context holds none
NO_NAMES = "none"
LABEL_COMMA = ", "
SQUAD_PROMPT = "{pair}\nQuestion: {text}\nAnswer:"
TEMPLATE_FIELDS = {
    "prompt": str,
    "answers": dict,
    "intro": str,
    "suffix": str,
    "separator": str,
    "max_answer_tokens": int,
}


@dataclass(frozen=True)
class TaskPrompt:
    """A query, its possible continuations (reference texts if generated), and which one is right.

    `ending` follows the continuation. If `partial`, it alone is scored: p(ending | query, choice),
    so that choices of unequal likelihood compete on the same words (Trinh & Le 2018 §3).
    """

    query: str
    choices: tuple[str, ...]
    gold: int | None
    ending: str = ""
    partial: bool = False
    written: bool = False  # the answer is generated, not chosen

    @property
    def shown(self) -> str:
        """The prompt with its right answer, as an example for other items."""
        gold = required(
            self.gold,
            "An example without an answer cannot be used in a prompt: {query!r:.80}.",
            query=self.query,
        )
        return self.query + self.choices[gold] + self.ending


def answer_cue(task: Task) -> str:
    """The cue for scoring an answer alone: the prompt's last line, or "Answer:" (GPT-3 §2.4)."""
    last = task.prompt.rpartition("\n")[2].strip()
    return last if last and "{" not in last else "Answer:"


def _query(task: Task, example: Example) -> str:
    with explained(
        (KeyError, IndexError, ValueError),
        "The prompt of {task} may name {{text}} and {{pair}} only, not {error}.",
        raises=UsageError,
        task=task.name,
    ):
        return task.prompt.format(text=example.text, pair=example.pair or "")


def _written_prompt(task: Task, example: Example, *golds: str) -> TaskPrompt:
    """Asks for an answer that is generated; `golds` are right."""
    known = 0 if golds and example.label is not None else None
    answers = tuple(f" {gold}" for gold in golds)
    return TaskPrompt(_query(task, example), answers, known, written=True)


def classification_prompt(task: Task, example: Example) -> TaskPrompt:
    names = task.labels or tuple(task.answers)
    gold = names.index(example.label) if example.label in names else None
    answers = tuple(f" {task.answers.get(name, name)}" for name in names)
    return TaskPrompt(_query(task, example), answers, gold, task.suffix)


def multilabel_prompt(task: Task, example: Example) -> TaskPrompt:
    """Asks for all labels of a text, as a list: " anger, fear"."""
    held = [task.answers.get(name, name) for name in example.label or ()]
    return _written_prompt(task, example, LABEL_COMMA.join(held) or NO_NAMES)


def parse_labels(answer: str, task: Task) -> tuple[str, ...]:
    """The labels in a generated list; anything that is not a label of the task is dropped."""
    named = {part.strip() for part in answer.split(LABEL_COMMA.strip())}
    return tuple(name for name in task.labels if task.answers.get(name, name) in named)


def regression_prompt(task: Task, example: Example) -> TaskPrompt:
    """Offers numbers as words; an example shows the nearest."""
    values = [float(value) for value in task.answers]
    require_that(
        values, "The task {task} has no prompt: it lists no numbers to answer with.", task=task.name
    )
    near = None
    if example.label is not None:
        near = min(range(len(values)), key=lambda i: abs(values[i] - example.label))
    answers = tuple(f" {word}" for word in task.answers.values())
    return TaskPrompt(_query(task, example), answers, near, task.suffix)


def choice_prompt(task: Task, example: Example) -> TaskPrompt:
    query = _query(task, example)
    space = " " if query and not query[-1].isspace() else ""
    if not task.gap:
        choices = tuple(space + choice for choice in example.choices)
        return TaskPrompt(query, choices, example.label, task.suffix)
    before, _, rest = (example.pair or "_").partition("_")
    query = f"{query}{space}{before}".rstrip()
    fills = tuple((" " if query else "") + choice for choice in example.choices)
    if task.gap == "rest":
        return TaskPrompt(query, fills, example.label, rest, partial=True)
    return TaskPrompt(query, tuple(fill + rest for fill in fills), example.label)


def answer_prompt(task: Task, example: Example) -> TaskPrompt:
    golds = dict.fromkeys(text for text, _ in example.label or ())
    return _written_prompt(task, example, *(golds or (NO_ANSWER,)))


def tagging_prompt(task: Task, example: Example) -> TaskPrompt:
    """Asks for the entities and their labels in order: " EU (ORG); German (MISC)"."""
    spans = sorted(entities(example.label or ()), key=lambda span: span[1])
    named = [f"{' '.join(example.words[a : b + 1])} ({label})" for label, a, b in spans]
    return _written_prompt(task, example, "; ".join(named) or NO_NAMES)


def parse_tags(answer: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Each word's tag from generated entities; entities not in the text are dropped."""
    tags = ["O"] * len(words)
    for part in answer.split(";"):
        name, _, label = part.strip().removesuffix(")").rpartition(" (")
        parts = tuple(name.split())
        places = range(len(words)) if parts and label else ()
        free = (i for i in places if words[i : i + len(parts)] == parts and tags[i] == "O")
        start = next(free, None)
        if start is not None:
            tags[start : start + len(parts)] = [f"B-{label}", *[f"I-{label}"] * (len(parts) - 1)]
    return tuple(tags)


def cloze_prompt(task: Task, example: Example) -> TaskPrompt:
    query = _query(task, example)
    if example.label is None:
        return TaskPrompt(query, (), None, task.suffix)
    return TaskPrompt(query, (f" {example.label}",), 0, task.suffix)


def write_prompt(task: Task, example: Example) -> TaskPrompt:
    return _written_prompt(task, example, *(example.label or ()))


# ------------------------------------------------------------------ templates of a .toml file


@cache
def templates() -> dict[str, dict[str, dict[str, Any]]]:
    """All templates by task and name."""
    return read_toml("malmoi.evaluation.in_context", "templates.toml")


def templated(task: Task, name: str | None) -> Task:
    """The task with another template: by name, or from a .toml file."""
    if name is None:
        return task
    known = templates().get(task.name, {})
    if name.endswith(".toml"):
        with explained(
            (OSError, ValueError), "The template {path} cannot be read: {error}.", path=name
        ):
            given = tomllib.loads(Path(name).read_text("utf-8"))
        return _changed(task, given, name)
    hint = nearest(name, known) or msg(" Write one in a .toml file and give that file.")
    require_that(
        name in known,
        "The task {task} has no template {name!r}.{hint}",
        task=task.name,
        name=name,
        hint=hint,
    )
    return _changed(task, known[name], name)


def _changed(task: Task, given: dict[str, Any], name: str) -> Task:
    unknown = "The template {template} has an unknown field {name!r}.{hint}"
    wrong = "The template {name}: {field} must be of type {type}."
    missing = "The template {name} has no answer for the label {label!r}."
    for field, value in given.items():
        require_known(field, TEMPLATE_FIELDS, unknown, template=name)
        kind = TEMPLATE_FIELDS[field]
        require_that(isinstance(value, kind), wrong, name=name, field=field, type=kind.__name__)
    for label in task.labels:
        require_that(label in given.get("answers", task.answers), missing, name=name, label=label)
    return replace(task, **given)
