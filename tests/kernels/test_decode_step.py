"""A decoding step in one call computes what the modules compute, for each kind of layer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.kernels.decode_step import fused_step
from malmoi.kernels.int8 import quantize_int8, why_not
from malmoi.kernels.kv_slots import KVSlots, SlotView, prefill_rows
from malmoi.model import Network, initialise
from malmoi.model.families import gpt1, gpt2, gpt3, llama
from malmoi.system.machine import parse_machine, pretend

SIZES: dict[str, Any] = dict(vocab=90, context=140, width=40, depth=3, heads=4)
FUSED = {
    "gpt2": gpt2(**SIZES),
    "gpt1, post-norm": gpt1(**SIZES),
    "llama, grouped keys": llama(**SIZES, kv_heads=2, hidden=56),
    "geglu, exact gelu": gpt2(**SIZES, activation="geglu", norm_bias=False),
    "rotary, qk_norm, relu2": gpt2(**SIZES, positions="rotary", qk_norm=True, activation="relu2"),
    "large enough for threads": gpt2(**(SIZES | dict(width=256, depth=1))),
    "shared layers, silu": gpt2(**SIZES, activation="silu", groups=1),
}
needs_kernel = pytest.mark.skipif(why_not() is not None, reason=f"no int8 kernel: {why_not()}")


def in_fp32(config: ModelConfig) -> Network:
    torch.manual_seed(0)
    network = initialise(Network(config, {"lm": 0}), 0)
    with torch.no_grad():
        for weight in network.parameters():  # biases and norms too must matter
            weight.add_(torch.randn_like(weight) * 0.1)
    return network.eval()


def stored_by_input(config: ModelConfig) -> Network:
    network = in_fp32(config)
    for module in network.trunk.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
    return network


def quantized(config: ModelConfig) -> Network:
    return quantize_int8(in_fp32(config))


@pytest.fixture(params=["", "no-avx512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    with pretend(parse_machine(request.param)):
        yield


@needs_kernel
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("weights", [quantized, in_fp32, stored_by_input])
@pytest.mark.parametrize("name", FUSED)
@torch.inference_mode()
def test_a_fused_step_equals_the_modules(
    name: str, weights: Callable[[ModelConfig], Network]
) -> None:
    """Rows of different lengths, one of them idle; more keys than one span."""
    network = weights(FUSED[name])
    starts = torch.tensor([100, 7, 64, 1, 9])
    live = torch.tensor([True, False, True, True, True])
    atol = 1e-3 if weights is quantized else 2e-5
    found: list[Tensor] = []
    caches = []
    for fused in (True, False):
        torch.manual_seed(1)
        slots = KVSlots(network, 5, 120)
        prompts = [torch.randint(0, 90, (int(n),)).tolist() for n in starts]
        prefill_rows(network, slots, [0, 1, 2, 3, 4], prompts, [0] * 5)
        step = fused_step(network.trunk, slots.keys, slots.values)
        assert step is not None
        for i in range(3):
            tokens = torch.tensor([3, 4, 5, 6, 7]) + i
            at = starts + i * live
            if fused:
                found.append(step.run(tokens, at, live))
            else:
                view = SlotView(slots, 5, 120)
                inputs = dict(keep=live[:, None], positions=at[:, None], cache=view)
                found.append(network.trunk(tokens[:, None], **inputs)[:, 0])
        caches.append([held[:, :, :120].clone() for held in (*slots.keys, *slots.values)])
    for one, other in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(one[live], other[live], rtol=0, atol=atol)
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=atol)


@needs_kernel
def test_what_the_kernel_does_not_cover_is_left_to_the_modules() -> None:
    window = quantized(gpt3(**SIZES))
    half = in_fp32(gpt2(**SIZES)).to(torch.bfloat16)
    switched_off = quantized(gpt2(**SIZES))
    for network in (window, half, switched_off):
        slots = KVSlots(network, 1, 120)
        with pretend(parse_machine("no-fused" if network is switched_off else "")):
            assert fused_step(network.trunk, slots.keys, slots.values) is None
