"""What a word did equals separate predictions, or a small step of its embedding."""

from functools import cache

import numpy as np
import pytest
import torch

from malmoi import UsageError
from malmoi.checkpoint import Checkpoint
from malmoi.inference import Model
from malmoi.interpret.intervention import view_with_taps
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.tokenizer import Tokenizer, train_tokenizer

ROWS = ["the state of the union is strong", "a small model of small words"]
SHAPE = {"width": 24, "depth": 2, "heads": 3, "context": 32, "init_std": 0.3}
TEXT = "the state of small words"


@cache
def pieces() -> Tokenizer:
    return train_tokenizer(ROWS, kind="wordpiece", vocab=90)


def classifier(problem: str = "") -> Model:
    words = pieces()
    network = initialise(Network(bert(vocab=words.vocab_size, **SHAPE), {"classify": 2}), seed=1)
    extra = {"problem_type": problem} if problem else {}
    return Model(Checkpoint(network, words, labels=("bad", "good"), extra=extra))


def language_model() -> Model:
    words = train_tokenizer(ROWS, kind="byte-bpe", vocab=280)
    network = initialise(Network(gpt2(vocab=words.vocab_size, **SHAPE), {"lm": 0}), seed=0)
    return Model(Checkpoint(network, words))


@pytest.mark.parametrize("problem", ["", "multi_label_classification"])
def test_leaving_a_word_out_is_a_prediction_without_it(problem: str) -> None:
    model = classifier(problem)
    found = model.attributions(TEXT, target="good")
    whole = model.predict(TEXT).scores["good"]
    assert found.probability == pytest.approx(whole)
    assert [one.text for one in found.pieces] == TEXT.split()
    for i, piece in enumerate(found.pieces):
        rest = " ".join(word for k, word in enumerate(TEXT.split()) if k != i)
        assert piece.score == pytest.approx(whole - model.predict(rest).scores["good"], abs=1e-6)
        assert TEXT[piece.start : piece.end] == piece.text
    assert (
        model.attributions(TEXT).target
        == max(model.predict(TEXT).scores.items(), key=lambda item: item[1])[0]
    )


def test_a_gpt_is_asked_for_its_own_next_token() -> None:
    model = language_model()
    found = model.attributions(TEXT)
    best = int(model.run(TEXT).logits[0].argmax())
    assert found.target == model.tokenizer.token(best)
    rest = "the state of small"
    chance = np.exp(model.run(rest).logits[0]) / np.exp(model.run(rest).logits[0]).sum()
    assert found.pieces[-1].score == pytest.approx(found.probability - chance[best], abs=1e-6)


def test_gradient_times_input_is_the_slope_of_log_p() -> None:
    for model, target in ((classifier(), "bad"), (language_model(), None)):
        found = model.attributions(TEXT, target=target, method="gradient")
        subject = model._subject
        inputs = subject.inputs([subject.encode(TEXT)])
        head = subject.head

        @torch.no_grad()
        def log_p(step: float, at: int, model: Model = model) -> float:
            """By the network's own forward pass, with one embedding scaled."""

            def scale(x: torch.Tensor) -> torch.Tensor:
                x = x.double()
                x[:, at] *= 1 + step
                return x

            view = view_with_taps(model.network.double(), {("embedding", 0): scale})
            scores = view(**inputs, heads=(head,))[head]  # noqa: B023
            last = scores[0] if head == "classify" else scores[0, -1]  # noqa: B023
            names = [subject.name(i) for i in range(len(last))]  # noqa: B023
            return float(last.log_softmax(-1)[names.index(found.target)])  # noqa: B023

        for at in (0, 2):
            slope = (log_p(1e-4, at) - log_p(-1e-4, at)) / 2e-4
            assert found.pieces[at].score == pytest.approx(slope, abs=1e-4)
        model.network.float()


def test_an_unknown_target_is_refused() -> None:
    for method in ("leave-one-out", "gradient"):
        with pytest.raises(UsageError, match="Did you mean 'good'"):
            classifier().attributions(TEXT, target="goood", method=method)
