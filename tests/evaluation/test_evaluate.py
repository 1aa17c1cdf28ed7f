"""A fine-tuned folder judges a file by itself: it remembers its task and its columns."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import malmoi
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.kinds import custom_task
from tiny_models import tiny_bert

TEXTS = ["he is angry", "she is glad", "they are calm", "he was glad and angry"] * 4
ONE_STEP: dict[str, Any] = dict(steps=1, batch=4, precision="fp32")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"), TEXTS, 90, context=16, width=16, heads=2)


def write_csv(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", "utf-8")
    return path


def evaluated(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert run_command(["evaluate", "--json", *map(str, words)]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_task_columns_and_labels_are_remembered(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{i},{text},{'yes' if 'glad' in text else 'no'}" for i, text in enumerate(TEXTS)]
    table = write_csv(tmp_path / "rows.csv", "stars,what they said,happy", rows)
    columns = dict(text="what they said", label="happy")
    malmoi.finetune(bert, "classification", table, tmp_path / "out", table, **columns, **ONE_STEP)
    found = evaluated(capsys, "-m", tmp_path / "out", "--data", table)
    assert {"accuracy", "f1_macro", "examples", "labels"} <= set(found)
    assert set(found["labels"]) == {"no", "yes"}
    assert found["labels"]["yes"]["support"] == 8
    assert set(found["labels"]["no"]) == {"precision", "recall", "f1", "support"}
    other = evaluated(capsys, "-m", tmp_path / "out", table, "--metric", "mcc")
    assert next(iter(other)) == "matthews"
    assert run_command(["evaluate", "-m", str(tmp_path / "out"), str(table), "--metric", "f2"]) == 2
    others = capsys.readouterr().err.rpartition("Use one of ")[2].rstrip(".\n").split(", ")
    assert {"accuracy", "f1_macro", "matthews"} <= set(others)


def test_columns_of_0_and_1_are_remembered(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{text},{int('angry' in text)},{int('glad' in text)}" for text in TEXTS]
    table = write_csv(tmp_path / "rows.csv", "said,anger,joy", rows)
    columns: dict[str, Any] = dict(text="said", label=("anger", "joy"))
    malmoi.finetune(bert, "multilabel", table, tmp_path / "out", table, **columns, **ONE_STEP)
    found = evaluated(capsys, "-m", tmp_path / "out", "--data", table)
    assert set(found["labels"]) == {"anger", "joy"}
    named = ("--text", "said", "--label", "anger,joy")
    assert found == evaluated(capsys, "multilabel", "-m", tmp_path / "out", table, *named)
    assert malmoi.evaluate(tmp_path / "out", data=table)["examples"] == len(TEXTS)


def test_a_vocabulary_that_does_not_fit_is_reported(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{word} 나는 기쁘다,{word}" for word in ("glad", "angry") * 6]
    table = write_csv(tmp_path / "rows.csv", "text,label", rows)
    with caplog.at_level(logging.WARNING):
        malmoi.finetune(bert, "classification", table, tmp_path / "out", table, **ONE_STEP)
        malmoi.evaluate(tmp_path / "out", data=table)
    unknown = "50% of the words are unknown"
    said = [one.message for one in caplog.records if unknown in one.message]
    assert len(said) == 2
    with pytest.raises(UsageError, match="Which task"):
        malmoi.evaluate(bert, data=table)


def test_wrong_tables_are_a_sentence_each(tmp_path: Path) -> None:
    def refused(task: str, data: Any, words: str, **columns: Any) -> None:
        with pytest.raises(MalmoiError) as caught:
            load_examples(custom_task(task, **columns), data)
        assert words in str(caught.value)

    both = write_csv(tmp_path / "both.csv", "text,clean,insult", ["a,1,1", "b,0,1", "c,1,0"])
    sentence = "both.csv:2: the labels 'clean' and 'insult' contradict each other"
    refused("multilabel", both, sentence, label=("clean", "insult"))
    unlabelled = write_csv(tmp_path / "none.csv", "text,label", ["a,", "b,", "c,"])
    sentence = "None of the 3 rows can be used: "
    refused("classification", unlabelled, sentence)
    refused("classification", unlabelled, "none.csv:2: the label in 'label' is missing")
    empty = tmp_path / "empty.csv"
    empty.write_text("", "utf-8")
    refused("classification", empty, "There are no examples in")
    pandas = pytest.importorskip("pandas", reason="tables in memory")
    table = pandas.DataFrame([["a", "b", "x"]], columns=["text", "text", "label"])
    refused("classification", table, "The table has two columns 'text'")
    pandas.DataFrame({"body": ["a"], "label": ["x"]}).to_parquet(tmp_path / "rows.parquet")
    refused("classification", tmp_path / "rows.parquet", "rows.parquet:1 has no column 'text'")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    refused("classification", tmp_path / "bad.parquet", "is damaged, or no .parquet file (Parquet")
