"""Texts through a quantised encoder in one call: what the modules compute, without the padding."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.kernels.decode_step import encode_texts
from malmoi.kernels.int8 import Packed, QuantizedLinear, product, quantize_int8, why_not
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2, modernbert
from malmoi.system.machine import parse_machine, pretend, this_machine

SIZES: dict[str, Any] = dict(vocab=90, context=200, width=64, depth=1, heads=4)
ENCODERS = {
    "bert": bert(**SIZES),
    "modernbert": modernbert(**SIZES, attention=("full",)),
    "a window with its own rotary base": modernbert(**SIZES, attention=("local:20",)),
    "grouped keys, qk_norm, relu": bert(
        **SIZES, kv_heads=2, qk_norm=True, positions="rotary", activation="relu"
    ),
}
DEEP: dict[str, Any] = SIZES | dict(depth=3)


@pytest.fixture(autouse=True)
def without_amx() -> Iterator[None]:
    """AMX's tiles read whole texts through the modules."""
    with pretend(parse_machine("no-amx")):
        yield


needs_kernel = pytest.mark.skipif(why_not() is not None, reason=f"no int8 kernel: {why_not()}")


def encoder(config: ModelConfig) -> Network:
    torch.manual_seed(0)
    network = initialise(Network(config, {}), 0)
    with torch.no_grad():
        for weight in network.parameters():  # biases and norms too must matter
            weight.add_(torch.randn_like(weight) * 0.1)
    network = quantize_int8(network.eval())
    network.trunk.fused_blocks = encode_texts
    return network


def texts() -> tuple[Tensor, Tensor]:
    """Padding on the right, on the left, on neither side; more keys than one span."""
    tokens = torch.randint(1, 90, (4, 150), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(4, 150, dtype=torch.bool)
    keep[0, 37:] = False
    keep[1, :9] = False
    keep[2, 1:] = False
    return tokens, keep


@needs_kernel
@pytest.mark.parametrize("name", ENCODERS)
@torch.inference_mode()
def test_a_layer_equals_the_modules_with_the_same_rounding(name: str) -> None:
    """A number between two bytes may be rounded the other way, which concerns a few rows."""
    network = encoder(ENCODERS[name])
    tokens, keep = texts()
    fused = network.trunk(tokens, keep=keep)
    for module in network.modules():
        if isinstance(module, QuantizedLinear):
            module.__dict__["_multiply"] = product(module.weight, module.bias, 8)
    with pretend(parse_machine("no-amx,no-fused")):
        wanted = network.trunk(tokens, keep=keep)
    errors = (fused - wanted)[keep].norm(dim=1) / wanted[keep].norm(dim=1)
    assert errors.median() < 1e-5
    assert errors.max() < 0.02
    assert not fused[~keep].any()


@needs_kernel
@pytest.mark.parametrize(
    "config",
    [
        bert(**DEEP),
        bert(**DEEP, groups=1),
        modernbert(**DEEP, attention=("full", "local:20", "local:20")),
    ],
)
@torch.inference_mode()
def test_layers_are_near_those_with_activations_of_15_bits(config: ModelConfig) -> None:
    network = encoder(config)
    tokens, keep = texts()
    fused = network.trunk(tokens, keep=keep)[keep]
    with pretend(parse_machine("no-amx,no-fused")):
        precise = network.trunk(tokens, keep=keep)[keep]
    assert (fused - precise).norm() < 0.03 * precise.norm()


@needs_kernel
@torch.inference_mode()
def test_a_text_is_encoded_alike_alone_and_among_others() -> None:
    network = encoder(bert(**DEEP))
    tokens, keep = texts()
    together = network.trunk(tokens, keep=keep)
    for i in range(4):
        alone = network.trunk(tokens[i][keep[i]][None])
        torch.testing.assert_close(together[i][keep[i]], alone[0], rtol=0, atol=1e-5)


@needs_kernel
def test_what_the_kernel_does_not_cover_is_left_to_the_modules() -> None:
    tokens, _ = texts()
    gpt = encoder(gpt2(**DEEP))
    narrow = encoder(bert(**(DEEP | dict(width=40))))  # heads of 10
    with torch.inference_mode():
        for network in (gpt, narrow):
            found = network.trunk(tokens)
            network.trunk.fused_blocks = None
            torch.testing.assert_close(found, network.trunk(tokens), rtol=0, atol=0)


@needs_kernel
@torch.inference_mode()
def test_amx_multiplies_8_bits_by_the_modules_and_4_bits_in_c() -> None:
    network = encoder(bert(**DEEP))
    tokens, keep = texts()
    fused: list[bool] = []

    def watched(*given: Any) -> Tensor | None:
        found = encode_texts(*given)
        fused.append(found is not None)
        return found

    network.trunk.fused_blocks = watched
    machine = this_machine()
    with pretend(replace(machine, features=machine.features | {"amx_int8"})):
        network.trunk(tokens, keep=keep)
        for module in network.trunk.modules():
            if isinstance(module, QuantizedLinear):
                numbers, scale = module.weight.signed()
                module.weight = Packed.of(numbers.clamp(-8, 7), scale, bits=4)
        network.trunk(tokens, keep=keep)
    assert fused == [False, True]
