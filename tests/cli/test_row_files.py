"""Folders of tables: shard in, shard out, each row once, the same bytes however often it stops."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import malmoi
from malmoi.cli import run_command
from tiny_models import tiny_bert

pyarrow = pytest.importorskip("pyarrow", reason="what reads and writes Parquet")
parquet = pytest.importorskip("pyarrow.parquet", reason="what reads and writes Parquet")

TEXTS = ["the state of the union is strong", "나는 오늘 학교에 갔다.", "a small model of words"]
TINY = {"width": 32, "depth": 2, "heads": 2, "context": 48, "init_std": 0.3}
ROWS = 1500  # of a file: results are kept after 1,000 and 1,500
Run = Callable[..., tuple[int, str, str]]
# a command that is killed when it has kept results for the Nth time
KILLED = """
import os, signal, sys
from malmoi.cli import row_files, run_command
left = int(sys.argv[1])
def kept(event):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
row_files.report_progress = kept
sys.exit(run_command(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _classifier(tmp_path_factory.mktemp("model"), seed=0)


def _classifier(folder: Path, seed: int) -> Path:
    two = dict(heads_of={"classify": 2}, labels=("negative", "positive"))
    return tiny_bert(folder, TEXTS * 4, 120, seed=seed, **two, **TINY)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three Parquet files; one row of each has no text."""
    folder = tmp_path_factory.mktemp("shards")
    for number, name in enumerate(("a", "b", "c")):
        draw = random.Random(number)
        words = " ".join(TEXTS).split()
        texts = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(ROWS)]
        ids = pyarrow.array(range(ROWS), pyarrow.int16())
        table = pyarrow.table({"id": ids, "body": [None, *texts[1:]]})
        parquet.write_table(table, folder / f"{name}.parquet")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def running(*words: object) -> tuple[int, str, str]:
        code = run_command([str(word) for word in words])
        return code, *capsys.readouterr()

    return running


def contents(folder: Path) -> dict[str, bytes]:
    """The tables that a reader of the folder finds."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder): path for path in found}
    return {
        str(name): path.read_bytes()
        for name, path in names.items()
        if not any(part.startswith((".", "_")) for part in name.parts)
    }


def test_a_folder_is_predicted_like_its_files(model: Path, tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    (data / "_temporary").mkdir()
    (data / "a.csv").write_text("n;body\n1;small words\n2;\n", "utf-8")
    (data / "b.jsonl").write_text('{"body": "the state", "n": [1]}\n', "utf-8")
    (data / "empty.jsonl").write_text("\n", "utf-8")
    (data / "notes.txt").write_text("no table\n", "utf-8")
    (data / "_temporary" / "half.csv").write_text("half", "utf-8")
    parquet.write_table(pyarrow.table({"body": ["a", "b"]}), data / "more" / "c.parquet")
    command = ("predict", "-m", model, "--data", data, "--text", "body", "--out", tmp_path / "out")
    code, out, err = run(*command)
    assert code == 0, err
    assert f"There are no rows in {data / 'empty.jsonl'}." in err
    found = contents(tmp_path / "out")
    assert sorted(found) == ["a.csv", "b.jsonl", "more/c.parquet"]
    assert out.splitlines()[-1] == f"{tmp_path / 'out' / 'more' / 'c.parquet'}: 2 rows"
    for name, content in found.items():
        alone = tmp_path / Path(name).name
        assert run("predict", "-m", model, data / name, "--text", "body", "-o", alone)[0] == 0
        assert alone.read_bytes() == content, name
    code, out, err = run(*command)  # all is there
    assert (code, out) == (0, "")
    assert "3 of 4 files are finished." in err


@pytest.mark.parametrize("verb", ["predict", "embed"])
def test_a_folder_that_was_killed_is_finished_to_the_same_bytes(
    verb: str, model: Path, shards: Path, tmp_path: Path, run: Run
) -> None:
    """Killed in the second file and in the third, then finished by two processes at once."""
    command = (verb, "-m", model, "--data", shards, "--text", "body", "--out")
    assert run(*command, tmp_path / "whole")[0] == 0
    out = tmp_path / "out"
    words = [*map(str, command), str(out)]
    for kept, half, survived in ((3, "b", 1000), (2, "c", 700)):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(kept), *words], check=False)
        assert killed.returncode < 0
        partial = out / f"{half}.parquet.partial"
        lines = partial.read_text("utf-8").splitlines(keepends=True)
        assert len(lines) == 1 + 1000
        assert not (out / f"{half}.parquet").exists()
        cut = [*lines[: 1 + survived], lines[-1][:9]]  # as a kill leaves it while it is written
        partial.write_text("".join(cut), "utf-8")
    both = [
        subprocess.Popen([sys.executable, "-m", "malmoi", *words], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = b"".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said.decode().splitlines() == [f"{out / 'c.parquet'}: 1,500 rows"]
    assert contents(out) == contents(tmp_path / "whole")


def test_two_parts_are_the_whole(model: Path, shards: Path, tmp_path: Path, run: Run) -> None:
    command = ("predict", "-m", model, "--data", shards, "--text", "body", "--out")
    assert run(*command, tmp_path / "whole")[0] == 0
    out = tmp_path / "out"
    assert run(*command, out, "--part", "1/2")[0] == 0
    assert sorted(contents(out)) == ["a.parquet", "c.parquet"]
    assert run(*command, out, "--part", "2/2")[0] == 0
    assert contents(out) == contents(tmp_path / "whole")
    for wrong in (("--part", "3/2"), ("--part", "1/2", "--overwrite")):
        assert run(*command, out, *wrong)[0] == 2
    assert parquet.read_table(out).num_rows == 3 * ROWS  # what is no table is skipped


def test_results_of_two_models_are_not_mixed(
    model: Path, shards: Path, tmp_path: Path, run: Run
) -> None:
    other = _classifier(tmp_path / "other", seed=1)
    out = tmp_path / "out"
    command = ("--data", shards, "--text", "body", "--out", out, "--part", "1/3")
    assert run("predict", "-m", model, *command)[0] == 0
    before = contents(out)
    code, _, err = run("predict", "-m", other, *command)
    assert code == 2
    assert "holds another prediction (by another model)" in err
    assert "--overwrite" in err
    code, _, err = run("predict", "-m", model, "--labels", "a,b", *command)
    assert code == 2
    assert "labels was []" in err
    assert contents(out) == before
    assert run("predict", "-m", other, *command[:-2], "--overwrite")[0] == 0
    assert contents(out)["a.parquet"] != before["a.parquet"]
    (out / "_malmoi.json").unlink()
    assert "already exists" in run("predict", "-m", model, *command)[2]
    inside = ("--data", shards, "--text", "body", "--out", shards / "out")
    assert "lies in" in run("predict", "-m", model, *inside)[2]


def test_vectors_are_written_with_their_rows(
    model: Path, shards: Path, tmp_path: Path, run: Run
) -> None:
    command = ("embed", "-m", model, "--data", shards / "a.parquet", "--text", "body", "-o")
    assert run(*command, tmp_path / "a.parquet")[0] == 0
    assert run(*command, tmp_path / "a.jsonl")[0] == 0
    code, _, err = run(*command, tmp_path / "a.csv")
    assert code == 2
    assert "a.csv should end in one of .jsonl .parquet." in err
    given = parquet.read_table(shards / "a.parquet")
    found = parquet.read_table(tmp_path / "a.parquet")
    assert found.drop_columns("embedding").equals(given)
    assert found.schema.field("embedding").type == pyarrow.list_(pyarrow.float32())
    vectors = found["embedding"].to_pylist()
    assert vectors[0] is None
    texts = given["body"].to_pylist()[1:1000]  # read together
    expected = malmoi.load(model, device="cpu").embed(texts)
    assert np.array_equal(np.array(vectors[1:1000], np.float32), expected)
    lines = (tmp_path / "a.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["embedding"] for line in lines] == vectors
    predicted = ("predict", "-m", model, tmp_path / "a.parquet", "--text", "body")
    assert run(*predicted, "-o", tmp_path / "both.parquet")[0] == 0
    assert "embedding" in parquet.read_schema(tmp_path / "both.parquet").names
