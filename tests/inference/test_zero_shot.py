"""Classification by the labels' names: a sentence encoder, a model of inference, the command."""

import json
from pathlib import Path

import numpy as np
import pytest

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.cli import run_command
from malmoi.errors import UsageError
from malmoi.inference.predict import Prediction
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer

TEXTS = ["a warm and funny film", "dull people"]
NLI = ("contradiction", "entailment", "neutral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sentence encoder and a model of inference, both random."""
    words = train_tokenizer([*TEXTS, "This text is good, bad."], kind="wordpiece", vocab=80)
    config = preset("bert-tiny", vocab=words.vocab_size, context=32, width=16, heads=2, depth=1)
    encoder = Checkpoint(
        initialise(Network(config, {}, pooler=True), 0), words, sentence=SentencePooling()
    )
    inference = Checkpoint(initialise(Network(config, {"classify": 3}), 0), words, NLI)
    found = {}
    for name, checkpoint in {"encoder": encoder, "inference": inference}.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(checkpoint, found[name])
    return found


def test_a_sentence_encoder_compares_cosines(folders: dict[str, Path]) -> None:
    model = malmoi.load(folders["encoder"], device="cpu")
    assert "classify" in model.abilities
    found = model.classify(TEXTS, {"1": "good", "0": "bad"})
    vectors = model.embed([*TEXTS, "This text is good.", "This text is bad."])
    cosines = 20 * vectors[:2] @ vectors[2:].T  # of length 1, as the folder says
    chances = np.exp(cosines) / np.exp(cosines).sum(1, keepdims=True)
    for one, row in zip(found, chances, strict=True):
        assert list(one.scores) == ["1", "0"]
        assert list(one.scores.values()) == pytest.approx(row.tolist(), abs=1e-4)
    with pytest.raises(UsageError, match="takes examples"):
        model.classify("a", ["good", "bad"], examples=[("a", "good")])


def test_an_nli_model_classifies_by_entailment(folders: dict[str, Path]) -> None:
    model = malmoi.load(folders["inference"], device="cpu")
    found = model.classify(TEXTS[0], ["good", "bad"], prompt="It is {label}.")
    pairs = [(TEXTS[0], "It is good."), (TEXTS[0], "It is bad.")]
    entailed = []
    for one in model.predict(pairs):
        assert isinstance(one, Prediction)
        entailed.append(one.scores["entailment"])
    assert found.scores["good"] == pytest.approx(entailed[0] / sum(entailed), abs=1e-4)


def test_the_command_classifies_texts_and_files(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = malmoi.load(folders["encoder"], device="cpu")
    expected = [one.label for one in model.classify(TEXTS, ["good", "bad"])]
    options = ["predict", "-m", str(folders["encoder"]), "--labels", "good, bad"]
    assert run_command([*options, "--json", *TEXTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["prediction"]["label"] for line in lines] == expected
    table = tmp_path / "rows.csv"
    table.write_text("text\n" + "".join(f"{text}\n" for text in TEXTS))
    out = tmp_path / "out.jsonl"
    assert run_command([*options, "--data", str(table), "-o", str(out)]) == 0
    written = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    assert written == expected
    assert run_command([*options, "--pairs", *TEXTS]) == 2
