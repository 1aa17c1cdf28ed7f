"""What a run takes before it starts: against the papers, against torch's own count, against a
run that was made.
"""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import native_bf16
from malmoi.cli.app import run_command
from malmoi.errors import UsageError
from malmoi.model import Layout, Network, count_parameters, initialise, parse_pattern
from malmoi.planning.flops import flops, kaplan_tokens, keys_seen, optimal
from malmoi.planning.gpus import GPUS, PlanSettings, find_gpu
from malmoi.planning.plan import DeviceLayout, Fleet, MemoryUse, RunPlan, device_layout, plan_run
from malmoi.training.budget import activation_bytes, meta_network
from malmoi.training.loss_module import LossModule
from malmoi.training.losses import objective
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import resolve_recipe
from tiny_runs import train, write_corpus

ROOT = Path(__file__).parents[2]
H200 = Fleet(find_gpu("h200"))


def planned(name: str, fleet: Fleet = H200, **changes: Any) -> RunPlan:
    return plan_run(resolve_recipe(name, changes), fleet)


# ---- parameters and FLOPs


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("bert-base", None),
        ("albert-base", None),
    ],
)
def test_the_parameters_are_the_models_own(name: str, count: int | None) -> None:
    made = planned(name)
    network = meta_network(made.recipe)
    assert made.parameters == count_parameters(network) == (count or made.parameters)
    assert made.embedding == count_parameters(network.trunk.embed)
    assert made.head == sum(
        p.numel() for n, p in network.named_parameters() if n.startswith(("heads.", "pooler."))
    )


def test_gpt3_takes_the_flops_of_its_paper() -> None:
    """Brown et al. 2020 table D.1: 174.6B parameters, 300B tokens, 3.14e23 FLOPs."""
    made = planned("gpt3-175b")
    assert made.parameters == pytest.approx(174.6e9, rel=1e-3)
    assert made.tokens == pytest.approx(300e9, rel=1e-3)
    assert made.flops.rule * made.tokens == pytest.approx(3.14e23, rel=0.02)
    assert made.flops.exact * made.tokens == pytest.approx(3.14e23, rel=0.02)


def tiny(objective: str, **changes: Any) -> Recipe:
    name = "gpt2-small" if objective == "lm" else "bert-tiny"
    sizes = dict(width=32, depth=3, heads=2, context=24, attention_dropout=0.0, attention="full")
    settings = {f"model.{key}": value for key, value in (sizes | changes).items()}
    recipe = resolve_recipe(
        name, {**settings, "model.attention": "causal", "data.lengths": "24", "data.shares": "1"}
    )
    return replace(
        recipe, objective=objective, model=replace(recipe.model, vocab=96, attention=("full",))
    )


