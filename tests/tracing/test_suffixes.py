"""What the index finds is what a search from the beginning of the text finds."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from malmoi.text.documents import read_documents
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.tracing.index import (
    IndexedStore,
    TextIndex,
    doubled_prefixes,
    sort_places,
    suffix_array,
)
from malmoi.tracing.trace import novelty, trace_text
from malmoi.training.data.encode import build_stores

numbers = st.lists(st.integers(1, 4), max_size=40)
DOCUMENTS = 12  # of a built-in text


@given(numbers)
def test_both_ways_sort_as_python_does(given_numbers: list[int]) -> None:
    text = [*given_numbers, 0]
    wanted = sorted(range(len(text)), key=lambda place: text[place:])
    array = np.array(text, np.int32)
    assert suffix_array(array).tolist() == wanted
    assert doubled_prefixes(array).tolist() == wanted


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=12), min_size=1, max_size=6))
def test_a_document_that_ends_precedes_one_that_goes_on(documents: list[list[int]]) -> None:
    tokens = np.array([token for some in documents for token in some], np.uint16)
    ends = np.cumsum([len(some) for some in documents])
    places = sort_places(tokens, ends, 301).tolist()

    def rest(place: int) -> bytes:
        stop = ends[np.searchsorted(ends, place, "right")]
        return tokens[place:stop].tobytes()

    assert sorted(places) == list(range(len(tokens)))
    ordered = [rest(place) for place in places]
    assert ordered == sorted(ordered)


# ------------------------------------------------------------------ real text


def texts_of(source: str) -> list[str]:
    found = [document.text for document in read_documents([source])]
    return [text[:4000] for text in found[:: len(found) // DOCUMENTS][:DOCUMENTS]]


def indexed(
    texts: list[str], tokenizer: Tokenizer, folder: Path, *, end: int | None = None
) -> TextIndex:
    file = folder / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    build_stores(read_documents([str(file)]), tokenizer, folder / "data", valid=0, end=end)
    return TextIndex(tokenizer, (IndexedStore.open(folder / "data" / "train"),))


def grep(texts: list[str], words: str) -> int:
    """Occurrences that may overlap."""
    return sum(text.startswith(words, at) for text in texts for at in range(len(text)))


@pytest.mark.parametrize("source", ["builtin:sotu", "builtin:korean"])
def test_counts_are_those_of_grep(source: str, tmp_path: Path) -> None:
    texts = texts_of(source)
    index = indexed(texts, train_tokenizer(texts, kind="char", vocab=2000), tmp_path)
    rng = random.Random(0)
    for _ in range(40):
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        words = text[at : at + rng.randint(1, 20)]
        tokens = index.array(index.tokenizer.encode(words, specials=False).tokens)
        if len(tokens) == len(words):  # a char vocabulary without spaces it trims
            assert index.count(tokens) == grep(texts, words), words


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
def test_words_count_at_the_beginning_of_a_line_too(kind: str, tmp_path: Path) -> None:
    texts = ["The law is old.\nThe law is new. The law is ours.", 'He said "The law is the law".']
    words = train_tokenizer(texts * 9, kind=kind, vocab=300)
    index = indexed(texts, words, tmp_path)
    match = trace_text(index, "The law is", sentences=9).matches[0]
    assert (match.text, match.count, match.documents) == (
        "The law is",
        grep(texts, "The law is"),
        2,
    )
    assert len({passage.text for passage in match.passages}) == 4


@pytest.fixture(scope="module", params=["byte-bpe", "wordpiece"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextIndex:
    texts = [*texts_of("builtin:sotu"), *texts_of("builtin:korean")]
    words = train_tokenizer(texts, kind=request.param, vocab=1200)
    folder = tmp_path_factory.mktemp(request.param)
    end = words.specials.eos if request.param == "byte-bpe" else None
    return indexed(texts, words, folder, end=end)


def documents_of(index: TextIndex) -> list[list[int]]:
    store = index.parts[0].store
    edges = store.documents
    return [store.tokens[a:b].tolist() for a, b in pairwise(edges)]


def brute_count(documents: list[list[int]], wanted: list[int]) -> int:
    size = len(wanted)
    return sum(
        document[at : at + size] == wanted
        for document in documents
        for at in range(len(document) - size + 1)
    )


def queries(index: TextIndex, count: int) -> list[list[int]]:
    """Pieces of the text put together at random."""
    rng = random.Random(1)
    documents = documents_of(index)
    found = []
    for _ in range(count):
        query: list[int] = []
        for _ in range(4):
            document = rng.choice(documents)
            at = rng.randrange(len(document))
            query += document[at : at + rng.randint(1, 9)]
        found.append(query)
    return found


def test_longest_matches_and_counts_are_those_of_a_search(real: TextIndex) -> None:
    documents = documents_of(real)
    unknown = real.tokenizer.specials.unk
    for query in queries(real, 4):
        lengths = real.longest(real.array(query))
        for at, length in enumerate(lengths.tolist()):
            match = query[at : at + length]
            assert length == 0 or brute_count(documents, match) == real.count(real.array(match))
            assert unknown not in match or real.tokenizer.kind == "byte-bpe"
            longer = query[at : at + length + 1]
            if at + length < len(query) and longer[-1] != unknown:
                assert brute_count(documents, longer) == 0


def test_novelty_is_that_of_sets_of_tuples(real: TextIndex) -> None:
    documents = documents_of(real)
    for query in queries(real, 4):
        found = novelty(real.longest(real.array(query)))
        for size, share in found.items():
            seen = {
                tuple(document[at : at + size])
                for document in documents
                for at in range(len(document) - size + 1)
            }
            grams = [tuple(query[at : at + size]) for at in range(len(query) - size + 1)]
            unknown = real.tokenizer.specials.unk if real.tokenizer.kind == "wordpiece" else None
            known = [gram in seen and unknown not in gram for gram in grams]
            assert share == pytest.approx(1 - sum(known) / len(grams))


@pytest.mark.parametrize("source", ["builtin:sotu", "builtin:korean"])
def test_sentences_have_their_match(real: TextIndex, source: str) -> None:
    text = texts_of(source)[1]
    words = " ".join(text.split()[4:10]) + (" 뷁 쾗 zzz" if "korean" in source else " zzz 뷁")
    found = trace_text(real, words)
    assert found.matches
    assert found.matches[0].tokens >= 4
    for match in found.matches:
        assert words[match.start : match.end] == match.text
        assert match.documents <= match.count
        for passage in match.passages:
            shown = passage.text[passage.start : passage.end]
            assert shown.lower().replace(" ", "") == match.text.lower().replace(" ", "")
            assert passage.marked() == (
                f"{passage.text[: passage.start]}«{shown}»{passage.text[passage.end :]}"
            )


def test_a_sentence_of_the_text_is_found_whole(tmp_path: Path) -> None:
    texts = ["나는 오늘 학교에 갔다. 비가 왔다. 그래서 우산을 썼다.", "나는 오늘 집에 갔다."]
    words = train_tokenizer(texts, kind="byte-bpe", vocab=400)
    index = indexed(texts, words, tmp_path, end=words.specials.eos)
    found = trace_text(index, "비가 왔다", top=1)
    assert found.novelty[2] == 0
    (match,) = found.matches
    assert (match.text, match.count, match.documents) == ("비가 왔다", 1, 1)
    (passage,) = match.passages
    assert passage.text == "비가 왔다."
    assert passage.document == 0
    both = trace_text(index, "나는 오늘", top=1).matches[0]
    assert (both.count, both.documents) == (2, 2)
    assert {one.document for one in both.passages} == {0, 1}


def test_only_matches_with_the_marked_words(real: TextIndex) -> None:
    text = "the people of the United States. zzz qqq and the Congress"
    marked = trace_text(real, text, words="Congress", top=50).matches
    start = text.index("Congress")
    assert marked
    assert all(match.end > start for match in marked)
    with pytest.raises(Exception, match="are not in the text"):
        trace_text(real, text, words="Senate")


def test_the_index_is_kept_until_the_text_changes(tmp_path: Path) -> None:
    texts = ["The state of the union is strong. " * 4] * 3
    words = train_tokenizer(texts, kind="byte-bpe", vocab=300)
    first = indexed(texts, words, tmp_path, end=words.specials.eos)
    folder = first.parts[0].store.folder
    (file,) = folder.glob("suffixes-*.bin")
    before = file.stat()
    again = indexed(texts, words, tmp_path, end=words.specials.eos)
    assert again.parts[0].places.tolist() == first.parts[0].places.tolist()
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    changed = indexed([*texts, "We work."], words, tmp_path, end=words.specials.eos)
    assert changed.size > first.size
    assert [path.name for path in folder.glob("suffixes-*.bin")] != [file.name]
