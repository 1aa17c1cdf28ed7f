"""A probe is logistic regression on the model's own hidden states."""

import lzma
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import malmoi
from malmoi import MalmoiError, UsageError
from malmoi.checkpoint import Checkpoint
from malmoi.cli import run_command
from malmoi.inference import Model
from malmoi.interpret.probe import RIDGE, fit_linear, probe_model, read_examples, read_probe_rows
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.tokenizer import train_tokenizer

WORDS = {"state": "NOUN", "union": "NOUN", "strong": "ADJ", "small": "ADJ", "is": "VERB"}
SHAPE = {"width": 16, "depth": 2, "heads": 2, "context": 32}


@cache
def model(kind: str = "wordpiece") -> Model:
    words = train_tokenizer([" ".join(WORDS)] * 4, kind=kind, vocab=300)
    family, head = (bert, "mlm") if kind == "wordpiece" else (gpt2, "lm")
    network = initialise(Network(family(vocab=words.vocab_size, **SHAPE), {head: 0}), seed=0)
    return Model(Checkpoint(network, words))


def rows(count: int, seed: int = 0) -> list[tuple[list[str], list[str]]]:
    rng = random.Random(seed)
    found = [rng.choices([*WORDS], k=5) for _ in range(count)]
    return [(words, [WORDS[word] for word in words]) for words in found]


def test_the_reader_is_scikit_learns() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="an oracle")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    y = (x[:, :3] + 0.5 * torch.randn(200, 3, generator=generator)).argmax(-1)
    weight, bias = fit_linear(x, y, 3, RIDGE)
    theirs = linear_model.LogisticRegression(C=1 / (2 * RIDGE * 200), max_iter=1000, tol=1e-8)
    theirs.fit(x.numpy(), y.numpy())
    assert np.allclose(weight.numpy(), theirs.coef_.T, atol=2e-2)
    shift = bias.numpy() - bias.numpy().mean()
    assert np.allclose(shift, theirs.intercept_ - theirs.intercept_.mean(), atol=2e-2)


def test_what_a_word_is_can_be_read_from_its_embedding() -> None:
    found = malmoi.probe(model(), rows(60), test=rows(20, seed=1))
    assert [one.layer for one in found.layers] == [0, 1, 2]
    assert found.labels == ("ADJ", "NOUN", "VERB")
    assert (found.train, found.test) == (300, 100)
    assert found.layers[0].accuracy == 1.0  # five words, each with one part of speech
    assert found.layers[0].control == 1.0  # five random labels are as easily learnt
    usual = [label for _, labels in rows(20, seed=1) for label in labels]
    assert found.majority == max(usual.count(label) for label in ("ADJ", "NOUN")) / 100
    assert found.best.accuracy == 1.0


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
def test_a_word_is_read_at_its_last_token(kind: str) -> None:
    one = model(kind)
    sentence = ["state", "unstrong", "is"]
    found = read_examples(one, [(sentence, ["a", "b", "c"])], 10)
    states = torch.tensor(one.hidden_states(" ".join(sentence)))
    encoding = one.tokenizer.encode(" ".join(sentence))
    end = len("state unstrong")
    at = max(
        i
        for i, (_, stop) in enumerate(encoding.offsets)
        if stop == end and not encoding.specials[i]
    )
    assert torch.allclose(found.vectors[:, 1], states[:, at], atol=1e-5)
    (mean,) = read_examples(one, [(" ".join(sentence), "a")], 10).vectors.unbind(1)
    assert torch.allclose(mean, states.mean(1), atol=1e-5)


def test_the_command_reads_conllu(
    tmp_path: Path, shared_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["# a comment"]
    for words, labels in rows(40):
        lines += ["1-2\tnothing\t" + "\t".join("_" * 8)]
        lines += [
            f"{i}\t{word}\t_\t{label}\tX\t_\t0\troot\t_\t_"
            for i, (word, label) in enumerate(zip(words, labels, strict=True), 1)
        ]
        lines.append("")
    data = tmp_path / "a.conllu.xz"
    data.write_bytes(lzma.compress("\n".join(lines).encode()))
    assert read_probe_rows(data) == rows(40)
    assert run_command(["probe", "--model", str(shared_model), "--data", str(data)]) == 0
    assert "100.0%" in capsys.readouterr().out.splitlines()[1]
    with pytest.raises(UsageError, match="upos"):
        read_probe_rows(data, "pos")
    (tmp_path / "b.conllu").write_text("1\tword\n", "utf-8")
    with pytest.raises(MalmoiError, match="2 columns"):
        read_probe_rows(tmp_path / "b.conllu")


@pytest.fixture
def shared_model(tmp_path: Path) -> Path:
    model().save(tmp_path / "model")
    return tmp_path / "model"


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Row 1"):
        probe_model(model(), [(["a", "b"], ["X"])] * 4)
    with pytest.raises(UsageError, match="two labels"):
        probe_model(model(), [("state", "X")] * 4)
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "the state,good\nthe union,bad\n" * 10, "utf-8")
    assert read_probe_rows(table)[0] == ("the state", "good")
