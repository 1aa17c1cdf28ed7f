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
    assert guess_columns([file]).sentences() == [
        "classification: text = Question Text, label = kind (2 labels), baseline 67% of these rows "
        "(always 'human')",
        "Not used: id. Choose with --text, --pair and --label.",
    ]
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
    spaced = [{"sentence": "Alice lives in Seoul", "tags": "B-PER O O B-LOC"}] * 3
    assert guess_columns(spaced).kind == "tagging"
    written = [{"tokens": "['New York', 'is']", "ner_tags": "['B-LOC' 'O']"}] * 3
    assert guess_columns(written).describe() == "tagging: text = tokens, label = ner_tags"
    answers = [{"text": "is it so", "label": "O"}, {"text": "or not so", "label": "X"}]
    assert guess_columns(answers * 3).kind == "classification"
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


MESSAGES = ["ok", "see you at the usual place", "free entry in a weekly competition", "call now"]
HEADERS = {  # a name that is also a label, in a first line that is a header all the same
    "spam": ("message,spam", "{text} {i},{label}", ("spam", "ham")),
    "numbered": ("id,message,spam", "{i},{text} {i},{label}", ("spam", "ham")),
    "words": ("word,noun", "{i}x,{label}", ("noun", "verb")),
    "two": ("text,topic,spam", "{text} {i},{topic},{label}", ("spam", "ham")),
    "short": ("sms,spam", "{text},{label}", ("spam", "ham")),
    "korean": ("댓글,혐오", "{text} 그렇지 않습니다 {i},{label}", ("혐오", "일반")),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_may_repeat_a_label(name: str, tmp_path: Path) -> None:
    header, row, labels = HEADERS[name]
    file = tmp_path / "a.csv"
    rows = [
        row.format(i=i, text=MESSAGES[i % 4], topic=("sport", "money")[i % 2], label=labels[i % 2])
        for i in range(40)
    ]
    file.write_text("\n".join([header, *rows]) + "\n", "utf-8")
    names = header.split(",")
    if name != "words":  # one word over words: only its name tells
        assert guess_columns([file]).label in names
    found = guess_columns([file], text=names[-2], label=names[-1])
    assert (found.text, found.label, set(found.labels)) == (*names[-2:], set(labels))
    texts = [document.text for document in read_documents(file, text=names[-2])]
    assert len(texts) == 40


@pytest.mark.parametrize("first", ["good", "a long review of a film", "Great!"])
def test_a_row_that_stands_first_is_no_header(first: str, tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    texts = [first, *(f"{'not ' * (i % 3)}good {i}" for i in range(30))]
    rows = [f"{i}\t{text}\t{('pos', 'neg')[i % 2]}\n" for i, text in enumerate(texts)]
    file.write_text("".join(rows), "utf-8")
    found = guess_columns([file])
    assert (found.text, found.label, found.unused) == ("column2", "column3", ("column1",))


TWO_TEXTS = [
    {"id": f"q{i}", "a": f"how can I learn {i}", "b": f"what is the way to {i}", "same": i % 2}
    for i in range(20)
]


def test_two_columns_of_texts_are_a_pair() -> None:
    found = guess_columns(TWO_TEXTS)
    assert (found.text, found.pair, found.label, found.unused) == ("a", "b", "same", ("id",))
    assert "pair; for one alone: --text a" in found.sentences()[1]
    one = guess_columns(TWO_TEXTS, text="b")
    assert (one.text, one.pair, one.unused) == ("b", None, ("id", "a"))
    assert one.sentences()[1] == "Not used: id, a. Choose with --text, --pair and --label."
    three = guess_columns([row | {"why": f"they mean the same {row['id']}"} for row in TWO_TEXTS])
    assert (three.pair, set(three.unused)) == (None, {"id", "a", "b", "why"} - {three.text})


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("date", [f"Mon Apr {i:02} 22:19:45 PDT 2009" for i in range(1, 31)]),
        ("user", ["Ada Lovelace", "Kim Chul Soo", "Bo Li"] * 10),
        ("url", [f"https://example.org/a-long-name-{i}" for i in range(30)]),
        ("desk", ["Science and Technology News", "World News of Today"] * 15),
        ("when", [f"2024년 {i % 12 + 1}월 3일" for i in range(30)]),
        ("note", [None, *(f"a remark of some words {i}" for i in range(29))]),
    ],
)
def test_other_columns_are_no_second_text(column: str, values: list[str]) -> None:
    rows = [
        {"target": i % 2, column: value, "tweet": f"so much to say about it {i}"}
        for i, value in enumerate(values)
    ]
    found = guess_columns(rows)
    assert (found.text, found.pair, found.label) == ("tweet", None, "target")
    assert found.unused == (column,)


def test_a_title_and_its_text_are_a_pair_also_with_several_labels(tmp_path: Path) -> None:
    file = tmp_path / "films.csv"
    kinds = ("war|drama", "war", "drama|sad", "sad")
    rows = [f"the film number {i},it is about a man who {i},{kinds[i % 4]}" for i in range(24)]
    file.write_text("\n".join(["title,body,tags", *rows]), "utf-8")
    found = guess_columns([file])
    assert (found.kind, found.text, found.pair) == ("multilabel", "title", "body")
    assert found.separator == "|"


def test_an_undetectable_column_names_the_option(tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    file.write_text("a,b\n" + "".join(f"text {i},x{i}\n" for i in range(9)), "utf-8")
    with pytest.raises(MalmoiError, match=r"looks like labels \(a, b\): name it with --label"):
        guess_columns([file])
    file.write_text("a,label\n" + "1,2\n" * 9, "utf-8")
    with pytest.raises(MalmoiError, match="name it with --text"):
        guess_columns([file])
    assert GuessedColumns("tagging", "a", "b").describe() == "tagging: text = a, label = b"
