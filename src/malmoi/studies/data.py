"""Text and tasks of a study: public data sets if a folder has them, else made from the text."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

from malmoi.demo.texts import SPEECHES
from malmoi.errors import require_that
from malmoi.evaluation.kinds import KINDS, custom_task
from malmoi.evaluation.tasks import Task, named_task
from malmoi.system.files import folder_lock, write_json, write_text
from malmoi.system.packages import read_toml
from malmoi.text.documents import read_documents
from malmoi.text.rows import DataRow
from malmoi.text.sentences import sentence_splitter

T = TypeVar("T")
BUILTIN = "builtin:sotu"
HELD_OUT_EACH = 12  # one document in this many is held out
FEW_DOCUMENTS = 60  # with fewer, the end of each document is held out instead
MANY_DOCUMENTS = 2000  # with fewer, each is shortened if only part of the text is used
MADE_ROWS = {"train": 4000, "dev": 1000}
WORDS_OF_A_SENTENCE = range(6, 30)
FEWEST_CAPITALS = 3  # per sentence; with fewer, short training learns to predict none
CAPITALS_AND_DIGITS = 0.2  # share of a sentence's characters, at most
MOST_ORDERED_WORDS = 14  # a pair has to fit into a small model's context


@dataclass(frozen=True)
class StudyTask:
    """A task of a study: its column, its role, its files and the number of rows to use."""

    name: str
    role: str  # sentence, acceptability, pair, similarity, tokens, span, summary, minimal pairs…
    task: str  # the name of a task, or a kind whose columns are text, pair and label
    dev: Path
    train: Path | None = None
    train_rows: int = 0  # 0: all
    dev_rows: int = 0

    def load(self) -> Task:
        """Returns the task with files cut to the rows that the study uses, sampled evenly."""
        pair = "pair" if self.role in ("pair", "minimal pairs") else None
        found = custom_task(self.task, pair=pair) if self.task in KINDS else named_task(self.task)
        limits = {self.train: self.train_rows, self.dev: self.dev_rows}

        def rows(path: Path) -> Iterable[DataRow]:
            every = list(found.rows(path))
            return evenly(every, limits.get(path) or len(every))

        return replace(found, rows=rows)


def evenly(rows: Sequence[T], count: int) -> list[T]:
    """So many of the rows, or all."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


SETTINGS: dict[str, Any] = read_toml("malmoi.studies", "settings.toml")
TASKS: dict[str, list[list[str]]] = SETTINGS["tasks"]


@dataclass(frozen=True)
class StudyData:
    """Training text, held-out text, tasks, and the folders with data sets."""

    text: tuple[str, ...]
    held_out: Path
    tasks: tuple[StudyTask, ...]
    folders: tuple[Path, ...] = ()

    @classmethod
    def prepare(cls, out: Path, sources: Sequence[str], characters: int = 0) -> "StudyData":
        """Splits the text and makes the tasks that no folder has, once, in a folder.

        Folders are searched for data sets in their public formats; other sources are text, of which
        `characters` are used, sampled evenly (0: all). Without text, uses the folders' `text/` or
        the demo's speeches.
        """
        folders = tuple(Path(one) for one in sources if Path(one).is_dir())
        texts = [one for one in sources if not Path(one).is_dir()]
        texts = texts or [str(f / "text") for f in folders if (f / "text").is_dir()] or [BUILTIN]
        public = list(public_tasks(folders))
        out.mkdir(parents=True, exist_ok=True)
        made_of = [*texts, characters, *(str(task.dev) for task in public)]
        with folder_lock(out, wait=True):
            if not (out / "made.json").is_file():
                _make(out, texts, characters, {task.role for task in public})
                write_json(out / "made.json", made_of)
        require_that(
            json.loads((out / "made.json").read_text("utf-8")) == made_of,
            "{out} was made from a different text or at another scale: choose another --out.",
            out=out,
        )
        return cls(
            (str(out / "train.jsonl"),), out / "held-out.txt", (*public, *_made_tasks(out)), folders
        )

    def of(self, *roles: str, dev_rows: int = 0) -> list[StudyTask]:
        """The first available task of each role."""
        first = {task.role: task for task in reversed(self.tasks)}
        return [replace(first[role], dev_rows=dev_rows) for role in roles if role in first]

    def file(self, pattern: str) -> Path | None:
        """The first matching file in the folders, for data that is not a task: PTB, WikiText…"""
        return _first(self.folders, pattern)


def public_tasks(
    folders: Sequence[Path], data_sets: Sequence[Sequence[str]] = TASKS["public"]
) -> Iterator[StudyTask]:
    """The data sets that the folders have."""
    for name, role, task, inside, train, dev in data_sets:
        places = [sorted(folder.rglob(inside)) if inside else [folder] for folder in folders]
        found_train = _first(chain(*places), train) if train else None
        found_dev = _first(chain(*places), dev)
        if found_dev is not None and (found_train is not None or not train):
            yield StudyTask(name, role, task, found_dev, found_train)


def _first(folders: Iterable[Path], pattern: str) -> Path | None:
    return next(
        (p for folder in folders for p in sorted(folder.rglob(pattern)) if p.is_file()), None
    )


# ------------------------------------------------------------------ made from the text

# role → the columns that its tasks may have, public data sets first
_COLUMNS = [(name, role) for name, role, *_ in (*TASKS["public"], *TASKS["made"])]
ROLE_COLUMNS = {role: [name for name, of in _COLUMNS if of == role] for _, role in _COLUMNS}


def _made_tasks(out: Path) -> Iterator[StudyTask]:
    for name, role, task in TASKS["made"]:
        train, dev = (out / f"{role}.{part}.jsonl" for part in ("train", "dev"))
        if dev.is_file():
            yield StudyTask(name, role, task, dev, train)


