"""Words that are encoded once give the ids of the whole text, in C and in Python."""

import json
import zlib
from collections import Counter
from itertools import chain, product
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Rust

from malmoi.errors import MalmoiError
from malmoi.system.machine import parse_machine, pretend, this_machine
from malmoi.tokenizer import Tokenizer, core, pipeline, train_tokenizer, training, word_cache

REAL = Path(__file__).parents[3] / "shared" / "tokenizers"
TEXT = ["aZ1 the can't 가다.é\n", "“the” 「가다」 ㅋㅋ 다가 — we'll the"]
PIECES = [
    *"aZ1.,'!-_가é中 \n\t\r\x0b\x0c\x1c\x85\xa0\u3000\u200b\u0301\u1100\u1161\u11a8👍;:)\"",
    *"“”’—…·「」？ㅋㅠ\u3164\u3130\u318f\u200f\u2028\u3012",
    *(" the", "can't", "'S", "'ll", "we're", "가다.", "  ", "   ", "\n\n", " " * 40, "a" * 99),
    *(
        "[MASK]",
        "[UNK]",
        "<|endoftext|>",
        "👨\u200d👩\u200d👧",
        "Ab12",
        "##a",
        *("x" * 101, "x" * 16, "x" * 17, "가" * 5, "가" * 34, "가" * 100, "가" * 101, "x" * 501),
        *("♥", "☆★", "ÉCOLE", "naïveß", "×÷", "。、", "！", "\u24b6", "\x00"),
    ),
]
texts = st.lists(
    st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=30).map(
        "".join
    ),
    max_size=5,
)


def _tokenizers() -> list[tuple[Tokenizer, int]]:
    """Tokenizers, and how C encodes the new words of each."""
    trained = [
        (train_tokenizer(TEXT, kind=kind, vocab=320, lowercase=lower), how)
        for (kind, how), lower in product(
            [("wordpiece", 2), ("bpe", 0), ("byte-bpe", 1), ("char", 0)], [False, True]
        )
    ]
    masked = train_tokenizer(TEXT, kind="byte-bpe", vocab=320, special="mask")
    names = {"gpt2": 1, "openai-gpt": 0, "bert-base-uncased": 2, "bert-base-cased": 2}
    names |= {"koelectra": 2, "kcbert-base": 2}
    real = [(Tokenizer.load(REAL / name), how) for name, how in names.items() if REAL.is_dir()]
    return [*trained, (masked, 1), *real]


def _rows(found: word_cache.EncodedTexts) -> list[list[int]]:
    ids, lengths = found
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []


@pytest.mark.parametrize("described", ["cores=2", "cores=1", "no-compiler"])
def test_words_encode_like_whole_texts(monkeypatch: pytest.MonkeyPatch, described: str) -> None:
    monkeypatch.setattr(word_cache, "MAX_CACHED_WORDS", 80)  # forgets now and then, too
    monkeypatch.setattr(word_cache, "_SIDES", [*"a.가é"])
    tokenizers = _tokenizers()
    with pretend(parse_machine(described)):
        ways: list[Any] = [tokenizer._words for tokenizer, _ in tokenizers]
    assert all(isinstance(way, word_cache.CachedWords) for way in ways)
    if all(isinstance(cache, word_cache.NativeWords) for way in ways for cache in way.caches):
        kinds = [way.caches[0].vocabulary[0].kind for way in ways]
        assert kinds == [how for _, how in tokenizers]

    @given(texts)
    @settings(max_examples=40, deadline=None)
    def equal(some: list[str]) -> None:
        for tokenizer, _ in tokenizers:
            assert _rows(tokenizer.encode_texts(some)) == tokenizer.ids(some)

    equal()


def test_every_character_encodes_as_in_whole_texts() -> None:
    """Beside letters, digits, spaces and itself, so that what C knows is what the library knows."""
    codes = [
        *range(0x400),
        *range(0x2000, 0x3400),
        *range(0xAC00, 0xD800, 97),
        *range(0xFE00, 0xFFFF),
    ]
    some = [f"a{c}b 1{c}2 {c}{c}, {c}x가{c}" for c in map(chr, codes)]
    for tokenizer, how in _tokenizers():
        if how:
            assert _rows(tokenizer.encode_texts(some)) == tokenizer._library_ids(some)


def test_many_texts_are_cached_and_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MANY_CHARACTERS", 100)
    tokenizer = train_tokenizer(TEXT, kind="byte-bpe", vocab=300)
    some = ["the can't 가다 é " * 5, "", "the"]
    assert tokenizer.ids(some[1:]) == tokenizer._library_ids(some[1:])
    assert "_words" not in vars(tokenizer)
    assert tokenizer.ids([*some, *some]) == tokenizer._library_ids([*some, *some])
    assert "_words" in vars(tokenizer)
    with pytest.raises(MalmoiError, match="Text 1 is not valid Unicode"):
        tokenizer.ids(["the can't 가다 " * 9, "a \ud800"])


def test_words_are_cut_in_c_as_in_python() -> None:
    """Every kind of character before and after every other, and full tables."""
    sides = [
        *"aZ9.,'(가힣ㄱé中👍\x1c\x00",
        *" \n\t\r\x0b\x0c\x85\xa0\u1680\u2007\u2028\u202f\u205f\u3000",
    ]
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F600, 0x1F650)]))
    some = ["", every, *("".join(three) for three in product(sides, repeat=3))]

    def checksums(words: list[str]) -> list[list[int]]:
        return [[zlib.crc32(word.encode()) >> 1, len(word)] for word in words]

    state = pipeline.parse_pipeline(pipeline.char({"<unk>": 0}))
    wanted = _rows(word_cache.PythonWords(checksums).encode(some))
    assert list(chain.from_iterable(row[1::2] for row in wanted[:2])) != [len(every)]
    for cache in word_cache.empty_caches(checksums, state):
        assert _rows(cache.encode(some)) == wanted


