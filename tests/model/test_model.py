"""One Transformer: sizes of every paper, patterns against brute force, cached decoding against
the full pass.
"""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model import (
    Activations,
    KVCache,
    Layout,
    Network,
    count_parameters,
    initialise,
    parse_pattern,
    preset,
)
from malmoi.model.families import albert, bert, gpt2, gpt3, modernbert, roberta

SIZES = {
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt1": 116_534_784,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "electra-small": 13_483_008,
    "electra-base": 108_891_648,
    "albert-base": 11_683_584,
    "distilbert": 66_362_880,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "xlm-roberta-base": 278_043_648,
    "xlm-roberta-large": 559_890_432,
    "modernbert-base": 149_014_272,
    "modernbert-large": 394_781_696,
    "llama-7b": 6_607_343_616,  # 6,738,415,616 with its untied head
    "llama3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize(("name", "count"), SIZES.items())
def test_every_preset_has_its_papers_number_of_weights(name: str, count: int) -> None:
    with torch.device("meta"):
        network = Network(
            preset(name), {}, pooler=name.startswith(("bert", "albert", "roberta", "xlm"))
        )
    assert count_parameters(network) == count


# ------------------------------------------------------------------ patterns

BRUTE = {
    "full": lambda i, j: True,
    "causal": lambda i, j: j <= i,
    "local:3": lambda i, j: abs(i - j) < 3,
    "column:4": lambda i, j: (i - j) % 4 == 0,
    "column:5": lambda i, j: (i - j) % 5 == 0,
    "column:7": lambda i, j: (i - j) % 7 == 0,
    "strided:4": lambda i, j: abs(i - j) < 4 or (i - j) % 4 == 0,
    "block:4": lambda i, j: i // 4 == j // 4,
    "summary:4,2": lambda i, j: j % 4 >= 2,
    "fixed:4,1": lambda i, j: i // 4 == j // 4 or j % 4 >= 3,
    "prefix:5": lambda i, j: j < 5,
}
ATOMS = st.sampled_from(sorted(BRUTE))


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, object]:
    """A random pattern as text, and the same as a Python predicate."""
    text = draw(ATOMS)
    truth = BRUTE[text]
    for sign, atom in draw(st.lists(st.tuples(st.sampled_from("&|"), ATOMS), max_size=3)):
        left, right = truth, BRUTE[atom]
        text = f"({text}) {sign} {atom}"
        if sign == "&":
            truth = lambda i, j, left=left, right=right: left(i, j) and right(i, j)  # noqa: E731
        else:
            truth = lambda i, j, left=left, right=right: left(i, j) or right(i, j)  # noqa: E731
    return text, truth


