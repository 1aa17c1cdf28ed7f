"""Every number under interventions equals an independent pass: hooks on the transformers twin."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import malmoi
from malmoi import Intervention, UsageError
from malmoi.inference import Model, load
from malmoi.interpret.intervention import view_with_taps
from malmoi.model import Network, initialise
from malmoi.model.families import modernbert
from malmoi.tokenizer import train_tokenizer
from random_models import random_gpt2

TEXTS = ["the state of the union is strong", "a small model of small words"] * 4
A = "the state of the union is strong"
B = "the state of a small model is strong"
MASKED = "the state of the [MASK] is strong"
WIDTH, HEADS = 48, 4
HEAD = WIDTH // HEADS
Hook = Callable[[Tensor], Tensor]


@dataclass
class Twin:
    """A model of transformers, ours, and the modules of theirs that the sites correspond to."""

    theirs: Any
    ours: Model
    out: Callable[[int], Any]  # the attention's output projection: its input is the heads'
    mlp: Callable[[int], Any]
    block: Callable[[int], Any]
    text: str

    def logits(self, text: str, mask: Tensor | None = None) -> np.ndarray:
        """Of every position, computed by transformers."""
        tokens = torch.tensor([self.ours._subject.encode(text).tokens])
        with torch.inference_mode():
            return self.theirs(input_ids=tokens, attention_mask=mask).logits[0].numpy()

    def run(self, *interventions: Intervention, text: str = "") -> np.ndarray:
        """Of every position, computed by us."""
        size = len(self.ours._subject.encode(text or self.text).tokens)
        found = self.ours.run(text or self.text, interventions, positions=range(size))
        return found.logits


@contextmanager
def hooked(module: Any, change: Hook, *, inputs: bool = False) -> Iterator[None]:
    """A change of a module's first input or output, by hand."""

    def before(_: object, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(given[0]), *given[1:])

    def after(_: object, given: object, found: Any) -> Any:
        return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

    hook = (
        module.register_forward_pre_hook(before) if inputs else module.register_forward_hook(after)
    )
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    words = train_tokenizer(TEXTS, kind="byte-bpe", vocab=300)
    theirs, ours = random_gpt2(words, tmp_path_factory.mktemp("gpt2"), context=32)
    theirs.set_attn_implementation("eager")
    layers = theirs.transformer.h
    return Twin(
        theirs, ours, lambda i: layers[i].attn.c_proj, lambda i: layers[i].mlp,
        lambda i: layers[i], A,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    folder = tmp_path_factory.mktemp("bert")
    words = train_tokenizer(TEXTS, kind="wordpiece", vocab=100)
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=words.vocab_size, hidden_size=WIDTH, num_hidden_layers=3,
        num_attention_heads=HEADS, intermediate_size=96, max_position_embeddings=32,
        initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    theirs = hf.BertForMaskedLM(config).eval()
    theirs.save_pretrained(folder)
    words.save(folder)
    layers = theirs.bert.encoder.layer
    return Twin(
        theirs, load(folder, device="cpu"), lambda i: layers[i].attention.output.dense,
        lambda i: layers[i].output.dense, lambda i: layers[i], MASKED,
    )  # fmt: skip


@pytest.fixture(params=["gpt", "bert"])
def twin(request: pytest.FixtureRequest) -> Twin:
    found: Twin = request.getfixturevalue(request.param)
    return found


def without_head(head: int) -> Hook:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., head * HEAD : (head + 1) * HEAD] = 0
        return x

    return change


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= 1e-5 * max(1.0, np.abs(other).max()))


