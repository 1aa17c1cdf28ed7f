"""The accuracy of the words alone, which a network should beat."""

from dataclasses import replace

from malmoi.evaluation.evaluate import word_baseline
from malmoi.evaluation.task import Example
from malmoi.tokenizer import train_tokenizer


def rows(count: int, first: int) -> list[Example]:
    said = ("bad", "good")
    return [
        Example(f"{said[i % 2]} film {i}", label=str(i % 2)) for i in range(first, first + count)
    ]


def test_a_bag_of_words_is_a_baseline() -> None:
    words = train_tokenizer([row.text for row in rows(40, 0)], kind="wordpiece", vocab=120)
    assert word_baseline(rows(40, 0), rows(20, 40), ("0", "1"), words) == 1
    others = [replace(row, label=str(i // 20)) for i, row in enumerate(rows(40, 0))]
    assert word_baseline(others, rows(20, 40), ("0", "1"), words) < 1