@given(expressions(), st.integers(1, 19), st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_patterns_equal_brute_force_also_behind_a_cache(
    expression: tuple, length: int, past: int
) -> None:
    text, truth = expression
    mask = (
        parse_pattern(text)
        .mask(Layout(1, length, past + length, offset=past))
        .expand(1, 1, length, past + length)
    )
    assert all(
        bool(mask[0, 0, i, j]) == truth(past + i, j)
        for i in range(length)
        for j in range(past + length)
    )


def test_padding_documents_and_head_groups_equal_brute_force() -> None:
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 2, 2]])
    layout = Layout(2, 6, 6, keep=keep, query_documents=documents, key_documents=documents)
    mask = parse_pattern("causal ; local:2", heads=4).mask(layout).expand(2, 4, 6, 6)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, 6, 6))).tolist():
        pattern = j <= i if h < 2 else abs(i - j) < 2
        assert bool(mask[b, h, i, j]) == bool(
            pattern and keep[b, j] and documents[b, i] == documents[b, j]
        )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("casual", "'causal'"),
        ("causal &", "joined by & and"),
        ("local", "local:window"),
        ("local:0", "positive"),
        ("(causal", "joined by & and"),
        ("causal causal", "joined by & and"),
        ("causal ; full ; full", "head groups"),
    ],
)
def test_a_misspelt_pattern_gives_a_clear_error(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        gpt2_tiny(attention=(text,))


@pytest.mark.parametrize(
    ("text", "causal"),
    [
        ("causal", True),
        ("causal & strided:4", True),
        ("causal & (full | local:9000)", True),
        ("local:1", False),  # it sees itself only, but does not say so
        ("block:1 ; causal", False),
        ("column:5 & column:7", False),  # the first later key that is seen is at 35
        ("causal | prefix:3", False),
        ("causal ; causal | block:2", False),
        ("causal | summary:5000,1", False),  # the first later key that is seen is at 4,999
        ("full", False),
        ("local:4", False),
    ],
)
def test_causal_patterns_are_recognised(text: str, causal: bool) -> None:
    assert parse_pattern(text, 2).is_causal is causal


@given(expressions())
@settings(deadline=None, max_examples=200)
def test_a_pattern_that_is_called_causal_never_sees_a_later_token(expression: tuple) -> None:
    text, truth = expression
    later = any(truth(i, j) for i in range(4) for j in range(i + 1, i + 4 * 5 * 7 + 1))
    assert not (parse_pattern(text).is_causal and later)
    assert parse_pattern(f"causal & ({text})").is_causal


# ------------------------------------------------------------------ the trunk


def gpt2_tiny(**changes: object) -> Network:
    config = gpt2(**(dict(vocab=50, width=32, depth=3, heads=2, context=32) | changes))
    network = initialise(Network(config, {"lm": 0}), seed=0).eval()
    for name, weight in network.named_parameters():
        if name.endswith("shares"):  # at first they leave nothing to see
            weight.data += torch.linspace(0.2, 0.9, len(weight))
    return network


VARIANTS: list[dict] = [
    {},
    {"attention": ("causal", "causal & local:3")},
    {"attention": ("causal & fixed:4,1",)},
    {"attention": ("causal & local:4 ; causal & column:4",)},
    {
        "positions": "rotary",
        "heads": 4,
        "kv_heads": 2,
        "qk_norm": True,
        "norm_kind": "rms",
        "activation": "swiglu",
    },
    {"positions": "sinusoidal", "norm": "post", "final_norm": False, "groups": 1, "embed_width": 8},
    {"embedding_residual": True, "skip_connections": True, "depth": 5, "kv_heads": 1},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.no_grad()
def test_cached_decoding_equals_the_full_pass_for_left_padded_batches(changes: dict) -> None:
    network = gpt2_tiny(**changes)
    tokens = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    keep = torch.arange(12) >= torch.tensor([[0], [3], [5]])
    full = network(tokens, keep=keep)["lm"]
    alone = network(tokens[1:2, 3:])["lm"]
    cache = KVCache(network.config, 3, 12, dtype=torch.float32, device="cpu")
    steps = [network(tokens[:, :6], keep=keep[:, :6], cache=cache)["lm"]]
    steps += [network(tokens[:, i : i + 1], cache=cache)["lm"] for i in range(6, 12)]
    torch.testing.assert_close(torch.cat(steps, 1)[keep], full[keep], rtol=0, atol=2e-6)
    torch.testing.assert_close(full[1:2, 3:], alone, rtol=0, atol=2e-6)


TINY = dict(vocab=50, width=32, depth=4, heads=2, context=16, hidden=48, init_std=0.05)
ENCODERS = {
    "bert": bert(**TINY),
    "roberta": roberta(**TINY),
    "modernbert": modernbert(**TINY, attention=("full", "local:3")),
}


@torch.no_grad()
def test_embedding_residuals_and_skip_connections_equal_their_formulas() -> None:
    network = gpt2_tiny(embedding_residual=True, skip_connections=True, depth=5, kv_heads=1)
    trunk = network.trunk
    tokens = torch.randint(0, 50, (2, 7))
    trail = Activations(attention=[])
    hidden = trunk(tokens, activations=trail)
    embedded = x = trail.hidden[0]
    written = []
    for i, block in enumerate(trunk.blocks):
        if i >= 3:
            x = x + trunk.skips.shares[4 - i] * written[4 - i]
        of_stream, of_embedding, of_values = block.again.shares
        x = of_stream * x + of_embedding * embedded
        values = block.attend.qkv(block.attend_norm(x))[..., -16:]
        values = values + of_values * block.again.value(embedded)
        seen = torch.einsum("bhqk,bke->bqhe", trail.attention[i], values).flatten(2)
        x = x + block.attend.out(seen)
        x = x + block.mlp(block.mlp_norm(x))
        written.append(x)
    torch.testing.assert_close(trunk.norm(x), hidden, rtol=0, atol=2e-6)


@pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS)
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(config: ModelConfig) -> None:
    network = initialise(Network(config, {"mlm": 0, "classify": 3, "tag": 2}), 0).eval()
    tokens = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    alone = network(tokens)
    for left in (0, 4):
        padded = torch.nn.functional.pad(tokens, (left, 4 - left))
        keep = torch.nn.functional.pad(torch.ones(1, 9, dtype=torch.bool), (left, 4 - left))
        found = network(padded, keep=keep)
        for head in ("mlm", "tag"):
            torch.testing.assert_close(found[head][:, left : left + 9], alone[head])
        torch.testing.assert_close(found["classify"], alone["classify"])


@pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS)
@torch.no_grad()
def test_packed_documents_equal_separate_passes(config: ModelConfig) -> None:
    network = initialise(Network(config, {"mlm": 0}), 0).eval()
    tokens = torch.randint(0, 50, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = network(tokens, documents=documents, positions=positions)["mlm"]
    apart = torch.cat([network(tokens[:, :5])["mlm"], network(tokens[:, 5:])["mlm"]], 1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=2e-6)


@torch.no_grad()
def test_activations_hold_every_layer_and_attention_that_sums_to_one() -> None:
    network, trail = gpt2_tiny(), Activations(attention=[])
    hidden = network.trunk(torch.randint(0, 50, (2, 7)), activations=trail)
    assert len(trail.hidden) == 4
    assert torch.equal(trail.hidden[-1], hidden)
    assert [a.shape for a in trail.attention] == [(2, 2, 7, 7)] * 3
    torch.testing.assert_close(trail.attention[1].sum(-1), torch.ones(2, 2, 7))
    assert not trail.attention[0].triu(1).any()


@pytest.mark.parametrize("keeps", ["inputs", "products"])
def test_rematerialised_gradients_are_the_same(keeps: str) -> None:
    network = gpt2_tiny(dropout=0.0, attention_dropout=0.0).train()
    tokens = torch.randint(0, 50, (2, 9))

    def gradients() -> list[torch.Tensor]:
        network.zero_grad()
        network(tokens)["lm"].square().mean().backward()
        return [p.grad.clone() for p in network.parameters()]

    plain = gradients()
    network.trunk.gradient_checkpointing = True
    network.trunk.checkpointing_keeps = keeps
    for ours, theirs in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_initialisation_follows_the_papers() -> None:
    network = initialise(Network(gpt2(vocab=500, width=128, depth=8, heads=2), {"lm": 0}), 0)
    block = network.trunk.blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # 1/√(2·8)
    assert network.heads["lm"].weight is network.trunk.embed.token.weight
    truncated = initialise(Network(bert(vocab=500, width=128, depth=1, heads=2), {}), 0)
    assert truncated.trunk.embed.token.weight.abs().max().item() <= 0.04


@torch.no_grad()
def test_pooled_heads_read_the_first_or_the_last_real_token() -> None:
    keep = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    hidden = torch.randn(2, 4, 8)
    last = Network(gpt2(vocab=9, width=8, depth=1, heads=1), {"classify": 2}).pooler
    assert torch.equal(last(hidden, keep), torch.stack([hidden[0, 2], hidden[1, 3]]))
    first = Network(bert(vocab=9, width=8, depth=1, heads=1, pooler="none"), {"classify": 2}).pooler
    assert torch.equal(first(hidden, keep), torch.stack([hidden[0, 0], hidden[1, 1]]))


def test_vocabulary_heads_read_only_the_requested_slots() -> None:
    network = initialise(
        Network(bert(vocab=50, width=32, depth=1, heads=2), {"mlm": 0, "nsp": 0}), 0
    ).eval()
    tokens, slots = torch.randint(0, 50, (2, 6)), torch.tensor([1, 8])
    some, all_ = network(tokens, slots=slots)["mlm"], network(tokens)["mlm"]
    torch.testing.assert_close(some, all_.flatten(0, 1)[slots])


# ------------------------------------------------------------------ configs


def test_configs_survive_json_and_name_the_nearest_field() -> None:
    config = gpt3(depth=2)
    assert ModelConfig.from_json(config.to_json()) == config
    assert config.override({"width": "1536"}).width == 1536
    assert config.override({"attention": "full, causal"}).attention == ("full", "causal")
    assert albert().groups == 1
    with pytest.raises(UsageError, match="'width'"):
        ModelConfig.from_dict({"vocab": 5, "widht": 3})
    with pytest.raises(UsageError, match="whole number"):
        gpt2(depth=2.5)
    with pytest.raises(UsageError, match="one of"):
        gpt2(norm="middle")
    with pytest.raises(UsageError, match="heads"):
        gpt2(width=100, heads=7)


def test_too_many_tokens_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"40 tokens.*32"):
        gpt2_tiny()(torch.zeros(1, 40, dtype=torch.long))