@pytest.mark.parametrize(("words", "size"), [(3, 1 << 20), (9, 3)])
def test_a_full_cache_starts_anew(monkeypatch: pytest.MonkeyPatch, words: int, size: int) -> None:
    asked: list[list[str]] = []

    def lengths(some: list[str]) -> list[list[int]]:
        asked.append(some)
        return [[len(one)] for one in some]

    monkeypatch.setattr(word_cache, "MAX_CACHED_WORDS", words)
    monkeypatch.setattr(word_cache, "MAX_CACHED_BYTES", size)
    state = pipeline.parse_pipeline(pipeline.char({"<unk>": 0}))
    for described in ("cores=1", "no-compiler"):
        with pretend(parse_machine(described)):
            (cache,) = word_cache.empty_caches(lengths, state)
        assert _rows(cache.encode(["a b"])) == [[1, 2]]
        assert _rows(cache.encode(["a b c d e"])) == [[9]]  # as a whole
        assert asked[-1] == ["a b c d e"]
        assert _rows(cache.encode(["b"])) == [[1]]
        assert asked[-1] == ["b"]


def _changed(rust: Rust, **parts: dict[str, Any]) -> dict[str, Any]:
    state = pipeline.parse_pipeline(rust)
    return state | {name: state[name] | part for name, part in parts.items()}


def test_only_what_c_does_exactly_is_left_to_it() -> None:
    bytes_, pieces = (
        train_tokenizer(TEXT, kind=kind, vocab=300)._rust for kind in ("byte-bpe", "wordpiece")
    )
    assert word_cache.by_merges(_changed(bytes_)) is not None
    assert word_cache.by_pieces(_changed(pieces)) is not None
    others: list[dict[str, Any]] = [
        {"pre_tokenizer": {"add_prefix_space": True}},
        {"pre_tokenizer": {"use_regex": False}},
        *({"model": {name: True}} for name in ("ignore_merges", "byte_fallback", "fuse_unk")),
        *({"model": {name: 0.1}} for name in ("dropout",)),
        *({"model": {name: "</w>"}} for name in ("end_of_word_suffix", "unk_token")),
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "StripAccents"}},
    ]
    assert not any(word_cache.by_merges(_changed(bytes_, **parts)) for parts in others)
    others = [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"max_input_chars_per_word": 50}},
        {"model": {"continuing_subword_prefix": ""}},
        {"model": {"unk_token": "nowhere"}},
        {"normalizer": {"type": "Lowercase", "normalizers": []}},
    ]
    assert not any(word_cache.by_pieces(_changed(pieces, **parts)) for parts in others)
    for rust, way in ((bytes_, word_cache.by_merges), (pieces, word_cache.by_pieces)):
        rust.add_tokens([AddedToken("the can", special=False)])
        assert way(json.loads(rust.to_str())) is None


def test_a_tokenizer_that_joins_words_is_left_alone() -> None:
    def joined(some: list[str]) -> list[list[int]]:
        return [[len(text)] for text in some]

    state = pipeline.parse_pipeline(pipeline.char({"<unk>": 0}))
    for kind in ("bpe", "other"):
        found = word_cache.make_encoder(joined, kind, state)
        assert not isinstance(found, word_cache.CachedWords)
        assert _rows(found(["a b", "c"])) == [[3], [1]]


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
@settings(max_examples=15, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 120))
def test_merges_learnt_in_c_are_those_of_the_library(
    kind: str, documents: list[str], least: int, more: int
) -> None:
    # the library numbers what is in no block of letters by chance, and so breaks ties by chance
    letters = {*training.joinable()}
    known = [
        "".join(c for c in text if c in letters or category(c)[0] in "PZ") for text in documents
    ]
    documents = [*TEXT, *known, "aaaa aaa abababab " * 9, "가나가나가나 cabab"]

    def learn() -> Tokenizer:
        wanted = dict(kind=kind, vocab=260 + more, min_frequency=least)
        return train_tokenizer(iter(documents), **wanted)

    with pretend(parse_machine("no-compiler")):
        library = learn()
    assert learn().fingerprint() == library.fingerprint()


@pytest.mark.skipif(this_machine().compiler is None, reason="words are counted in C")
@pytest.mark.parametrize("room", [2, 20, 1000])
def test_words_are_counted_in_a_cache_of_any_size(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [*TEXT, *(" ".join(f"w{i % 7} b{i}" for i in range(j, j + 9)) for j in range(9))]
    monkeypatch.setattr(word_cache, "MAX_CACHED_WORDS", room)
    monkeypatch.setattr(word_cache, "COUNTED_CHARACTERS", 30)
    counts = word_cache.count_words(documents, many=1000)
    assert counts == Counter(chain.from_iterable(map(word_cache.WORD.findall, documents)))


@pytest.mark.skipif(this_machine().compiler is None, reason="words are counted in C")
@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
@pytest.mark.parametrize("room", [2, 1000])
def test_of_many_words_those_that_occur_once_teach_nothing(
    kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = ["said that the", *("that", "the", "that") * 9, "said that the"]
    once = [f"q{'zx' * i}" for i in range(1, 9)]
    known, every = (
        train_tokenizer(texts, kind=kind, vocab=300).fingerprint()
        for texts in (often, often + once)
    )
    monkeypatch.setattr(word_cache, "MAX_CACHED_WORDS", room)
    monkeypatch.setattr(word_cache, "COUNTED_CHARACTERS", 1)
    monkeypatch.setattr(training, "MANY_WORDS", 5)
    learnt = train_tokenizer(often + once, kind=kind, vocab=300).fingerprint()
    assert learnt == known != every
