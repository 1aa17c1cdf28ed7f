"""The paths of inference on machines that are not this one: no bf16, no compiler, no int8, one
core, little memory.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.compression.quantize import quantize_model
from malmoi.errors import MalmoiError, UsageError
from malmoi.inference import Model
from malmoi.inference.generation.sampling import sample_token
from malmoi.kernels.int8 import is_quantized, why_not
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2, llama
from malmoi.system.machine import float64_device, parse_machine, per_device, pretend, this_machine
from malmoi.tokenizer import train_tokenizer
from malmoi.tokenizer.padding import forward_limits

MACHINES = [
    "",
    "no-bf16",
    "no-compiler",
    "no-int8",
    "no-avx512",
    "cores=1",
    "no-bf16,no-int8,no-compiler,cores=1,memory=1G",
]
SIZES: dict[str, Any] = dict(vocab=300, context=40, width=64, depth=2, heads=4)
TEXT = "the state of the union is strong"
GREEDY: dict[str, Any] = dict(max_new_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    words = train_tokenizer([TEXT] * 20, kind="byte-bpe", vocab=290)
    small = llama(**SIZES, kv_heads=2, hidden=96)
    made = {
        "gpt": (gpt2(**SIZES), {"lm": 0}),
        "half": (small, {"lm": 0}),
        "bert": (bert(**SIZES), {"classify": 3}),
    }
    for name, (config, heads) in made.items():
        network = initialise(Network(config, heads), 0)
        with torch.no_grad():
            # tokens that are well apart, so that no tie is broken by chance
            network.trunk.embed.token.weight.mul_(10)
        network.to(torch.bfloat16) if name == "half" else network
        write_checkpoint(
            Checkpoint(network, words, ("a", "b", "c") if "classify" in heads else ()),
            folder / name,
        )
    for bits in (8, 4):
        quantize_model(folder / "gpt", folder / f"gpt-{bits}", bits=bits)
    return folder


@pytest.fixture(params=MACHINES, ids=lambda text: text or "this one")
def described(request: pytest.FixtureRequest) -> Iterator[str]:
    with pretend(parse_machine(request.param)):
        yield str(request.param)


@pytest.fixture(scope="module")
def plain(folders: Path) -> Model:
    return malmoi.load(folders / "gpt", device="cpu", dtype="fp32")


def test_text_and_labels_are_the_same_on_every_machine(
    described: str, folders: Path, plain: Model
) -> None:
    found = malmoi.load(folders / "gpt", device="cpu")
    prompts = [TEXT[:9], "the union of"]
    assert found.generate(prompts, **GREEDY) == plain.generate(prompts, **GREEDY)
    assert found.generate(TEXT[:9], seed=1) == plain.generate(TEXT[:9], seed=1)
    assert found.perplexity(TEXT) == pytest.approx(plain.perplexity(TEXT), rel=1e-4)
    assert set(malmoi.load(folders / "bert", device="cpu").predict(TEXT).scores) == {"a", "b", "c"}


def test_half_precision_is_computed_in_what_the_chip_has_and_saved_as_it_was(
    described: str, folders: Path, tmp_path: Path
) -> None:
    found = malmoi.load(folders / "half", device="cpu")
    computed = this_machine().inference_dtype("cpu", torch.bfloat16)
    assert {weight.dtype for weight in found.network.parameters()} == {computed}
    assert any("stored in bf16, computed in fp32" in note for note in found.notes) == (
        computed == torch.float32
    )
    found.save(tmp_path)
    again = malmoi.load(tmp_path, device="cpu", dtype="fp32")
    want = malmoi.load(folders / "half", device="cpu", dtype="fp32")
    assert (tmp_path / "model.safetensors").stat().st_size == (
        folders / "half/model.safetensors"
    ).stat().st_size
    assert again.perplexity(TEXT) == want.perplexity(TEXT)


def test_explicit_half_precision_warns_of_its_cost(described: str, folders: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = malmoi.load(folders / "half", device="cpu", dtype="bf16")
        found.perplexity(TEXT)
    emulated = not this_machine().native_bf16("cpu")
    assert any("bf16 is emulated" in note for note in found.notes) == emulated
    assert not (emulated and [one for one in told if "mkldnn" in str(one.message)])


def test_int8_runs_or_is_refused(described: str, folders: Path, plain: Model) -> None:
    if why_not() is not None:
        with pytest.raises(UsageError, match="int8 would be slower than fp32 here"):
            malmoi.load(folders / "gpt", device="cpu", dtype="int8")
        return
    found = malmoi.load(folders / "gpt", device="cpu", dtype="int8")
    assert found.perplexity(TEXT) == pytest.approx(plain.perplexity(TEXT), rel=0.02)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_folder_predicts_the_same_with_and_without_a_kernel(
    described: str, bits: int, folders: Path
) -> None:
    found = malmoi.load(folders / f"gpt-{bits}", device="cpu")
    assert is_quantized(found.network) == (why_not() is None)
    assert bool(found.notes) == (why_not() is not None)
    want = malmoi.load(folders / f"gpt-{bits}", device="cpu", dtype="fp32")
    assert found.perplexity(TEXT) == pytest.approx(want.perplexity(TEXT), rel=0.02)
    assert len(found.generate([TEXT[:9], "the"], **GREEDY)) == 2


def test_a_model_that_does_not_fit_when_converted_is_refused(folders: Path) -> None:
    size = (folders / "half/model.safetensors").stat().st_size
    machine = parse_machine(f"no-bf16,memory={int(1.5 * size)}")
    with pretend(machine), pytest.raises(MalmoiError, match="of memory"):
        malmoi.load(folders / "half", device="cpu")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_every_kind_of_device_has_its_settings(kind: str) -> None:
    assert forward_limits(torch.device(kind)).rows > 0
    assert per_device({"cpu": 1, "cuda": 2}, kind) == (2 if kind == "cuda" else 1)
    assert float64_device(torch.device(kind)).type == ("cpu" if kind == "mps" else kind)


def test_a_token_is_drawn_on_the_device_of_its_scores() -> None:
    found = sample_token(torch.tensor([[0.0, 50.0, 0.0]]), [torch.Generator().manual_seed(0)])
    assert found.tolist() == [1]
