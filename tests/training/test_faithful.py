"""The schedules of the papers, computed as the trainer computes them (docs/faithful.md)."""

from itertools import accumulate, islice, takewhile
from math import ceil

import pytest
import torch

from malmoi.model import Network, initialise
from malmoi.model.families import bert
from malmoi.training.budget import Budget, steps_per_sample
from malmoi.training.feed import batch_sizes
from malmoi.training.recipe import Recipe, rate_at
from malmoi.training.recipes import RECIPES
from malmoi.training.state import RunState

GPT3_TOKENS = 300e9
# Brown et al. 2020 table 2.1: batch in tokens; ours: tokens over which it grows
GPT3S = {
    "gpt3-125m": (0.5e6, 4e9),
    "gpt3-1.3b": (1e6, 5.5e9),
    "gpt3-6.7b": (2e6, 8.4e9),
    "gpt3-175b": (3.2e6, 12e9),
}


# recipe, setting, the paper's number
NUMBERS: list[tuple[str, str, object]] = [
    ("bert-base", "train.lr", 1e-4),
    ("bert-base", "train.steps", 1_000_000),
    ("bert-base", "train.batch", 256),
    ("bert-base", "train.eps", 1e-6),
    ("bert-base", "data.shares", (0.9, 0.1)),
    ("bert-base", "data.lengths", (128, 512)),
    ("bert-base", "data.mask_rate", 0.15),
    ("bert-base", "data.mask_token", 0.8),
    ("bert-base", "data.mask_random", 0.1),
    ("bert-base", "data.short", 0.1),
    ("bert-base", "train.betas", (0.9, 0.999)),
    ("bert-base", "train.decay", 0.01),
    ("bert-base", "train.warmup", 10_000 / 1_000_000),
    ("bert-base", "model.dropout", 0.1),
    ("bert-base", "model.context", 512),
    ("bert-tiny", "train.lr", 1e-3),
    ("bert-mini", "train.lr", 5e-4),
    ("bert-small", "train.lr", 5e-4),
    ("bert-medium", "train.lr", 3e-4),
    ("bert-large", "model.width", 1024),
    ("gpt1", "train.lr", 2.5e-4),
    ("gpt1", "train.epochs", 100),
    ("gpt1", "train.decay", 0.01),
    ("gpt1", "train.batch", 64),
    ("gpt1", "train.warmup_steps", 2000),
    ("gpt1", "model.context", 512),
    ("gpt1", "model.dropout", 0.1),
    ("gpt2-small", "tokenizer.vocab", 50_257),
    ("gpt2-small", "model.context", 1024),
    ("gpt2-small", "train.warmup", 0.01),
    ("gpt2-xl", "model.width", 1600),
    ("gpt3-175b", "train.betas", (0.9, 0.95)),
    ("gpt3-175b", "train.eps", 1e-8),
    ("gpt3-175b", "train.decay", 0.1),
    ("gpt3-1.3b", "model.heads", 16),
    ("gpt3-13b", "model.width", 5120),
    ("gpt3-175b", "train.lr", 0.6e-4),
    ("gpt3-175b", "train.clip", 1.0),
    ("transformer-base", "train.betas", (0.9, 0.98)),
    ("transformer-base", "train.label_smoothing", 0.1),
    ("transformer-base", "train.steps", 100_000),
    ("transformer-base", "train.eps", 1e-9),
    ("transformer-base", "train.warmup_steps", 4000),
    ("transformer-base", "train.batch", 50),
    ("transformer-base", "data.lengths", (512,)),
    ("transformer-base", "train.ema", 0.05),
    ("transformer-tiny", "data.lengths", (256,)),
    ("transformer-tiny", "train.lr", 2e-3),
    ("transformer-small", "train.lr", 0.005),
    ("transformer-small", "model.dropout", 0.3),
    ("transformer-big", "model.dropout", 0.3),
    ("electra-small", "train.lr", 5e-4),
    ("electra-small", "train.batch", 128),
    ("electra-base", "train.steps", 766_000),
    ("electra-base", "model.generator_share", 1 / 3),
    ("electra-small", "data.mask_token", 0.85),
    ("albert-base", "model.embed_width", 128),
    ("transformer-xl-base", "train.lr", 2.5e-4),
    ("transformer-xl-base", "model.width", 410),
    ("transformer-xl-base", "model.memory", 150),
    ("transformer-xl-base", "train.warmup_steps", 0),
    ("transformer-xl-base", "train.warmup", 0),
    ("transformer-xl-base", "train.steps", 200_000),
    ("transformer-xl-base", "train.batch", 60),
    ("transformer-xl-large", "train.warmup_steps", 16_000),
    ("transformer-xl-large", "train.warmup", 0),
    ("transformer-xl-large", "train.steps", 4_000_000),
    ("transformer-xl-large", "train.batch", 128),
    ("transformer-xl-large", "train.clip", 0.25),
    ("transformer-xl-large", "model.dropout", 0.2),
    ("transformer-xl-large", "model.attention_dropout", 0.2),
    ("lstm-gpt1", "model.width", 2048),
    ("lstm-gpt1", "model.depth", 1),
]