def batch_of(recipe: Recipe, rows: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tokens, length = torch.randint(0, 96, (rows, 24)), 24
    if recipe.objective == "lm":
        return {"tokens": tokens, "lm_labels": tokens}, {"lm_labels": torch.tensor(1.0)}
    slots = torch.arange(int(rows * length * recipe.data.mask_rate))
    labels = {
        "mlm_labels": tokens.flatten()[slots],
        "nsp_labels": torch.zeros(rows, dtype=torch.long),
    }
    return {"tokens": tokens, "mlm_slots": slots, **labels}, {
        name: torch.tensor(1.0) for name in labels
    }


@pytest.mark.parametrize("rematerialise", ["", "inputs", "products"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lm", {}),
        ("lm", dict(activation="swiglu", kv_heads=1, tied=False)),
        ("lm", dict(groups=1, embed_width=16)),
        ("mlm+nsp", {}),
    ],
)
def test_the_exact_flops_are_those_that_torch_counts(
    name: str, changes: dict[str, Any], rematerialise: str
) -> None:
    recipe = tiny(name, **changes)
    recipe = recipe.override(
        {"train.gradient_checkpointing": bool(rematerialise), "data.mask_rate": 0.25}
        | ({"train.checkpointing_keeps": rematerialise} if rematerialise else {})
    )
    network = initialise(Network(recipe.model, dict.fromkeys(objective(name).heads, 0)), 0)
    network.trunk.gradient_checkpointing = bool(rematerialise)
    network.trunk.checkpointing_keeps = rematerialise
    batch, counts = batch_of(recipe, rows=4)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        LossModule(network, objective(name))(batch, counts)[0].backward()
    assert flops(network, recipe).done * 4 * 24 == pytest.approx(
        counter.get_total_flops(), rel=1e-9
    )


@given(
    st.sampled_from(
        [
            "full",
            "causal",
            "causal & local:5",
            "causal & local:4 ; causal & column:3",
            "causal & document",
        ]
    ),
    st.integers(1, 40),
)
def test_the_keys_seen_are_counted(text: str, length: int) -> None:
    document = torch.zeros(1, length, dtype=torch.long)
    mask = parse_pattern(text, 4).mask(
        Layout(1, length, length, query_documents=document, key_documents=document)
    )
    pairs = mask.expand(1, 4, length, length).float().mean(1).sum().item()
    assert keys_seen(text, 4, length) == pytest.approx(pairs / length)


def test_a_long_context_is_sampled() -> None:
    assert keys_seen("causal", 1, 12_000) == pytest.approx(6_000.5, rel=1e-3)


def test_the_utilisation_is_what_was_measured() -> None:
    """docs/performance.md: gpt2-small without dropout, tokens a second on one H200."""
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    rate = 1000 * int(re.findall(r"gpt2-small, 128 × 1024, no dropout \| (\d+)k tokens/s", page)[0])
    share = planned("gpt2-small").flops.exact * rate / (GPUS["h200"].bf16 * 1e12)
    assert pytest.approx(share, abs=0.005) == PlanSettings().utilisation


# ---- memory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    train("gpt", write_corpus(folder / "text.txt"), folder / "run", steps=2)
    return folder / "run"


def test_weights_and_optimizer_are_those_of_a_run(finished: Path) -> None:
    made = planned(
        str(finished),
        **{"tokenizer.vocab": json.loads((finished / "config.json").read_text())["vocab_size"]},
    )
    (file,) = (finished / "train_state" / "step-2").glob("*.safetensors")
    state = load_file(file)
    held = {
        part: sum(t.nbytes for n, t in state.items() if n.startswith(part) and t.dim())
        for part in ("w", "o")
    }
    assert (made.memory.weights, made.memory.optimizer) == (held["w"], held["o"])
    assert made.state == held["w"] + held["o"]
    assert made.memory.gradients == held["w"]
    model = load_file(finished / "model.safetensors")
    assert sum(t.nbytes for t in model.values()) == held["w"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_holds_what_was_planned(optimizer: str) -> None:
    from malmoi.training.optim import make_optimizers

    recipe = tiny("lm").override({"train.optimizer": optimizer})
    network = initialise(Network(recipe.model, {"lm": 0}), 0)
    made = make_optimizers(network, recipe.train)
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    for one in made:
        one.step()
    held = sum(
        t.nbytes for one in made for slots in one.state.values() for t in slots.values() if t.dim()
    )
    assert device_layout(network, recipe, "one", 1, half=False).fixed.optimizer == held


@pytest.mark.parametrize("rematerialise", [False, True])
def test_the_activations_are_what_autograd_keeps(rematerialise: bool) -> None:
    """At least what is saved for the backward pass in bf16, and not far more; then a block lives
    while it is redone.
    """
    recipe = tiny("lm", width=32, depth=4, context=64).override(
        {"train.gradient_checkpointing": rematerialise, "data.lengths": "64"}
    )
    network = initialise(Network(recipe.model, {"lm": 0}), 0)
    network.trunk.gradient_checkpointing = rematerialise
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 96, (2, 64))
    attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    half = torch.autocast("cpu", torch.bfloat16)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        attention,
        half,
        native_bf16(),
    ):
        LossModule(network, objective("lm"))(
            {"tokens": tokens, "lm_labels": tokens}, {"lm_labels": torch.tensor(1.0)}
        )
    laid = device_layout(network, recipe, "one", 1, half=True)
    planned = laid.fixed.copies + activation_bytes(recipe, 2, half=True, device="cpu")
    assert sum(kept.values()) <= planned
    assert rematerialise or planned <= 2 * sum(kept.values())