def _make(out: Path, sources: Sequence[str], characters: int, filled: set[str]) -> None:
    """train.jsonl, held-out.txt, and rows for the roles that no data set fills."""
    parts = _split([document.text for document in read_documents(sources)], characters)
    require_that(
        parts["dev"], "{named} is too short for a study: give more text.", named=", ".join(sources)
    )
    write_rows(out / "train.jsonl", ({"text": text} for text in parts["train"]))
    write_text(out / "held-out.txt", "\n\n".join(parts["dev"]))
    makers = {role: make for role, make in ROW_MAKERS.items() if role not in filled}
    for part, texts in parts.items():
        sentences = [w for text in texts for w in _sentences(text)] if makers else []
        for role, make in makers.items():
            rows = islice(make(sentences, random.Random(role)), MADE_ROWS[part])
            write_rows(out / f"{role}.{part}.jsonl", rows)
        if list(sources) == [BUILTIN] and "sentence" not in filled:
            write_rows(out / f"sentence.{part}.jsonl", islice(_eras(part), MADE_ROWS[part]))


def _split(texts: Sequence[str], characters: int) -> dict[str, list[str]]:
    size = sum(map(len, texts))
    if characters and size > characters:
        texts = _part(texts, characters / size)
    if len(texts) >= FEW_DOCUMENTS:
        return _held_out_each(texts)
    cuts = [(text, len(text) - len(text) // HELD_OUT_EACH) for text in texts]
    ends = [text[cut:] for text, cut in cuts if text[cut:].strip()]
    return {"train": [text[:cut] for text, cut in cuts], "dev": ends}


def _held_out_each(documents: Sequence[T]) -> dict[str, list[T]]:
    return {
        "train": [one for i, one in enumerate(documents) if (i + 1) % HELD_OUT_EACH],
        "dev": list(documents[HELD_OUT_EACH - 1 :: HELD_OUT_EACH]),
    }


def _part(texts: Sequence[str], share: float) -> list[str]:
    """An evenly sampled share of the documents; if they are few, the beginning of each."""
    if len(texts) >= MANY_DOCUMENTS:
        return evenly(texts, int(share * len(texts)))
    ends = (text.find(" ", int(share * len(text))) for text in texts)
    return [text if end < 0 else text[:end] for text, end in zip(texts, ends, strict=True)]


def _sentences(text: str) -> Iterator[list[str]]:
    """Sentences of a document as lists of words, with an empty list between paragraphs."""
    split = sentence_splitter("rules")
    for paragraph in text.split("\n\n"):
        for sentence in split(" ".join(paragraph.split())):
            words = sentence.split()
            yield words if len(words) in WORDS_OF_A_SENTENCE and _is_prose(words) else []
        yield []


def _is_prose(words: Sequence[str]) -> bool:
    """Few capitals and digits: no row of a table, no title, both of which have many tokens."""
    text = "".join(words)
    return sum(c.isupper() or c.isdigit() for c in text) <= CAPITALS_AND_DIGITS * len(text)


Sentences = Sequence[Sequence[str]]
Row = dict[str, Any]


def _next_rows(sentences: Sentences, rng: random.Random) -> Iterator[Row]:
    """Does the second sentence follow the first in the text?"""
    some = [words for words in sentences if words]
    pairs = [(a, b) for a, b in pairwise(sentences) if a and b]
    for first, second in rng.sample(pairs, min(len(pairs), MADE_ROWS["train"])):
        follows = rng.random() < 0.5
        pair = second if follows else rng.choice(some)
        label = "next" if follows else "other"
        yield {"text": " ".join(first), "pair": " ".join(pair), "label": label}


def _capital_rows(sentences: Sentences, rng: random.Random) -> Iterator[Row]:
    """Which words of a lower-cased sentence are written with a capital?"""
    for words in _shuffled(sentences, rng):
        tags = ["B-CAP" if word[0].isupper() else "O" for word in words[1:]]
        if tags.count("B-CAP") >= FEWEST_CAPITALS:
            yield {"text": [word.lower() for word in words[1:]], "label": tags}


def _order_rows(sentences: Sentences, rng: random.Random) -> Iterator[Row]:
    """A sentence, and the same one with two neighbouring words swapped."""
    for words in (some for some in _shuffled(sentences, rng) if len(some) <= MOST_ORDERED_WORDS):
        at = rng.randrange(1, len(words) - 2)
        wrong = [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
        if wrong != list(words):
            yield {"text": " ".join(words), "pair": " ".join(wrong)}


def _last_word_rows(sentences: Sentences, rng: random.Random) -> Iterator[Row]:
    for words in _shuffled(sentences, rng):
        yield {"text": " ".join(words).rstrip(".,;:?!\"'")}


def _shuffled(sentences: Sentences, rng: random.Random) -> list[Sequence[str]]:
    some = [words for words in sentences if words]
    return rng.sample(some, len(some))


ROW_MAKERS: dict[str, Callable[[Sentences, random.Random], Iterator[Row]]] = {
    "pair": _next_rows,
    "tokens": _capital_rows,
    "minimal pairs": _order_rows,
    "last word": _last_word_rows,
}


def _eras(part: str) -> Iterator[Row]:
    """The demo's task: the period in which a paragraph was written."""
    documents = _held_out_each([document.rows for document in SPEECHES.documents()])[part]
    rows = [row for document in documents for row in document]
    for text, label in random.Random("era").sample(rows, len(rows)):
        yield {"text": text, "label": label}


def json_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    write_text(path, json_lines(rows))
