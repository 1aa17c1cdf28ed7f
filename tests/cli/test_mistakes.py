"""What people give by mistake, through the command: a sentence with the row's place, or the work
done and told.
"""

import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import environment
from malmoi.cli import run_command
from tiny_models import tiny_bert

GOOD = "".join(f"a good film {i},pos\na bad film {i},neg\n" for i in range(4))
KOREAN = (
    "본문,라벨\n"
    + "".join(f"재미있는 영화 {i},긍정\n지루한 영화 {i},부정\n" for i in range(4))
    + "라벨 없음,\n"
)
ASKED = {"text": "who", "context": "Alice lives in Rome."}
OWN = ["--text", "본문", "--label", "라벨"]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def squad(*answers: object) -> str:
    asked = [
        {"id": str(i), "question": "q", "answers": [answer]} for i, answer in enumerate(answers)
    ]
    return json.dumps({"data": [{"paragraphs": [{"context": "Rome is old.", "qas": asked}]}]})


def encoded(text: str, name: str = "utf-8") -> bytes:
    return text.encode(name)


MISSING = f"text,label\n{GOOD}no label,\n"
REFUSED: dict[str, tuple[list[str], str, bytes, str]] = {  # arguments, file, content, what is said
    "a label is missing": (
        ["classification"],
        "a.csv",
        encoded(MISSING),
        "a.csv:10: the label in 'label' is missing",
    ),
    "… in a file with CRLF": (
        ["classification"],
        "a.csv",
        encoded(MISSING.replace("\n", "\r\n")),
        "a.csv:10: the label",
    ),
    "… with a byte order mark": (
        ["classification"],
        "a.csv",
        encoded(MISSING, "utf-8-sig"),
        "a.csv:10: the label",
    ),
    "… in UTF-16": (["classification"], "a.csv", encoded(MISSING, "utf-16"), "a.csv:10: the label"),
    "… compressed": (
        ["classification"],
        "a.csv.xz",
        lzma.compress(encoded(MISSING)),
        "a.csv.xz:10: the label",
    ),
    "… in EUC-KR": (
        ["classification", *OWN],
        "a.csv",
        encoded(KOREAN, "euc-kr"),
        "a.csv:10: the label in '라벨' is miss",
    ),
    "… after a field of two lines": (
        ["classification"],
        "a.csv",
        encoded('text,label\n"two\nlines, ""said"" he",pos\nbad,\n'),
        "a.csv:4: the label",
    ),
    "a carriage return in the midst of a row": (
        ["classification"],
        "a.csv",
        encoded("text,label\na good\rfilm,pos\na bad film,neg\n"),
        "a.csv:2 is not a valid row (new-line character seen in unquoted field)",
    ),
    "a label of its own in every row": (
        ["classification"],
        "a.csv",
        encoded("text,label\n" + "".join(f"a film,tt{i:04}\n" for i in range(12))),
        "Each of the 12 rows has a different label ('tt0000', 'tt0001'…)",
    ),
    "one text of each label": (
        ["classification"],
        "a.csv",
        b"text,label\na,pos\nb,neg\nc,mid\n",
        "Each label has only one text (a.csv:2…), which cannot teach it and test it too",
    ),
    "no column of labels": (
        ["classification"],
        "a.csv",
        b"text,when\na,1\nb,2\n",
        "No column of a.csv looks like labels (text, when): name it with --label COLUMN.",
    ),
    "an unknown column of labels": (
        ["--label", "lable"],
        "a.csv",
        encoded(f"text,label\n{GOOD}"),
        "a.csv has no column 'lable'. Did you mean 'label'?",
    ),
    "texts without labels": (
        [],
        "a.txt",
        b"a good film\na bad film\n" * 4,
        "a.txt has one column (column1), but labels are needed",
    ),
    "an unknown column": (
        ["classification", "--text", "txt"],
        "a.csv",
        b"text,label\na,1\n",
        "a.csv:2 has no column 'txt'. Did you mean 'text'? Name the column with --text COLUMN",
    ),
    "a row without its column": (
        ["classification"],
        "a.jsonl",
        encoded(lines({"text": "a", "label": 1}, {"txt": "b", "label": 2})),
        "a.jsonl:2: there is no column 'text'",
    ),
    "two columns of one name": (
        ["classification"],
        "a.csv",
        b"text,text,label\na,b,1\n",
        "a.csv:1 has two columns 'text'",
    ),
    "one class only": (
        ["classification"],
        "a.csv",
        b"text,label\na,pos\nb,pos\nc,pos\n",
        "All 3 rows (from a.csv:2 on) have the label 'pos'",
    ),
    "one number only": (
        ["regression"],
        "a.csv",
        b"text,label\na,3\nb,3\n",
        "have the label 3.0: there is nothing to learn",
    ),
    "no number": (
        ["regression"],
        "a.csv",
        b"text,label\na,1\nb,nan\n",
        "a.csv:3: 'label' must be a number, not 'nan'",
    ),
    "half a choice": (
        ["choice", "--choices", "a,b"],
        "a.csv",
        b"text,a,b,label\nx,1,2,0.5\n",
        "a.csv:2: 'label' must be a whole number",
    ),
    "a quote that is not closed": (
        ["classification"],
        "a.csv",
        encoded(f'text,label\n{GOOD}"open,pos\nnext,neg\n'),
        "a.csv:10: 1 field where there should be 2 (a quote that opens here continues to line 11)",
    ),
    "an answer elsewhere": (
        ["answer"],
        "a.jsonl",
        encoded(lines({**ASKED, "label": "Paris"})),
        "a.jsonl:1: the answer 'Paris' is not in its context",
    ),
    "an answer at the wrong place": (
        ["squad"],
        "a.json",
        encoded(squad({"text": "Rome", "answer_start": 3})),
        "a.json:1: the answer 'Rome' is not found at character 3",
    ),
    "an answer without its place": (
        ["squad"],
        "a.json",
        encoded(squad({"text": "Rome"})),
        "a.json:1: an answer must have a text and an answer_start",
    ),
    "an id that comes twice": (
        ["answer"],
        "a.jsonl",
        encoded(lines(*[{**ASKED, "label": "Rome", "id": "x"}] * 2)),
        "a.jsonl:2: the id 'x' comes 2 times, but ids must differ",
    ),
    "a tag without its word": (
        ["conll2003"],
        "a.txt",
        b"EU NNP I-NP I-ORG\nO\n",
        "a.txt:1: line 2 must hold a word and a tag, not 'O'",
    ),
    "… where the word is blank": (
        ["conll2003"],
        "a.txt",
        b"EU NNP I-NP I-ORG\n\tNNP\tI-NP\tO\n",
        "line 2 must hold a word and a tag",
    ),
    "a word without its tag": (
        ["conll2003"],
        "a.txt",
        b"EU NNP I-NP I-ORG\n\nGerman JJ I-NP\n",
        "a.txt:3: line 3 must have 4 columns",
    ),
    "an empty word": (
        ["tagging"],
        "a.jsonl",
        encoded(lines({"text": ["a", ""], "label": ["O", "B-X"]})),
        "a.jsonl:1: word 2 is empty",
    ),
    "fewer tags than words": (
        ["tagging"],
        "a.csv",
        b"text,label\nAlice lives,B-PER\n",
        "a.csv:2: there are 2 words and 1 tags",
    ),
    "another encoding": (
        ["classification"],
        "latin1.csv",
        encoded("text,label\ncafé Zürich,pos\nnuméro,neg\n", "latin-1"),
        "latin1.csv:2: not readable as utf-8. Malmoi reads UTF-8, UTF-16 and CP949 (EUC-KR); "
        "convert a file of Windows in Europe with iconv -f WINDOWS-1252 -t UTF-8 latin1.csv",
    ),
    "NULs": (
        ["classification"],
        "nul.csv",
        b"text,label\na\0b,pos\nc\0d,neg\n",
        "nul.csv:2: not text: it has NUL characters. Remove them, with tr -d",
    ),
    "one example": (
        ["classification"],
        "a.csv",
        b"text,label\na,pos\n",
        "There is only one example",
    ),
    "no examples": (["classification"], "a.csv", b"text,label\n", "There are no examples in"),
    "a file cut off": (
        ["classification"],
        "a.csv.xz",
        lzma.compress(encoded(MISSING))[:-9],
        "is damaged or truncated",
    ),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [GOOD, "Alice lives in Rome", KOREAN] * 3
    sizes = dict(context=32, width=16, depth=1, heads=1)
    return tiny_bert(tmp_path_factory.mktemp("bert"), texts, 150, **sizes)


@pytest.fixture
def tune(bert: Path, tmp_path: Path, workdir: Path) -> Callable[..., int]:

    def call(arguments: list[str], name: str, content: bytes) -> int:
        (tmp_path / name).write_bytes(content)
        return run_command(
            [
                "finetune",
                *arguments,
                "--model",
                str(bert),
                "--data",
                name,
                "--out",
                "out",
                "--epochs",
                "1",
                "--overwrite",
            ]
        )

    return call


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_reported_with_its_place(
    what: str, tune: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, name, content, said = REFUSED[what]
    assert tune(arguments, name, content) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("malmoi: ")
    assert said in error
    assert not (tmp_path / "out").exists()  # nothing is begun that cannot be done


@pytest.mark.parametrize("columns", [[], ["--text", "message", "--label", "spam"]])
def test_a_column_named_like_its_label_and_an_advice_that_fits(
    columns: list[str], tune: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"win a prize {i},spam\nsee you later {i},ham\n" for i in range(100))
    settings = ["--set", "batch=2", "--set", "prompt=false", "--lr", "1e-9", "--steps", "1"]
    words = ["classification", *columns, *settings]
    assert tune(words, "sp.csv", f"message,spam\n{rows}".encode()) == 0
    said = capsys.readouterr().err
    assert "text = message, label = spam (2 labels), baseline 50% of these rows" in said
    assert "would be right for 50.0% of the evaluation rows." in said
    assert "It has read only 1% of the training rows: give it more --epochs" in said
    assert "a higher --lr" not in said


def test_suspicious_rows_are_used_with_a_warning(
    tune: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = f"{'good ' * 25_000},pos\n{'bad ' * 25_000},neg\n"
    assert tune(["classification"], "a.csv", f"text,label\n{GOOD}{long},pos\n".encode()) == 0
    said = capsys.readouterr().err
    assert "note: 1 empty text, the first at a.csv:12." in said
    assert "texts are longer than 32 tokens and are truncated" in said
    assert (
        tune(["nsmc"], "b.txt", "id\tdocument\tlabel\n1\t굳 ㅋ\t1\n1\t별로\t0\n2\t굳\t1\n".encode())
        == 0
    )
    assert "note: b.txt:3: the id '1' comes 2 times." in capsys.readouterr().err
    assert tune(["classification", "--skip-bad"], "a.csv", MISSING.encode()) == 0
    assert "note: 1 bad row skipped, such as a.csv:10" in capsys.readouterr().err


def test_a_very_long_context_is_read_in_windows(
    tune: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "text": "who",
            "context": "lives in Rome . " * 7000 + "Alice",
            "label": "Alice",
            "id": str(i),
        }
        for i in (1, 2)
    ]
    assert len(rows[0]["context"]) > 100_000
    assert (
        tune(
            ["answer", "--set", "steps=1", "--set", "stride=1000"], "a.jsonl", lines(*rows).encode()
        )
        == 0
    )
    assert "span_f1" in capsys.readouterr().out


PATHS = {
    "generate -m demo-ko/gtp hi": "There is no folder 'demo-ko/gtp'. Did you mean 'demo-ko/gpt'?",
    "fill -m demo-k/gpt hi": "Did you mean 'demo-ko/gpt'?",
    "predict -m demo-ko/gpt new.cvs --data new.cvs": "'new.cvs'. Did you mean 'new.csv'?",
    "pretrain gtp new.csv": "There is no recipe, file or folder 'gtp'. Did you mean 'gpt'?",
    "finetune nwe.csv": "There is no file or folder 'nwe.csv'. Did you mean 'new.csv'?",
    "finetune new.csv --dev nwe.csv": "Did you mean 'new.csv'?",
    "evaluate new.cvs -m demo-ko/gpt": "Did you mean 'new.csv'?",
    "pretrain gpt new.cvs": "Did you mean 'new.csv'?",
    "tokenizer train new.cvs -o t": "Did you mean 'new.csv'?",
    "finetune nosuch.csv": "malmoi: There is no file or folder 'nosuch.csv'.\n",
}


def test_a_misspelt_path_is_noticed_at_once(tmp_path: Path) -> None:
    (tmp_path / "demo-ko" / "gpt").mkdir(parents=True)
    (tmp_path / "new.csv").write_text("text,label\na,b\n")
    code = (
        "import sys; from malmoi.cli import run_command\n"
        "for command in sys.argv[1:]:\n"
        "    print(run_command(command.split()), 'torch' in sys.modules)\n"
        "    print('=', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *PATHS],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    ends = done.stdout.splitlines()
    said = done.stderr.split("=\n")
    for (command, sentence), end, errors in zip(PATHS.items(), ends, said[:-1], strict=True):
        assert sentence in errors, command
        assert end in ("1 False", "2 False"), command


def test_a_path_that_is_not_there_is_named_in_korean(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "new.csv").write_text("")
    with environment(MALMOI_LANG="ko"):
        for name, hint in (("nosuch.csv", ""), ("a.b.txt", ""), ("nwe.csv", "new.csv")):
            run_command(["finetune", name])
            said = f"malmoi: '{name}': 그런 파일이나 폴더가 없습니다."
            found = f" '{hint}'를 찾으셨나요?" if hint else ""
            assert capsys.readouterr().err == f"{said}{found}\n"


@pytest.mark.parametrize("command", ["tokenizer train", "pretrain gpt --minutes 1"])
def test_why_no_line_could_be_read_is_told(
    command: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "nul.txt").write_bytes(b"a\0b c\nd\0 e\n" * 3000)
    assert run_command([*command.split(), "nul.txt", "-o", "out"]) == 1
    said = "6,000 bad lines skipped, such as nul.txt:1: not text: it has NUL characters. Remove"
    assert said in capsys.readouterr().err


def test_pretrain_finds_the_text_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{i},a review of some length {i}\n" for i in range(20))
    (tmp_path / "rows.csv").write_text(f"stars,review\n{rows}", "utf-8")
    words = ["pretrain", "gpt-char", str(tmp_path / "rows.csv"), "--steps", "2", "--dry-run"]
    assert run_command(words) == 0
    assert "text = review" in capsys.readouterr().err
