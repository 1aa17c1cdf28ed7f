"""Norms, dropout and activations that are written out, against torch's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model import elementwise
from malmoi.model.attention import attend, fastest_kernel
from malmoi.model.attention_mask import Mask
from malmoi.model.elementwise import ACTIVATIONS, Dropout, RMSNorm, kept

PLACES = torch.Size((64, 256, 64))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["norm", "relu2"])
def test_values_and_slopes_are_torchs(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(24, eps=1e-3).to(kind)
    torch.nn.init.normal_(norm.weight)
    ways: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
        "norm": (norm, lambda x: F.rms_norm(x, [24], norm.weight, 1e-3)),
        "relu2": (ACTIVATIONS["relu2"], lambda x: F.relu(x).square()),
    }
    x = torch.randn(3, 5, 24, dtype=kind)
    x[0, 0] = 0
    rows = x.requires_grad_()
    asked = [rows, norm.weight] if name == "norm" else [rows]
    found = []
    for way in ways[name]:
        y = way(rows)
        found.append([y, *torch.autograd.grad(y.sin().sum(), asked)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_slopes_of_slopes_are_those_of_the_formula() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    for way in (RMSNorm(8, eps=1e-5).double(), ACTIVATIONS["relu2"]):
        assert torch.autograd.gradcheck(way, (x,))
        assert torch.autograd.gradgradcheck(way, (x,))


def hashed(shape: torch.Size, p: float, seed: int) -> Tensor:
    return ~kept(shape, p, torch.tensor([seed], dtype=torch.int32))


def drawn(shape: torch.Size, p: float, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return elementwise.dropout(torch.ones(shape), p) == 0


@pytest.mark.parametrize("choose", [hashed, drawn])
def test_each_value_is_dropped_by_itself(choose: Callable[..., Tensor]) -> None:
    dropped: list[Tensor] = []
    for p in (0.05, 0.5):
        for seed in (3, 4, 1_000_000_007):
            gone = choose(PLACES, p, seed)
            assert gone.float().mean() == pytest.approx(p, rel=0.02)
            columns = gone.float().mean((0, 1))
            assert columns.std() < 1.3 * (p * (1 - p) / (64 * 256)) ** 0.5  # none is preferred
            dropped.append(gone.flatten())
        for a in dropped[-3:]:
            others = [one for one in dropped[-3:] if one is not a]
            for b in (*others, a.roll(1), a.roll(2), a.roll(3), a.roll(64), a.roll(1 << 14)):
                assert (a & b).float().mean() == pytest.approx(p * p, rel=0.1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_layer_drops_in_training_alone(
    compiled: bool, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "compiles_for_gpu", lambda x: compiled)
    layer, ones = Dropout(0.25), torch.ones(PLACES, dtype=kind)
    first, second = layer(ones), layer(ones)
    assert first.dtype == kind
    assert first.unique().tolist() == pytest.approx([0, 4 / 3], rel=0.004)
    assert first.float().mean() == pytest.approx(1, rel=0.01)
    assert not torch.equal(first, second)
    assert torch.equal(layer.eval()(ones), ones)
    x = torch.randn(5, 7, requires_grad=True)  # not a multiple of four values
    y = layer.train()(x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(y, x * x.grad)


def test_attention_drops_whole_weights() -> None:
    """In training as in torch's own kernel; of many draws the mean is attention without dropout."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 6, 4).expand(4000, -1, -1, -1).requires_grad_() for _ in range(2))
    v, mask, p = torch.eye(6).expand(4000, 2, 6, 6), Mask(causal=True), 0.3
    probs = attend(q, k, v, mask)
    for kernel in (None, "sdpa"):
        y = attend(q, k, v, mask, p, kernel=kernel)
        stays = y != 0
        torch.testing.assert_close(y[stays], probs[stays] / (1 - p))
        torch.testing.assert_close(y.mean(0), probs[0], atol=0.03, rtol=0)
    assert fastest_kernel(q, k, mask, p) == "short"
