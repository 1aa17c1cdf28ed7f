"""Attention that computes less: tiles, rings and linear attention against brute force."""

import logging

import pytest
import torch
from torch import Tensor

from malmoi.inference.generation.batch import DecodeBatch
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import Sampling
from malmoi.inference.generation.sampling import SequenceState
from malmoi.kernels.kv_slots import KVSlots, SlotView, prefill_rows
from malmoi.model import Layout, Network, initialise, parse_pattern
from malmoi.model.attention import attend, fastest_kernel
from malmoi.model.attention_mask import Mask, build_mask
from malmoi.model.families import gpt2, gpt3
from malmoi.model.sparse import make_tiling

CPU = torch.device("cpu")
PATTERNS = (
    "causal & local:20",
    "local:33",
    "causal & strided:24",
    "causal & fixed:24,2",
    "causal & (local:20 | prefix:3)",
    "local:9 | prefix:2",
    "causal & (block:32 | prefix:3)",
    "causal & summary:32,2",  # queries before the first summary see nothing
    "causal & local:24 ; causal & column:24",
    "causal & block:32 ; causal & summary:32,2",
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def dense(pattern: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √E) v under the whole mask; a query without keys gets zeros."""
    seen = parse_pattern(pattern, q.size(1)).mask(Layout(1, q.size(2), k.size(2)))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).masked_fill(~seen, -1e9)
    return scores.softmax(-1).masked_fill(~seen, 0.0) @ v


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_tiles_equal_brute_force(pattern: str, key_heads: int) -> None:
    torch.manual_seed(0)
    T = 900  # not a multiple of a tile
    inputs = [drawn(1, 2, T, 4), drawn(1, key_heads, T, 4), drawn(1, key_heads, T, 4)]
    tiles = make_tiling(parse_pattern(pattern, 2), T)
    assert tiles is not None
    mask = Mask(tiles=tiles)
    assert fastest_kernel(inputs[0], inputs[1], mask) == "tiled"
    mine, truth = attend(*inputs, mask), dense(pattern, *inputs)
    torch.testing.assert_close(mine, truth)
    wanted = torch.randn_like(mine)
    for one, other in zip(
        torch.autograd.grad(mine, inputs, wanted),
        torch.autograd.grad(truth, inputs, wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_tiles_hold_only_what_is_seen() -> None:
    T = 2048
    band = make_tiling(parse_pattern("causal & local:64"), T)
    assert band is not None
    pairs = sum(b.seen.numel() for g in band.groups for part in g.parts for b in part)
    assert pairs < 0.12 * T**2
    assert make_tiling(parse_pattern("causal & local:2000"), T) is None


def test_a_sparse_mask_is_tiled_unless_attention_drops_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pattern, layout = parse_pattern("causal & local:64"), Layout(1, 1024, 1024)
    assert build_mask(pattern, layout, CPU, None, 0.0).tiles is not None
    assert build_mask(parse_pattern("causal"), layout, CPU, None, 0.0).causal
    with caplog.at_level(logging.WARNING):
        assert build_mask(pattern, layout, CPU, None, 0.1).dense is not None
    padded = Layout(1, 1024, 1024, keep=torch.ones(1, 1024, dtype=torch.bool))
    assert build_mask(pattern, padded, CPU, None, 0.0).dense is not None


def test_a_ring_of_keys_equals_the_whole_text() -> None:
    """Prompts in chunks and single tokens, rows of different lengths, windows that wrap around."""
    network = initialise(
        Network(
            gpt3(
                vocab=40, width=16, heads=2, depth=3, context=64,
                attention=("causal", "causal & local:5"),
            ),
            {"lm": 0},
        ),
        0,
    ).eval()  # fmt: skip
    tokens = torch.randint(0, 40, (2, 40), generator=torch.Generator().manual_seed(0))
    whole = network.hidden(tokens)
    with torch.inference_mode():
        slots = KVSlots(network, 2, 40, pass_tokens=6)
        assert slots.rings == {1: 10}
        at = [0, 0]
        for sizes in ((6, 4), (6, 1), (3, 6)):
            ends = [a + n for a, n in zip(at, sizes, strict=True)]
            parts = [tokens[i, at[i] : ends[i]].tolist() for i in range(2)]
            hidden = prefill_rows(network, slots, [0, 1], parts, at)
            for i in range(2):
                torch.testing.assert_close(hidden[i, : sizes[i]], whole[i, at[i] : ends[i]])
            at = ends
        for _ in range(20):
            hidden = network.trunk(
                torch.stack([tokens[i, at[i]] for i in range(2)])[:, None],
                keep=torch.ones(2, 1, dtype=torch.bool),
                positions=torch.tensor(at)[:, None],
                cache=SlotView(slots, 2, max(at) + 1),
            )
            torch.testing.assert_close(hidden[:, 0], whole[range(2), at])
            at = [a + 1 for a in at]
        assert [layer.size(2) for layer in slots.keys] == [41, 11, 41]  # and a spare place each
        slots.copy(0, 1, at[0])
        for layer in slots.keys:
            assert (layer[0, :, :10] == layer[1, :, :10]).all()


def greedy(network: Network, prompt: list[int], count: int) -> list[int]:
    """Token by token, each time reading the whole text."""
    text = list(prompt)
    for _ in range(count):
        scores = network(torch.tensor([text]), heads=("lm",))["lm"][0, -1]
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


def test_generation_equals_full_recomputation() -> None:
    config = gpt2(
        vocab=40, width=16, heads=2, depth=2, context=600, attention=("causal & local:4",)
    )
    network = initialise(Network(config, {"lm": 0}), 3).eval()
    prompts = [list(range(3, 15)), [5]]
    best = Sampling(temperature=0.0)
    sequences = [
        SequenceState(tuple(prompt), torch.Generator(), limit, best)
        for prompt, limit in zip(prompts, (8, 550), strict=True)
    ]
    decoding = Decoding(network, sequences)
    assert set(decoding.batch.slots.rings) == {0, 1}
    found: list[list[int]] = [[], []]
    for _ in range(8):
        for i, tokens in decoding.step().items():
            found[i] += tokens
    with torch.no_grad():
        assert found == [greedy(network, prompt, 8) for prompt in prompts]


def test_rings_of_captured_steps() -> None:
    """Steps in the fixed shapes of a GPU, whose windows wrap around."""
    config = gpt2(
        vocab=40, width=16, heads=2, depth=2, context=600, attention=("causal & local:4",)
    )
    network = initialise(Network(config, {"lm": 0}), 3).eval()
    batch = DecodeBatch(network, 1, 590, mode="captured")
    places = batch.slots.rings[0]
    prompt = [token % 40 for token in range(places)]
    sequence = SequenceState(tuple(prompt), torch.Generator(), 6, Sampling(temperature=0.0))
    batch.add(sequence)
    while not sequence.decoding:
        batch.prefill()
    for _ in range(7):
        batch.step()
    assert batch.slots.keys[0].size(2) == places + 1 < 590
    with torch.no_grad():
        assert sequence.tokens[places:] == greedy(network, prompt, 6)