@pytest.mark.parametrize(("recipe", "setting", "number"), NUMBERS)
def test_numbers_are_the_papers(recipe: str, setting: str, number: object) -> None:
    part, name = setting.split(".")
    assert getattr(getattr(RECIPES[recipe](), part), name) == pytest.approx(number)


def rate_after(recipe: Recipe, tokens: float) -> float:
    """The rate's share of its peak once this many tokens were seen."""
    steps = Budget.of(recipe).steps
    return rate_at(round(steps * tokens / GPT3_TOKENS), tokens / GPT3_TOKENS, recipe.train, steps)


@pytest.mark.parametrize("name", GPT3S)
def test_gpt3s_rate_follows_its_tokens(name: str) -> None:
    recipe = RECIPES[name]()
    assert rate_after(recipe, 375e6 / 2) == pytest.approx(0.5, abs=1e-3)
    assert rate_after(recipe, 375e6) == pytest.approx(1.0, abs=1e-3)
    halfway = (375e6 + 260e9) / 2
    assert rate_after(recipe, halfway) == pytest.approx(0.55, abs=1e-3)
    assert [rate_after(recipe, n) for n in (260e9, 280e9, 300e9)] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(("name", "batch", "ramp"), [(n, *v) for n, v in GPT3S.items()])
def test_gpt3s_batch_grows_from_32k_tokens(name: str, batch: float, ramp: float) -> None:
    recipe = RECIPES[name]()
    context = recipe.model.context
    samples = GPT3_TOKENS / context
    sizes = list(islice(batch_sizes(recipe.train, 0, samples, 1), 40_000))
    seen = [0, *accumulate(sizes)]
    assert sizes[0] * context == 32_768
    assert sizes[-1] * context == pytest.approx(batch, rel=0.005)
    full = next(n for n, size in zip(seen, sizes, strict=False) if size == sizes[-1]) * context
    assert full == pytest.approx(ramp, rel=0.01)
    middle = next(size for n, size in zip(seen, sizes, strict=False) if n * context >= ramp / 2)
    assert middle * context == pytest.approx((32_768 + batch) / 2, rel=0.02)


@pytest.mark.parametrize("name", GPT3S)
def test_the_steps_of_a_growing_batch_use_the_tokens(name: str) -> None:
    c = RECIPES[name]().train
    samples = GPT3_TOKENS / 2048
    growing = c.batch_ramp * samples
    totals = accumulate(batch_sizes(c, 0, samples, 1))
    counted = sum(1 for _ in takewhile(lambda seen: seen < growing, totals))
    rest = (1 - c.batch_ramp) * samples / c.batch
    assert steps_per_sample(c) * samples == pytest.approx(counted + rest, rel=0.01)


@pytest.mark.parametrize("name", GPT3S)
def test_gpt3_keeps_the_shares_of_its_tokens_under_a_budget_in_minutes(name: str) -> None:
    recipe = RECIPES[name]().override({"train.minutes": 30})
    budget = Budget.of(recipe)
    updates = 100_000  # that fit into the minutes; the warm-up has 125 of them

    def rate(tokens: float) -> float:
        share = tokens / GPT3_TOKENS
        progress = budget.progress(RunState(step=7, seconds=1800 * share))
        assert progress == pytest.approx(share)
        return rate_at(round(updates * share), progress, recipe.train, updates)

    shares = [rate(tokens) for tokens in (375e6 / 2, 375e6, (375e6 + 260e9) / 2, 260e9, 300e9)]
    assert shares == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1], abs=1e-3)
    # the batch grows over the same share of the samples, however many fit
    c = recipe.train
    assert next(batch_sizes(c, 0, 1e6, 1)) == c.batch_start
    assert next(batch_sizes(c, ceil(1e6 * c.batch_ramp), 1e6, 1)) == c.batch


def test_nsp_reads_the_pooled_vector_without_dropout() -> None:
    config = bert(width=16, heads=2, depth=1, dropout=0.5)
    network = initialise(Network(config, {"nsp": 0, "classify": 2}), 0)
    pooled = torch.randn(64, 16)
    twice = {name: [head(pooled) for _ in range(2)] for name, head in network.train().heads.items()}
    assert (twice["nsp"][0] == twice["nsp"][1]).all()
    assert (twice["classify"][0] != twice["classify"][1]).any()


def test_gpt1_warms_up_for_2000_updates_of_its_100_epochs() -> None:
    recipe = RECIPES["gpt1"]()
    steps = Budget.of(recipe, epoch=2_000_000).steps
    assert steps == 100 * 2_000_000 / 64
    shares = [rate_at(step, step / steps, recipe.train, steps) for step in (999, 1999, steps)]
    assert shares == pytest.approx([0.5, 1.0, 0.0], abs=1e-3)


def test_a_shortened_warm_up_of_the_2017_schedule_lowers_its_peak() -> None:
    c = RECIPES["transformer-base"]().train
    whole = [rate_at(step, 0.0, c, expected=100_000) for step in (1999, 3999, 15_999)]
    assert whole == pytest.approx([0.5, 1.0, 0.5])
    short = [rate_at(step, 0.0, c, expected=10_000) for step in (499, 999, 3999)]
    assert short == pytest.approx([0.25, 0.5, 0.25])
