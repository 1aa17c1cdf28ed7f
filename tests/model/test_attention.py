"""Attention by every path against brute force, and the law of a causal model: what comes later
changes nothing.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_model import BRUTE, expressions
from torch import Tensor

from conftest import native_bf16
from malmoi.errors import MalmoiError
from malmoi.kernels.kv_slots import BranchCache, KVSlots, prefill_rows
from malmoi.model import Activations, KVCache, Layout, Network, initialise, parse_pattern
from malmoi.model.attention import (
    Attention,
    attend,
    attention_probs,
    compile_each_shape,
    fastest_kernel,
)
from malmoi.model.attention_mask import Bounds, Mask, _block_mask, build_mask
from malmoi.model.families import gpt2
from malmoi.model.patterns import PATTERNS
from malmoi.model.sparse import attend_parts, make_parts

CPU = torch.device("cpu")
Truth = Callable[[int, int], bool]  # (query, key)
Sees = Callable[[int, int, int, int], bool]  # (batch, head, query, key)

# ------------------------------------------------------------------ every path against brute force

T = 11
CAUSAL = {
    f"causal & ({text})": lambda i, j, p=predicate: j <= i and p(i, j)
    for text, predicate in BRUTE.items()
}
CASES: dict[str, tuple[Truth, ...]] = {
    text: (predicate,) for text, predicate in (BRUTE | CAUSAL).items()
}
# Child et al. 2019, fixed: positions 0-2 of head 2 see nobody
CHILD = "causal & block:4 ; causal & summary:4,1"
CASES[CHILD] = (lambda i, j: j <= i and i // 4 == j // 4, lambda i, j: j <= i and j % 4 == 3)


def test_every_pattern_is_compared_with_brute_force() -> None:
    added_by_the_batch = {"padding", "document"}
    assert {text.partition(":")[0] for text in BRUTE} == PATTERNS.keys() - added_by_the_batch


def by_hand(q: Tensor, k: Tensor, v: Tensor, sees: Sees) -> Tensor:
    """softmax(q kᵀ / √E) v over the keys that each query sees, one query after another; none:
    zeros.
    """
    B, H, queries, E = q.shape
    rows = []
    for b, h, i in torch.cartesian_prod(
        torch.arange(B), torch.arange(H), torch.arange(queries)
    ).tolist():
        seen = [j for j in range(k.size(2)) if sees(b, h, i, j)]
        keys, values = (x[b, h * k.size(1) // H, seen] for x in (k, v))
        chosen = (keys @ q[b, h, i] / math.sqrt(E)).softmax(0)
        rows.append(chosen @ values if seen else 0 * q[b, h, i])
    return torch.stack(rows).view(B, H, queries, E)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return attend(q, k, v, mask, kernel="sdpa")


def short(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return attend(q, k, v, mask, kernel="short")


def picture(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return attention_probs(q, k, mask) @ v.repeat_interleave(q.size(1) // v.size(1), dim=1)


PATHS = {"sdpa": sdpa, "short": short, "picture": picture}


def tensors(key_heads: int = 2, keys: int = T, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, T, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8)
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    wanted = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, inputs, wanted)]


def compare(
    path: str,
    layout: Layout,
    text: str,
    sees: Callable[[int, int, int, int], bool],
    key_heads: int = 2,
) -> None:
    mask = build_mask(parse_pattern(text, 2), layout, CPU, None, 0.0)
    q, k, v = tensors(key_heads, layout.keys)
    found = gradients(PATHS[path](q, k, v, mask), [q, k, v])
    for mine, truth in zip(found, gradients(by_hand(q, k, v, sees), [q, k, v]), strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text", CASES)
def test_outputs_and_gradients_equal_brute_force(path: str, text: str) -> None:
    truths = CASES[text]
    by_head = lambda b, h, i, j: truths[h * len(truths) // 2](i, j)  # noqa: E731
    compare(path, Layout(2, T, T), text, by_head)
    compare(path, Layout(2, T, T), text, by_head, key_heads=1)
    behind_a_cache = lambda b, h, i, j: by_head(b, h, i + 3, j)  # noqa: E731
    compare(path, Layout(2, T, T + 3, offset=3), text, behind_a_cache)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text", ["full", "causal", CHILD])
def test_padding_documents_and_keys_ahead_equal_brute_force(path: str, text: str) -> None:
    keep = torch.arange(T) >= torch.tensor([[0], [4]])
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 8 + [1] * 3])
    truths = CASES[text]

    def sees(b: int, h: int, i: int, j: int) -> bool:
        same = bool(keep[b, j]) and documents[b, i] == documents[b, j]
        return same and truths[h * len(truths) // 2](i, j)

    layout = Layout(2, T, T, keep=keep, query_documents=documents, key_documents=documents)
    compare(path, layout, text, sees)
    compare(path, layout.with_prefix(2), text, lambda b, h, i, j: j < 2 or sees(b, h, i, j - 2))


@pytest.mark.parametrize("text", CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_and_its_picture_equal_brute_force(text: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    pattern, truths = parse_pattern(text, 2), CASES[text]
    q, k, v = (x.detach() for x in tensors())
    expected = by_hand(q, k, v, lambda b, h, i, j: truths[h * len(truths) // 2](i, j))
    blocks = _block_mask(pattern, Layout(2, T, T), None, CPU)
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=blocks), expected, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(picture(q, k, v, Mask(blocks=blocks)), expected, rtol=0, atol=1e-12)


def with_log_sum(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, **_: object) -> Any:
    """FlexAttention by hand: it has no backward pass on a CPU."""
    seen = block_mask.mask_mod(0, 0, torch.arange(q.size(2))[:, None], torch.arange(k.size(2)))
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~seen, -1e30)
    total = scores.logsumexp(-1)
    y = (scores - total[..., None]).exp().masked_fill(~seen, 0.0) @ v
    return y, SimpleNamespace(lse=total.masked_fill(~seen.any(-1), -torch.inf))


@pytest.mark.parametrize(
    "text",
    [
        "causal & strided:8",
        "causal & fixed:8,2",
        "causal & column:8",
        "causal & local:8 ; causal & column:8",
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_reordered_blocks_equal_brute_force(text: str) -> None:
    """T is no multiple of the stride, as at the end of a text."""
    from torch.nn.attention.flex_attention import flex_attention

    length = 45
    pattern = parse_pattern(text, 2)
    parts = make_parts(pattern, length, CPU)
    assert parts is not None
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.double) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    seen = pattern.mask(Layout(1, length, length))
    expected = gradients(attend(q, k, v, Mask.of(seen)), inputs)
    for mine, truth in zip(
        gradients(attend_parts(q, k, v, parts, with_log_sum), inputs), expected, strict=True
    ):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)
    q, k, v = (x.detach() for x in inputs)
    one = attend_parts(q, k, v, parts, flex_attention)
    torch.testing.assert_close(one, expected[0].detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(picture(q, k, v, Mask(parts=parts)), one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", CASES)
def test_bf16_training_on_a_cpu_equals_brute_force(text: str) -> None:
    """The dtype for which the short path is chosen; emulated where the chip has no units for it."""
    mask, truths = build_mask(parse_pattern(text, 2), Layout(2, T, T), CPU, None, 0.0), CASES[text]
    q, k, v = tensors(dtype=torch.bfloat16)
    assert fastest_kernel(q, k, mask) == "short"
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = gradients(
        by_hand(*exact, lambda b, h, i, j: truths[h * len(truths) // 2](i, j)), exact
    )
    for mine, truth in zip(gradients(attend(q, k, v, mask), [q, k, v]), expected, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=0.05, atol=0.05)
    empty = [i for i in range(T) if not any(truths[-1](i, j) for j in range(T))]
    assert not attend(q, k, v, mask)[:, 1, empty].any()


def test_a_kernel_that_spreads_a_query_without_keys_over_all_is_corrected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one behind SDPA in bf16 on a GPU does."""

    def spread(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *_: object, **__: object) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        return scores.masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) @ v

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spread)
    compare("sdpa", Layout(2, T, T), CHILD, lambda b, h, i, j: CASES[CHILD][h](i, j))


