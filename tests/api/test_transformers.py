"""Folders of Malmoi's own model type open in transformers' Auto classes, with the same scores."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.tokenizer import train_tokenizer

TEXTS = ["the state of the union is strong", "a free people of small words"] * 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT with a band, a BERT with one, and a classifier: transformers has no class for them."""
    root = tmp_path_factory.mktemp("own")
    for name, kind, make, heads in (
        ("gpt", "char", gpt2, {"lm": 0}),
        ("bert", "wordpiece", bert, {"mlm": 0}),
        ("moods", "wordpiece", bert, {"classify": 3}),
    ):
        words = train_tokenizer(TEXTS, kind=kind, vocab=120)
        size = dict(vocab=words.vocab_size, width=32, depth=2, heads=2, context=32)
        config = make(**size, attention=("causal & local:4" if name == "gpt" else "local:4",))
        network = initialise(Network(replace(config, init_std=0.3), heads), seed=0)
        labels = ("bad", "fair", "good") if name == "moods" else ()
        write_checkpoint(Checkpoint(network.eval(), words, labels), root / name)
        assert '"model_type": "malmoi"' in (root / name / "config.json").read_text()
    return root


def test_a_gpt_of_our_own_type_scores_and_writes_in_transformers(folders: Path) -> None:
    theirs = hf.AutoModelForCausalLM.from_pretrained(folders / "gpt")
    words = hf.AutoTokenizer.from_pretrained(folders / "gpt")
    ours = malmoi.load(folders / "gpt", device="cpu")
    inputs = words("the state of", return_tensors="pt")
    with torch.no_grad():
        scores = theirs(**inputs).logits[0].numpy()
    assert np.abs(scores - ours.logits("the state of")).max() <= 1e-5
    written = theirs.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
    text = ours.generate("the state of", max_new_tokens=6, temperature=0)
    assert words.decode(written) == f"the state of{text}"
    assert theirs(**inputs, labels=inputs["input_ids"]).loss > 0


def test_a_bert_of_our_own_type_is_saved_and_opened_again(folders: Path, tmp_path: Path) -> None:
    theirs = hf.AutoModelForMaskedLM.from_pretrained(folders / "bert")
    words = hf.AutoTokenizer.from_pretrained(folders / "bert")
    inputs = words("the [MASK] of", return_tensors="pt")
    with torch.no_grad():
        scores = theirs(**inputs).logits
    ours = malmoi.load(folders / "bert", device="cpu")
    assert np.abs(scores[0].numpy() - ours.logits("the [MASK] of")).max() <= 1e-5
    theirs.save_pretrained(tmp_path)
    again = hf.AutoModelForMaskedLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert again(**inputs).logits.equal(scores)
        states = hf.AutoModel.from_pretrained(tmp_path)(**inputs, output_hidden_states=True)
    assert np.abs(torch.stack(states.hidden_states)[-1, 0].numpy()).max() > 0
    assert again.config.hidden_size == 32


def test_a_pipeline_classifies_a_padded_batch_as_we_do(folders: Path) -> None:
    classify = hf.pipeline("text-classification", model=str(folders / "moods"), batch_size=2)
    texts = ["strong", "a free people of small words"]
    for said, ours in zip(
        classify(texts), malmoi.load(folders / "moods", device="cpu").predict(texts), strict=True
    ):
        assert said["label"] == ours.label  # type: ignore[union-attr]
        assert said["score"] == pytest.approx(ours.scores[said["label"]], abs=1e-5)  # type: ignore[union-attr]


def test_unopenable_folders_give_the_reason(folders: Path) -> None:
    with pytest.raises(malmoi.UsageError, match="needs a lm head, and this folder has: mlm"):
        hf.AutoModelForCausalLM.from_pretrained(folders / "bert")
    with pytest.raises(malmoi.UsageError, match="opened without"):
        hf.AutoModel.from_pretrained(folders / "gpt", device_map={"": 0})
