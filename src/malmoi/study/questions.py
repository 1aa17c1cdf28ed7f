"""What the models are asked: tasks of held-out words, one for each rule and parameter, with and without instruction."""

from collections.abc import Iterator
from functools import partial
from random import Random

from malmoi.study.documents import Items
from malmoi.study.rules import Rule
from malmoi.tasks import Example, Task
from malmoi.tasks.rows import Row, any_rows

ROWS = 64  # of a task: questions, and what their examples are drawn from
MOST = 16  # characters of an answer: a space, seven letters doubled, the line's end


def questions(rule: Rule, items: Items, number: int, *, instructed: bool) -> Task:
    """A rule with the parameter that this number draws; the same rows with the instruction and without."""
    return Task(
        f"{rule.name}/{number}", "write", any_rows, _example, prompt="{text} =", between="\n", most=MOST,
        intro=f"{rule.instruction}\n" if instructed else "", made=partial(_rows, rule, items),
    )  # fmt: skip


def _rows(rule: Rule, items: Items, rng: Random) -> Iterator[Row]:
    hidden, some = items.hidden(rule, rng), items.of(rule)
    for number, one in enumerate(rng.sample(some, min(ROWS, len(some))), start=1):
        x, y = rule.pair(one, hidden, rng)
        yield Row({"x": x, "y": y}, f"{rule.name}:{number}")


def _example(row: Row) -> Example:
    return Example(row.text("x"), None, (row.text("y"),), "", row.place)
