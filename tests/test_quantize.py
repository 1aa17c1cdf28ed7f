"""int8 weights: near the weights they stand for, exact about activations, saved and read back to the bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import malmoi
from malmoi.checkpoint import Checkpoint, read, write
from malmoi.errors import UsageError
from malmoi.model import Network, initialise, preset
from malmoi.model.families import bert, gpt2, llama
from malmoi.model.int8 import LARGEST, Int8Linear, is_quantized, pack, quantize
from malmoi.model.int8_row import kernel, row_product
from malmoi.tokenizer import train

SIZES = dict(vocab=300, width=48, depth=2, heads=4, context=64)
FAMILIES = {
    "gpt2": (gpt2(**SIZES), ("lm",)),
    "llama": (llama(**SIZES, kv_heads=2, hidden=96), ("lm",)),
    "bert": (bert(**SIZES), ("mlm", "nsp")),
    "softcapped": (gpt2(**SIZES, softcap=5.0, embed_width=24), ("lm",)),
}


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1e-6, 1e6), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_weight_is_off_by_half_a_step_at_most(rows: int, columns: int, size: float, seed: int) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    packed, scale = pack(weight)
    scale = scale.float()
    assert packed.abs().max() <= LARGEST
    assert ((packed * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("columns", "bias"), [(70, True), (80, True), (80, False)])
@torch.no_grad()
def test_the_product_is_that_of_the_rounded_weights(rows: int, columns: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset, x = torch.randn(50, columns), torch.randn(50) if bias else None, torch.randn(2, rows, columns)
    x[..., 3] *= 300  # one feature far above the others, as real models have
    x[0, 0] = 0
    packed, scale = pack(weight)
    scale = scale.float()
    want = F.linear(x.double(), packed.double() * scale[:, None].double(), None if offset is None else offset.double())
    found = Int8Linear(weight, offset)(x)
    sizes = packed.abs() * scale[:, None]
    step = x.abs().amax(-1, keepdim=True) / LARGEST**2  # all that an activation is off by
    assert ((found - want).abs() <= step * sizes.sum(1) + 1e-5 * want.abs().max()).all()
    one = x[1:, :1]  # takes another way: row, sums and result are each rounded to the 8 bits of bfloat16
    assert (
        (Int8Linear(weight, offset)(one) - want[1:, :1]).abs() <= 3 * 2**-8 * (one.abs() @ sizes.T) + step[1:, :1]
    ).all()
    assert Int8Linear(weight, offset)(x.bfloat16()).dtype == torch.bfloat16


@given(st.integers(1, 70), st.integers(1, 40), st.floats(1e-6, 1e6), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_our_own_kernel_takes_one_row_and_loses_as_little(outputs: int, eighths: int, size: float, seed: int) -> None:
    if kernel() is None:
        pytest.skip("this processor has no VNNI, or there is no compiler")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 8 * eighths, generator=generator)
    x, bias = size * torch.randn(1, 8 * eighths, generator=generator), torch.randn(outputs, generator=generator)
    packed, scale = pack(weight)
    product = row_product(packed, scale, bias)
    assert product is not None
    stood_for = packed.double() * scale.double()[:, None]
    want = F.linear(x.double(), stood_for, bias.double())
    step = x.abs().max() / LARGEST**2
    assert ((product(x) - want).abs() <= step * stood_for.abs().sum(1) + 1e-5 * (want.abs().max() + 1)).all()


def test_a_machine_without_the_kernel_takes_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layer, x = Int8Linear(torch.randn(50, 64)), torch.randn(1, 64)
    first = layer(x)
    kernel.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    other = Int8Linear(torch.zeros(50, 64))
    other.weight, other.scale = layer.weight, layer.scale
    assert kernel() is None
    assert other.row is None
    torch.testing.assert_close(other(x), first, rtol=0.05, atol=0.5)
    kernel.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_says_nearly_the_same_and_comes_back_from_its_folder(family: str, tmp_path: Path) -> None:
    config, heads = FAMILIES[family]
    network = initialise(Network(config, dict.fromkeys(heads, 0)), 0).eval()
    tokens = torch.randint(0, 300, (2, 20))
    want = network(tokens)[heads[0]]
    found = quantize(network)(tokens)[heads[0]]
    assert not any(type(module) is torch.nn.Linear for module in network.trunk.modules())
    assert (found - want).norm() < 0.02 * want.norm()
    write(Checkpoint(network), tmp_path)
    again = read(tmp_path)
    assert is_quantized(again.network)
    assert torch.equal(again.network(tokens)[heads[0]], found)
    assert again.network(tokens.expand(2, 20))[heads[0]].dtype == torch.float32


def test_a_model_is_opened_with_int8_weights_by_name(tmp_path: Path) -> None:
    network = initialise(Network(gpt2(**SIZES), {"lm": 0}), 0)
    words = train(["the state of the union is strong"] * 20, kind="byte-bpe", vocab=290)
    write(Checkpoint(network, words), tmp_path / "plain")
    plain, small = (malmoi.load(tmp_path / "plain", device="cpu", dtype=dtype) for dtype in (None, "int8"))
    assert small.perplexity("the state of the union") == pytest.approx(
        plain.perplexity("the state of the union"), rel=0.01
    )
    small.save(tmp_path / "small")
    settings = dict(max_new_tokens=12, temperature=0)
    again = malmoi.load(tmp_path / "small", device="cpu")
    assert again.generate("the state", **settings) == small.generate("the state", **settings)
    both = small.generate(["the state", "the union of"], **settings)
    assert both[0] == small.generate("the state", **settings)
    with pytest.raises(UsageError, match=r"no dtype 'int9'.*Did you mean 'int8'"):
        malmoi.load(tmp_path / "plain", dtype="int9")


def test_no_other_place_than_the_processor() -> None:
    network = quantize(Network(preset("gpt2-small", depth=1, vocab=50), {"lm": 0}))
    network.to(torch.bfloat16)  # about the other weights alone
    assert network.trunk.blocks[0].mlp.up.weight.dtype == torch.int8
    assert network.trunk.embed.token.weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="for the processor"):
        network.trunk.blocks[0].mlp.up._apply(lambda tensor: Elsewhere())


class Elsewhere:
    device = torch.device("cuda")
