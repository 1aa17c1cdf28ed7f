"""What a table asks is guessed from its columns, and every guess can be overruled."""

import unicodedata
from pathlib import Path

import pytest

from malmoi.errors import MalmoiError
from malmoi.text.columns import GuessedColumns, guess_columns
from malmoi.text.documents import read_documents

TREC = "id,Question Text,kind\n" + "".join(
    f"{i},What is the name of thing number {i}?,{'human' if i % 3 else 'number'}\n"
    for i in range(30)
)
NSMC = "id\tdocument\tlabel\n" + "".join(
    f"{i}\t영화가 참 재미있었다 {i}\t{i % 2}\n" for i in range(20)
)
PAIRS = "sentence1\tsentence2\tscore\n" + "".join(
    f"a man runs {i}\ta person runs {i}\t{i / 7:.2f}\n" for i in range(20)
)
FREE = "headline,body_of_news,desk\n" + "".join(
    f"news {i},a much longer text than its headline {i},{'sport' if i % 4 else 'money'}\n"
    for i in range(40)
)
FLAGS = "문장,혐오,욕설\n" + "".join(f"댓글 {i},{i % 2},{int(i % 3 == 0)}\n" for i in range(20))
TABLES = {
    "flags.csv": (FLAGS, "multilabel", "문장", None, ("혐오", "욕설")),
    "trec.csv": (TREC, "classification", "Question Text", None, "kind"),
    "nsmc.tsv": (NSMC, "classification", "document", None, "label"),
    "sts.tsv": (PAIRS, "regression", "sentence1", "sentence2", "score"),
    "news.csv": (FREE, "classification", "body_of_news", None, "desk"),
}


@pytest.mark.parametrize("name", TABLES)
def test_columns_and_kind_are_guessed(name: str, tmp_path: Path) -> None:
    content, *expected = TABLES[name]
    (tmp_path / name).write_text(content, "utf-8")
    found = guess_columns([tmp_path / name])
    assert [found.kind, found.text, found.pair, found.label] == expected


def test_detected_columns_are_described_with_a_baseline(tmp_path: Path) -> None:
    file = tmp_path / "trec.csv"
    file.write_text(TREC, "utf-8")
    assert guess_columns([file]).describe() == (
        "classification: text = Question Text, label = kind (2 labels), baseline 67% (always "
        "'human')"
    )
    assert guess_columns([file], text="kind", label="id").text == "kind"
    assert guess_columns([file], kind="regression").kind == "regression"


def test_labels_are_told_apart_as_people_read_them(tmp_path: Path) -> None:
    names = ["긍정", unicodedata.normalize("NFD", "긍정"), " 부정", ""]
    path = tmp_path / "a.csv"
    header = unicodedata.normalize("NFD", "문장,라벨\n")
    path.write_text(header + "".join(f"글 {i},{names[i % 4]}\n" for i in range(40)), "utf-8")
    found = guess_columns([path])
    assert (found.text, found.label, found.labels) == ("문장", "라벨", ("긍정", "부정"))
    path.write_text("text,score\n" + "".join(f"t,{i / 7 if i else 'nan'}\n" for i in range(40)))
    assert guess_columns([path]).kind == "regression"


def test_lists_are_tags_or_several_labels(tmp_path: Path) -> None:
    tags = tmp_path / "tags.jsonl"
    tags.write_text('{"text": "Alice lives", "label": ["B-PER", "O"]}\n' * 3, "utf-8")
    assert guess_columns([tags]).kind == "tagging"
    several = tmp_path / "several.jsonl"
    several.write_text('{"text": "a long question", "label": ["x"]}\n' * 3, "utf-8")
    assert guess_columns([several]).kind == "multilabel"
    several.write_text('{"text": "a long question", "labels": ["x"]}\n' * 3, "utf-8")
    assert guess_columns([several], kind="multilabel").label == "labels"


def test_labels_that_are_separated(tmp_path: Path) -> None:
    file = tmp_path / "films.csv"
    kinds = ("war|drama", "war", "drama|sad", "sad")
    rows = [f"a long review {i},{kinds[i % 4]}\n" for i in range(24)]
    file.write_text("text,labels\n" + "".join(rows), "utf-8")
    found = guess_columns([file])
    assert (found.kind, found.separator) == ("multilabel", "|")
    assert set(found.labels) == {"war", "sad", "drama"}
    assert guess_columns([file], kind="multilabel") == found
    file.write_text("text;price\n" + "".join(f"a review {i};{i},5\n" for i in range(24)), "utf-8")
    assert guess_columns([file], label="price").kind == "classification"


@pytest.mark.parametrize("first", ["", "0,1\n", "text,label\n"])
def test_a_table_without_a_header_keeps_its_first_row(
    first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.csv"
    rows = "".join(f"a review of film {i},{i % 2}\n" for i in range(1, 25))
    file.write_text(first + rows, "utf-8")
    found = guess_columns([file])
    names = ("column1", "column2") if not first else tuple(first.strip().split(","))
    assert (found.text, found.label) == names
    assert found.baseline == 0.5
    assert ("has no header" in caplog.text) == (not first)
    texts = [document.text for document in read_documents(file, text=found.text)]
    assert texts == [f"a review of film {i}" for i in range(1, 25)]


def test_an_undetectable_column_names_the_option(tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    file.write_text("a,b\n" + "".join(f"text {i},x{i}\n" for i in range(9)), "utf-8")
    with pytest.raises(MalmoiError, match=r"looks like labels \(a, b\): name it with --label"):
        guess_columns([file])
    file.write_text("a,label\n" + "1,2\n" * 9, "utf-8")
    with pytest.raises(MalmoiError, match="name it with --text"):
        guess_columns([file])
    assert GuessedColumns("tagging", "a", "b").describe() == "tagging: text = a, label = b"