LAYOUTS = st.fixed_dictionaries(
    {
        "model.depth": st.integers(1, 4),
        "model.heads": st.just(2),
        "model.width": st.sampled_from([32, 96]),
        "tokenizer.vocab": st.integers(300, 3000),
        "train.batch": st.integers(64, 200),
        "train.gradient_checkpointing": st.booleans(),
        "train.optimizer": st.sampled_from(["adamw", "muon"]),
    }
)


@given(LAYOUTS, st.integers(1, 9), st.integers(2, 63))
def test_more_gpus_never_take_more_memory_of_each(
    changes: dict[str, Any], micro: int, gpus: int
) -> None:
    recipe = resolve_recipe("gpt2-small", {**changes, "train.micro": micro})
    network = meta_network(recipe)
    few, more = (
        device_layout(network, recipe, "fsdp", n, half=True).best(0) for n in (gpus, gpus + 1)
    )
    assert more.total <= few.total


def test_fsdp_holds_the_rows_that_torch_gives_the_first_process() -> None:
    recipe = resolve_recipe("bert-tiny", {})
    network = meta_network(recipe)
    rows = sum(p.chunk(3)[0].numel() for p in network.parameters())
    assert device_layout(network, recipe, "fsdp", 3, half=True).memory(86).weights == 4 * rows


@settings(max_examples=30)
@given(st.integers(1, 200))
def test_the_micro_batch_is_the_largest_that_fits(gigabytes: int) -> None:
    laid = gpt2_large_on_four()
    best = laid.best(gigabytes * 1e9)
    fitting = [n for n in range(1, laid.share + 1) if laid.memory(n).total <= gigabytes * 1e9]
    assert best.micro == max(fitting) if fitting else best.total > gigabytes * 1e9


@cache
def gpt2_large_on_four() -> DeviceLayout:
    recipe = resolve_recipe("gpt2-large", {})
    return device_layout(meta_network(recipe), recipe, "fsdp", 4, half=True)


# ---- time, energy, cost, laws


@settings(max_examples=15)
@given(st.integers(1, 512), st.floats(0.05, 1), st.sampled_from(sorted(GPUS)))
def test_time_is_inversely_proportional_to_the_gpus(
    gpus: int, utilisation: float, name: str
) -> None:
    one, many = (
        planned("gpt2-small", Fleet(find_gpu(name), n, utilisation, price=2.0)) for n in (1, gpus)
    )
    assert many.seconds * gpus == pytest.approx(one.seconds)
    assert many.gpu_hours == pytest.approx(one.gpu_hours)
    assert many.cost == pytest.approx(2 * one.gpu_hours)
    assert many.kwh == pytest.approx(one.gpu_hours * GPUS[name].watts / 1000 * 1.2)


def test_minutes_are_the_time_and_tokens_what_fits_in_them() -> None:
    one, two = (planned("gpt-char", replace(H200, gpus=n)) for n in (1, 2))
    assert (one.steps, one.seconds) == (0, 180)
    assert two.tokens == pytest.approx(2 * one.tokens)


def test_rematerialisation_takes_time_and_gives_memory() -> None:
    kept, again = (
        planned("gpt2-small", **{"train.gradient_checkpointing": r}) for r in (False, True)
    )
    assert 1.2 < again.seconds / kept.seconds < 4 / 3
    assert all(after < before for before, after in kept.activations.values())


