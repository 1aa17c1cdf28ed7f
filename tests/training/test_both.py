"""One network that reads as a GPT and as a BERT: masks, shift, training, and one folder for
everything.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import malmoi
from malmoi.errors import UsageError
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2
from malmoi.system.run_folder import read_metrics
from malmoi.text.documents import read_documents
from malmoi.tokenizer import train_tokenizer
from malmoi.training.data.encode import build_stores
from malmoi.training.data.loader import MaskedWindows, Masking
from malmoi.training.data.windows import Windows
from malmoi.training.losses import ForwardPass, both
from malmoi.training.recipe import DataConfig
from malmoi.training.signals import Stopped
from tiny_runs import TINY, assert_equal_weights, losses, signalled, write_corpus

SETTINGS: dict[str, Any] = {
    **TINY,
    "model.width": 32,
    "model.context": 32,
    "model.heads": 2,
    "tokenizer.vocab": 320,
    "train.minutes": 0,
    "train.optimizer": "adamw",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt", documents=200)


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("both") / "run"
    train(corpus, out, steps=120, **{"train.valid_every": 60, "train.ema": 0.1})
    return out


def train(corpus: Path, out: Path, **changes: Any) -> None:
    from malmoi.training.recipes import named_recipe

    settings = SETTINGS | {"train.steps": changes.pop("steps")} | changes
    recipe = named_recipe("both").override(settings)
    malmoi.pretrain(recipe, data=corpus, out=out, device="cpu")


def network() -> Network:
    config = gpt2(vocab=50, context=16, width=16, depth=2, heads=2, both_ways=True)
    config = config.override({"dropout": 0.0, "attention_dropout": 0.0})
    return initialise(Network(config, {"lm": 0}), 0).eval()


def test_the_masked_reading_shares_every_weight_and_sees_both_ways() -> None:
    net = network()
    view = net.masked()
    assert {id(p) for p in view.parameters()} == {id(p) for p in net.parameters()}
    tokens = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 6] = (other[0, 6] + 1) % 50
    for reads, changed in ((net, range(6, 9)), (view, range(9))):
        one, two = (reads.hidden(t)[0] for t in (tokens, other))
        differs = (one - two).abs().amax(-1) > 1e-6
        assert differs.nonzero().flatten().tolist() == list(changed)
    scores = view(tokens, heads=("mlm",))["mlm"][0]
    torch.testing.assert_close(scores[1:], net.heads["lm"](view.hidden(tokens))[0, :-1])
    slots = torch.tensor([4, 7])
    torch.testing.assert_close(view(tokens, heads=("mlm",), slots=slots)["mlm"], scores[slots])
    assert net.trunk.is_causal
    assert not view.trunk.is_causal
    with pytest.raises(UsageError, match="reads left to right only"):
        Network(gpt2(vocab=50, context=16, width=16, depth=1, heads=2), {"lm": 0}).masked()


def test_masked_tokens_are_predicted_one_place_to_the_left(corpus: Path, tmp_path: Path) -> None:
    words = train_tokenizer([corpus.read_text()], kind="byte-bpe", vocab=300, special="mask")
    assert words.vocab_size == 300
    assert words.specials.mask == 299
    reader = read_documents(corpus)
    store = build_stores(reader, words, tmp_path, end=words.specials.eos).train
    windows = Windows(store, 24, 0)
    masking = Masking.of(words, DataConfig(mask_rate=0.3, mask_token=1.0, mask_random=0.0))
    batch = MaskedWindows(windows, masking, 0).at(8, 4)
    whole = windows.batch(np.arange(8, 12))["tokens"][:, :-1]
    hidden = batch["tokens"] != whole
    assert (batch["tokens"][hidden] == 299).all()
    assert not hidden[:, 0].any()
    assert not (whole[hidden] == words.specials.eos).any()
    found = batch["mlm_labels"] != -100
    places = [divmod(int(slot), 24) for slot in batch["mlm_slots"][found]]
    assert {(row, at + 1) for row, at in places} == set(zip(*np.nonzero(hidden), strict=True))
    assert batch["mlm_labels"][found].tolist() == [int(whole[r, at + 1]) for r, at in places]
    short = MaskedWindows(windows, masking, 0, parts=3).at(8, 4)["tokens"]
    hidden = short != whole.reshape(12, 8)
    assert hidden.any(axis=1).all()
    assert not hidden[:, 0].any()


def test_the_loss_of_both_is_each_loss_by_its_share() -> None:
    net = network()
    tokens = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(1))
    slots, labels = torch.tensor([3, 15]), torch.tensor([7, 9])
    masked = {"tokens": tokens, "mlm_slots": slots, "mlm_labels": labels}
    causal = {"tokens": tokens[:, :-1], "lm_labels": tokens[:, 1:]}
    counts = {"lm_labels": torch.tensor(18.0), "mlm_labels": torch.tensor(2.0)}
    objective = both(0.25)
    assert objective.heads == ("lm",)
    cross = torch.nn.functional.cross_entropy
    scores = net.heads["lm"](net.masked().hidden(tokens)).flatten(0, 1)[slots]
    loss, told = objective(ForwardPass.of(net, masked), counts)
    torch.testing.assert_close(loss, 0.75 * cross(scores, labels))
    assert set(told) == {"mlm"}
    scores = net.heads["lm"](net.hidden(tokens[:, :-1])).flatten(0, 1)
    loss, told = objective(ForwardPass.of(net, causal), counts)
    torch.testing.assert_close(loss, 0.25 * cross(scores, tokens[:, 1:].flatten()))
    assert set(told) == {"lm"}


def test_both_losses_fall(run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    for name in ("lm", "mlm"):
        assert training[-1][name] < 0.8 * training[0][name]
    last = rows[-1]
    measures = {"lm_loss", "mlm_loss", "mlm_accuracy", "perplexity", "valid_loss_without_ema"}
    assert measures <= set(last)


def test_one_folder_generates_scores_fills_embeds_and_is_fine_tuned(
    run: Path, tmp_path: Path
) -> None:
    model = malmoi.load(run, device="cpu")
    assert {"generate", "score", "fill", "embed"} <= set(model.abilities)
    text = model.generate("The state of", max_new_tokens=8, seed=0)
    assert isinstance(text, str)
    assert model.score("The state of the", " union").logprob < 0
    found = model.fill("We work for [MASK] and peace.", top=3)
    assert len(found) == 3
    assert all(fill.text.startswith("We work for") for fill in found)
    assert all(fill.text.endswith(" and peace.") for fill in found)
    assert model.embed(["The law", "is strong."]).shape == (2, 32)
    rows = "\n".join(f"{i % 2}\t{'peace law' if i % 2 else 'we are free'}" for i in range(40))
    (tmp_path / "train.tsv").write_text(f"label\ttext\n{rows}\n")
    task = malmoi.custom_task("classification", text="text", label="label")
    done = malmoi.finetune(
        run, task, tmp_path / "train.tsv", tmp_path / "out", device="cpu", epochs=1.0
    )
    assert done.model.config.attention == ("full",)
    assert done.model.predict("peace law").label in ("0", "1")


@torch.inference_mode()
def test_a_prompt_is_not_closed_as_a_whole_text_is(run: Path) -> None:
    model = malmoi.load(run, device="cpu")
    end = model.tokenizer.specials.eos
    before, after = model.tokenizer.ids(["The state of", " the"])
    logits = model.network(torch.tensor([[end, *before, *after]]), heads=("lm",))["lm"][0]
    logprobs = logits.float().log_softmax(-1)[len(before) :]
    expected = sum(float(row[token]) for row, token in zip(logprobs, after, strict=False))
    assert model.score("The state of", " the").logprob == pytest.approx(expected, abs=1e-4)
    text = model.generate("The state of", max_new_tokens=1, temperature=0)
    best = int(logits[len(before)].argmax())
    assert text == model.tokenizer.decode([best], skip_specials=True)


def test_a_stopped_run_of_both_ends_like_an_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    settings = {"steps": 8, "train.micro": 3, "train.ema": 0.5}
    train(corpus, tmp_path / "whole", **settings)
    with signalled(5), pytest.raises(Stopped):
        train(corpus, tmp_path / "stopped", **settings)
    train(corpus, tmp_path / "stopped", **settings)
    assert_equal_weights(tmp_path / "stopped", tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
