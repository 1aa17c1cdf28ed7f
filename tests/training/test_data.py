"""From documents to batches: the store survives kills, the samplers are pure and hold the
papers' rates.
"""

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from conftest import exit_code_of
from malmoi.errors import MalmoiError, UsageError
from malmoi.system.progress import listening
from malmoi.tokenizer import Tokenizer, word_cache
from malmoi.training.data import encode
from malmoi.training.data.background import prefetched
from malmoi.training.data.encode import Stores, assign, build_stores, cut, draw
from malmoi.training.data.loader import IGNORE_LABEL, BertBatches, Masking, mask
from malmoi.training.data.pairs import Pairs, Spans, truncate
from malmoi.training.data.permute import Draws, permutation_key, permute_all
from malmoi.training.data.store import Appender, Store
from malmoi.training.data.windows import Mixture, Windows
from malmoi.training.recipe import DataConfig
from malmoi.training.recipes import resolve_recipe

SHARED = Path(__file__).parents[3] / "shared"


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

    def encode_texts(self, texts: list[str]) -> word_cache.EncodedTexts:
        return word_cache.encode_plainly(self.ids, texts)

    def fingerprint(self) -> str:
        return f"words{self.vocab_size}"


@dataclass(frozen=True)
class Specials:
    pad: int | None = 0
    unk: int | None = 1
    cls: int | None = 2
    sep: int | None = 3
    mask: int | None = 4
    eos: int | None = None


@dataclass(frozen=True)
class Vocabulary:
    """Thirds of the ids continue a word."""

    vocab_size: int = 60_000
    specials: Specials = Specials()

    def token(self, id: int) -> str:
        return f"##{id}" if id % 3 == 0 else f"{id}"


def lines(text: str) -> list[str]:
    return text.split("\n")


