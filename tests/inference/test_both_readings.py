"""One folder with two readings, through every ability that takes a model: each uses its own."""

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import malmoi
from live_server import Live
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.errors import UsageError
from malmoi.interpret.probe import read_examples
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2
from malmoi.tokenizer import train_tokenizer

TEXTS = ["The state of the union is strong.", "We work for peace and for the law."]
MASKED = "We work for [MASK] and for the law."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = train_tokenizer(TEXTS * 4, kind="byte-bpe", vocab=320, special="mask")
    config = gpt2(
        vocab=words.vocab_size, context=48, width=16, depth=2, heads=2, both_ways=True, init_std=0.5
    )
    out = tmp_path_factory.mktemp("both") / "both"
    write_checkpoint(Checkpoint(initialise(Network(config, {"lm": 0}), 0), words), out)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> malmoi.Model:
    return malmoi.load(folder, device="cpu")


@torch.inference_mode()
def both_directions(model: malmoi.Model, text: str) -> Tensor:
    """The hidden states of a whole text [T, D], each token attending to every other."""
    tokens = torch.tensor([model.tokenizer.encode(text).tokens])
    states: Tensor = model.network.masked().trunk(tokens)
    return states[0]


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_an_adapter_is_read_as_it_was_trained(folder: Path, tmp_path: Path, kind: str) -> None:
    rows = "\n".join(f"{i % 2}\t{TEXTS[i % 2]} {i}" for i in range(16))
    (tmp_path / "train.tsv").write_text(f"label\ttext\n{rows}\n")
    task = malmoi.custom_task("classification", text="text", label="label")
    done = malmoi.finetune(
        *(folder, task, tmp_path / "train.tsv", tmp_path / "out"),
        device="cpu",
        epochs=1.0,
        adapter=kind,
    )
    again = malmoi.load(tmp_path / "out", device="cpu")
    assert again.config.attention == ("full",)
    found = malmoi.evaluate(again, task, tmp_path / "train.tsv")
    assert found == malmoi.evaluate(done.model, task, tmp_path / "train.tsv")
    if kind == "lora":  # a copy knows the task and its columns
        again.save(tmp_path / "copy")
        copy = malmoi.load(tmp_path / "copy", device="cpu")
        assert malmoi.evaluate(copy, data=tmp_path / "train.tsv") == found


def test_pictures_probes_and_vectors_read_both_ways(model: malmoi.Model) -> None:
    states = both_directions(model, TEXTS[0]).numpy()
    np.testing.assert_allclose(model.embed(TEXTS[0]), states.mean(0), atol=1e-5)
    probed = read_examples(model, [(TEXTS[0], "a")], 1).vectors
    np.testing.assert_allclose(probed[-1, 0], states.mean(0), atol=1e-5)
    picture = model.show("attention", TEXTS[0], layer=0).svg
    assert picture.count("<rect") == len(states) ** 2


def test_the_server_uses_the_reading_of_each_verb(model: malmoi.Model) -> None:
    with Live({"both": model}) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        vector = client.post("/v1/embeddings", json={"input": TEXTS[0]}).json()["data"][0]
        np.testing.assert_allclose(vector["embedding"], model.embed(TEXTS[0]), atol=1e-5)
        asked = {"model": "both", "text": TEXTS[0]}
        both = client.post("/studio/attention", json=asked).json()["weights"]
        np.testing.assert_allclose(both, model.attention(TEXTS[0])[0, 0], atol=1e-4)
        asked["reading"] = "causal"
        left = np.array(client.post("/studio/attention", json=asked).json()["weights"])
        assert (np.triu(left, 1) == 0).all()
        asked = {"model": "both", "text": MASKED, "reading": "masked", "top": 1}
        lens = client.post("/studio/lens", json=asked).json()
        asked = {"text": TEXTS[1], "place": 3, "gpt": "both", "bert": "both"}
        sides = client.post("/studio/beside", json=asked).json()
    best = model.fill(MASKED, top=1)[0]
    assert sides["bert"]["guesses"][0]["probability"] == pytest.approx(best.probability, abs=1e-5)
    assert sides["bert"]["row"] == 2  # one place to the left
    there = lens["layers"][-1][lens["tokens"].index("[MASK]")][0]
    assert there["probability"] == pytest.approx(best.probability, abs=1e-5)
    told = model.score("We work for", " peace").logprob
    assert sides["gpt"]["logprob"] == pytest.approx(told, abs=1e-4)


def test_a_model_of_both_readings_teaches_both(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS * 40))
    done = malmoi.compress(
        *(folder, tmp_path / "student", "distil"),
        data=text,
        layers=1,
        steps=2,
        device="cpu",
        **{"data.valid": 0.2, "train.batch": 4, "train.compile": False},
    )
    assert {"lm_loss", "mlm_loss"} <= set(done.metrics)
    student = malmoi.load(tmp_path / "student", device="cpu")
    assert {"generate", "fill"} <= set(student.abilities)


def test_the_folder_says_how_transformers_reads_it(folder: Path, model: malmoi.Model) -> None:
    card = (folder / "README.md").read_text("utf-8")
    assert "generate(" in card
    assert "fill(" in card
    assert "add_special_tokens=False" in card
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(MASKED).input_ids == model.tokenizer.encode_masked(MASKED).tokens
    network = AutoModelForCausalLM.from_pretrained(folder)
    prompt = theirs(TEXTS[0], return_tensors="pt", add_special_tokens=False)
    assert network.generate(**prompt, max_new_tokens=1).size(1) == prompt.input_ids.size(1) + 1
    with pytest.warns(UserWarning, match="ends with the end-of-text token"):
        network.generate(**theirs(TEXTS[0], return_tensors="pt"), max_new_tokens=1)


def test_one_reading_alone_is_not_saved(model: malmoi.Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="save the model itself"):
        model.masked.save(tmp_path / "half")
    assert not (tmp_path / "half").exists()
