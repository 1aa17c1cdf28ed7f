"""A corpus from raw text: each step against brute force or a law, and a build that was stopped."""

import gzip
import io
import json
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from malmoi.cli import run_command
from malmoi.corpus import build, mix, ngrams, steps as stages
from malmoi.corpus.build import run_build
from malmoi.corpus.clean import clean, clean_columns
from malmoi.corpus.columns import Shard, TextColumn, text_columns
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.decontaminate import BenchmarkSets, cut_overlaps, hash_runs, overlap_words
from malmoi.corpus.duplicates import (
    duplicates,
    exact_duplicates,
    near_duplicates,
    signature,
    signatures_of,
)
from malmoi.corpus.filter import are_in_language, broken_rules, text_stats
from malmoi.corpus.quality import QualityScorer, pareto_draw
from malmoi.corpus.steps import Execution
from malmoi.errors import MalmoiError, UsageError
from malmoi.system.files import folder_lock
from malmoi.system.machine import parse_machine, pretend
from malmoi.system.progress import Progress, listening
from malmoi.text.documents import Document, DocumentBatch

DEFAULT = CorpusConfig()
ENGLISH = (
    "The old man walked slowly to the river and looked at the boats that were lying there in "
    "the evening light."
)
KOREAN = "이 법은 국민의 생명과 재산을 보호하기 위하여 필요한 사항을 정함을 목적으로 하며 책무를 함께 규정한다."  # noqa: E501
GERMAN = (
    "Der alte Mann ging langsam zu dem Fluss und sah auf die Boote, die dort im Licht des "
    "Abends lagen."
)
VOCABULARY = [
    a + b
    for a in ("ka", "lo", "mi", "tu", "se", "바", "물", "하")
    for b in ("ren", "do", "pi", "sa", "늘", "람")
]


def prose(seed: int, words: int = 120) -> str:
    """Random words in sentences: no two texts are alike, and no rule is broken."""
    chosen = np.random.default_rng(seed).choice(VOCABULARY, words)
    return " ".join(word + "." * (place % 9 == 8) for place, word in enumerate(chosen))


def hashed(texts: list[str]) -> ngrams.HashedTexts:
    return ngrams.HashedTexts.of(TextColumn.of(texts))


def broken(text: str, config: CorpusConfig) -> str:
    return broken_rules(hashed([text]), config)[0]