def corpus(documents: int = 40, seed: int = 0) -> Docs:
    """Documents of 2 to 12 sentences of 1 to 9 words; word d*100+s in document d, sentence s."""
    rng = random.Random(seed)
    return Docs(
        [
            "\n".join(
                " ".join([f"w{100 + d * 100 + s}"] * rng.randint(1, 9))
                for s in range(rng.randint(2, 12))
            )
            for d in range(documents)
        ]
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return build_stores(
        corpus(400), Words(), tmp_path_factory.mktemp("store"), sentences=lines, valid=0.1
    )


# ---- the store


def test_store_holds_every_token_document_and_sentence(tmp_path: Path) -> None:
    docs, told = corpus(60), []
    with listening(told.append):
        made = build_stores(docs, Words(), tmp_path, sentences=lines, valid=0.2, end=7)
    assert made.how == "built"
    assert told[-1].done == 60
    split = list(assign((d.text for d in docs), 0.2, 0))
    for store, part in ((made.train, False), (made.valid, True)):
        texts = [text for text, valid in split if valid is part]
        wanted = [
            [[int(w[1:]) for w in sentence.split()] for sentence in lines(text)] for text in texts
        ]
        for document in wanted:
            document[-1].append(7)
        assert store.tokens.tolist() == [t for d in wanted for s in d for t in s]
        assert np.diff(store.documents).tolist() == [sum(map(len, d)) for d in wanted]
        assert np.diff(store.sentences).tolist() == [len(s) for d in wanted for s in d]
        assert store.about["bytes"] == sum(len(text) for text in texts)
        assert store.end == 7
        assert store.tokens.dtype == np.uint16
    assert 2 < len(made.valid) < 30


def test_store_is_reused_or_rebuilt(tmp_path: Path) -> None:
    docs, words = corpus(), Words()
    build_stores(docs, words, tmp_path, sentences=lines)
    seen = len(words.seen)
    assert build_stores(docs, words, tmp_path, sentences=lines).how == "reused"
    assert len(words.seen) == seen
    assert build_stores(docs, words, tmp_path).how == "rebuilt because the settings changed"
    assert not (tmp_path / "train" / "sentences.bin").exists()
    assert build_stores(corpus(41), words, tmp_path).how == "rebuilt because the text changed"
    assert "tokenizer" in build_stores(corpus(41), Words(70_000), tmp_path).how
    assert Store.open(tmp_path / "train").tokens.dtype == np.uint32
    os.truncate(tmp_path / "valid" / "tokens.bin", 1)
    assert "damaged" in build_stores(corpus(41), Words(70_000), tmp_path).how


def test_one_document_is_split_by_position(tmp_path: Path) -> None:
    text = " ".join(f"w{i}" for i in range(1000))
    made = build_stores(Docs([text]), Words(), tmp_path, valid=0.1)
    assert made.train.tokens.tolist() + made.valid.tokens.tolist() == list(range(1000))
    assert 80 < len(made.valid.tokens) < 120
    assert made.train.about["bytes"] + made.valid.about["bytes"] == len(text)


def test_a_long_last_document_validates_in_part() -> None:
    words = " ".join(f"w{i}" for i in range(9000))
    (first, _), (second, trains), (rest, validates) = assign(["w1 w2", words], 0.02, 0)
    assert (first, second + rest, trains, validates) == ("w1 w2", words, False, True)
    assert 0.01 < len(rest) / len(words) < 0.03


@given(st.integers(2, 60), st.floats(0.001, 0.6), st.integers(0, 1 << 40))
def test_split_keeps_order_and_always_validates(count: int, share: float, seed: int) -> None:
    split = list(assign([f"w{i}" for i in range(count)], share, seed))
    assert [text for text, _ in split] == [f"w{i}" for i in range(count)]
    assert any(valid for _, valid in split)
    assert not split[0][1]
    assert not any(valid for _, valid in assign(["a", "b", "c"], 0, seed))


@given(st.text(alphabet="ab \n", max_size=400))
def test_cut_loses_nothing_and_keeps_words(text: str) -> None:
    pieces = cut(text, most=16)
    assert "".join(pieces) == text
    if all(len(word) < 12 for word in text.split()) and "   " not in text.replace("\n", " "):
        assert [word for piece in pieces for word in piece.split()] == text.split()


def test_a_part_of_the_text_is_drawn_evenly() -> None:
    short = [(f"document {i} " + "word " * (i % 9), i % 10 == 0) for i in range(4000)]
    long = [(" ".join(f"w{k}" for k in range(60_000)), False)] * 3
    for fraction in (0.05, 0.3):
        drawn = list(draw([*short, *long], fraction))
        assert [one for one in drawn if one[1]] == [one for one in short if one[1]]
        some = [text for text, valid in drawn if not valid and text.startswith("document")]
        assert len(some) == pytest.approx(3600 * fraction, rel=0.1)
        places = [int(text.split()[1]) for text in some]
        assert np.mean(places) == pytest.approx(2000, rel=0.1)  # from everywhere
        stretches = [text for text, _ in drawn if text.startswith("w")]
        assert len(stretches) == 3
        for text in stretches:
            numbers = [int(word[1:]) for word in text.split()]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert len(text) == pytest.approx(fraction * len(long[0][0]), rel=0.01)
        assert len({text[:20] for text in stretches}) == 3
    fewer, more = (set(draw(short, fraction)) for fraction in (0.05, 0.3))
    assert fewer < more
    assert list(draw(short, 1.0)) == short


def test_bad_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MalmoiError, match="is not there"):
        Store.open(tmp_path)
    with pytest.raises(MalmoiError, match="no text"):
        build_stores(Docs(["", " "]), Words(), tmp_path / "empty")
    train = build_stores(corpus(), Words(), tmp_path / "whole").train.folder
    about = (train / "store.json").read_text()
    (train / "store.json").write_text(about[:40])
    with pytest.raises(MalmoiError, match="does not describe a token store"):
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


