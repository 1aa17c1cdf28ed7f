"""Examples for an item: drawn for each with a seed, never the item itself (GPT-3 §2.4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from malmoi.errors import UsageError
from malmoi.evaluation.task import Example


def shuffled(size: int, rng: Random) -> Iterator[int]:
    """0 … size − 1 in any order, drawn only as far as they are taken: a pool may hold a million."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = rng.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def is_same_question(one: Example, other: Example) -> bool:
    """Whether two examples ask the same, wherever they stand."""
    return (one.text, one.pair, one.choices) == (other.text, other.pair, other.choices)


def draw_examples(
    pool: Sequence[Example], item: Example, seed: int, number: int
) -> Iterator[Example]:
    """Examples for item `number`, without repetition, that have an answer and are not the item."""
    places = shuffled(len(pool), Random(f"{seed}:{number}"))
    return (
        pool[i] for i in places if pool[i].label is not None and not is_same_question(pool[i], item)
    )


@dataclass(frozen=True)
class Shots:
    """How many examples are shown: a number, or as many as fit."""

    count: int
    as_many_as_fit: bool = False

    def __str__(self) -> str:
        return "max" if self.as_many_as_fit else str(self.count)


def parse_shots(given: int | str) -> list[Shots]:
    """4 → [4]; "0,1,max" → all three."""
    found = []
    for word in str(given).split(","):
        word = word.strip()
        if word == "max":
            found.append(Shots(0, as_many_as_fit=True))
        elif word.isdigit():
            found.append(Shots(int(word)))
        else:
            raise UsageError(f"The number of examples must be 0, 1, 2… or max, not {word!r}.")
    return found
