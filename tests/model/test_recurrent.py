"""LSTM models: the layers against torch's own cell by hand, and the commands that take them."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import malmoi
from malmoi.errors import UsageError
from malmoi.model import KVCache, Network, count_parameters, initialise, preset
from malmoi.model.families import elmo, lstm
from malmoi.model.trunks import FeatureConfig, FeatureReader
from malmoi.training.losses import ForwardPass, objective
from tiny_runs import TINY, write_corpus

LSTM = lstm(vocab=40, width=12, hidden=20, depth=2, dropout=0.0)
ELMO = elmo(vocab=40, width=16, embed_width=8, hidden=20, depth=2, dropout=0.0)


def network_of(config: malmoi.ModelConfig) -> Network:
    return initialise(Network(config, {"lm": 0}), 0).eval()


def some_tokens(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def by_hand(cells: torch.nn.LSTM, x: Tensor) -> Tensor:
    """One LSTM layer, token after token (Hochreiter & Schmidhuber 1997; Sak et al. 2014)."""
    h = x.new_zeros(len(x), cells.proj_size or cells.hidden_size)
    c = x.new_zeros(len(x), cells.hidden_size)
    out = []
    for token in x.unbind(1):
        gates = token @ cells.weight_ih_l0.T + h @ cells.weight_hh_l0.T
        i, f, g, o = (gates + cells.bias_ih_l0 + cells.bias_hh_l0).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        h = h @ cells.weight_hr_l0.T if cells.proj_size else h
        out.append(h)
    return torch.stack(out, 1)


def test_an_lstm_model_is_its_formula() -> None:
    network = network_of(LSTM)
    x = network.trunk.embed.token(some_tokens())
    for i, block in enumerate(network.trunk.blocks):
        y = by_hand(block.directions[0].cells, x)  # type: ignore[union-attr, index]
        x = x + y if i else y
    torch.testing.assert_close(network.hidden(some_tokens()), x)


def test_elmo_is_two_language_models() -> None:
    """Each half of a hidden state depends on its own side only, and predicts the other."""
    network = network_of(ELMO)
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40
    same = (network.hidden(tokens) - network.hidden(changed)).abs().amax((0, 2)) == 0
    forward, backward = (network.hidden(t).chunk(2, -1) for t in (tokens, changed))
    assert not same.any()
    torch.testing.assert_close(forward[0][:, :5], backward[0][:, :5])
    torch.testing.assert_close(forward[1][:, 6:], backward[1][:, 6:])
    batch = {"tokens": tokens[:, :-1], "lm_labels": tokens[:, 1:]}
    counts = {"lm_labels": torch.tensor(float(batch["lm_labels"].numel()))}
    _, means = objective("bilm")(ForwardPass.of(network, batch), counts)
    states = network.hidden(batch["tokens"])[:, 1:, 8:]
    logits = states @ network.trunk.embed.token.weight.T
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, :-2])
    torch.testing.assert_close(means["backward_lm"], expected.detach())


@pytest.mark.parametrize("config", [LSTM, ELMO], ids=["lstm", "elmo"])
def test_padding_on_either_side_changes_nothing(config: malmoi.ModelConfig) -> None:
    network = network_of(config)
    tokens = some_tokens()
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[0, :4] = False
    keep[1, 6:] = False
    hidden = network.hidden(tokens, keep=keep)
    torch.testing.assert_close(hidden[0, 4:], network.hidden(tokens[:1, 4:])[0])
    torch.testing.assert_close(hidden[1, :6], network.hidden(tokens[1:2, :6])[0])
    torch.testing.assert_close(hidden[2], network.hidden(tokens[2:])[0])


def test_a_state_continues_a_text_beyond_the_context() -> None:
    network = network_of(lstm(vocab=40, width=12, depth=2, context=4, dropout=0.0))
    tokens = some_tokens()
    cache = KVCache(network.config, 3, 9, dtype=torch.float32, device="cpu")
    pieces = [network.hidden(part, cache=cache) for part in tokens.split((5, 1, 3), 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), network.hidden(tokens))
    assert cache.keys.numel() == 0


def test_sizes() -> None:
    def size(name: str) -> int:
        with torch.device("meta"):
            return count_parameters(Network(preset(name), {"lm": 0}))

    # 4 gates of 2,048 units from 2,048 inputs and states, 2 biases; 768 in and out; 40,478 tokens
    cells = 4 * 2048 * (2048 + 2048 + 2)
    assert size("lstm-gpt1") == cells + 768 * 2048 * 2 + 2048 + 768 * 40_478
    # Peters et al. 2018 §3.4, without characters: 2 layers × 2 directions of 4,096 units, 512 out
    each = 4 * 4096 * (512 + 512 + 2) + 512 * 4096
    assert size("elmo") == 4 * each + 512 * 10_000


def test_the_mix_is_elmos_equation_1() -> None:
    reader = FeatureReader(ELMO, FeatureConfig(layers=(0, 1, 2), weighted=True))
    states = torch.randn(2, 3, 3, 16)
    weights = torch.tensor([0.5, -1.0, 2.0])
    reader.weights.data.copy_(weights)  # type: ignore[union-attr]
    reader.scale.data.fill_(3.0)  # type: ignore[union-attr]
    s = weights.softmax(0)
    expected = 3 * sum(s[i] * states[:, :, i] for i in range(3))
    torch.testing.assert_close(reader(states), expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recurrent")
    text = write_corpus(root / "text.txt")
    small = {k: v for k, v in TINY.items() if k != "model.heads"}
    small |= {"model.context": 16, "tokenizer.vocab": 280}
    malmoi.pretrain("lstm", data=str(text), out=root / "lstm", device="cpu", steps=8, **small)
    both = {**small, "model.embed_width": 8, "model.hidden": 16}
    malmoi.pretrain("elmo-small", data=str(text), out=root / "elmo", device="cpu", steps=8, **both)
    rows = [f"{'good' if i % 2 else 'bad'} state,{'yes' if i % 2 else 'no'}" for i in range(24)]
    (root / "rows.csv").write_text("\n".join(["text,label", *rows]), "utf-8")
    return root


def test_an_lstm_writes_alone_as_in_a_batch(runs: Path) -> None:
    model = malmoi.load(runs / "lstm", device="cpu")
    prompts = ["The state", "We work for the people of", "Law"]
    options: dict[str, int] = {"temperature": 0, "max_new_tokens": 40}  # beyond its context of 16
    alone = [model.generate(prompt, **options) for prompt in prompts]
    assert model.generate(prompts, **options) == alone
    assert "".join(model.stream(prompts[1], **options)) == alone[1]
    assert model.generate(prompts[0], beams=2, temperature=0, max_new_tokens=5)
    with pytest.raises(UsageError, match="state"):
        model.generate(prompts[0], speculate=True, temperature=0)


def test_scores_are_the_networks_own(runs: Path) -> None:
    for name in ("lstm", "elmo"):
        model = malmoi.load(runs / name, device="cpu")
        ids = model.tokenizer.encode("The state of", specials=False).tokens
        start = len(model.tokenizer.encode("The", specials=False).tokens)
        with torch.no_grad():
            logits = model.network(torch.tensor([ids]), heads=("lm",))["lm"][0]
        picked = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        expected = float(picked[start - 1 :].sum())
        assert model.score("The", " state of").logprob == pytest.approx(expected, abs=1e-4)
        assert model.perplexity("The state of the union is strong.") > 1


def test_tasks_take_them(runs: Path) -> None:
    for name, options in (("lstm", {}), ("elmo", {"features": "mix"})):
        out = runs / f"{name}-{len(options)}"
        rows = runs / "rows.csv"
        settings = {"epochs": 24, "lr": 3e-2, "batch": 8, "lm": 0.0, "device": "cpu", **options}
        malmoi.finetune(runs / name, "classification", rows, out, rows, **settings)
        predicted = malmoi.load(out, device="cpu").predict(["good state", "bad state"])
        assert [one.label for one in predicted] == ["yes", "no"]
    config = json.loads((runs / "elmo-1" / "config.json").read_text("utf-8"))
    assert config["features"]["layers"] == [0, 1, 2]


def test_unsupported_uses_are_refused(runs: Path) -> None:
    model = malmoi.load(runs / "elmo", device="cpu")
    assert "generate" not in model.abilities
    with pytest.raises(UsageError, match="token by token"):
        model.generate("The state", max_new_tokens=2)
    with pytest.raises(UsageError, match="softmax attention"):
        malmoi.export(runs / "lstm", runs / "lstm.onnx")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UsageError, match="packed documents"):
        model.network.trunk(tokens, documents=tokens)