def test_a_gpu_without_bf16_computes_in_fp32() -> None:
    made = planned("gpt2-small", Fleet(find_gpu("v100")))
    assert made.fleet.peak(made.recipe) == 15.7e12
    assert made.memory.copies == 0
    assert "fp32" in made.notes[0]
    assert planned("gpt2-small", **{"train.precision": "fp32"}).fleet.half(made.recipe)


def test_the_scaling_laws_match_their_papers() -> None:
    assert kaplan_tokens(1.3e9) == pytest.approx(2e10)  # table 6 at one PF-day
    # Hoffmann et al. 2022: 70B and 1.4T tokens for 5.76e23 FLOPs
    chinchilla = optimal(0, 70_000_000_000, 5.76e23)
    assert chinchilla.hoffmann == 1.4e12
    assert chinchilla.same_parameters == pytest.approx(70e9, rel=0.03)
    assert planned("bert-tiny").optimal is None


# ---- what a user may get wrong, and the command


def test_an_unknown_gpu_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'h100'"):
        find_gpu("h10")
    assert find_gpu("mi300x", memory=192, tflops=1307).memory == 192
    assert find_gpu("h200", memory=100).bf16 == 989


@pytest.mark.parametrize(
    ("fleet", "sentence"),
    [
        (dict(gpus=0), "at least one GPU"),
        (dict(utilisation=1.5), "utilisation"),
        (dict(pue=0.5), "pue"),
        (dict(price=-1), "price"),
        (dict(price=float("nan")), "price"),
        (dict(gpus=513), "cannot share a step of 512 sequences"),
    ],
)
def test_impossible_plans_are_refused(fleet: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        planned("gpt2-small", Fleet(find_gpu("h200"), **fleet))


def test_a_plan_that_does_not_fit_suggests_a_remedy() -> None:
    made = planned("gpt3-13b", replace(H200, gpus=64))
    assert not made.fits
    words = re.findall(r"It fits with (.*)\.", made.help)[0].split()
    assert words == ["--set", "train.parallel=fsdp"]
    assert planned("gpt3-13b", replace(H200, gpus=64), **{"train.parallel": "fsdp"}).fits


def test_more_gpus_may_help() -> None:
    made = planned("gpt3-175b", replace(H200, gpus=8))
    wanted = int(re.findall(r"--gpus (\d+)", made.help)[0])
    changes: dict[str, Any] = {"train.parallel": "fsdp", "train.gradient_checkpointing": True}
    assert planned("gpt3-175b", replace(H200, gpus=wanted), **changes).fits
    assert not planned("gpt3-175b", replace(H200, gpus=wanted // 2), **changes).fits


def test_a_model_too_large_for_any_number_of_gpus_is_reported() -> None:
    assert "No number of these GPUs" in planned("gpt3-175b", Fleet(find_gpu("rtx4090"))).help


def test_a_batch_that_the_gpus_do_not_divide_is_noted() -> None:
    made = planned("gpt2-small", replace(H200, gpus=5))
    assert "set train.batch=510" in made.notes[0]
    assert not planned("gpt2-small").notes
    assert "sized for its text" in planned("gpt").notes[0]


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "gpt2-small", "--gpus", "8", "--gpu", "h100", "--set", "train.tokens=20e9"]
    assert run_command([*arguments, "--json", "--price", "2.5", "--gradient-checkpointing"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"]["all"] == 124_439_808
    assert said["tokens"] == pytest.approx(20e9, rel=1e-3)
    assert said["fits"] is True
    assert said["memory"]["gradient_checkpointing"] is True
    assert said["cost"] == pytest.approx(2.5 * said["gpu_hours"])
    assert set(MemoryUse.__annotations__) < set(said["ways"][0])
    assert run_command(arguments) == 0
    told = capsys.readouterr().out
    assert "124,439,808" in told
    assert "cost" not in told


def test_plan_without_arguments_lists_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in GPUS)
    assert "Example: malmoi plan" in said
    assert run_command(["plan", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(GPUS)
    assert run_command(["plan", "gpt2-small", "--gpu", "h20"]) == 2
    assert "Did you mean 'h200'" in capsys.readouterr().err