def test_heads_attention_mlps_and_layers_off_equal_hooks(twin: Twin) -> None:
    clean = twin.logits(twin.text)
    assert close(twin.run(), clean)
    with hooked(twin.out(1), without_head(2), inputs=True):
        expected = twin.logits(twin.text)
    assert close(twin.run(Intervention("head", layer=1, head=2)), expected)
    assert not close(expected, clean)
    with hooked(twin.out(0), torch.zeros_like):
        assert close(twin.run(Intervention("attention", layer=0)), twin.logits(twin.text))
    with hooked(twin.mlp(2), torch.zeros_like):
        assert close(twin.run(Intervention("mlp", layer=2)), twin.logits(twin.text))
    with ExitStack() as stack:  # several at once, at all layers
        stack.enter_context(hooked(twin.out(0), without_head(0), inputs=True))
        for i in range(3):
            stack.enter_context(hooked(twin.mlp(i), torch.zeros_like))
        expected = twin.logits(twin.text)
    assert close(twin.run(Intervention("head", 0, head=0), Intervention("mlp")), expected)
    kept: list[Tensor] = []
    with (
        hooked(twin.block(1), lambda x: kept.append(x) or x, inputs=True),
        hooked(twin.block(1), lambda _: kept[-1]),
    ):
        assert close(twin.run(Intervention("layer", layer=1)), twin.logits(twin.text))


def test_patching_from_another_sentence_equals_hooks(twin: Twin) -> None:
    kept: list[Tensor] = []
    with hooked(twin.block(0), lambda x: kept.append(x) or x):
        twin.logits(B)

    def patch(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 3] = kept[0][:, 4]
        return x

    with hooked(twin.block(0), patch):
        expected = twin.logits(twin.text)
    change = Intervention(
        "residual", 0, positions=(3,), value="copy", source=B, source_positions=(4,)
    )
    assert close(twin.run(change), expected)
    # a whole text put in the place of another, at the embedding: its own answer
    assert close(
        twin.run(Intervention("embedding", value="copy", source=twin.text)), twin.logits(twin.text)
    )


def test_the_mean_of_a_source_equals_a_hook(twin: Twin) -> None:
    kept: list[Tensor] = []
    with hooked(twin.mlp(1), lambda x: kept.append(x) or x):
        twin.logits(B)
    with hooked(twin.mlp(1), lambda x: kept[0].mean(1, keepdim=True).expand_as(x)):
        expected = twin.logits(twin.text)
    assert close(twin.run(Intervention("mlp", 1, value="mean", source=B)), expected)
    with hooked(twin.mlp(1), lambda x: x.mean(1, keepdim=True).expand_as(x)):
        expected = twin.logits(twin.text)
    assert close(twin.run(Intervention("mlp", 1, value="mean")), expected)


def test_a_bert_reads_causally_and_a_gpt_both_ways(gpt: Twin, bert: Twin) -> None:
    size = len(bert.ours._subject.encode(MASKED).tokens)
    ahead = torch.ones(1, 1, size, size).triu(1) * torch.finfo(torch.float32).min
    assert close(bert.run(Intervention("mask", pattern="causal")), bert.logits(MASKED, ahead))
    size = len(gpt.ours._subject.encode(A).tokens)
    everything = torch.zeros(1, 1, size, size)
    both = gpt.logits(A, everything)
    assert close(gpt.run(Intervention("mask", pattern="full")), both)
    assert not close(both, gpt.logits(A))


def test_a_gpt_answers_after_its_text_and_a_bert_at_its_mask(gpt: Twin, bert: Twin) -> None:
    found = gpt.ours.run(A, top=3, hidden=True, attention=True)
    assert found.tokens == tuple(gpt.ours.tokens(A))
    assert found.positions == (len(found.tokens) - 1,)
    assert np.array_equal(found.hidden, gpt.ours.hidden_states(A))
    assert np.allclose(found.attention, gpt.ours.attention(A), atol=1e-6)
    best = gpt.ours.generate(A, max_new_tokens=1, temperature=0)
    assert gpt.ours.tokenizer.decode([int(found.logits[0].argmax())]) == best
    found = bert.ours.run(MASKED, top=3)
    assert [one.name for one in found.guesses[0]] == [
        one.token for one in bert.ours.fill(MASKED, top=3)
    ]
    assert found.to_dict()["positions"] == [found.tokens.index("[MASK]")]


