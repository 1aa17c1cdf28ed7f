"""GPTQ: outputs nearer to the original's than rounding's, in folders that transformers opens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import malmoi
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.quantized import Packing
from malmoi.compression.quantize import gptq, quantize_model
from malmoi.compression.result import folder_size
from malmoi.errors import UsageError
from malmoi.model import Network, initialise
from malmoi.model.families import bert, llama
from malmoi.tokenizer import train_tokenizer

WORDS = ("the sea", "a ship", "sails", "at night", "over", "the wall", "말이", "모인다", "하나")
SIZES = dict(width=32, depth=2, heads=2, context=32)
FAMILIES = {
    "llama": (llama, "byte-bpe", {"lm": 0}, {"hidden": 64}),
    "bert": (bert, "wordpiece", {"mlm": 0}, {}),
}


def sentences(seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(WORDS), (1500,), generator=generator).tolist()
    return " ".join(WORDS[i] for i in chosen)


def hidden(folder: Path, text: str) -> Tensor:
    opened = read_checkpoint(folder)
    assert opened.tokenizer is not None
    tokens = torch.tensor(opened.tokenizer.ids([text])[0][: 32 * 20]).view(-1, 32)
    network = opened.network.float().eval()
    with torch.no_grad():
        return network.hidden(tokens)


@pytest.fixture(params=FAMILIES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and its text; in it, the same model rounded and by GPTQ."""
    family, kind, heads, others = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    words = train_tokenizer([sentences(0)], kind=kind, vocab=300)
    config = family(**SIZES, **others, vocab=words.vocab_size, init_std=0.3)
    checkpoint = Checkpoint(initialise(Network(config, heads), 0), words)
    write_checkpoint(checkpoint, folder)
    write_checkpoint(checkpoint, folder / "round", packing=Packing(4, 32))
    (folder / "text.txt").write_text(sentences(1))
    found = quantize_model(folder, folder / "gptq", bits=4, calibration=folder / "text.txt")
    assert found.weights[0] == found.weights[1]
    assert found.size[1] == folder_size(folder / "round")
    return folder


def test_outputs_on_other_text_are_closer_than_with_rounding(model: Path) -> None:
    want = hidden(model, sentences(2))
    off = {
        way: (hidden(model / way, sentences(2)) - want).square().mean().sqrt().item()
        for way in ("round", "gptq")
    }
    assert off["gptq"] < 0.8 * off["round"]


def test_transformers_opens_the_folder_with_the_same_scores(model: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the other side of the format")
    pytest.importorskip("compressed_tensors", reason="transformers reads the format through it")
    ours = read_checkpoint(model / "gptq")
    (head,) = ours.network.heads
    kind = "AutoModelForCausalLM" if head == "lm" else "AutoModelForMaskedLM"
    opened = getattr(transformers, kind).from_pretrained(model / "gptq", dtype=torch.float32)
    tokens = torch.arange(20)[None] + 5
    with torch.no_grad():
        want = opened.eval()(tokens).logits
        found = ours.network.float().eval()(tokens)[head]
    assert torch.allclose(found, want, atol=1e-3 * want.abs().max().item())


def test_an_input_that_is_always_zero_is_handled() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 16, generator=generator)
    rows = torch.randn(40, 16, generator=generator)
    rows[:, 3] = 0
    found = gptq(weight, rows.T @ rows, 4, 8)
    assert found.scale.shape == (6, 2)
    assert torch.isfinite(found.dense()).all()


def test_missing_inputs_of_gptq_are_reported(model: Path, tmp_path: Path) -> None:
    text = model / "text.txt"
    short = tmp_path / "short.txt"
    short.write_text("the sea")
    for options, reason in ((dict(calibration=short), "too few"), (dict(group=4), "multiple of 8")):
        with pytest.raises(UsageError, match=reason):
            malmoi.compress(
                model, tmp_path / "out", "quantize", bits=4, **{"calibration": text, **options}
            )