def test_a_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "JOURNAL_BYTES", 500)
    docs, words, append = corpus(), Words(), Appender.append
    room = [20_00]

    def full(self: Appender, tokens: np.ndarray, *lengths: Any) -> None:
        room[0] -= tokens.nbytes
        if room[0] < 0:
            append(self, tokens[: len(tokens) // 2], *lengths)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, tokens, *lengths)

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append", full)
        with pytest.raises(MalmoiError, match="disk is full"):
            build_stores(docs, words, tmp_path / "a")
    again = Words()
    made = build_stores(docs, again, tmp_path / "a")
    assert made.how.startswith("continued after")
    assert 0 < len(again.seen) < len(docs.texts)
    build_stores(docs, words, tmp_path / "b")
    assert _content(tmp_path / "a") == _content(tmp_path / "b")


def _content(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def build_until(call: int, folder: Path) -> None:
    """Builds stores, and is killed at this call of the tokenizer."""
    calls = count()

    class Mortal(Words):
        def ids(self, texts: list[str]) -> list[list[int]]:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().ids(texts)

    encode.JOURNAL_BYTES = 400
    build_stores(corpus(300), Mortal(), folder, sentences=lines)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_killed_builds_resume_to_the_same_bytes(tmp_path: Path) -> None:
    """Killed in the middle of a text: of the first one, of later ones; the last build survives."""
    for call, code in ((0, -signal.SIGKILL), (20, -signal.SIGKILL), (35, -signal.SIGKILL), (-1, 0)):
        assert exit_code_of(build_until, call, tmp_path / "a") == code
    build_stores(corpus(300), Words(), tmp_path / "b", sentences=lines)
    assert _content(tmp_path / "a") == _content(tmp_path / "b")


def _tokenizers() -> list[Tokenizer]:
    folder = SHARED / "tokenizers"
    if not folder.is_dir():
        pytest.skip("the shared tokenizers are not here")
    return [
        Tokenizer.load(folder / name)
        for name in ("gpt2", "openai-gpt", "bert-base-uncased", "koelectra")
    ]


def test_long_documents_encode_as_a_whole() -> None:
    text = "The  quick brown fox,\n\n didn't jump\t over 1,234 dogs. " * 60
    for tokenizer in _tokenizers():
        pieces = cut(text, most=300)
        assert len(pieces) > 5
        assert [id for piece in tokenizer.ids(pieces) for id in piece] == tokenizer.ids([text])[0]


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_much_text_takes_little_memory(tmp_path: Path) -> None:
    if not (tokenizer := SHARED / "tokenizers" / "gpt2").is_dir():
        pytest.skip("the shared tokenizers are not here")
    script = (
        "import resource, sys\n"
        "from malmoi.text.documents import read_documents; from malmoi.text.sentences import "
        "split_sentences\nfrom malmoi.training.data.encode import build_stores\nfrom "
        "malmoi.tokenizer import Tokenizer\n"
        "build_stores(read_documents(sys.argv[1]), Tokenizer.load(sys.argv[2]), sys.argv[3], "
        "sentences=split_sentences)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    common = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(200_000)]
    with (tmp_path / "text.txt").open("w") as file:
        size = 0
        while size < 1_000_000_000:
            size += file.write(
                " ".join(common[int(len(common) * rng.random() ** 4)] for _ in range(2000)) + ".\n"
            )
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            str(tmp_path / "text.txt"),
            str(tokenizer),
            str(tmp_path / "store"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout) / 1024 < 1024  # MiB, for a gigabyte of text


def test_reading_errors_reach_the_caller(tmp_path: Path) -> None:
    class Broken(Docs):
        def __iter__(self) -> Iterator[Text]:
            yield Text("w1 w2")
            raise MalmoiError("line 2 is bad")

    with pytest.raises(MalmoiError, match="line 2 is bad"):
        build_stores(Broken([]), Words(), tmp_path)


# ---- positions are computed


@given(st.integers(1, 3000), st.integers(0, (1 << 64) - 1))
def test_permute_is_a_bijection(size: int, secret: int) -> None:
    image = permute_all(np.arange(size), size, secret)
    assert sorted(image.tolist()) == list(range(size))


def test_permute_mixes() -> None:
    size = 1 << 20
    image = permute_all(np.arange(1000), size, permutation_key(3))
    assert abs(np.corrcoef(np.arange(1000), image)[0, 1]) < 0.15
    assert abs(image.mean() / size - 0.5) < 0.05
    counts = np.zeros((5, 5))
    for secret in range(2000):
        counts[np.arange(5), permute_all(np.arange(5), 5, permutation_key(secret))] += 1
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
    assert windows.batch([index])["tokens"][0].tolist() == list(
        range(windows.starts(index)[0], windows.starts(index)[0] + context + 1)
    )


def test_windows_shift_and_tell_documents(tmp_path: Path) -> None:
    store = build_stores(corpus(200), Words(), tmp_path, end=7).train
    windows = Windows(store, 32, 0, documents=True)
    assert len({int(windows.starts(epoch * len(windows))[0] % 32) for epoch in range(20)}) > 5
    batch = windows.batch(range(50))
    for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
        assert documents.tolist() == [tokens[:i].tolist().count(7) for i in range(33)]
    with pytest.raises(MalmoiError, match=r"has 5 tokens, fewer than one context of 8"):
        Windows(Store(Path("x"), np.arange(5), np.array([0, 5]), None, {"end": None}), 8, 0)


def test_shuffled_documents_are_whole_and_in_another_order_every_epoch(tmp_path: Path) -> None:
    store = build_stores(corpus(50), Words(), tmp_path, end=7).train
    windows = Windows(store, 16, 3, shuffled=True)
    edges = store.documents
    known = {tuple(store.tokens[a:b].tolist()) for a, b in pairwise(edges.tolist())}
    orders = []
    for epoch in range(2):
        numbers = np.arange(len(windows)) + epoch * len(windows)
        order = np.argsort(windows.starts(numbers))
        text = windows.batch(numbers[order])["tokens"][:, :16].reshape(-1).tolist()
        ends = [i + 1 for i, token in enumerate(text) if token == 7]
        documents = [tuple(text[a:b]) for a, b in pairwise(ends)]
        assert len(documents) > 40
        assert all(document in known for document in documents)
        orders.append(documents)
    assert orders[0] != orders[1]
    assert sorted(windows.batch([5, 2])["tokens"][1]) == sorted(windows.batch([2])["tokens"][0])


# ---- pairs


def _parts(tokens: np.ndarray) -> tuple[list[int], list[int]]:
    """A and B of one sample without padding."""
    ids = tokens.tolist()
    assert ids[0] == 2
    assert ids[-1] == 3
    middle = ids.index(3)
    return ids[1:middle], ids[middle + 1 : -1]


def test_nsp_pairs_hold_the_papers_rates(stores: Stores) -> None:
    pairs = Pairs(stores.train, 32, 3, specials=Specials())
    batch = pairs.batch(np.arange(20_000))
    assert abs(batch["labels"].mean() - 0.5) < 5 * 0.5 / 20_000**0.5
    assert batch["lengths"].max() == 32
    whole = stores.train.tokens.tolist()
    for row in range(0, 20_000, 10):
        length = batch["lengths"][row]
        a, b = _parts(batch["tokens"][row, :length])
        assert batch["segments"][row, :length].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert not batch["tokens"][row, length:].any()
        # whole documents, never across
        assert len({t // 100 for t in a}) == len({t // 100 for t in b}) == 1
        assert (a[0] // 100 != b[0] // 100) == batch["labels"][row]
        if not batch["labels"][row]:
            assert a[-1] <= b[0]  # sentences are numbered in their document
        for part in (a, b):
            at = whole.index(part[0])
            assert any(whole[i : i + len(part)] == part for i in range(at, at + 10))


def test_pairs_cover_the_text_and_shorten_a_tenth(stores: Stores) -> None:
    long = build_stores(
        corpus(80, seed=4), Words(), stores.train.folder.parent / "long", sentences=lines
    ).train
    pairs = Pairs(long, 16, 0, specials=Specials(), next=None, short=0)
    seen = np.unique(pairs.batch(np.arange(8 * len(pairs)))["tokens"])
    assert len(np.setdiff1d(np.unique(long.tokens), seen)) <= 0.01 * len(np.unique(long.tokens))
    words = Docs([" ".join(["w9"] * 4000)] * 2)
    flat = build_stores(
        words, Words(), stores.train.folder.parent / "flat", sentences=lambda t: t.split(), valid=0
    ).train
    batch = Pairs(flat, 128, 0, specials=Specials()).batch(np.arange(10_000))
    # ends of documents are short as well
    assert abs((batch["lengths"] < 127).mean() - 0.1 * 123 / 125) < 0.03
    assert batch["lengths"].min() == 3 + 2


def test_sop_pairs_are_swapped_by_half(stores: Stores) -> None:
    pairs = Pairs(stores.train, 32, 3, specials=Specials(), next="sop")
    batch = pairs.batch(np.arange(4000))
    assert abs(batch["labels"].mean() - 0.5) < 5 * 0.5 / 4000**0.5
    for row in range(4000):
        length = batch["lengths"][row]
        a, b = _parts(batch["tokens"][row, :length])
        assert batch["segments"][row, :length].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        first, second = (b, a) if batch["labels"][row] else (a, b)
        assert first[0] // 100 == second[0] // 100
        assert first[-1] < second[0] or len({*first, *second}) == 1


def test_pairs_are_pure_functions_of_their_number(stores: Stores) -> None:
    for way in ("nsp", "sop", None):
        pairs = Pairs(stores.train, 24, 5, specials=Specials(), next=way)
        numbers = [7, 3 * len(pairs) + 1, 0]
        batch = pairs.batch(numbers)
        for row, number in enumerate(numbers):
            for name, (alone,) in pairs.batch([number]).items():
                assert np.array_equal(
                    np.atleast_1d(alone), np.atleast_1d(batch[name][row])[: np.size(alone)]
                )
    assert not np.array_equal(
        pairs.batch(np.arange(8))["lengths"], pairs.batch(np.arange(8) + len(pairs))["lengths"]
    )


@given(
    st.integers(1, 300), st.integers(0, 300), st.integers(2, 125), st.floats(0, 1, exclude_max=True)
)
def test_truncation_equals_googles_code(a: int, b: int, room: int, draw: float) -> None:
    left, right = a, b
    while left + right > room:
        left, right = (left - 1, right) if left > right else (left, right - 1)
    spans = (Spans(np.array([0]), np.array([a])), Spans(np.array([1000]), np.array([1000 + b])))
    first, second = truncate(*spans, room, np.array([[draw], [draw * 0.7]]))
    assert (first.length[0], second.length[0]) == (left, right)
    assert first.start[0] >= 0
    assert first.stop[0] <= a
    assert second.start[0] >= 1000
    assert second.stop[0] <= 1000 + b


def test_truncation_tosses_fair_coins() -> None:
    n = 50_000
    spans = (Spans(np.zeros(n, int), np.full(n, 60)), Spans(np.full(n, 100), np.full(n, 160)))
    first, second = truncate(*spans, 100, Draws(0, np.arange(n)).random((n, 2)).T)
    for front in (first.start, second.start - 100):
        assert abs(front.mean() - 5) < 0.05
        assert abs(front.std() - (10 / 4) ** 0.5) < 0.05
    assert abs(np.corrcoef(first.start, second.start)[0, 1]) < 0.03


def test_missing_inputs_of_pairs_are_reported(tmp_path: Path, stores: Stores) -> None:
    plain = build_stores(corpus(), Words(), tmp_path / "plain").train
    with pytest.raises(MalmoiError, match="without sentences"):
        Pairs(plain, 32, 0, specials=Specials())
    one = build_stores(
        Docs(["w1 w2\nw3 w4"]), Words(), tmp_path / "one", sentences=lines, valid=0
    ).train
    with pytest.raises(MalmoiError, match="needs two documents"):
        Pairs(one, 32, 0, specials=Specials())
    assert (
        Pairs(one, 32, 0, specials=Specials(), others=stores.train)
        .batch(np.arange(50))["labels"]
        .any()
    )
    with pytest.raises(MalmoiError, match=r"no \[CLS\]"):
        Pairs(stores.train, 32, 0, specials=Specials(cls=None))
    with pytest.raises(UsageError, match="no room"):
        Pairs(stores.train, 4, 0, specials=Specials())
    with pytest.raises(MalmoiError, match="no document"):
        Pairs(
            build_stores(corpus(), Words(), tmp_path / "none", sentences=lines, valid=0).valid,
            32,
            0,
            specials=Specials(),
        )


# ---- masking


def test_masking_holds_its_rates_exactly() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 60_000, (2000, 128))
    tokens[:, 0], tokens[:, 60] = 2, 3
    lengths = rng.integers(3, 129, 2000)
    how = Masking.of(Vocabulary(), DataConfig())
    maskable = ~how.special[tokens] & (np.arange(128) < lengths[:, None])
    corrupted, labels = mask(tokens, maskable, rng, how)
    chosen = labels != IGNORE_LABEL
    assert np.array_equal(chosen.sum(1), np.maximum(1, np.rint(0.15 * maskable.sum(1))))
    assert not (chosen & ~maskable).any()
    assert np.array_equal(labels[chosen], tokens[chosen])
    assert np.array_equal(corrupted[~chosen], tokens[~chosen])
    n = chosen.sum()
    masked, kept = (corrupted[chosen] == 4).mean(), (corrupted == tokens)[chosen].mean()
    assert abs(masked - 0.8) < 5 * (0.16 / n) ** 0.5
    assert abs(kept - 0.1) < 5 * (0.09 / n) ** 0.5
    random_ones = corrupted[chosen & (corrupted != 4) & (corrupted != tokens)]
    assert random_ones.min() >= 5
    assert abs(random_ones.mean() / 60_000 - 0.5) < 0.05
    places = (chosen & (lengths[:, None] == 128)).sum(0)
    assert places[[0, 60]].sum() == 0
    one, _ = mask(tokens[3], maskable[3], Draws(0, [3]), how)
    assert one.shape == (128,)


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(4, 60))
def test_whole_words_are_googles_greedy_choice(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 100, (6, width))
    tokens[:, 0] = 2
    how = Masking.of(Vocabulary(100), DataConfig(whole_word=True, mask_rate=0.3))
    maskable = ~how.special[tokens]
    _, labels = mask(tokens, maskable, np.random.default_rng(seed), how)
    scores = np.random.default_rng(seed).random(tokens.shape)
    for row in range(6):
        words: list[list[int]] = []
        for place in np.flatnonzero(maskable[row]).tolist():
            if how.starts[tokens[row, place]] or not words or not maskable[row, place - 1]:
                words.append([])
            words[-1].append(place)
        count, taken = max(1, round(0.3 * int(maskable[row].sum()))), []
        for number in sorted(range(len(words)), key=lambda number: scores[row, number]):
            if len(taken) + len(words[number]) <= count:
                taken += words[number]
        if not taken:
            taken = words[int(np.argmin(scores[row, : len(words)]))][:count]
        assert np.flatnonzero(labels[row] != IGNORE_LABEL).tolist() == sorted(taken)


def test_masking_refuses_what_cannot_be() -> None:
    with pytest.raises(MalmoiError, match=r"no \[MASK\]"):
        Masking.of(Vocabulary(specials=Specials(mask=None)), DataConfig())
    with pytest.raises(UsageError, match="more than 1 together"):
        resolve_recipe("bert-tiny", {"data.mask_token": 0.9, "data.mask_random": 0.2})


# ---- mixtures


class Numbers:
    """A source whose sample n is n."""

    def __init__(self, size: int, offset: int = 0, width: int = 1):
        self.size, self.offset, self.width = size, offset, width

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        numbers = np.asarray(indices) + self.offset
        return {"tokens": np.repeat(numbers[:, None], self.width, 1), "labels": numbers}


@settings(max_examples=30)
@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=6), st.integers(0, 9))
def test_mixture_has_exact_weights_and_misses_nothing(weights: list[float], seed: int) -> None:
    mixture = Mixture([Numbers(100)] * len(weights), weights, seed)
    count = 1 << 20
    source, local = mixture.pick(np.arange(0, 64 * 1024))
    for number, weight in enumerate(weights):
        mine = np.sort(local[source == number])
        # every sample once, in its source's own order
        assert mine.tolist() == list(range(len(mine)))
        assert abs(len(mine) - 64 * 1024 * weight / sum(weights)) < 66
    assert sum(mixture.units) == count
    later, place = mixture.pick(np.arange(1024) + 5 * count)
    first, start = mixture.pick(np.arange(1024))
    assert np.array_equal(np.bincount(later), np.bincount(first))
    for number, unit in enumerate(mixture.units):
        if (later == number).any():
            assert place[later == number].min() == start[first == number].min() + 5 * unit
    assert np.abs(mixture.units / 2**20 - np.array(weights) / sum(weights)).max() < 6e-6


def test_mixture_cycle_is_exact_and_batches_keep_order() -> None:
    mixture = Mixture([Numbers(1000), Numbers(50, 10_000_000, 3)], [0.73, 0.27])
    source, local = mixture.pick(np.arange(1 << 20))
    # 2^20 × 0.73 = 765460.48
    assert np.bincount(source).tolist() == mixture.units.tolist() == [765460, 283116]
    assert np.array_equal(np.sort(local[source == 1]), np.arange(283116))
    numbers = np.array([5, 70_000, 3])
    batch = mixture.batch(numbers)
    wanted = [int(l + 10_000_000 * s) for s, l in zip(*mixture.pick(numbers), strict=True)]
    assert batch["labels"].tolist() == wanted
    assert batch["tokens"][:, 0].tolist() == wanted
    with pytest.raises(UsageError, match="one weight for each"):
        Mixture([Numbers(1)], [1, 2])
    with pytest.raises(UsageError, match="positive"):
        Mixture([Numbers(1)], [0])


# ---- batches


@pytest.mark.parametrize("whole_word", [False, True])
def test_packed_and_padded_batches_agree(stores: Stores, whole_word: bool) -> None:
    pairs = Pairs(stores.train, 32, 0, specials=Specials())
    how = Masking.of(Vocabulary(), DataConfig(whole_word=whole_word))
    padded = BertBatches(pairs, how, 0, 0, own_masks=0.5).at(72, 24)
    packed = BertBatches(pairs, how, 0, 0, packed=True, own_masks=0.5).at(72, 24)
    assert padded["tokens"].shape[1] % 8 == 0
    total = int(padded["keep"].sum())
    size = packed["tokens"].shape[1]
    assert size % 128 == 0
    assert packed["bounds"].tolist() == [0, *np.cumsum(padded["keep"].sum(1)), size]
    assert packed["bounds"].dtype == np.int32
    for name in ("tokens", "segments"):
        assert np.array_equal(packed[name][0, :total], padded[name][padded["keep"]])
    assert np.array_equal(packed["tokens"][0, packed["firsts"]], np.full(24, 2))
    for document in range(24):
        here = packed["documents"][0] == document
        assert packed["positions"][0, here].tolist() == list(range(int(here.sum())))
    assert (packed["documents"][0, total:] == 24).all()
    real = [
        {label: batch["mlm_labels"] != IGNORE_LABEL}
        for label, batch in (("a", padded), ("b", packed))
    ]
    assert real[0]["a"].sum() == real[1]["b"].sum() > 24
    for name in ("mlm_labels", "own_labels"):
        assert np.array_equal(padded[name][real[0]["a"]], packed[name][real[1]["b"]])
    own = padded["own_labels"] != IGNORE_LABEL
    assert np.array_equal(padded["own_labels"][own], padded["mlm_labels"][own])
    assert 0.3 < own.sum() / real[0]["a"].sum() < 0.7
    flat = padded["tokens"].reshape(-1)[padded["mlm_slots"][real[0]["a"]]]
    assert np.array_equal(flat, packed["tokens"][0][packed["mlm_slots"][real[1]["b"]]])
    assert (padded["mlm_slots"][~real[0]["a"]] == 0).all()
    assert np.array_equal(padded["nsp_labels"], packed["nsp_labels"])


def test_processes_share_a_batch_and_shapes_are_stable(stores: Stores) -> None:
    pairs = Mixture([Pairs(stores.train, 32, s, specials=Specials()) for s in (1, 2)], [2, 1])
    how = Masking.of(Vocabulary(), DataConfig())
    batches = BertBatches(pairs, how, 0, 0)
    one = batches.at(80, 16)
    halves = [batches.at(80, 8), batches.at(88, 8)]
    for name in ("tokens", "segments", "keep"):
        rows = [
            row[row_keep]
            for half in halves
            for row, row_keep in zip(half[name], half["keep"], strict=True)
        ]
        assert all(
            np.array_equal(a, b[k]) for a, b, k in zip(rows, one[name], one["keep"], strict=True)
        )
    some = [batches.at(16 * step, 16) for step in range(30)]
    shapes = {(b["tokens"].shape, b["mlm_slots"].shape) for b in some}
    assert len(shapes) == len({tokens for tokens, _ in shapes})


def test_prefetching_works_ahead_and_stops_cleanly() -> None:
    source = iter(range(7, 100))
    with prefetched(source, ahead=4) as ahead:
        assert [next(ahead) for _ in range(5)] == list(range(7, 12))
    assert not any(thread.name.startswith("malmoi-data") for thread in threading.enumerate())
    assert 12 <= next(source) <= 16

    def failing() -> Iterator[int]:
        yield 1
        raise MalmoiError("the disk went away")

    with prefetched(failing()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(MalmoiError, match="went away"):
            next(ahead)
        with pytest.raises(StopIteration):
            next(ahead)
