"""The texts that the demo can learn from, and a task on each."""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from malmoi.text.sources import KOREAN_TEXTS, korean_pieces, sotu_messages

TASK = "order"  # names the label's column and the model's folder
# a sentence, or its words in random order: counting words cannot tell
ORDERS = {"en": ("sentence", "shuffled"), "ko": ("문장", "뒤섞은 말")}
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
    labels: tuple[str, str]  # of a sentence, and of one whose words are shuffled
    prompts: tuple[str, ...]
    masked: tuple[str, ...]
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


SPEECHES = DemoText(
    source="builtin:sotu",
    documents=_messages,
    rule="file",
    out="demo",
    title="Two language models from 12 MB of speeches",
    about="Every State of the Union message since 1790.",
    labels=ORDERS["en"],
    prompts=(
        "The state of the Union is",
        "My fellow Americans,",
        "We must",
        "The people of the United States",
    ),
    masked=(
        "The [MASK] of the United States is strong.",
        "I ask the [MASK] to pass this bill.",
        "We are at [MASK] with all nations.",
    ),
    attended="The Congress must act now to protect the people.",
    example="we will put a man on the moon",
)


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


PIECES = DemoText(
    source="builtin:korean",
    documents=_pieces,
    rule="blank",
    out="demo-ko",
    title="Two language models from short Korean pieces",
    about="Short pieces on six topics, written in Korean for this demo.",
    labels=ORDERS["ko"],
    prompts=("옛날 어느 마을에", "우리나라의 산에는", "겨울이 되면", "오늘은"),
    masked=(
        "호랑이는 깊은 산속에 [MASK].",
        "임금은 백성을 위해 새 글자를 [MASK].",
        "물이 끓으면 소금을 [MASK] 간을 맞춘다.",
    ),
    attended="할머니는 겨울밤마다 옛날이야기를 들려주셨다.",
    example="할머니는 손자에게 따뜻한 국을 끓여 주셨다",
    joined=8,
    settings={
        "bert": {
            "model.width": 64,
            "model.depth": 2,
            "model.heads": 4,
            # a first layer that sees only neighbours starts to learn at once, a full one after
            # more steps than slow cores make in the demo
            "model.attention": ["local:2", "full"],
            "train.batch": 16,
        }
    },
    repetition_penalty=1.2,  # on slow cores the GPT reads this text a few times only, and loops
)

BUILT_IN = {"en": SPEECHES, "ko": PIECES}  # by the user's language
