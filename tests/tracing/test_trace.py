"""Tracing through its doors: Python, the command, HTTP, the run's page."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest

import malmoi
from conftest import environment, standard_input
from live_server import Live
from malmoi import UsageError
from malmoi.cli import run_command
from malmoi.tracing.index import TextIndex
from tiny_runs import KINDS, train, write_corpus

TEXT = "the state of the union is zzz"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt")


@pytest.fixture(scope="module")
def gpt(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "gpt"
    train("gpt", corpus, out, steps=20)
    return out


@pytest.fixture(scope="module")
def bert(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "bert"
    train("bert", corpus, out, steps=4)
    return out


def own_text(run: Path) -> TextIndex:
    return TextIndex.open(run, malmoi.Tokenizer.load(run))


def test_a_model_just_trained_knows_its_text(corpus: Path, tmp_path: Path) -> None:
    model = train("gpt", corpus, tmp_path / "run", steps=1)
    assert model.trace("the state of the union").matches


def test_matches_are_in_the_file(gpt: Path, corpus: Path) -> None:
    text = corpus.read_text("utf-8")
    found = malmoi.trace(gpt, TEXT, top=3, sentences=2)
    assert found == malmoi.load(gpt).trace(TEXT, top=3, sentences=2)
    assert 1 <= len(found.matches) <= 3
    assert [match.tokens for match in found.matches] == sorted(
        (match.tokens for match in found.matches), reverse=True
    )
    assert found.novelty[2] > 0  # zzz
    for match in found.matches:
        assert match.text in text
        for passage in match.passages:
            assert passage.text.strip("…") in text
            assert passage.text[passage.start : passage.end] == match.text
    assert "zzz" not in {match.text for match in found.matches}


def test_the_command_prints_what_python_returns(
    gpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([str(gpt), TEXT], ["--model", str(gpt), TEXT]):
        assert run_command(["trace", *words, "--json", "--top", "2"]) == 0
        out = capsys.readouterr().out
        assert json.loads(out) == malmoi.trace(gpt, TEXT, top=2).to_dict()
    assert run_command(["trace", str(gpt), TEXT]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split("\t") == ["tokens", "times", "words", "sentence"]
    assert "«" in printed.out
    with standard_input(TEXT.encode()):
        assert run_command(["trace", "-m", str(gpt), "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == TEXT


def test_the_command_speaks_korean(gpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with environment(MALMOI_LANG="ko"):
        assert run_command(["trace", str(gpt), TEXT]) == 0
        assert "학습 텍스트" in capsys.readouterr().err
        assert run_command(["trace", str(gpt), TEXT, "--words", "house"]) == 2
        assert "없습니다" in capsys.readouterr().err


def test_the_server_answers_as_python_does(gpt: Path) -> None:
    model = malmoi.load(gpt, device="cpu")
    body = {"text": TEXT, "words": "union", "top": 2, "sentences": 1, "nearest": 2}
    with Live({"gpt": model}) as live:
        answer = httpx.post(f"{live.url}/v1/trace", json=body, timeout=60)
        about = httpx.get(f"{live.url}/studio/about", timeout=60).json()
    assert answer.status_code == 200, answer.text
    options = {name: value for name, value in body.items() if name != "text"}
    wanted = json.loads(json.dumps(model.trace(TEXT, **options).to_dict()))
    assert answer.json() == {"model": "gpt", "trace": wanted}
    assert about["models"][0]["trained"]


@pytest.mark.parametrize(("settings", "status"), [({}, 403), ({"trace": True}, 200)])
def test_other_machines_read_training_text_only_if_allowed(
    gpt: Path, settings: dict[str, bool], status: int
) -> None:
    with Live({"gpt": malmoi.load(gpt)}, host="0.0.0.0", **settings) as live:
        url = live.url.replace("0.0.0.0", "127.0.0.1")
        answer = httpx.post(f"{url}/v1/trace", json={"text": TEXT}, timeout=60)
    assert answer.status_code == status, answer.text


def test_the_nearest_sentence_is_the_sentence_itself(bert: Path) -> None:
    model = malmoi.load(bert, device="cpu")
    index = own_text(bert)
    passage = next(index.passages(index.array(index.tokenizer.ids(["union"])[0]), most=1))
    for _ in range(2):  # the second time from the file
        near = model.trace(passage.text, nearest=3).nearest
        assert near[0].similarity == pytest.approx(1, abs=1e-3)
        assert near[0].text == passage.text
        assert [one.similarity for one in near] == sorted(
            (one.similarity for one in near), reverse=True
        )


def test_any_text_can_be_searched(
    gpt: Path, corpus: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["trace", "-m", "malmoi-gpt", TEXT]) == 2
    assert "--data" in capsys.readouterr().err
    found = malmoi.trace("malmoi-gpt", "the state of the union", data=str(corpus))
    assert found.matches[0].text in corpus.read_text("utf-8")


# ------------------------------------------------------------------ a run's text


def test_a_text_that_is_gone_is_encoded_again_without_training(
    gpt: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(gpt, run)
    wanted = malmoi.trace(run, TEXT)
    shutil.rmtree(run / "data")
    weights = (run / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="Encode it again") as refusal:
        malmoi.trace(run, TEXT)
    command = re.search(r"malmoi (pretrain .*)", str(refusal.value))
    assert command is not None
    assert run_command(command[1].replace("SOURCE", str(corpus)).split()) == 0
    assert (run / "model.safetensors").read_bytes() == weights
    assert malmoi.trace(run, TEXT) == wanted


def test_a_snapshot_is_traced_in_its_runs_text(corpus: Path, tmp_path: Path) -> None:
    train("gpt", corpus, tmp_path / "run", steps=2, **{"train.snapshots": True})
    (snapshot, *_) = sorted((tmp_path / "run" / "snapshots").iterdir())
    assert malmoi.trace(snapshot, TEXT).matches == malmoi.trace(tmp_path / "run", TEXT).matches


def test_weighted_sources_are_searched_together(tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "first.txt")
    second = tmp_path / "second.txt"
    second.write_text("The cat sat on the mat. " * 200, "utf-8")
    recipe, tiny = KINDS["gpt"]
    changes = {**tiny, "data.weights": [0.5, 0.5], "data.valid": 0.0, "steps": 1}
    malmoi.pretrain(recipe, data=[str(first), str(second)], out=tmp_path / "run", **changes)
    found = malmoi.trace(tmp_path / "run", "the state of the cat sat on the mat")
    texts = " / ".join(match.text for match in found.matches)
    assert "sat on the mat" in texts
    assert "state of the" in texts


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_the_memory_of_a_run_is_on_its_page(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Path = request.getfixturevalue(kind)
    assert run_command(["trace", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["held_out"]) <= {"2", "4", "6", "8", "13"}
    assert 0 <= found["known_held_out"] <= 1
    assert bool(found["written"]) == (kind == "gpt")
    page = (run / "report.html").read_text("utf-8")
    assert "Memory and novelty" in page
    assert f"{found['held_out']['4']:.1%}" in page
    assert run_command(["trace", str(run)]) == 0
    assert "in held-out text" in capsys.readouterr().out


def test_a_model_that_copies_is_found_out(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    sentence = "We the people of the united states work for peace and law. "
    text.write_text((sentence * 60 + "\n\n") * 10, "utf-8")
    model = train("gpt", text, tmp_path / "run", steps=150, **{"train.lr": 1e-2})
    found = model.memorisation()
    assert found.known > 0.9
    assert found.known_held_out > 0.9  # held-out text is the same sentence
    assert found.written[8] < 0.5
    assert found.copies[0].tokens > 13
