"""int8 weights: near the weights they stand for, exact about activations, saved and read back to
the bit.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import malmoi
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.errors import UsageError
from malmoi.kernels.int8 import (
    INT8_MAX,
    Packed,
    QuantizedLinear,
    expanded,
    is_quantized,
    pack_int8,
    packed,
    product,
    quantize_int8,
    why_not,
)
from malmoi.model import Network, initialise, preset
from malmoi.model.families import bert, gpt2, llama
from malmoi.system.machine import detect, parse_machine, pretend
from malmoi.tokenizer import train_tokenizer

needs_kernel = pytest.mark.skipif(
    why_not() is not None, reason="there is no int8 kernel for this machine"
)

KERNELS = ("", "no-vnni", "no-avx512")  # where these instructions are, others take their place
SIZES = dict(vocab=300, width=48, depth=2, heads=4, context=64)
FAMILIES = {
    "gpt2": (gpt2(**SIZES), ("lm",)),
    "llama": (llama(**SIZES, kv_heads=2, hidden=96), ("lm",)),
    "bert": (bert(**SIZES), ("mlm", "nsp")),
    "softcapped": (gpt2(**SIZES, softcap=5.0, embed_width=24), ("lm",)),
}


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1e-6, 1e6), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_weight_is_off_by_half_a_step_at_most(
    rows: int, columns: int, size: float, seed: int
) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    packed, scale = pack_int8(weight)
    scale = scale.float()
    assert packed.abs().max() <= INT8_MAX
    assert ((packed * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()


@given(
    st.sampled_from((8, 4)),
    st.integers(1, 70),
    st.integers(1, 5),
    st.sampled_from((0, 8, 16)),
    st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_packed_weights_unpack_to_the_same_numbers(
    bits: int, outputs: int, strides: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    half, inputs = 1 << bits - 1, strides * (group or 7)
    numbers = torch.randint(-half, half, (outputs, inputs), generator=generator).to(torch.int8)
    scale = torch.rand(outputs, strides if group else 1, generator=generator).bfloat16()
    weight = Packed.of(numbers, scale, bits)
    found, same = weight.signed()
    assert torch.equal(found, numbers)
    assert torch.equal(same, scale)
    if bits == 8 and not group:
        index = torch.randint(0, outputs, (2, 3), generator=generator)
        assert torch.equal(weight.rows(index), expanded(numbers, scale)[index])


@needs_kernel
@given(
    st.sampled_from((8, 4)),
    st.sampled_from((1, 2, 3, 70, 130)),
    st.integers(1, 70),
    st.integers(1, 9),
    st.sampled_from((0, 8, 32, 136, 256, 1040)),
    st.sampled_from(KERNELS),
    st.integers(0, 10_000),
)
@settings(max_examples=100, deadline=None)
@torch.no_grad()
def test_the_product_is_that_of_the_rounded_weights(
    bits: int, rows: int, outputs: int, strides: int, group: int, kernel: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    half, inputs = 1 << bits - 1, strides * (group or 7)
    numbers = torch.randint(1 - half, half, (outputs, inputs), generator=generator).to(torch.int8)
    scale = (0.1 + torch.rand(outputs, strides if group else 1, generator=generator)).bfloat16()
    x, bias = (
        torch.randn(rows, inputs, generator=generator),
        torch.randn(outputs, generator=generator),
    )
    x[:, -1] *= 300  # one feature far above the others, as real models have
    x[0] = 0
    stood_for = expanded(numbers, scale).double()
    want = F.linear(x.double(), stood_for, bias.double())
    with pretend(parse_machine(kernel)):
        precise, rough = (product(Packed.of(numbers, scale, bits), bias, n) for n in (15, 8))
    found = precise(x)
    step = x.abs().amax(1, True) / INT8_MAX**2  # all that an activation is off by
    slack = stood_for.abs().sum(1)
    float_error = 1e-5 * (want.abs().max() + 1)
    assert ((found - want).abs() <= step * slack + float_error).all()
    found = rough(x)
    step *= INT8_MAX / 2
    assert ((found - want).abs() <= 1.001 * step * slack + float_error).all()


@needs_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_of_the_largest_numbers_do_not_overflow(bits: int, kernel: str) -> None:
    lowest, inputs = -(1 << bits - 1), 8192
    numbers = torch.full((16, inputs), lowest, dtype=torch.int8)
    weight = Packed.of(numbers, torch.ones(16, 1).bfloat16(), bits)
    x = torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, inputs)
    with pretend(parse_machine(kernel)):
        found = product(weight, None)(x)
    torch.testing.assert_close(found, x[:, :1].expand(3, 16) * lowest * inputs, rtol=1e-6, atol=0)


@needs_kernel
@torch.no_grad()
def test_a_map_keeps_shapes_and_types_and_refuses_gradients() -> None:
    layer = QuantizedLinear(packed(torch.randn(50, 64)), torch.randn(50))
    assert layer(torch.randn(2, 3, 64)).shape == (2, 3, 50)
    assert layer(torch.randn(1, 64).bfloat16()).dtype == torch.bfloat16
    with torch.enable_grad(), pytest.raises(UsageError, match="have no gradients"):
        layer(torch.randn(1, 64, requires_grad=True))


MISSING = [("no-compiler", "no C compiler"), ("no-int8", "neither AVX2 nor ARM's dotprod")]


@pytest.mark.parametrize(("without", "reason"), MISSING)
def test_a_machine_without_the_kernel_refuses_int8_with_a_reason(
    without: str, reason: str, tmp_path: Path
) -> None:
    write_checkpoint(Checkpoint(initialise(Network(gpt2(**SIZES), {"lm": 0}), 0)), tmp_path)
    refused = pytest.raises(UsageError, match=f"slower than fp32 here: .*{reason}")
    with pretend(parse_machine(without)), refused:
        malmoi.load(tmp_path, device="cpu", dtype="int8")


def test_a_failing_compiler_is_reported(tmp_path: Path) -> None:
    broken = replace(detect(), compiler="false", features=detect().features | {"dotprod"})
    with pretend(broken), pytest.raises(UsageError, match="false could not compile"):
        quantize_int8(Network(gpt2(**SIZES), {"lm": 0}))


@needs_kernel
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_predicts_nearly_the_same_and_round_trips(family: str, tmp_path: Path) -> None:
    config, heads = FAMILIES[family]
    network = initialise(Network(config, dict.fromkeys(heads, 0)), 0).eval()
    tokens = torch.randint(0, 300, (2, 20))
    want = network(tokens)[heads[0]]
    found = quantize_int8(network)(tokens)[heads[0]]
    assert not any(type(module) is torch.nn.Linear for module in network.trunk.modules())
    assert (found - want).norm() < 0.02 * want.norm()
    write_checkpoint(Checkpoint(network), tmp_path)
    again = malmoi.load(tmp_path, device="cpu")
    assert is_quantized(again.network)
    torch.testing.assert_close(again.network(tokens)[heads[0]], found, rtol=0, atol=1e-5)
    assert not is_quantized(read_checkpoint(tmp_path).network)  # for training


@needs_kernel
def test_a_model_is_opened_with_int8_weights_by_name(tmp_path: Path) -> None:
    network = initialise(Network(gpt2(**SIZES), {"lm": 0}), 0)
    words = train_tokenizer(["the state of the union is strong"] * 20, kind="byte-bpe", vocab=290)
    write_checkpoint(Checkpoint(network, words), tmp_path / "plain")
    plain, small = (
        malmoi.load(tmp_path / "plain", device="cpu", dtype=dtype) for dtype in (None, "int8")
    )
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


@needs_kernel
def test_int8_is_refused_on_other_devices_than_the_cpu() -> None:
    network = quantize_int8(Network(preset("gpt2-small", depth=1, vocab=50), {"lm": 0}))
    network.to(torch.bfloat16)  # about the other weights alone
    assert network.trunk.blocks[0].mlp.up.weight.numbers.dtype == torch.uint8
    assert network.trunk.embed.position.weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="run on the CPU"):
        network.trunk.blocks[0].mlp.up._apply(lambda tensor: Elsewhere())


class Elsewhere:
    device = torch.device("cuda")