@pytest.mark.parametrize(
    "text", ["causal & local:5", "causal & fixed:4,1", "causal & local:4 ; causal & column:4"]
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_takes_the_same_predicate(text: str, packed: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    from malmoi.model.attention import attend
    from malmoi.model.attention_mask import Mask, _block_mask

    documents = torch.tensor([[0] * 50 + [1] * 78, [0] * 100 + [1] * 28]) if packed else None
    layout = Layout(2, 128, 128, query_documents=documents, key_documents=documents)
    pattern = parse_pattern(text, 2)
    q, k, v = torch.randn(3, 2, 2, 128, 16).unbind()
    blocks = _block_mask(pattern, layout, 2 if packed else None, torch.device("cpu"))
    dense = attend(q, k, v, Mask.of(pattern.mask(layout)))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), dense, rtol=0, atol=2e-6)


@torch.no_grad()
def test_heads_of_a_gated_network_take_the_activation_of_its_gate() -> None:
    config = bert(vocab=50, width=32, depth=1, heads=2, activation="swiglu")
    network = initialise(Network(config, {"mlm": 0, "detect": 0}), 0).eval()
    tokens = torch.arange(6)[None]
    hidden, heads = network.trunk(tokens), network.heads
    told = network(tokens)
    features = heads["mlm"].norm(torch.nn.functional.silu(heads["mlm"].dense(hidden)))
    torch.testing.assert_close(told["mlm"], features @ network.trunk.embed.token.weight.T)
    detected = heads["detect"].linear(torch.nn.functional.silu(heads["detect"].dense(hidden)))
    torch.testing.assert_close(told["detect"], detected.squeeze(-1))


