"""Few labels and a language model: label words after a prompt, from the rows to the folder."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli.app import run_command
from malmoi.errors import UsageError
from malmoi.finetuning.few_labels import fit_calibration
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer

GOOD = ("a warm film", "warm and funny", "funny people", "a funny warm story")
BAD = ("a dull film", "dull and slow", "slow people", "a slow dull story")
ROWS = [{"text": text, "label": "good"} for text in GOOD]
ROWS += [{"text": text, "label": "bad"} for text in BAD]
SENTENCES = [f"{t}\nSentiment: good" for t in GOOD] + [f"{t}\nSentiment: bad" for t in BAD]


@pytest.fixture(scope="module", params=["gpt", "bert"])
def language_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random GPT or BERT whose head prefers the word "bad"."""
    gpt = request.param == "gpt"
    words = train_tokenizer(SENTENCES, kind="bpe" if gpt else "wordpiece", vocab=300)
    name, head = ("gpt2-small", "lm") if gpt else ("bert-tiny", "mlm")
    config = preset(name, vocab=words.vocab_size, context=64, width=32, heads=2, depth=1)
    network = initialise(Network(config, {head: 0}), 0)
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(Checkpoint(network, words), folder)
    return folder


def test_label_words_are_compared_with_a_layer_and_kept_in_the_folder(
    language_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO):
        done = malmoi.finetune(
            language_model, "classification", ROWS, out, ROWS, prompt=True, device="cpu"
        )
    assert "Label words after" in caplog.text
    assert done.steps == 0
    tried = json.loads((out / "report.json").read_text())["trials"]
    names = [one["name"] for one in tried]
    assert (names[0], names[-2:]) == (
        "the most frequent label",
        ["the mean of the best three", "a new layer"],
    )
    assert len(tried) == 8
    assert all(one["gain"]["error"] >= 0 for one in tried[1:])
    assert "the most frequent label" in (out / "report.html").read_text()
    chosen = json.loads((out / "config.json").read_text())["malmoi"]["words"]
    ways = [chosen, *chosen["also"]]
    assert {repr(way["prompt"]) for way in ways} < {*names[1:-2]}
    # the folder predicts by the mean of scale · log p + bias, as the untouched model has log p
    base = malmoi.load(language_model, device="cpu")
    if "lm" in base.network.heads:
        text = ROWS[0]["text"]
        means = []
        for way in ways:
            query = way["prompt"].replace("{text}", text)
            logs = np.array([base.score(query, said).logprob for said in way["said"]])
            means.append(log_softmax(way["scale"] * log_softmax(logs) + way["bias"]))
        expected = softmax(np.mean(means, 0))
        found = malmoi.load(out, device="cpu").predict(text)
        assert list(found.scores.values()) == pytest.approx(expected, abs=1e-4)
    again = malmoi.finetune(
        language_model, "classification", ROWS, out, ROWS, prompt=True, device="cpu"
    )
    assert again.metrics == done.metrics
    (tmp_path / "rows.csv").write_text("text,label\na warm film,good\nslow people,bad\n")
    given = ["-m", str(out), "--device", "cpu"]
    assert run_command(["evaluate", *given, "--data", str(tmp_path / "rows.csv")]) == 0
    assert run_command(["predict", *given, str(tmp_path / "rows.csv")]) == 0


def test_prompts_need_words_and_can_be_turned_off(language_model: Path, tmp_path: Path) -> None:
    numbered = [{**row, "label": str(len(row["label"]))} for row in ROWS]
    with pytest.raises(UsageError, match="labels that are different words"):
        malmoi.finetune(
            language_model, "classification", numbered, tmp_path / "no", numbered, prompt=True
        )
    out = tmp_path / "off"
    malmoi.finetune(language_model, "classification", ROWS, out, ROWS, steps=1, device="cpu")
    assert not (out / "search.json").exists()  # steps ask for training


def test_the_calibration_is_the_penalised_fit() -> None:
    """The fit without a row, against scipy's minimum of the same objective."""
    torch.manual_seed(0)
    logs = torch.randn(2, 6, 3, dtype=torch.double).log_softmax(-1)
    prior = torch.randn(2, 3, dtype=torch.double)
    labels = torch.tensor([0, 1, 2, 0, 1, 1])
    held = torch.cat((torch.eye(6, dtype=torch.bool), torch.zeros(1, 6, dtype=torch.bool)))
    found = fit_calibration(logs, prior, labels, held)

    def loss(values: np.ndarray, prompt: int, left: int) -> float:
        scores = np.exp(values[0]) * logs[prompt].numpy() + values[1:]
        ways = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        rows = [i for i in range(6) if i != left]
        penalty = values[0] ** 2 + ((values[1:] - prior[prompt].numpy()) ** 2).sum()
        return float(-sum(ways[i, labels[i]] for i in rows) + 0.5 * penalty)

    for prompt, left in ((0, 3), (1, -1)):
        best = minimize(loss, np.zeros(4), args=(prompt, left), tol=1e-10).x
        if left < 0:
            assert found.scale[prompt].item() == pytest.approx(np.exp(best[0]), abs=1e-4)
            assert found.bias[prompt].numpy() == pytest.approx(best[1:], abs=1e-4)
        else:
            scores = np.exp(best[0]) * logs[prompt, left].numpy() + best[1:]
            assert found.held_out[prompt, left].numpy() == pytest.approx(scores, abs=1e-3)