def test_a_query_without_keys_attends_to_nothing() -> None:
    network, trail = small(attention=(CHILD,)), Activations(attention=[])
    network.trunk(torch.arange(8)[None], activations=trail)
    assert not trail.attention[0][0, 1, :3].any()
    torch.testing.assert_close(trail.attention[0][0, 1, 3:].sum(-1), torch.ones(5))


PACKED: dict[str, Truth] = {
    "full": lambda i, j: True,
    "causal": lambda i, j: j <= i,
    "local:3": lambda i, j: abs(i - j) < 3,
    "causal & local:3": lambda i, j: 0 <= i - j < 3,
}


@pytest.mark.parametrize("text", PACKED)
def test_bounds_and_windows_of_packed_rows_equal_brute_force(text: str) -> None:
    """What the kernel of packed sequences on a GPU is given instead of a mask."""
    starts = [0, 4, 9, T]
    bounds = Bounds(torch.tensor(starts, dtype=torch.int32), 5)
    rows = Layout(1, T, T, query_documents=torch.zeros(1, T), key_documents=torch.zeros(1, T))
    mask = build_mask(parse_pattern(text, 2), rows, torch.device("cuda"), bounds, 0.0)
    assert mask.bounds is bounds
    document = [sum(start <= i for start in starts[1:]) for i in range(T)]
    q, k, v = (x[:1] for x in tensors())
    truth = by_hand(q, k, v, lambda b, h, i, j: document[i] == document[j] and PACKED[text](i, j))
    torch.testing.assert_close(picture(q, k, v, mask), truth, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ the law


def small(kernel: str | None = None, dtype: torch.dtype = torch.float32, **changes: Any) -> Network:
    sizes = dict(
        vocab=40,
        width=16,
        depth=2,
        heads=2,
        context=24,
        dropout=0.0,
        attention_dropout=0.0,
        init_std=0.3,
    )
    network = initialise(Network(gpt2(**(sizes | changes)), {"lm": 0}), seed=0).to(dtype).eval()
    for module in network.modules():
        if isinstance(module, Attention):
            module.kernel = kernel
    return network


@st.composite
def causal_patterns(draw: st.DrawFn) -> str:
    """A random causal pattern, of one head set or of two."""
    sets = draw(st.lists(expressions(), min_size=1, max_size=2))
    return " ; ".join(f"causal & ({text})" for text, _ in sets)


TEXTS = st.lists(st.integers(0, 39), min_size=2, max_size=20)
WAYS = st.sampled_from([(None, torch.float32), ("short", torch.float32), (None, torch.bfloat16)])


def put_ahead(network: Network, kind: str) -> int:
    """Puts soft tokens, or keys and values alone, before every text: this many positions."""
    torch.manual_seed(0)
    weight, c = network.trunk.embed.token.weight, network.config
    if kind == "soft":
        network.trunk.soft_prompt = torch.nn.Parameter(torch.randn_like(weight[:2]))
    if kind == "prefix":
        shape = (c.depth, 2, c.key_heads, 2, c.size_per_head)
        network.trunk.prefix_kv = torch.nn.Parameter(torch.randn(shape, dtype=weight.dtype))
    return 0 if kind == "none" else 2


@given(causal_patterns(), TEXTS, WAYS, st.sampled_from(["none", "soft", "prefix"]), st.data())
@settings(deadline=None, max_examples=80)
def test_a_later_token_changes_nothing_before_it(
    pattern: str, text: list[int], way: tuple[Any, torch.dtype], ahead: str, data: st.DataObject
) -> None:
    network = small(*way, attention=("causal", pattern)).train(data.draw(st.booleans()))
    start = put_ahead(network, ahead)
    at = data.draw(st.integers(1, len(text) - 1))
    tokens = torch.tensor([text])
    other = tokens.clone()
    other[:, at:] = (other[:, at:] + 1 + data.draw(st.integers(0, 38))) % 40
    with native_bf16():
        before = network(tokens)["lm"][:, :at]
        assert torch.equal(network(other)["lm"][:, :at], before)
        before.float().square().sum().backward()
    slope = network.trunk.embed.position.weight.grad
    assert not slope[start + at :].any()
    assert slope[start + at - 1].any()


@given(causal_patterns(), TEXTS, st.data())
@settings(deadline=None, max_examples=40)
@torch.no_grad()
def test_every_cache_gives_what_the_full_pass_gives(
    pattern: str, text: list[int], data: st.DataObject
) -> None:
    """Whole, in chunks behind a cache, in a row that another text has used, and as a branch of
    such a row.
    """
    network = small(attention=("causal", pattern))
    cut = data.draw(st.integers(1, len(text) - 1))
    tokens = torch.tensor([text])
    full = network.trunk(tokens)
    cache = KVCache(network.config, 1, len(text), dtype=torch.float32, device="cpu")
    chunks = [network.trunk(part, cache=cache) for part in (tokens[:, :cut], tokens[:, cut:])]
    torch.testing.assert_close(torch.cat(chunks, 1), full, rtol=0, atol=1e-5)

    slots = KVSlots(network, rows=3, capacity=24)
    for held in (*slots.keys, *slots.values):
        held.normal_(std=30)  # what was left by others
    longer = [*text[::-1], *text][:24]
    prefill_rows(network, slots, [0, 2], [text[:cut], longer], [0, 0])
    branch = BranchCache(slots, torch.tensor([0]), torch.tensor([cut]))
    positions = torch.arange(cut, len(text))[None]
    grown = network.trunk(tokens[:, cut:], positions=positions, cache=branch)
    torch.testing.assert_close(grown, full[:, cut:], rtol=0, atol=1e-5)
    rest = prefill_rows(network, slots, [2, 0], [longer[:1], text[cut:]], [len(longer) - 1, cut])
    torch.testing.assert_close(rest[1:, : len(text) - cut], full[:, cut:], rtol=0, atol=1e-5)


# ------------------------------------------------------------------ a GPU's kernels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "text",
    [
        "causal",
        "causal & local:100",
        "causal & strided:64",
        "causal & fixed:64,8",
        "causal & block:64 ; causal & summary:64,8",
    ],
)
def test_every_kernel_of_a_gpu_equals_the_picture(text: str, dtype: torch.dtype) -> None:
    cuda, length, pattern = torch.device("cuda"), 1024, parse_pattern(text, 2)
    torch.manual_seed(0)
    q, k, v = (
        x.requires_grad_()
        for x in torch.randn(3, 2, 2, length, 64, device=cuda, dtype=dtype).unbind()
    )
    layout, wanted = (
        Layout(2, length, length),
        torch.randn(2, 2, length, 64, device=cuda, dtype=dtype),
    )
    dense = Mask.of(pattern.mask(layout, cuda))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = picture(*exact, dense)
    expected = [truth, *torch.autograd.grad(truth, exact, wanted.double())]
    masks = [build_mask(pattern, layout, cuda, None, 0.0), dense]
    if (parts := make_parts(pattern, length, cuda)) is not None:  # as for long texts
        masks.append(Mask(parts=parts))
    for mask in masks:
        y = attend(q, k, v, mask)
        for mine, right in zip(
            [y, *torch.autograd.grad(y, (q, k, v), wanted)], expected, strict=True
        ):
            error = (mine.double() - right).norm() / right.norm()
            assert error < (0.02 if dtype == torch.bfloat16 else 2e-3)  # TF32 may be on
        assert not y[:, 1, ~dense.dense.any(-1).expand(1, 2, length)[0, 1]].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", ["full", "causal", "local:65", "causal & local:65"])