def write(path: Path, texts: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return str(path)


def texts_of(out: Path) -> list[str]:
    shards = sorted(out.glob("shard-*.jsonl"))
    return [
        json.loads(line)["text"]
        for shard in shards
        for line in shard.read_text("utf-8").splitlines()
    ]


# ------------------------------------------------------------------ words


@given(st.text(alphabet="abcÀ가나 .,-1\n\U0001f600", max_size=60), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_word_ngrams_are_equal_where_the_words_are(text: str, length: int) -> None:
    found = ngrams.hash_words(text)
    split = "".join(c if c.isalnum() else " " for c in text).lower().split()
    assert [text[a:b].lower() for a, b in zip(found.starts, found.ends, strict=True)] == split
    runs = [tuple(split[i : i + length]) for i in range(len(split) - length + 1)]
    assert len({*zip(runs, found.ngrams(length).tolist(), strict=True)}) == len(set(runs))
    assert len(set(found.ngrams(length).tolist())) == len(set(runs))


@pytest.mark.parametrize("texts", [[prose(1, 300), "x" * 500, "", prose(2, 20)], ["", "."], []])
def test_words_are_the_same_without_a_compiler(texts: list[str]) -> None:
    column = TextColumn.of(texts)
    ours = ngrams.HashedTexts.of(column)
    with pretend(parse_machine("no-compiler")):
        plain = ngrams.HashedTexts.of(column)
    for name in ("hashes", "starts", "ends"):
        assert getattr(plain.words, name).tolist() == getattr(ours.words, name).tolist()
    assert plain.lasts.tolist() == ours.lasts.tolist()


@given(st.lists(st.text(alphabet="ab가 .", max_size=20), max_size=8))
@settings(max_examples=50, deadline=None)
def test_ngrams_of_a_batch_do_not_cross_texts(texts: list[str]) -> None:
    groups = map(ngrams.HashedTexts.of, text_columns(texts))
    parts = (group.part(row) for group in groups for row in range(len(group)))
    for together, text in zip(parts, texts, strict=True):
        alone = ngrams.hash_words(text)
        for name in ("hashes", "starts", "ends"):
            assert (getattr(together, name) == getattr(alone, name)).all()


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # lone surrogates too
PROSE = st.lists(  # longer than the blocks of bytes that C looks at together
    st.sampled_from(
        ["thirty-two bytes of plain words, ", *"a .<\n#가\U0001f600", "  ", " \n", "..."]
    )
).map("".join)
REPETITIVE = st.text("aB가<.…#-*•,1\n \U0001f600\u0301\u1112\u1161\t", max_size=200)


@given(PROSE | REPETITIVE | ANY_TEXT, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_c_computes_what_is_computed_without_it(text: str, length: int) -> None:
    def all_of_it() -> list[object]:
        found = ngrams.hash_words(text)
        runs = found.ngrams(length)
        texts = hashed([text, "", f"{text} {text[:20]}", text[::-1], "a b a b a"])
        together = (*text_stats(texts, (0.1, 0.1, 0.1))[1:], *signatures_of(texts, DEFAULT))
        parts = [found.hashes, found.starts, found.ends, runs, signature(runs, 37), *together]
        known = BenchmarkSets({length: np.unique(hash_runs(found, length))})
        spans = known.overlaps(texts.where(np.array([True, False, True, True, True])))
        return [
            *(part.tolist() for part in parts),
            spans,
            [list(part) for part in clean_columns(texts.texts)],
        ]

    with pretend(parse_machine("no-compiler")):
        wanted = all_of_it()
    assert all_of_it() == wanted


# ------------------------------------------------------------------ columns

DOCUMENTS = st.lists(
    st.builds(
        Document,
        st.text('a가\U0001f600 "\\\n\t\x01\x7f', max_size=9),
        st.sampled_from(["web", "책"]),
        st.text(max_size=3),
        st.sampled_from(["", "http://a.org"]),
    ),
    max_size=6,
)


def shard_of(documents: list[Document]) -> Shard:
    return Shard.of([DocumentBatch(d.source, [d.text], [d.place], d.url) for d in documents])


@given(DOCUMENTS, st.dictionaries(st.integers(0, 5), DOCUMENTS, max_size=3), st.integers(0, 63))
@settings(max_examples=100, deadline=None)
def test_a_shard_does_what_a_list_of_documents_does(
    documents: list[Document], others: dict[int, list[Document]], chosen: int
) -> None:
    changes = {row: new for row, new in others.items() if row < len(documents)}
    expected = [new for row, old in enumerate(documents) for new in changes.get(row, [old])]
    shard = shard_of(documents).changed(changes)
    wanted = [bool(chosen >> row % 6 & 1) for row in range(len(expected))]
    file = io.BytesIO()
    shard.where(np.array(wanted, bool)).save(file)
    file.seek(0)
    for found in (shard.where(np.array(wanted, bool)), Shard.load(file)):
        assert [found[row] for row in range(len(found))] == list(compress(expected, wanted))
        assert [*found.texts.line_breaks()] == [text.count("\n") for text in found.texts]
        assert [*found.texts.characters] == [len(text) for text in found.texts]


@given(DOCUMENTS)
@settings(max_examples=50, deadline=None)
def test_documents_are_written_as_json_dumps_writes_them(documents: list[Document]) -> None:
    rows = [
        {"text": d.text, "source": d.source, "place": d.place} | ({"url": d.url} if d.url else {})
        for d in documents
    ]
    found = b"".join(map(stages.json_lines, shard_of(documents).batches()))
    assert found == "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


# ------------------------------------------------------------------ clean, filter, quality


def test_cleaning() -> None:
    page = "<html><body><script>x()</script><p>Tom &amp; Ann</p><p>a<b>b</b></p></body></html>"
    assert clean(page) == "Tom & Ann\n\nab"
    # the script does not end
    assert clean("<!-- a <p> b --><p>c<script>d<STYLE>e</style></p>f<p>") == "cd\nf"
    assert clean("<script><p>" * 100_000 + "x") == "x"  # and takes no time
    assert clean("if a < b and c > d:  x&amp;y") == "if a < b and c > d: x&amp;y"
    assert clean("\ufeff가\r\n\r\n\r\n\r\nb\x00\u200b\t c \n") == "가\n\nb c"


def test_rules_keep_prose_and_name_what_they_drop() -> None:
    config = DEFAULT.override({"min_words": 10})
    bad = {
        "too short": "Just a few words.",
        "few letters": "12 345 67 89 1,234 5,678 12 34 56 78 90 and 12",
        "symbols": "#one #two #three four five six seven eight nine ten eleven",
        "bullets": "\n".join(f"- {word} is {word[::-1]} now" for word in VOCABULARY[:8]),
        "ellipses": "\n".join(f"read more on {word} ..." for word in VOCABULARY[:30]).replace(
            "on", "about", 3
        ),
        "repeated lines": "\n".join(
            ["Sign up for our letter to get all of the news.", *[prose(3, 12)] * 4]
        ),
        "repeated words": "buy cheap shoes " * 8,
        "length of words": " ".join("abcdefghijklmnop" + word for word in VOCABULARY[:20]),
    }
    assert {
        name: broken(text, config) for name, text in bad.items() if name not in ("ellipses",)
    } == {name: name for name in bad if name != "ellipses"}
    assert broken(bad["ellipses"], config) in ("ellipses", "symbols")
    assert [broken(text, config) for text in (ENGLISH, KOREAN, prose(0))] == [""] * 3


def test_language() -> None:
    texts = {"en": ENGLISH, "ko": KOREAN, "de": GERMAN}
    for code in texts:
        found = are_in_language(TextColumn.of([*texts.values(), "", "12"]), code)
        assert found.tolist() == [*(name == code for name in texts), False, False]
    assert broken(KOREAN * 3, DEFAULT.override({"language": "en"})) == "another language"


def test_the_classifier_separates_good_text_and_draws_like_numpy() -> None:
    good = [f"{ENGLISH} {prose(n, 20)}" for n in range(40)]
    raw = [f"click here to win a free phone {prose(n, 20)}" for n in range(100, 160)]
    scorer = QualityScorer.fit(good[:30], raw[:50])
    assert min(map(scorer, good[30:])) > 0.8 > 0.2 > max(map(scorer, raw[50:]))
    draws = np.array([pareto_draw(str(n), 9.0, 0) for n in range(4000)])
    expected = np.random.default_rng(0).pareto(9, 4000)
    assert np.quantile(draws, [0.1, 0.5, 0.9]) == pytest.approx(
        np.quantile(expected, [0.1, 0.5, 0.9]), rel=0.15
    )


# ------------------------------------------------------------------ dedup


def jaccard(a: str, b: str, length: int = 5) -> float:
    sets = []
    for text in (a, b):
        found = text.replace(".", "").split()
        sets.append({tuple(found[i : i + length]) for i in range(len(found) - length + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def changed(text: str, times: int, seed: int) -> str:
    words, random = text.split(), np.random.default_rng(seed)
    for place in random.choice(len(words), times, replace=False):
        words[place] = f"new{place}"
    return " ".join(words)


def test_signatures_estimate_jaccard_within_their_error() -> None:
    errors = []
    for seed in range(150):
        a = prose(seed, 200)
        b = changed(a, seed % 15, seed)
        share = float(np.equal(*signatures_of(hashed([a, b]), DEFAULT)[1]).mean())
        true = jaccard(a, b)
        errors.append((share - true) / max(np.sqrt(true * (1 - true) / DEFAULT.hashes), 0.01))
    assert abs(np.mean(errors)) < 0.35
    assert 0.75 < np.std(errors) < 1.25
    assert max(map(abs, errors)) < 4.5


def test_similar_texts_are_found_and_others_are_not() -> None:
    firsts = [prose(seed, 300) for seed in range(120)]
    seconds = [changed(text, seed % 20, seed) for seed, text in enumerate(firsts)]
    equal, nearly = duplicates(*signatures_of(hashed(firsts + seconds), DEFAULT), DEFAULT)
    assert (equal[:120] < 0).all()
    assert (nearly[:120] < 0).all()
    for n, (a, b) in enumerate(zip(firsts, seconds, strict=True)):
        of = max(equal[120 + n], nearly[120 + n])
        assert of in (-1, n)
        true = jaccard(a, b)
        assert of == n or true < 0.85
        assert of == -1 or true > 0.62


def test_the_first_of_several_stays() -> None:
    assert exact_duplicates(np.array([7, 8, 7, 9, 8, 7], np.uint64)).tolist() == [
        -1,
        -1,
        0,
        -1,
        1,
        0,
    ]
    _, signatures = signatures_of(
        hashed([prose(1), prose(2), prose(1) + " end", prose(1)]), DEFAULT
    )
    assert near_duplicates(signatures, DEFAULT.rows, DEFAULT.similar).tolist() == [-1, -1, 0, 0]


# ------------------------------------------------------------------ decontaminate


@given(
    st.lists(st.sampled_from("abc"), max_size=40),
    st.lists(st.sampled_from("abc"), min_size=8, max_size=14),
)
@settings(max_examples=100, deadline=None)
def test_overlaps_are_those_of_brute_force(text: list[str], test: list[str]) -> None:
    known = BenchmarkSets({3: np.unique(hash_runs(ngrams.hash_words(" ".join(test)), 3))})
    runs = {tuple(test[i : i + 3]) for i in range(len(test) - 2)}
    hit = {i + j for i in range(len(text) - 2) if tuple(text[i : i + 3]) in runs for j in range(3)}
    marked = {
        place // 2
        for begin, end in known.overlaps(hashed([" ".join(text)])).get(0, [])
        for place in range(begin, end, 2)
    }
    assert marked == hit


def test_pieces_and_lengths() -> None:
    assert cut_overlaps("a" * 500 + "X" * 10 + "b" * 500, [(500, 510)], 200) == [
        "a" * 300,
        "b" * 300,
    ]
    assert cut_overlaps("abXc", [(2, 3)], 9) == []
    assert [overlap_words([n]) for n in (3, 10, 40)] == [8, 10, 13]


def test_passages_of_a_test_set_are_removed(tmp_path: Path) -> None:
    secret = [prose(seed, 40) for seed in range(900, 905)]
    rows = "".join(f"{n}\t{text}\tyes\n" for n, text in enumerate(secret))
    (tmp_path / "test.tsv").write_text("id\tquestion\tanswer\n" + rows, "utf-8")
    texts = [prose(n, 200) for n in range(20)]
    texts[3] = f"{prose(50, 150)} {secret[0].upper()} {prose(51, 150)}"
    texts[5] = " ".join(f"{prose(60 + n, 160)} {secret[n % 5]}" for n in range(12))
    source = write(tmp_path / "in" / "web.jsonl", texts)
    found = run_build([source], tmp_path / "out", decontaminate=[str(tmp_path / "test.tsv")])
    left = texts_of(tmp_path / "out")
    assert found["finished"]["steps"]["decontaminate"]["rules"] == {"cut": 1, "too many pieces": 1}
    assert len(left) == 20  # one in two pieces, one gone
    assert not any(
        run in " ".join(left).lower()
        for run in (" ".join(secret[0].split()[3:16]), secret[1][:100])
    )


# ------------------------------------------------------------------ mix


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.floats(0, 4))
@settings(max_examples=100, deadline=None)
def test_copies_hold_the_share_to_a_document(sizes: list[int], epochs: float) -> None:
    lengths = np.array(sizes)
    copies = mix.copy_counts(
        lengths, np.random.default_rng(0).integers(0, 2**63, len(sizes)).astype(np.uint64), epochs
    )
    assert abs((copies * lengths).sum() - epochs * lengths.sum()) <= max(sizes)
    assert {*copies.tolist()} <= {int(epochs), int(epochs) + 1}


def test_weights_decide_the_shares(tmp_path: Path) -> None:
    web = write(tmp_path / "web.jsonl", [prose(n) for n in range(60)])
    books = write(tmp_path / "b.jsonl", [prose(n) for n in range(100, 120)])
    found = run_build([web, f"books={books}"], tmp_path / "out", weights="web=1,books=3")[
        "finished"
    ]["mix"]
    written = Counter(texts_of(tmp_path / "out"))
    size = {name: sum(len(prose(n)) * written[prose(n)] for n in numbers) for name, numbers in
            {"web": range(60), "books": range(100, 120)}.items()}  # fmt: skip
    assert size["books"] / sum(size.values()) == pytest.approx(0.75, abs=0.02)
    assert {share["source"]: share["characters"][1] for share in found["shares"]} == size
    assert {written[prose(n)] for n in range(100, 120)} == {3}


def test_a_share_that_cannot_be_met_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = write(tmp_path / "one.jsonl", [prose(0, 3000)])
    many = write(tmp_path / "many.jsonl", [prose(n) for n in range(1, 40)])
    run_build([one, many], tmp_path / "out", weights="one=1,many=3")
    said = caplog.messages[-1]
    assert said.startswith("one has ")
    assert said.endswith("mixed more exactly.")


# ------------------------------------------------------------------ the whole


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Two sources with duplicates of either kind across them, menus, another encoding, an empty
    file.
    """
    texts = [f"Home\nAbout us\n{prose(n)}\nContact" for n in range(40)]
    web = write(tmp_path / "raw" / "web.jsonl", [*texts, texts[3], "short"])
    korean = [f"{KOREAN} {prose(200 + n)}" for n in range(20)] + [
        changed(prose(7, 120), 2, 0),
        prose(8),
    ]
    (tmp_path / "raw" / "bills.txt").write_bytes("\n".join(korean).encode("cp949"))
    (tmp_path / "raw" / "empty.txt").write_bytes(b"")
    with gzip.open(tmp_path / "raw" / "line.txt.gz", "wt") as file:
        file.write("x" * 2_000_000 + " " + prose(500))
    return [
        web,
        *(str(tmp_path / "raw" / name) for name in ("bills.txt", "empty.txt", "line.txt.gz")),
    ]


SMALL = {"shard": 6000}


def test_one_and_two_workers_build_the_same_corpus(sources: list[str], tmp_path: Path) -> None:
    one = run_build(sources, tmp_path / "one", **SMALL)
    two = run_build(sources, tmp_path / "two", execution=Execution(2), **SMALL)
    assert one == two
    shards = sorted(path.name for path in (tmp_path / "one").glob("*.jsonl"))
    assert len(shards) > 3
    for name in shards:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    steps = one["finished"]["steps"]
    assert steps["menus"]["rules"] == {"menu lines": 41}
    assert steps["filter"]["rules"] == {"too short": 1, "length of words": 1}
    assert steps["dedup"]["rules"] == {"the same words": 2, "similar words": 1}
    assert texts_of(tmp_path / "one") == [prose(n) for n in range(40)] + [
        f"{KOREAN} {prose(200 + n)}" for n in range(20)
    ]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        ".lock",
        "corpus.json",
        *shards,
    ]


def same_files(one: Path, two: Path) -> bool:
    names = sorted(path.name for path in one.glob("[!.]*"))  # locks stay where parts were shared
    assert names == sorted(path.name for path in two.glob("[!.]*"))
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_parts_build_the_same_corpus_as_one_process(sources: list[str], tmp_path: Path) -> None:
    """As in an array of cluster jobs: every part in three rounds, then the build itself."""
    ways = SMALL | {"weights": "web=1,bills=0,empty=0,line=0"}
    good = [write(tmp_path / "good.jsonl", [prose(n) for n in range(300, 320)])]
    run_build(sources, tmp_path / "whole", quality_reference=good, **ways)
    verbs: list[set[str]] = []
    for _ in range(3):
        events: list[Progress] = []
        for part in ("2/3", "1/3", "3/3"):
            with listening(events.append):
                found = run_build(
                    sources,
                    tmp_path / "parts",
                    quality_reference=good,
                    execution=Execution(part=part),
                    **ways,
                )
            assert "finished" not in found
        verbs.append({event.verb for event in events})
    # the last part of a round finds the others done
    assert verbs == [{"read and clean", "filter"}, {"filter", "deduplicate"}, {"deduplicate"}]
    events.clear()
    with listening(events.append):
        run_build(sources, tmp_path / "parts", quality_reference=good, **ways)
    assert {event.verb for event in events} == {"write"}
    assert same_files(tmp_path / "whole", tmp_path / "parts")


def test_a_build_finishes_without_a_part_that_was_lost(sources: list[str], tmp_path: Path) -> None:
    run_build(sources, tmp_path / "whole", **SMALL)
    run_build(sources, tmp_path / "parts", execution=Execution(part="2/2"), **SMALL)
    with folder_lock(tmp_path / "parts", shared=True), pytest.raises(MalmoiError) as error:
        run_build(sources, tmp_path / "parts", **SMALL)  # while a part is at work
    assert "Another process is using" in str(error.value)
    run_build(sources, tmp_path / "parts", **SMALL)
    assert same_files(tmp_path / "whole", tmp_path / "parts")


def test_two_ray_workers_build_the_same_corpus(sources: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="a build on a cluster needs ray: pip install ray")
    run_build(sources, tmp_path / "here", **SMALL)
    ray = Execution(2, "ray")
    with ray.pool() as pool:
        run_build(sources, tmp_path / "ray", execution=ray, **SMALL)
        with pytest.raises(UsageError) as error:
            pool.run([(mix.parse_weights, ("web", ["web"]))], "fail")
    assert same_files(tmp_path / "here", tmp_path / "ray")
    assert str(error.value).startswith("The weight 'web' is not NAME=NUMBER")  # without a traceback


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "0 workers: give at least 1"),
        ({"executor": "rai"}, "There is no executor 'rai'. Did you mean 'ray'?"),
        ({"part": "0/4"}, "'0/4' is not a part of a job; write for example 3/16"),
        ({"part": "5/4"}, "'5/4' is not a part of a job"),
        ({"part": "4"}, "'4' is not a part of a job"),
    ],
)
def test_wrong_executions(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        Execution(**given)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("verb", ["read and clean", "filter", "deduplicate", "write"])
def test_a_build_that_was_killed_resumes(verb: str, sources: list[str], tmp_path: Path) -> None:
    def stop(event: Progress) -> None:
        if event.verb == verb and event.done == 2:
            raise KeyboardInterrupt

    ways = SMALL | {"weights": "web=1,bills=1,empty=0,line=0"}
    whole = run_build(sources, tmp_path / "whole", **ways)
    with listening(stop), pytest.raises(KeyboardInterrupt):
        run_build(sources, tmp_path / "again", **ways)
    events: list[Progress] = []
    with listening(events.append):
        assert run_build(sources, tmp_path / "again", **ways) == whole
    assert texts_of(tmp_path / "again") == texts_of(tmp_path / "whole")
    assert events[-1].verb == "write"
    assert (verb == "read and clean") == (events[0].verb == "read and clean")
    events.clear()
    with listening(events.append):
        assert run_build(sources, tmp_path / "again", **ways) == whole
    assert not events  # a finished build is not repeated


def test_text_like_the_reference_is_kept(tmp_path: Path) -> None:
    junk = [f"click here to win a free phone now {prose(n)}" for n in range(120)]
    fine = [f"{ENGLISH} {prose(n)}" for n in range(200, 212)]
    good = write(tmp_path / "good.jsonl", [f"{ENGLISH} {prose(n)}" for n in range(300, 360)])
    source = write(tmp_path / "in" / "web.jsonl", junk + fine)
    run_build([source], tmp_path / "out", quality_reference=[good])
    left = texts_of(tmp_path / "out")
    kept = [sum(text in left for text in texts) / len(texts) for texts in (fine, junk)]
    assert kept[0] > 0.3  # a score of 0.9 stays in 1.1⁻⁹ = 42 % of the draws
    assert kept[1] < 0.02


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": "clean,dedupe"}, "There is no step 'dedupe'. Did you mean 'dedup'?"),
        ({"weights": "wep=1"}, "There is no source 'wep' to weight. Did you mean 'web'?"),
        (
            {"weights": "web"},
            "The weight 'web' is not NAME=NUMBER; write for example web=0.6,books=0.4.",
        ),
        ({"weights": "web=-1"}, "The weight 'web=-1' is not NAME=NUMBER"),
        ({"weights": "web=0"}, "All weights are 0"),
        ({"hashes": 0}, "hashes must be at least 1, not 0."),
        (
            {"hashes": 4, "rows": 8},
            "A band of 8 rows needs at least that many hashes; there are 4.",
        ),
        ({"max_run": [0.2, 0.2]}, "max_run needs 3 shares, for 2, 3 and 4 words; there are 2."),
        ({"decontaminate": ["builtin:sotu"]}, "builtin:sotu cannot be used as a test set"),
        ({"language": "xx"}, "There is no detector for the language 'xx'."),
        ({"min_word": "3"}, "There is no setting 'min_word'. Did you mean 'min_words'"),
    ],
)
def test_wrong_requests(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "web.jsonl", [prose(0)])
    with pytest.raises(UsageError) as error:
        run_build([source], tmp_path / "out", **settings)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test.txt", "{0}\n\nsomething else that no document has at all\n"),
        ("test.md", "# Title\n\n{0}\n"),
        ("test.tsv", "id\ttext\n1\t{0}\n"),
        ("test.csv", 'id,text\n1,"{0}"\n'),
        ("test.jsonl", '{{"question": ["x", {{"text": "{0}"}}]}}\n'),
    ],
)
def test_a_test_set_in_any_format_is_removed(name: str, content: str, tmp_path: Path) -> None:
    secret = prose(7, 30)
    source = write(tmp_path / "in" / "web.jsonl", [f"{prose(1)} {secret} {prose(2)}", prose(3)])
    (tmp_path / name).write_text(content.format(secret), "utf-8")
    out = tmp_path / "out"
    done = run_build([source], out, decontaminate=[str(tmp_path / name)], margin=0, piece=20)
    assert done["finished"]["steps"]["decontaminate"]["rules"] == {"cut": 1}
    assert not any(secret in text for text in texts_of(out))
    assert prose(3) in texts_of(out)


def test_a_broken_test_set_names_its_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "web.jsonl", [prose(1)])
    (tmp_path / "test.jsonl").write_text('{"a": "b"}\nnonsense\n')
    with pytest.raises(MalmoiError, match=r"test.jsonl:2 is not JSON"):
        run_build([source], tmp_path / "out", decontaminate=[str(tmp_path / "test.jsonl")])
    (tmp_path / "test.parquet").write_bytes(b"")
    with pytest.raises(UsageError, match=r"test.parquet cannot be used as a test set: give \.txt"):
        run_build([source], tmp_path / "o2", decontaminate=[str(tmp_path / "test.parquet")])


def test_a_source_of_which_nothing_is_left_cannot_have_a_share(tmp_path: Path) -> None:
    empty = write(tmp_path / "in" / "short.jsonl", ["too short"])
    full = write(tmp_path / "in" / "web.jsonl", [prose(n) for n in range(3)])
    with pytest.raises(MalmoiError, match="No document of short is left, which should make up 50%"):
        run_build([full, empty], tmp_path / "out", weights="web=1,short=1")


@pytest.mark.parametrize(
    ("given", "name"),
    [("in/web.jsonl", "web"), ("mine=in/web.jsonl", "mine"), ("in/*.jsonl", "in"), ("in", "in")],
)
def test_sources_are_named(given: str, name: str, workdir: Path) -> None:
    write(workdir / "in" / "web.jsonl", [prose(n) for n in range(3)])
    done = run_build([given], workdir / "out")
    assert [source["name"] for source in done["sources"]] == [name]


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "web.jsonl", [prose(0), prose(1)])
    with pytest.raises(UsageError, match="overlap"):
        run_build([str(tmp_path / "in")], tmp_path / "in" / "out")
    with pytest.raises(UsageError, match="is not empty and holds no corpus"):
        run_build([source], Path(write(tmp_path / "full" / "own.jsonl", [prose(2)])).parent)
    run_build([source], tmp_path / "out")
    with pytest.raises(
        UsageError, match=r"holds another corpus \(settings\.seed was 0\).*--overwrite"
    ):
        run_build([source], tmp_path / "out", seed=1)
    run_build([source], tmp_path / "out", seed=1, overwrite=True)
    with pytest.raises(MalmoiError, match=r"Every document was dropped \(too short 1\)"):
        run_build([write(tmp_path / "short" / "a.jsonl", ["too short"])], tmp_path / "none")
    # corrected, it starts over
    done = run_build([tmp_path / "short" / "a.jsonl"], tmp_path / "none", min_words=1)
    assert done["finished"]["mix"]["shards"] == 1


def test_work_of_an_older_version_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in" / "web.jsonl", [prose(n) for n in range(3)])

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "_finalize", stop)
        with pytest.raises(KeyboardInterrupt):
            run_build([source], tmp_path / "out")
    marks = tmp_path / "out" / "work" / "00000.marks.npz"
    with np.load(marks) as found:
        np.savez(marks, exact=found["exact"], signatures=found["bands"].T)
    with pytest.raises(MalmoiError, match=r"another version of Malmoi left it.*--overwrite"):
        run_build([source], tmp_path / "out")
    run_build([source], tmp_path / "out", overwrite=True)


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stages, "finalize_shard", full)
    with pytest.raises(MalmoiError, match="The disk is full"):
        run_build([write(tmp_path / "in" / "a.jsonl", [prose(0)])], tmp_path / "out")


def test_names_of_control_tokens_are_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        prose(1),
        f"{prose(2)} <|endoftext|> [SEP]",
        f"{prose(3)} <|endoftext|>",
        f"{prose(4)} [sep] <2 | 3>",
    ]
    command = [
        "corpus",
        "build",
        write(tmp_path / "in" / "web.jsonl", texts),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert run_command(command) == 0
    told = capsys.readouterr().err
    assert "Names of control tokens in 2 documents (<|endoftext|> 2, [SEP] 1); they will be" in told
    kept = json.loads((tmp_path / "out" / "corpus.json").read_text("utf-8"))["finished"]["control"]
    assert kept == {"documents": 2, "names": {"<|endoftext|>": 2, "[SEP]": 1}}
    assert sum("<|endoftext|>" in text for text in texts_of(tmp_path / "out")) == 2


def test_the_command_and_what_pretrain_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from malmoi.text.documents import read_documents

    source = write(tmp_path / "in" / "web.jsonl", [prose(0), prose(1), prose(0)])
    out = tmp_path / "out"
    assert run_command(["corpus", "build", source, "--out", str(out), "--workers", "1"]) == 0
    assert "dedup\t3\t2\t" in capsys.readouterr().out
    assert [document.text for document in read_documents(out)] == [prose(0), prose(1)]
    assert run_command(["corpus", "build", source, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mix"]["shards"] == 1


# ---- select


def web_pages(path: Path) -> str:
    """Pages of six sites, and one without a URL."""
    urls = ["http://www.a.org/x/", "https://b.org/low", "https://c.org/?p=1", "https://d.org/",
            "https://en.wikipedia.org/wiki/A", "https://notwikipedia.org/a", None]  # fmt: skip
    rows = [{"text": prose(n), "url": url} for n, url in enumerate(urls)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


LINKS = [("https://a.org/x#top", 3), ("https://b.org/low", 2), ("https://c.org?p=1", 1),
         ("https://c.org/?p=1", 40), ("https://en.wikipedia.org/wiki/A", 99),
         ("https://notwikipedia.org/a", 3), ("", 5), ("https://e.org", "?")]  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_links_with_scores_select_pages(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"links.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"url": url, "score": score}) for url, score in LINKS]
    else:
        sign = "\t" if kind == "tsv" else ","
        lines = ["score" + sign + "url", *(f"{score}{sign}{url}" for url, score in LINKS)]
    path.write_text("\n".join(lines) + "\n")
    raw = web_pages(tmp_path / "web.jsonl")
    done = run_build([raw], tmp_path / "out", links=str(path), steps="clean")
    rows = map(json.loads, (tmp_path / "out" / "shard-00000.jsonl").read_text().splitlines())
    assert [row["url"] for row in rows] == [
        "http://www.a.org/x/", "https://c.org/?p=1", "https://notwikipedia.org/a"
    ]  # fmt: skip
    select = done["finished"]["steps"]["select"]
    assert select["documents"] == [7, 3]
    assert select["rules"] == {
        "score below 3": 1, "not in the links": 1, "blocked domain": 1, "no URL": 1
    }  # fmt: skip
    assert "2 rows without URL or score" in caplog.text


def test_blocked_domains_and_lower_scores(tmp_path: Path) -> None:
    raw = web_pages(tmp_path / "web.jsonl")
    domains = tmp_path / "domains.txt"
    domains.write_text("b.org\nWikipedia.org\n")

    def kept(name: str, **changes: Any) -> int:
        done = run_build([raw], tmp_path / name, steps="clean", **changes)
        return int(done["finished"]["steps"]["clean"]["documents"][1])

    assert kept("all") == 7
    assert kept("file", block_domains=(str(domains), "a.org")) == 4
    links = tmp_path / "links.csv"
    links.write_text("url,score\n" + "".join(f"{url},{score}\n" for url, score in LINKS))
    assert kept("lower", links=str(links), min_score=2, block_domains="none") == 5
    links.write_text("url,score\nhttps://d.org,4\n")
    with pytest.raises(UsageError, match="link lists"):
        kept("lower", links=str(links), min_score=2, block_domains="none")
    with pytest.raises(UsageError, match="does not exist"):
        kept("missing", links=str(tmp_path / "missing.csv"))
    links.write_text("url,karma\nhttps://d.org,4\n")
    with pytest.raises(MalmoiError, match="no column 'score'"):
        kept("new", links=str(links))
