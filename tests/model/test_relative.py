"""Transformer-XL: scores by the paper's formula, segments with memory, runs that remember."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import malmoi
from malmoi.errors import UsageError
from malmoi.model import Activations, KVCache, Network, initialise
from malmoi.model.attention import Attention, Kernel
from malmoi.model.attention_mask import Mask
from malmoi.model.families import gpt2, transformer_xl
from malmoi.model.positions import POSITIONS, PositionScheme
from malmoi.model.recurrent import RelativeAttention, SegmentMemory
from malmoi.training.data.store import Store
from malmoi.training.data.windows import Stretches
from malmoi.training.signals import Stopped
from tiny_runs import TINY, assert_equal_weights, losses, signalled, write_corpus

SMALL = transformer_xl(
    vocab=40, width=16, heads=2, depth=3, hidden=32, context=6, memory=6, dropout=0.0
)


def network_of(config: malmoi.ModelConfig, seed: int = 0) -> Network:
    network = initialise(Network(config, {"lm": 0}), seed).eval()
    torch.manual_seed(seed)
    for block in network.trunk.blocks:  # larger than they are drawn, so that they matter
        block.attend.distance_bias.data.normal_()  # type: ignore[union-attr, operator]
        block.attend.content_bias.data.normal_()  # type: ignore[union-attr, operator]
    return network


def some_tokens(length: int = 40) -> Tensor:
    return torch.randint(0, 40, (2, length), generator=torch.Generator().manual_seed(1))


def sinusoid(distance: int, width: int) -> Tensor:
    pairs = [10_000 ** (-2 * (i // 2) / width) * distance for i in range(width)]
    return torch.tensor(
        [
            torch.tensor(p).sin() if i % 2 == 0 else torch.tensor(p).cos()
            for i, p in enumerate(pairs)
        ]
    )


def by_hand(attend: RelativeAttention, x: Tensor, window: int) -> Tensor:
    """Dai et al. 2019 §3.3, pair by pair: attention probabilities [H, T, T] of one row."""
    T, E = len(x), attend.size
    q, k, _ = attend.qkv(x).view(T, 3, attend.heads, E).unbind(1)
    out = torch.zeros(attend.heads, T, T)
    for h in range(attend.heads):
        u, v = attend.content_bias[h, 0], attend.distance_bias[h, 0]
        for i in range(T):
            seen = range(max(0, i - window + 1), i + 1)
            scores = []
            for j in seen:
                r = attend.distance(sinusoid(i - j, x.size(1))).view(attend.heads, E)[h]
                scores.append((q[i, h] @ k[j, h] + q[i, h] @ r + u @ k[j, h] + v @ r) / E**0.5)
            out[h, i, list(seen)] = torch.stack(scores).softmax(0)
    return out


@torch.no_grad()
def test_scores_are_the_papers() -> None:
    network = network_of(SMALL)
    tokens = some_tokens(10)[:1]
    seen = Activations(attention=[])
    network.hidden(tokens, activations=seen)
    for layer in range(SMALL.depth):
        attend = network.trunk.blocks[layer].attend
        truth = by_hand(attend, seen.hidden[layer][0], window=7)  # type: ignore[arg-type]
        assert seen.attention is not None
        torch.testing.assert_close(seen.attention[layer][0], truth)


def test_segments_with_memory_equal_the_whole_text() -> None:
    network = network_of(SMALL)
    tokens = some_tokens()
    whole = network.hidden(tokens)
    memory = SegmentMemory(6)
    parts = [network.hidden(part, cache=memory) for part in tokens.split(6, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    alone = [network.hidden(part) for part in tokens.split(6, 1)]
    assert (torch.cat(alone, 1) - whole)[:, 6:].abs().max() > 1e-3
    cache = KVCache(SMALL, 2, 40, dtype=torch.float32, device="cpu")
    steps = [network.hidden(part, cache=cache) for part in tokens.split((7, 1, 32), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    longer = network.with_memory(20)
    assert longer.config.attention == ("causal & local:21",)
    assert (longer.hidden(tokens) - whole).abs().max() > 1e-3


def test_memory_gets_no_gradient_and_survives_checkpointing() -> None:
    tokens = some_tokens(12)
    found = []
    for checkpointing in (False, True):
        network = network_of(SMALL).train()
        network.trunk.gradient_checkpointing = checkpointing
        memory = SegmentMemory(6)
        for part in tokens.split(6, 1):
            network.zero_grad()
            (network.hidden(part, cache=memory) * torch.linspace(-1, 1, 16)).sum().backward()
        assert not any(state.requires_grad for state in memory.coming.values())
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class Linear(Attention):
    """ALiBi (Press et al. 2022 §3): scores fall with the distance, by a slope for each head."""

    needs_distances = True

    def biased(self, q: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        assert mask.distances is not None
        return q, replace(mask, bias=-SLOPES * mask.distances.abs())


SLOPES = torch.tensor([0.5, 0.25])[:, None, None]


@pytest.mark.parametrize("kernel", ["sdpa", "short"])
def test_a_scheme_may_add_a_bias_to_the_scores(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POSITIONS, "none", PositionScheme(attention=Linear))
    config = gpt2(vocab=40, width=16, heads=2, kv_heads=1, depth=2, context=12, positions="none")
    network = initialise(Network(config, {"lm": 0}), 0).eval()
    for block in network.trunk.blocks:
        block.attend.kernel = kernel  # type: ignore[union-attr]
    tokens = some_tokens(12)
    keep = torch.arange(12) >= torch.tensor([[0], [5]])
    seen = Activations(attention=[])
    with torch.no_grad():
        full = network(tokens, keep=keep, activations=seen)["lm"]
        alone = network(tokens[1:, 5:])["lm"]
        cache = KVCache(config, 2, 12, dtype=torch.float32, device="cpu")
        steps = [network(tokens[:, :6], keep=keep[:, :6], cache=cache)["lm"]]
        steps += [network(tokens[:, i : i + 1], cache=cache)["lm"] for i in range(6, 12)]
        attend = network.trunk.blocks[0].attend
        x = network.trunk.blocks[0].attend_norm(seen.hidden[0])  # type: ignore[operator]
        q, k, _ = attend.qkv(x[0]).split((16, 8, 8), -1)  # type: ignore[operator]
    torch.testing.assert_close(torch.cat(steps, 1)[keep], full[keep], rtol=0, atol=2e-6)
    torch.testing.assert_close(full[1:, 5:], alone, rtol=0, atol=2e-6)
    scores = q.view(12, 2, 8).transpose(0, 1) @ k.T / 8**0.5
    behind = torch.arange(12)[:, None] - torch.arange(12)
    scores = (scores - SLOPES * behind).masked_fill(behind < 0, -torch.inf)
    assert seen.attention is not None
    torch.testing.assert_close(seen.attention[0][0], scores.softmax(-1))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("xl") / "text.txt", documents=120)


SETTINGS = {
    **TINY,
    "model.hidden": 32,
    "model.context": 8,
    "tokenizer.vocab": 280,
    "model.dropout": 0.1,
    "train.batch": 4,
    "train.save_every": 5,
}


def test_rows_read_on_in_order_and_a_run_resumes_with_its_memory(
    corpus: Path, tmp_path: Path
) -> None:
    def run(name: str, steps: int = 12) -> malmoi.Model:
        return malmoi.pretrain(
            "transformer-xl-small",
            data=str(corpus),
            out=tmp_path / name,
            device="cpu",
            steps=steps,
            **SETTINGS,
        )

    run("whole")
    with pytest.raises(Stopped), signalled(8):
        run("stopped")
    model = run("stopped")
    assert_equal_weights(tmp_path / "whole", tmp_path / "stopped")
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    assert malmoi.load(tmp_path / "whole").config.memory == 64

    stretches = Stretches(Store.open(tmp_path / "whole" / "data" / "train"), 8, 4)
    first, second = stretches.at(0, 4)["tokens"], stretches.at(4, 4)["tokens"]
    assert (first[:, -1] == second[:, 0]).all()

    text = corpus.read_text("utf-8")[:600]
    assert model.perplexity(text) != model.perplexity(text, memory=0)
    written = model.generate("The state", max_new_tokens=30, temperature=0)
    assert written.startswith(model.generate("The state", max_new_tokens=10, temperature=0))


def test_memory_needs_distances() -> None:
    with pytest.raises(UsageError, match="positions=relative"):
        gpt2(memory=64)
    gpt = Network(gpt2(vocab=9, width=8, heads=1, depth=1, context=8), {"lm": 0})
    with pytest.raises(UsageError, match="end at its context of 8"):
        gpt.with_memory(64)