def test_every_method_works_under_an_intervention_and_the_model_stays(gpt: Twin) -> None:
    before = gpt.ours.generate(A, max_new_tokens=5, temperature=0)
    off = gpt.ours.intervene(Intervention("layer", layer=2), Intervention("head", 0, head=1))
    with hooked(gpt.out(0), without_head(1), inputs=True):
        layers = gpt.theirs.transformer.h
        gpt.theirs.transformer.h = layers[:2]
        gpt.theirs.config.num_hidden_layers = 2
        tokens = torch.tensor([gpt.ours.tokenizer.encode(A).tokens])
        written = gpt.theirs.generate(tokens, max_new_tokens=5, do_sample=False)[0]
        gpt.theirs.config.num_hidden_layers = 3
        gpt.theirs.transformer.h = layers
    expected = gpt.ours.tokenizer.decode(written[tokens.size(1) :].tolist())
    assert off.generate(A, max_new_tokens=5, temperature=0) == expected
    assert gpt.ours.generate(A, max_new_tokens=5, temperature=0) == before


def test_a_bert_fills_under_another_mask(bert: Twin) -> None:
    causal = Intervention("mask", pattern="causal")
    found = bert.ours.intervene(causal).fill(MASKED, top=3)
    expected = bert.ours.run(MASKED, [causal], top=3).guesses[0]
    assert [one.token for one in found] == [one.name for one in expected]
    assert [one.probability for one in found] == pytest.approx(
        [one.probability for one in expected], abs=1e-6
    )


def test_rotary_tables_and_shared_blocks_keep_their_layers() -> None:
    config = modernbert(vocab=50, width=32, depth=4, heads=4, context=64, groups=2)
    network = initialise(Network(config, {"mlm": 0}), seed=0).eval()
    tokens = torch.arange(12)[None]
    same = view_with_taps(network, {}, attention=tuple(config.attention * 4)[:4])
    with torch.inference_mode():
        assert torch.equal(same(tokens)["mlm"], network(tokens)["mlm"])
        full = view_with_taps(network, {}, attention=("full",) * 4)
        for one in (network.trunk, full.trunk):
            assert one.local_layers == [pattern.is_local for pattern in network.trunk.patterns]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"site": "heads"}, "Did you mean 'head'"),
        ({"site": "head", "layer": 0}, "needs head="),
        ({"site": "mask"}, "needs pattern="),
        ({"site": "mlp", "value": "copy"}, "needs source="),
        ({"site": "mlp", "layer": 7}, "no layer 7"),
        ({"site": "head", "head": 9}, "no head 9"),
        ({"site": "mlp", "positions": (99,)}, "no position 99"),
        ({"site": "mask", "pattern": "causl"}, "causal"),
    ],
)
def test_a_wrong_intervention_is_refused(gpt: Twin, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gpt.ours.run(A, [Intervention(**values)])


def test_interventions_on_positions_need_run(gpt: Twin, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run"):
        gpt.ours.intervene(Intervention("mlp", positions=(0,)))
    with pytest.raises(UsageError, match="cannot generate"):
        gpt.ours.intervene(Intervention("mask", pattern="full"))
    assert repr(malmoi.Intervention("head", layer=0, head=0)) == (
        "Intervention(site='head', layer=0, head=0)"
    )


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_pass_without_interventions_reads_a_soft_prompt(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name).ours
    text = request.getfixturevalue(name).text
    plain = model.run(text, hidden=True)
    trunk = model.network.trunk
    trunk.soft_prompt = torch.nn.Parameter(torch.randn(2, WIDTH))
    try:
        model.__dict__.pop("_subject")
        found = model.run(text, hidden=True)
        expected = model.logits(text)[list(found.positions)]
    finally:
        trunk.soft_prompt = None
        model.__dict__.pop("_subject")
    np.testing.assert_allclose(found.logits, expected, atol=1e-5)
    assert np.abs(found.logits - plain.logits).max() > 1e-3
    assert found.hidden.shape == plain.hidden.shape
