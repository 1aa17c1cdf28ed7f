"""Few labels: contrasted sentence vectors and a logistic head, from the rows to the folder."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError
from malmoi.evaluation.features import TrainingItem
from malmoi.finetuning.few_labels import fit_logistic_head
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer

GOOD = ("a warm film", "warm and funny", "funny people", "a funny warm story")
BAD = ("a dull film", "dull and slow", "slow people", "a slow dull story")
ROWS = [{"text": text, "label": "good"} for text in GOOD] * 2
ROWS += [{"text": text, "label": "bad"} for text in BAD] * 2


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sentence encoder."""
    words = train_tokenizer([*GOOD, *BAD], kind="wordpiece", vocab=80)
    config = preset("bert-tiny", vocab=words.vocab_size, context=16, width=32, heads=2, depth=1)
    network = initialise(Network(config, {}, pooler=True), 0)
    folder = tmp_path_factory.mktemp("encoder")
    write_checkpoint(Checkpoint(network, words, sentence=SentencePooling()), folder)
    return folder


def test_few_rows_are_contrasted(
    encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        done = malmoi.finetune(
            encoder, "classification", ROWS, tmp_path / "out", ROWS, lr=3e-3, device="cpu"
        )
    assert "as in SetFit" in caplog.text
    assert done.metrics["accuracy"] == 1
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows if "loss" in json.loads(row)]
    assert losses[-1] < losses[0]
    model = malmoi.load(tmp_path / "out", device="cpu")
    assert model.predict("warm people").label == "good"
    assert model.predict(["slow film", "funny film"])[0].label == "bad"
    again = malmoi.finetune(encoder, "classification", ROWS, tmp_path / "out", ROWS, lr=3e-3)
    assert again.metrics == done.metrics  # finished: read back, not trained again


def test_best_leaves_few_rows_to_the_contrast(
    encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = dict(lr=3e-3, device="cpu")
    plain = malmoi.finetune(encoder, "classification", ROWS, tmp_path / "a", ROWS, **options)
    with caplog.at_level(logging.INFO):
        best = malmoi.finetune(
            encoder, "classification", ROWS, tmp_path / "b", ROWS, best=True, minutes=1, **options
        )
    assert "too few rows to compare settings" in caplog.text
    assert best.metrics == plain.metrics


def test_contrastive_training_can_be_turned_off_and_needs_an_encoder(
    encoder: Path, tmp_path: Path
) -> None:
    options = dict(steps=1, device="cpu")
    malmoi.finetune(
        encoder, "classification", ROWS, tmp_path / "off", ROWS, contrastive=False, **options
    )
    config = json.loads((tmp_path / "off" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    malmoi.load(tmp_path / "off").save(tmp_path / "plain")
    for task, model in (("classification", tmp_path / "plain"), ("regression", encoder)):
        rows = (
            [{**row, "label": str(len(row["text"]))} for row in ROWS]
            if task == "regression"
            else ROWS
        )
        with pytest.raises(UsageError, match="contrastive needs"):
            malmoi.finetune(model, task, rows, tmp_path / "no", rows, contrastive=True, **options)


def test_the_head_is_logistic_regression(encoder: Path) -> None:
    checkpoint = malmoi.load(encoder, device="cpu").checkpoint
    network = Network(checkpoint.network.config, {"classify": 3})
    initialise(network, 1).eval()
    texts = [*GOOD, *BAD]
    labels = [0, 1, 2, 0, 1, 2, 2, 1]
    assert checkpoint.tokenizer is not None
    rows = checkpoint.tokenizer.rows(texts)
    items = [TrainingItem((row,), label) for row, label in zip(rows, labels, strict=True)]
    fit_logistic_head(network, items)
    with torch.no_grad():
        vectors = torch.stack(
            [
                network.pooler(  # type: ignore[misc]
                    network.hidden(
                        torch.tensor(row.tokens)[None].long(),
                        segments=torch.tensor(row.segments)[None].long(),
                    )
                )[0]
                for row in rows
            ]
        ).numpy()
    scale = np.linalg.norm(vectors, axis=1).mean()
    theirs = LogisticRegression(C=1, tol=1e-8, max_iter=1000).fit(vectors / scale, labels)
    head = network.heads["classify"].linear
    assert abs(head.weight.detach().numpy() * scale - theirs.coef_).max() < 1e-3
    ours = vectors @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    theirs_scores = theirs.decision_function(vectors / scale)
    centred = [one - one.mean(1, keepdims=True) for one in (ours, theirs_scores)]
    assert abs(centred[0] - centred[1]).max() < 1e-3
