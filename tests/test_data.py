"""From documents to batches: the store survives kills, the samplers are pure and hold the papers' rates."""

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malmoi.data import Store, Stores, Windows, build, encode, journal
from malmoi.data.permute import Draws, key, permute, permute_all
from malmoi.data.split import assign, cut
from malmoi.errors import MalmoiError, UsageError

SHARED = Path(__file__).parents[2] / "shared"


@dataclass(frozen=True)
class Text:
    text: str


@dataclass
class Docs:
    """A reader over a list."""

    texts: list[str]

    def __iter__(self) -> Iterator[Text]:
        return iter([Text(text) for text in self.texts])

    def fingerprint(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


@dataclass
class Words:
    """A tokenizer of words: w17 is token 17."""

    vocab_size: int = 60_000
    seen: list[str] = field(default_factory=list)

    def ids(self, texts: list[str]) -> list[list[int]]:
        self.seen += texts
        return [[int(word[1:]) for word in text.split()] for text in texts]

    def fingerprint(self) -> str:
        return f"words{self.vocab_size}"


def lines(text: str) -> list[str]:
    return text.split("\n")


def corpus(documents: int = 40, seed: int = 0) -> Docs:
    """Documents of 2 to 12 sentences of 1 to 9 words; word d*100+s in document d, sentence s."""
    rng = random.Random(seed)
    return Docs(
        [
            "\n".join(" ".join([f"w{100 + d * 100 + s}"] * rng.randint(1, 9)) for s in range(rng.randint(2, 12)))
            for d in range(documents)
        ]
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return build(corpus(400), Words(), tmp_path_factory.mktemp("store"), sentences=lines, valid=0.1)


# ---- the store


def test_store_holds_every_token_document_and_sentence(tmp_path: Path) -> None:
    docs, told = corpus(60), []
    made = build(docs, Words(), tmp_path, sentences=lines, valid=0.2, end=7, progress=told.append)
    assert made.how == "built"
    assert told[-1].documents == 60
    split = list(assign(docs, 0.2, 0))
    for store, part in ((made.train, False), (made.valid, True)):
        texts = [text for text, valid in split if valid is part]
        wanted = [[[int(w[1:]) for w in sentence.split()] for sentence in lines(text)] for text in texts]
        for document in wanted:
            document[-1].append(7)
        assert store.tokens.tolist() == [t for d in wanted for s in d for t in s]
        assert np.diff(store.documents).tolist() == [sum(map(len, d)) for d in wanted]
        assert np.diff(store.sentences).tolist() == [len(s) for d in wanted for s in d]
        assert store.bytes == sum(len(text) for text in texts)
        assert store.end == 7
        assert store.tokens.dtype == np.uint16
    assert 2 < len(made.valid) < 30


def test_store_is_reused_or_rebuilt(tmp_path: Path) -> None:
    docs, words = corpus(), Words()
    build(docs, words, tmp_path, sentences=lines)
    seen = len(words.seen)
    assert build(docs, words, tmp_path, sentences=lines).how == "reused"
    assert len(words.seen) == seen
    assert build(docs, words, tmp_path).how == "rebuilt because the settings changed"
    assert not (tmp_path / "train" / "sentences.bin").exists()
    assert build(corpus(41), words, tmp_path).how == "rebuilt because the text changed"
    assert "tokenizer" in build(corpus(41), Words(70_000), tmp_path).how
    assert Store.open(tmp_path / "train").tokens.dtype == np.uint32
    os.truncate(tmp_path / "valid" / "tokens.bin", 1)
    assert "damaged" in build(corpus(41), Words(70_000), tmp_path).how


def test_one_document_is_split_by_position(tmp_path: Path) -> None:
    text = " ".join(f"w{i}" for i in range(1000))
    made = build(Docs([text]), Words(), tmp_path, valid=0.1)
    assert made.train.tokens.tolist() + made.valid.tokens.tolist() == list(range(1000))
    assert 80 < len(made.valid.tokens) < 120
    assert made.train.bytes + made.valid.bytes == len(text)


@given(st.integers(2, 60), st.floats(0.001, 0.6), st.integers(0, 1 << 40))
def test_split_keeps_order_and_always_validates(count: int, share: float, seed: int) -> None:
    split = list(assign(Docs([f"w{i}" for i in range(count)]), share, seed))
    assert [text for text, _ in split] == [f"w{i}" for i in range(count)]
    assert any(valid for _, valid in split)
    assert not split[0][1]
    assert not any(valid for _, valid in assign(Docs(["a", "b", "c"]), 0, seed))


@given(st.text(alphabet="ab \n", max_size=400))
def test_cut_loses_nothing_and_keeps_words(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("malmoi.data.split.PIECE", 16)
        pieces = cut(text)
    assert "".join(pieces) == text
    if all(len(word) < 12 for word in text.split()) and "   " not in text.replace("\n", " "):
        assert [word for piece in pieces for word in piece.split()] == text.split()


def test_bad_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MalmoiError, match="is not there"):
        Store.open(tmp_path)
    with pytest.raises(MalmoiError, match="no text"):
        build(Docs(["", " "]), Words(), tmp_path / "empty")
    with pytest.raises(UsageError, match="valid=1"):
        build(corpus(), Words(), tmp_path, valid=1)
    train = build(corpus(), Words(), tmp_path / "whole").train.folder
    about = (train / "store.json").read_text()
    (train / "store.json").write_text(about[:40])
    with pytest.raises(MalmoiError, match="not readable"):
        Store.open(train)
    (train / "store.json").write_text(about.replace('"format": 1', '"format": 9'))
    with pytest.raises(MalmoiError, match="another version"):
        Store.open(train)
    (train / "store.json").write_text(about)
    os.truncate(train / "documents.bin", 8)
    with pytest.raises(MalmoiError, match=r"documents.bin is damaged: 8 bytes"):
        Store.open(train)
    (train / "store.json").unlink()
    with pytest.raises(MalmoiError, match="half-written"):
        Store.open(train)


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH", 500)
    docs, words, write = corpus(), Words(), journal.Appender._write
    room = [20_00]

    def full(self: journal.Appender, name: str, array: np.ndarray) -> None:
        room[0] -= array.nbytes
        if room[0] < 0:
            write(self, name, array[: len(array) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, array)

    monkeypatch.setattr(journal.Appender, "_write", full)
    with pytest.raises(MalmoiError, match="disk is full"):
        build(docs, words, tmp_path / "a")
    monkeypatch.setattr(journal.Appender, "_write", write)
    again = Words()
    made = build(docs, again, tmp_path / "a")
    assert made.how.startswith("continued after")
    assert 0 < len(again.seen) < len(docs.texts)
    build(docs, words, tmp_path / "b")
    assert _content(tmp_path / "a") == _content(tmp_path / "b")


def _content(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


CHILD = """
import sys, time
sys.path[:0] = {path!r}
import test_data as t
from malmoi.data import build, encode
encode.BATCH = 400
class Slow(t.Words):
    def ids(self, texts):
        time.sleep(0.004)
        return super().ids(texts)
print("ready", flush=True)
build(t.corpus(300), Slow(), sys.argv[1], sentences=t.lines)
"""


def test_killed_builds_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    rng = random.Random(1)
    script = CHILD.format(path=[str(Path(__file__).parent)])
    kills, code = 0, None
    while code != 0:
        child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "a")], stdout=subprocess.PIPE)
        with child:
            child.stdout.readline()
            time.sleep(rng.uniform(0.02, 0.35) if kills < 6 else 0)
            if kills < 6 and child.poll() is None:
                child.send_signal(signal.SIGKILL)
                kills += 1
        code = child.returncode
        assert code in (0, -signal.SIGKILL)
    assert kills >= 2
    build(corpus(300), Words(), tmp_path / "b", sentences=lines)
    assert _content(tmp_path / "a") == _content(tmp_path / "b")


def test_reading_errors_reach_the_caller(tmp_path: Path) -> None:
    class Broken(Docs):
        def __iter__(self) -> Iterator[Text]:
            yield Text("w1 w2")
            raise MalmoiError("line 2 is bad")

    with pytest.raises(MalmoiError, match="line 2 is bad"):
        build(Broken([]), Words(), tmp_path)


# ---- positions are computed


@given(st.integers(1, 3000), st.integers(0, (1 << 64) - 1))
def test_permute_is_a_bijection(size: int, secret: int) -> None:
    image = permute_all(np.arange(size), size, secret)
    assert sorted(image.tolist()) == list(range(size))
    assert permute(size // 2, size, secret) == image[size // 2]


def test_permute_mixes() -> None:
    size = 1 << 20
    image = permute_all(np.arange(1000), size, key(3))
    assert abs(np.corrcoef(np.arange(1000), image)[0, 1]) < 0.15
    assert abs(image.mean() / size - 0.5) < 0.05
    counts = np.zeros((5, 5))
    for secret in range(2000):
        counts[np.arange(5), permute_all(np.arange(5), 5, key(secret))] += 1
    assert np.abs(counts - 400).max() < 5 * 20  # five standard deviations


def test_draws_are_uniform_and_keyed_by_row() -> None:
    whole = Draws(5, np.arange(100, 300)).random((200, 64))
    part = Draws(5, [150]).random((1, 64))
    assert np.array_equal(whole[50], part[0])
    assert abs(whole.mean() - 0.5) < 0.01
    assert np.abs(np.histogram(whole, 16, (0, 1))[0] - 800).max() < 5 * 28
    assert np.abs(np.corrcoef(whole.T) - np.eye(64)).max() < 0.4
    again = Draws(5, [150])
    assert not np.array_equal(again.random((1, 8)), again.random((1, 8)))
    assert not np.array_equal(Draws(6, [150]).random((1, 8)), part[:, :8])


# ---- windows


@settings(max_examples=60)
@given(st.integers(2, 40), st.integers(0, 300), st.integers(0, 9))
def test_windows_take_every_place_once_an_epoch(context: int, extra: int, seed: int) -> None:
    tokens = np.arange(context + 1 + extra)
    store = Store(Path("x"), tokens, np.array([0, len(tokens)]), None, {"end": None})
    windows = Windows(store, context, seed)
    for epoch in range(3):
        starts = windows.starts(np.arange(len(windows)) + epoch * len(windows))
        assert len({*starts.tolist()}) == len(windows)
        assert all(b - a == context for a, b in pairwise(sorted(starts.tolist())))
        assert starts.min() >= 0
        assert starts.min() < context
        assert starts.max() + context < len(tokens)
    assert len(windows) >= (len(tokens) - 1) // context - 1
    index = 2 * len(windows)
    assert windows.sample(index).tolist() == list(
        range(windows.starts(index)[0], windows.starts(index)[0] + context + 1)
    )


def test_windows_shift_and_tell_documents(tmp_path: Path) -> None:
    store = build(corpus(200), Words(), tmp_path, end=7).train
    windows = Windows(store, 32, 0, documents=True)
    assert len({int(windows.starts(epoch * len(windows))[0] % 32) for epoch in range(20)}) > 5
    batch = windows.batch(range(50))
    for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
        assert documents.tolist() == [tokens[:i].tolist().count(7) for i in range(33)]
    with pytest.raises(MalmoiError, match=r"has 5 tokens, fewer than one context of 8"):
        Windows(Store(Path("x"), np.arange(5), np.array([0, 5]), None, {"end": None}), 8, 0)
