"""A decoding step in fused GPU kernels computes what the modules compute.

Without a GPU, `TRITON_INTERPRET=1 pytest tests/kernels/test_fused_step.py` runs the kernels in
Triton's interpreter (Triton 3.6 needs numpy below 2.4 for it).
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.inference.generation.batch import DecodeSteps, gpu_fused_step
from malmoi.inference.generation.sampling import TokenSelector
from malmoi.kernels.kv_slots import KVSlots, SlotView, prefill_rows
from malmoi.model import Network, initialise
from malmoi.model.families import gpt1, gpt2, llama
from malmoi.system.machine import Machine, parse_machine, pretend, this_machine
from malmoi.training.recipes import MODERN_GPT
from malmoi.training.sizing import SMALL_TEXT_GPT

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="the kernels need a GPU, or Triton's interpreter (TRITON_INTERPRET=1)",
)
needs_gpu = pytest.mark.skipif(not GPU, reason="recorded steps need a GPU")
CAPACITY = 136
SIZES: dict[str, Any] = dict(vocab=90, context=140, width=48, depth=2, heads=3)
MODELS = {
    "gpt2": gpt2(**SIZES),
    "gpt": gpt2(**SIZES, **MODERN_GPT),
    "gpt for little text": gpt2(**SIZES, **SMALL_TEXT_GPT),
    "llama": llama(**(SIZES | dict(width=96, heads=6, kv_heads=2, hidden=80))),
    "gpt1, exact gelu": gpt1(**(SIZES | dict(activation="gelu", lm_bias=True))),
    "geglu, no bias of norms, softcap": gpt2(
        **SIZES, activation="geglu", norm_bias=False, softcap=30.0, qk_norm=True
    ),
    "shared layers, factorised embedding, relu": gpt2(
        **SIZES, groups=1, embed_width=16, activation="relu"
    ),
}


def built(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Network:
    torch.manual_seed(0)
    network = initialise(Network(config, {"lm": 0}), 0)
    with torch.no_grad():
        for weight in network.parameters():  # biases and norms too must matter
            weight.add_(torch.randn_like(weight) * 0.1)
    for block in network.trunk.blocks:  # as GPT-2's files store them
        up = block.mlp.up.weight
        up.data = up.data.t().contiguous().t()
    return network.eval().to(DEVICE, dtype)


@torch.inference_mode()
def run_two_steps(
    network: Network, lengths: list[int], *, fused: bool, overlap: bool | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of live rows, and what the cache then holds; the second row is idle."""
    torch.manual_seed(1)
    starts = torch.tensor(lengths, device=DEVICE)
    rows = len(lengths)
    live = torch.arange(rows, device=DEVICE) != 1
    slots = KVSlots(network, rows, CAPACITY)
    prompts = [torch.randint(0, 90, (n,)).tolist() for n in lengths]
    prefill_rows(network, slots, list(range(rows)), prompts, [0] * rows)
    found = []
    for i in range(2):
        tokens = torch.arange(rows, device=DEVICE) + 3 + i
        at = starts + i * live
        if fused:
            from malmoi.kernels.triton_step import FusedStep

            logits = FusedStep(network, slots, overlap=overlap)(tokens, at, live)
        else:
            view = SlotView(slots, rows, CAPACITY)
            inputs = dict(keep=live[:, None], positions=at[:, None], cache=view)
            logits = network.read("lm", network.trunk(tokens[:, None], **inputs)[:, 0])
        found.append(logits[live].float())
    return found, [held[:, :, :CAPACITY] for held in (*slots.keys, *slots.values)]


@torch.inference_mode()
def run_recorded(network: Network, lengths: list[int], *, fused: bool) -> list[Tensor]:
    """The logits of three steps, the first recorded as a CUDA graph and the others replayed."""
    torch.manual_seed(1)
    rows = len(lengths)
    slots = KVSlots(network, rows, CAPACITY)
    prompts = [torch.randint(0, 90, (n,)).tolist() for n in lengths]
    prefill_rows(network, slots, list(range(rows)), prompts, [0] * rows)
    with pretend(replace(this_machine(), fused=fused)):
        steps = DecodeSteps(network, slots, TokenSelector(network, None), "captured")
    assert (steps.gpu_fused is not None) == fused
    steps.at[:] = torch.tensor(lengths, device=DEVICE)
    found = []
    for i in range(3):
        steps.last[:] = torch.arange(rows, device=DEVICE) + 3 + i
        logits = steps.run(rows, CAPACITY)
        found.append(logits.float().clone())
    return found


@runs_kernels
@pytest.mark.parametrize("lengths", [[131], [131, 7, 64]], ids=["1 row", "3 rows"])
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_step_equals_the_modules(name: str, lengths: list[int]) -> None:
    """Rows of different lengths, one of them idle; more keys than one block of the kernel."""
    pytest.importorskip("triton")
    from malmoi.kernels.triton_step import supports

    network = built(MODELS[name])
    assert supports(network)
    found, cache = run_two_steps(network, lengths, fused=True)
    expected, expected_cache = run_two_steps(network, lengths, fused=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-4, atol=1e-4)


@runs_kernels
def test_what_the_kernels_do_not_have_is_left_to_the_modules() -> None:
    pytest.importorskip("triton")
    from malmoi.kernels.triton_step import supports

    network = built(MODELS["gpt2"])
    assert not supports(network.train())
    adapted = network.eval()
    adapted.trunk.blocks[0].mlp.up = torch.nn.Sequential(adapted.trunk.blocks[0].mlp.up)
    assert not supports(adapted)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 70])
@pytest.mark.parametrize("name", ["gpt2", "gpt", "gpt for little text", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_fused_step_on_a_gpu_is_as_exact_as_the_modules(
    name: str, rows: int, dtype: torch.dtype
) -> None:
    """With and without CUDA graphs, and with kernels that overlap; the oracle is double."""
    lengths = [131, 64, *range(1, 69)][:rows]
    network = built(MODELS[name], dtype)
    exact = built(MODELS[name], dtype).double()
    recorded = [run_recorded(one, lengths, fused=False) for one in (network, exact)]
    assert_as_exact(run_recorded(network, lengths, fused=True), *recorded)
    called = [run_two_steps(one, lengths, fused=False)[0] for one in (network, exact)]
    ways = (False, True) if torch.cuda.get_device_capability() >= (9, 0) else (False,)
    for overlap in ways:
        found, _ = run_two_steps(network, lengths, fused=True, overlap=overlap)
        assert_as_exact(found, *called)


def assert_as_exact(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    for ours, theirs, right in zip(found, plain, exact, strict=True):
        rounding = float((theirs - right).norm())
        assert float((ours - right).norm()) <= 1.5 * rounding + 1e-5 * float(right.norm())


def test_the_fused_step_is_a_switch_of_the_machine() -> None:
    assert Machine().fused
    assert not parse_machine("no-fused").fused
    network = built(MODELS["gpt2"])
    if not GPU:
        with pretend(Machine(triton=True)):
            assert gpu_fused_step(network, KVSlots(network, 1, 8)) is None