@pytest.mark.parametrize("normed", [torch.bfloat16, torch.float32], ids=str)
def test_packed_sequences_on_a_gpu_equal_the_picture(text: str, normed: torch.dtype) -> None:
    """Autocast leaves queries and keys that were normalised in fp32."""
    cuda, starts = torch.device("cuda"), [0, 300, 1000, 1024]
    torch.manual_seed(0)
    shape = (1, 2, starts[-1], 64)
    q, k, v, wanted = torch.randn(4, *shape, device=cuda, dtype=torch.bfloat16).unbind()
    q, k = q.to(normed), k.to(normed)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    bounds = Bounds(torch.tensor(starts, dtype=torch.int32, device=cuda), 700)
    layout = Layout(1, starts[-1], starts[-1])
    mask = build_mask(parse_pattern(text, 2), layout, cuda, bounds, 0.0)
    assert fastest_kernel(q, k, mask) == "packed"
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = picture(*exact, mask)
    expected = [truth, *torch.autograd.grad(truth, exact, wanted.double())]
    y = attend(q, k, v, mask)
    found = [y, *torch.autograd.grad(y, inputs, wanted)]
    for mine, right in zip(found, expected, strict=True):
        assert (mine.double() - right).norm() / right.norm() < 0.02


def test_a_compiled_kernel_never_falls_back_without_a_word() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(inputs)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return 2 * x

    run = compile_each_shape(double, shapes=12, backend=backend)
    for length in range(2, 14):  # more shapes than torch's own limit of 8
        assert run(torch.ones(length)).sum() == 2 * length
    assert len(compiled) == 12
    with pytest.raises(MalmoiError, match="for 12 shapes"):
        run(torch.ones(14))
