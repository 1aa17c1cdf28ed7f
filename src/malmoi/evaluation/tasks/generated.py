"""GPT-3's tasks that are generated from a seed: arithmetic (§3.9.1), scrambled words (§3.9.2)."""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random

from malmoi.errors import MalmoiError
from malmoi.evaluation.task import Example, Task
from malmoi.messages import msg
from malmoi.text.documents import read_documents
from malmoi.text.rows import DataRow, any_rows

# ------------------------------------------------------------------ arithmetic

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
            yield _arithmetic_row(
                f"What is {a} {OPERATOR_WORDS[sign]} {b}?", OPERATORS[sign](a, b), number
            )

    return made


def three_digits(rng: Random) -> Iterator[DataRow]:
    """Three one-digit numbers, the last two in parentheses: "What is 6+(4*8)?"."""
    for number in range(1, EXAMPLES_PER_TASK + 1):
        a, b, c = (rng.randrange(10) for _ in range(3))
        first = rng.choice("+-*")
        second = rng.choice("+-*")
        yield _arithmetic_row(
            f"What is {a}{first}({b}{second}{c})?",
            OPERATORS[first](a, OPERATORS[second](b, c)),
            number,
        )


def _arithmetic_row(question: str, answer: int, number: int) -> DataRow:
    return DataRow({"question": question, "answer": str(answer)}, f"drawn:{number}")


def arithmetic_example(row: DataRow) -> Example:
    answer = row.label("answer")
    return Example(row.text("question"), label=None if answer is None else (answer,))


def _arithmetic_task(name: str, about: str, made: Callable[[Random], Iterator[DataRow]]) -> Task:
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


ARITHMETIC = (
    *(
        _arithmetic_task(
            f"{n}d{sign}",
            msg("{words}, numbers of up to {n} digits", words=OPERATOR_WORDS[sign], n=n),
            two_numbers(n, sign),
        )
        for n in (2, 3, 4, 5)
        for sign in "+-"
    ),
    _arithmetic_task("2dx", "times, numbers of up to 2 digits", two_numbers(2, "*")),
    _arithmetic_task("1dc", "two operators, three numbers of 1 digit", three_digits),
)

# ------------------------------------------------------------------ scrambled words

MAX_WORDS = 10_000  # most frequent words used (GPT-3 §3.9.2)
BUILT_IN = "builtin:sotu"  # the default source of words
WORD_PATTERN = re.compile(r"[^\W\d_]{5,14}")  # "more than 4 characters and less than 15"


def cycle_letters(word: str, rng: Random) -> str:
    """lyinevitab → inevitably."""
    at = rng.randrange(1, len(word))
    return word[at:] + word[:at]


def anagram(word: str, rng: Random, kept: int) -> str:
    """All but the first and last `kept` letters shuffled: criroptuon → corruption."""
    middle = list(word[kept:-kept])
    rng.shuffle(middle)
    return word[:kept] + "".join(middle) + word[-kept:]


def random_insertion(word: str, rng: Random) -> str:
    """Inserts a mark or a space between letters: s.u!c/c!e.s s i/o/n → succession."""
    return word[0] + "".join(rng.choice(".!/ ") + letter for letter in word[1:])


def reversed_word(word: str, rng: Random) -> str:
    """stcejbo → objects."""
    return word[::-1]


@cache
def frequent_words(source: str) -> tuple[str, ...]:
    """The most frequent words of a text, lowercased, most frequent first."""
    counts = Counter(
        word
        for document in read_documents([source])
        for word in WORD_PATTERN.findall(document.text.lower())
    )
    if not counts:
        raise MalmoiError("There are no words of 5 to 14 letters in {source}.", source=source)
    return tuple(
        word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_WORDS]
    )


Mix = Callable[[str, Random], str]


def scrambled_words(mix: Mix, rng: Random, source: str = BUILT_IN) -> Iterator[DataRow]:
    """Yields every frequent word once, in random order."""
    words = list(frequent_words(source))
    rng.shuffle(words)
    for number, word in enumerate(words, start=1):
        yield DataRow({"mixed": mix(word, rng), "word": word}, f"{source}:word {number}")


def scrambled_file(mix: Mix, path: Path) -> Iterator[DataRow]:
    """Yields scrambled words from a text of the user's."""
    return scrambled_words(mix, Random(0), str(path))


def _scramble_task(name: str, about: str, mix: Mix) -> Task:
    return Task(
        name,
        "writing",
        partial(scrambled_file, mix),
        lambda row: Example(row.text("mixed"), label=(row.text("word"),)),
        about,
        prompt="{text} =",
        separator="\n",
        metrics=("match",),
        max_answer_tokens=12,
        intro="Please unscramble the letters into a word, and write that word:\n",
        generated=partial(scrambled_words, mix),
    )


SCRAMBLED = (
    _scramble_task("cycle-letters", "lyinevitab = inevitably", cycle_letters),
    _scramble_task("anagram-1", "criroptuon = corruption", partial(anagram, kept=1)),
    _scramble_task("anagram-2", "opoepnnt = opponent", partial(anagram, kept=2)),
    _scramble_task("random-insertion", "s.u!c/c!e.s s i/o/n = succession", random_insertion),
    _scramble_task("reversed-words", "stcejbo = objects", reversed_word),
)

TASKS = (*ARITHMETIC, *SCRAMBLED)
