"""Few-shot examples: drawn for each item with a seed, never the item itself (GPT-3 §2.4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from malmoi.errors import UsageError
from malmoi.evaluation.task import Example


def shuffled(size: int, rng: Random) -> Iterator[int]:
    """A lazy random permutation of 0 … size − 1: the pool may hold a million."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = rng.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def is_same_question(one: Example, other: Example) -> bool:
    """Whether two examples ask the same, wherever they come from."""
    return (one.text, one.pair, one.choices) == (other.text, other.pair, other.choices)


def draw_examples(
    pool: Sequence[Example], item: Example, seed: int, number: int
) -> Iterator[Example]:
    """Yields labelled examples for item `number`, without repetition and never the item itself."""
    places = shuffled(len(pool), Random(f"{seed}:{number}"))
    return (
        pool[i] for i in places if pool[i].label is not None and not is_same_question(pool[i], item)
    )


@dataclass(frozen=True)
class Shots:
    """The number of examples: fixed, or as many as fit."""

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
