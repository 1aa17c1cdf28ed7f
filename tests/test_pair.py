"""The pair that comes with the package: stored small, opened by everyone, the default."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import malmoi
from conftest import environment
from malmoi.cli import run_command
from malmoi.pair import BERT, GPT, STORED, shipped

TEXTS = ["She opened the door and went in.", "이 영화는 정말 재미있다."]
MEGABYTES = 12


@pytest.mark.parametrize("name", [BERT, GPT])
def test_it_is_small(name: str) -> None:
    size = sum(path.stat().st_size for path in (STORED / name).iterdir())
    assert size <= MEGABYTES * 1e6


@pytest.mark.parametrize("name", [BERT, GPT])
def test_transformers_computes_the_same(name: str) -> None:
    import transformers

    kind = transformers.BertForPreTraining if name == BERT else transformers.GPT2LMHeadModel
    theirs, loading = kind.from_pretrained(shipped(name), output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    words = transformers.AutoTokenizer.from_pretrained(shipped(name))
    model = malmoi.load(name)
    head = "mlm" if name == BERT else "lm"
    for text in TEXTS:
        ids = model.tokenizer.encode(text).tokens
        assert ids == words(text)["input_ids"]
        with torch.inference_mode():
            found = theirs(torch.tensor([ids]))
            ours = model.network(torch.tensor([ids]))[head]
        expected = found.prediction_logits if name == BERT else found.logits
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [BERT, GPT])
def test_its_card_is_that_of_the_repository(name: str) -> None:
    card = (STORED / name / "README.md").read_text("utf-8")
    assert card == (Path(__file__).parents[1] / "models" / name / "README.md").read_text("utf-8")
    assert "…" not in card


def test_it_is_saved_for_others_with_the_same_scores(tmp_path: Path) -> None:
    """As a plain folder, and as a file of llama.cpp, which transformers reads too."""
    import transformers

    pytest.importorskip("gguf")
    model = malmoi.load(GPT)
    model.save(tmp_path / "plain")
    malmoi.export(GPT, tmp_path / "gpt.gguf")
    kind = transformers.GPT2LMHeadModel
    for theirs in (
        kind.from_pretrained(tmp_path / "plain"),
        kind.from_pretrained(tmp_path, gguf_file="gpt.gguf"),
    ):
        for text in TEXTS:
            ids = torch.tensor([model.tokenizer.encode(text).tokens])
            with torch.inference_mode():
                torch.testing.assert_close(
                    theirs(ids).logits, model.network(ids)["lm"], rtol=1e-4, atol=1e-3
                )


def test_eight_bits_keep_the_weights(tmp_path: Path) -> None:
    folder = shipped(BERT)
    assert folder is not None
    script = Path(__file__).parents[1] / "models" / "store.py"
    subprocess.run([sys.executable, script, folder, tmp_path], check=True)
    assert (tmp_path / "tokenizer.json").is_file()
    again = load_file(tmp_path / "numbers.safetensors")
    stored = load_file(STORED / BERT / "numbers.safetensors")
    for name, numbers in stored.items():  # what was rounded once is not rounded further
        np.testing.assert_allclose(again[name], numbers, rtol=2e-3, atol=0)


def test_it_is_unpacked_once(tmp_path: Path) -> None:
    with environment(XDG_CACHE_HOME=str(tmp_path)):
        first = shipped(GPT)
        assert first is not None
        assert first.is_relative_to(tmp_path)
        made = (first / "model.safetensors").stat().st_mtime_ns
        assert shipped(GPT) == first
        assert (first / "model.safetensors").stat().st_mtime_ns == made
        assert [path.name for path in first.parent.iterdir()] == [GPT]
        tmp_path.chmod(0o777)  # anyone could write there: it is not used
        other = shipped(GPT)
        assert other is not None
        assert not other.is_relative_to(tmp_path)
        assert (other / "config.json").is_file()


def test_own_folder_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shipped(GPT)
    assert folder is not None
    shutil.copytree(folder, tmp_path / BERT)
    monkeypatch.chdir(tmp_path)
    assert "generate" in malmoi.load(BERT).abilities


def test_commands_need_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["fill", "She opened the [MASK] and went in."]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split("\t")[1] == "door"
    assert "malmoi-bert, which comes with Malmoi" in shown.err
    assert run_command(["generate", "--max-new-tokens", "8", "The old man"]) == 0
    assert "malmoi-gpt" in capsys.readouterr().err
    assert run_command(["embed", "--json", "hello"]) == 0
    assert len(json.loads(capsys.readouterr().out)["vector"]) == 256
    assert run_command(["predict", "--labels", "good,bad", "I love it"]) == 0
    assert "near guessing" in capsys.readouterr().err
    assert run_command(["predict", "I love it"]) == 2
    assert "--labels" in capsys.readouterr().err


def test_finetuning_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(f"it was {word} {i}", "up" if word == "good" else "down") for i in range(20)
            for word in ("good", "bad")]  # fmt: skip
    lines = ["text,label", *(f"{text},{label}" for text, label in rows)]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    assert run_command(["finetune", "rows.csv", "--epochs", "1"]) == 0
    assert "malmoi-bert" in capsys.readouterr().err
    assert malmoi.load("runs/rows").predict("it was good 3").label == "up"
