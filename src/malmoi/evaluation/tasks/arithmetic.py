"""GPT-3's arithmetic tasks (§3.9.1), generated from a seed, so that no file is needed."""

import operator
from collections.abc import Callable, Iterator
from random import Random

from malmoi.evaluation.task import Example, Task
from malmoi.text.rows import DataRow, any_rows

EXAMPLES_PER_TASK = 2000  # per task (GPT-3 §3.9.1)
OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times"}
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


def two_numbers(digits: int, sign: str) -> Callable[[Random], Iterator[DataRow]]:
    """Draws uniformly from [0, 10^digits): "What is 48 plus 76?"; differences may be negative."""

    def made(rng: Random) -> Iterator[DataRow]:
        for number in range(1, EXAMPLES_PER_TASK + 1):
            a = rng.randrange(10**digits)
            b = rng.randrange(10**digits)
            yield _row(f"What is {a} {OPERATOR_WORDS[sign]} {b}?", OPERATORS[sign](a, b), number)

    return made


def three_digits(rng: Random) -> Iterator[DataRow]:
    """Three one-digit numbers, the last two in parentheses: "What is 6+(4*8)?"."""
    for number in range(1, EXAMPLES_PER_TASK + 1):
        a, b, c = (rng.randrange(10) for _ in range(3))
        first = rng.choice("+-*")
        second = rng.choice("+-*")
        yield _row(
            f"What is {a}{first}({b}{second}{c})?",
            OPERATORS[first](a, OPERATORS[second](b, c)),
            number,
        )


def _row(question: str, answer: int, number: int) -> DataRow:
    return DataRow({"question": question, "answer": str(answer)}, f"drawn:{number}")


def arithmetic_example(row: DataRow) -> Example:
    answer = row.label("answer")
    return Example(row.text("question"), label=None if answer is None else (answer,))


def _task(name: str, about: str, made: Callable[[Random], Iterator[DataRow]]) -> Task:
    return Task(
        name,
        "writing",
        any_rows,
        arithmetic_example,
        about,
        prompt="Q: {text}\nA:",
        metrics=("match",),
        max_answer_tokens=10,
        generated=made,
    )


TASKS = (
    *(
        _task(
            f"{n}d{sign}",
            f"{OPERATOR_WORDS[sign]}, numbers of up to {n} digits",
            two_numbers(n, sign),
        )
        for n in (2, 3, 4, 5)
        for sign in "+-"
    ),
    _task("2dx", "times, numbers of up to 2 digits", two_numbers(2, "*")),
    _task("1dc", "two signs, three numbers of 1 digit", three_digits),
)
