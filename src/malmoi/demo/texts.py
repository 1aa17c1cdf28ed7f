"""The texts that the demo can learn from, and a task on each."""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from malmoi.system.packages import read_toml
from malmoi.text.sources import KOREAN_TEXTS, korean_pieces, sotu_messages

TASK = "order"  # names the label's column and the model's folder
TEXTS: dict[str, dict[str, Any]] = read_toml("malmoi.demo", "texts.toml")
# a sentence, or its words in random order: counting words cannot tell
ORDERS = {language: tuple(text["labels"]) for language, text in TEXTS.items()}
SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
SENTENCE_WORDS = range(6, 15)
PUNCTUATION = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class DemoConfig:
    """The time of each part; the size of the models follows from it, the text and the machine."""

    gpt_seconds: float = 100
    bert_seconds: float = 150
    stretch: float = 2.0  # times as long at most while other programs take their share
    settings: Mapping[str, Any] = field(default_factory=dict)  # of pre-training; else by the rule
    labelled: int = 400  # training passages with a label: few, as labels are scarce in practice
    judged: int = 400  # passages of held-out documents
    updates: int = 200  # per fine-tuning run
    seeds: int = 3  # fine-tuning runs of each kind; their mean is reported
    seed: int = 0  # of the rows, the models and the samples


@dataclass(frozen=True)
class DemoDocument:
    """A document, the file it is written to, and its passages with their labels."""

    file: str
    text: str
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class DemoText:
    """A text, a classification task on it, and the prompts of the demo."""

    source: str
    documents: Callable[[], list[DemoDocument]]
    rule: Literal["blank", "file"]  # how documents are separated in the files that the demo writes
    out: str  # the default folder
    title: str
    about: str
    labels: Sequence[str]  # of a sentence, and of one whose words are shuffled
    prompts: Sequence[str]
    masked: Sequence[str]
    attended: str  # the sentence whose attention is shown
    example: str  # for `malmoi predict`
    joined: int = 1  # documents that are written as one, to fill the rows of a batch
    # of pre-training, by model; else by the rule of `malmoi pretrain`
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repetition_penalty: float = 1.0  # of the samples


def _messages() -> list[DemoDocument]:
    """Every State of the Union message."""
    chance = random.Random(0)
    texts = ((f"{message['name']}.txt", message["text"]) for message in sotu_messages())
    return [DemoDocument(name, text, list(_orders(text, "en", chance))) for name, text in texts]


def _pieces() -> list[DemoDocument]:
    """Every piece of `builtin:korean`; of its sentences, half have their words shuffled."""
    chance = random.Random(0)
    return [
        DemoDocument(path.name, piece, list(_orders(piece, "ko", chance)))
        for path in sorted(KOREAN_TEXTS.glob("*.txt"))
        for piece in korean_pieces(path)
    ]


def _orders(text: str, language: str, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Sentences as they are or shuffled: only the order tells which."""
    labels = ORDERS[language]
    for words in plain_sentences(text):
        label = chance.choice(labels)
        if label == labels[1]:
            chance.shuffle(words)
        yield " ".join(words), label


def plain_sentences(text: str) -> Iterator[list[str]]:
    """The words of each sentence of six to fourteen, without punctuation and capitals."""
    for sentence in SENTENCE_END.split(text):
        words = PUNCTUATION.sub("", sentence).lower().split()
        if len(words) in SENTENCE_WORDS:
            yield words


SPEECHES = DemoText(documents=_messages, **TEXTS["en"])
PIECES = DemoText(documents=_pieces, **TEXTS["ko"])
BUILT_IN = {"en": SPEECHES, "ko": PIECES}  # by the user's language
