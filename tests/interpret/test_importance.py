"""The maps equal one `run` for each of their numbers."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from malmoi import Intervention, UsageError
from malmoi.checkpoint import Checkpoint
from malmoi.inference import Model
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.tokenizer import Tokenizer, train_tokenizer

ROWS = ["the state of the union is strong", "a small model", "of small words the state is"]
SHAPE = {"width": 24, "depth": 2, "heads": 3, "context": 32, "init_std": 0.4}


@cache
def pieces() -> Tokenizer:
    return train_tokenizer(ROWS, kind="wordpiece", vocab=90)


@pytest.fixture(scope="module")
def gpt() -> Model:
    words = train_tokenizer(ROWS, kind="byte-bpe", vocab=280)
    network = initialise(Network(gpt2(vocab=words.vocab_size, **SHAPE), {"lm": 0}), seed=0)
    return Model(Checkpoint(network, words))


def encoder(head: str, labels: tuple[str, ...] = ()) -> Model:
    words = pieces()
    config = bert(vocab=words.vocab_size, dropout=0.0, attention_dropout=0.0, **SHAPE)
    network = initialise(Network(config, {head: len(labels)}), seed=1)
    return Model(Checkpoint(network, words, labels=labels))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.tensor(logits).double().log_softmax(-1).numpy()


def gpt_loss(model: Model, *changes: Intervention) -> float:
    """The mean loss by one pass per row."""
    logs = []
    for row in ROWS:
        tokens = model.tokenizer.encode(row).tokens
        found = model.run(row, changes, positions=range(len(tokens))).logits
        logs += [-log_softmax(found)[i, token] for i, token in enumerate(tokens[1:])]
    return float(np.mean(logs))


def test_the_importance_of_a_head_is_the_loss_without_it(gpt: Model) -> None:
    found = gpt.head_importance(ROWS)
    assert found.heads.shape == (2, 3)
    whole = gpt_loss(gpt)
    assert found.baseline == pytest.approx(whole, abs=1e-5)
    for layer, head in ((0, 2), (1, 0)):
        without = gpt_loss(gpt, Intervention("head", layer, head=head))
        assert found.heads[layer, head] == pytest.approx(without - whole, abs=1e-5)
    without = gpt_loss(gpt, Intervention("attention", 1))
    assert found.attention[1] == pytest.approx(without - whole, abs=1e-5)
    assert found.mlp[0] == pytest.approx(gpt_loss(gpt, Intervention("mlp", 0)) - whole, abs=1e-5)


def test_the_gradient_is_the_slope_of_the_loss(gpt: Model) -> None:
    found = gpt.head_importance(ROWS, method="gradient")
    whole = gpt_loss(gpt)
    assert found.baseline == pytest.approx(whole, abs=1e-5)
    columns = gpt.network.trunk.blocks[1].attend.out.weight[:, 8:16]  # what head 1 writes
    step = 1e-2
    slopes = []
    with torch.no_grad():
        for sign in (1, -1):
            kept = columns.clone()
            columns.mul_(1 + sign * step)
            slopes.append(gpt_loss(Model(gpt.checkpoint)))
            columns.copy_(kept)
    slope = (slopes[0] - slopes[1]) / (2 * step)
    assert found.heads[1, 1] == pytest.approx(-slope, rel=1e-2)


def test_a_classifier_and_a_bert_are_scored_on_their_own_predictions() -> None:
    model = encoder("classify", ("bad", "good"))
    rows = [(text, label) for text, label in zip(ROWS, ("good", "bad", "good"), strict=True)]
    found = model.head_importance(rows)
    off = Intervention("head", 1, head=2)

    def loss(*changes: Intervention) -> float:
        logs = [log_softmax(model.run(text, changes).logits)[0] for text, _ in rows]
        return -float(
            np.mean([log[("bad", "good").index(y)] for log, (_, y) in zip(logs, rows, strict=True)])
        )

    assert found.heads[1, 2] == pytest.approx(loss(off) - loss(), abs=1e-5)
    accuracy = model.head_importance(rows, metric="accuracy").baseline
    said = [model.predict(text).label == label for text, label in rows]
    assert accuracy == pytest.approx(np.mean(said))
    reader = encoder("mlm")
    words = [len(reader.tokenizer.encode(row, specials=False).tokens) for row in ROWS]
    assert reader.head_importance(ROWS).predictions == sum(max(1, round(0.15 * n)) for n in words)
    with pytest.raises(UsageError, match="label"):
        model.head_importance(ROWS)
    with pytest.raises(UsageError, match="no label"):
        model.head_importance([("a small model", "fine")])


@pytest.mark.parametrize("site", ["residual", "attention", "mlp"])
def test_a_patching_map_equals_one_pass_for_each_cell(gpt: Model, site: str) -> None:
    source, text = "the state of the union is", "the state of a small is"
    sizes = [len(gpt.tokens(one)) for one in (source, text)]
    size = min(sizes)
    source, text = (
        gpt.tokenizer.decode(gpt.tokenizer.encode(t).tokens[:size]) for t in (source, text)
    )
    found = gpt.patching_map(source, text, site=site)
    best = int(gpt.run(source).logits[0].argmax())
    assert found.answer == gpt.tokenizer.token(best)
    assert found.logprob == pytest.approx(log_softmax(gpt.run(text).logits)[0, best], abs=1e-5)
    for layer in range(2):
        for at in (0, size - 2, size - 1):
            change = Intervention(site, layer, positions=(at,), value="copy", source=source)
            alone = log_softmax(gpt.run(text, [change]).logits)[0, best]
            assert found.logprobs[layer, at] == pytest.approx(alone, abs=1e-5)
    if site == "residual":  # the last layer's last position is the answer itself
        assert found.recovered[-1, -1] == pytest.approx(1, abs=1e-4)


def test_sentences_that_cannot_be_patched_are_refused(gpt: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same length"):
        gpt.patching_map(ROWS[0], ROWS[1])
    with pytest.raises(UsageError, match="single token"):
        gpt.patching_map(ROWS[1], ROWS[1], answer="the state of words")