@pytest.mark.parametrize(
    ("name", "discriminator", "generator"),
    [("electra-small", 13_549_057, 4_620_026), ("electra-base", 109_483_009, 33_740_602)],
)
def test_an_electra_is_as_large_as_its_paper_says(
    name: str, discriminator: int, generator: int
) -> None:
    """14M and 110M (Clark et al. 2020 table 1 and 2), by transformers' own counts of both parts."""
    with torch.device("meta"):
        network = Network(preset(name), {"generator": 0, "detect": 0})
    assert count_parameters(network.without_head("generator")) == discriminator
    assert count_parameters(network.heads["generator"]) == generator


def test_a_network_draws_nothing_and_on_the_meta_device_has_shapes_and_tables() -> None:
    config = gpt2(vocab=50, width=32, depth=2, heads=2, context=8, positions="rotary")
    before = torch.get_rng_state()
    with torch.device("meta"):
        hollow = Network(config, {"lm": 0, "classify": 3})
    real = Network(config, {"lm": 0, "classify": 3})
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.is_meta for weight in hollow.parameters())
    assert {k: v.shape for k, v in hollow.state_dict().items()} == {
        k: v.shape for k, v in real.state_dict().items()
    }
    assert torch.equal(hollow.trunk.rotary, real.trunk.rotary)
    weights = {k: v for k, v in real.state_dict().items() if "norm.weight" not in k}
    assert not any(weight.any() for weight in weights.values())
