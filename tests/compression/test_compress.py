"""Smaller models: packed weights are those of compressed-tensors, a pruned network is the whole
one less its parts.
"""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import malmoi
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.quantized import from_words, rounded, to_words
from malmoi.cli.app import run_command
from malmoi.compression.prune import gradients, prune_model, with_heads, with_layers, with_neurons
from malmoi.compression.quantize import quantize_model
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, UsageError
from malmoi.kernels.int8 import QuantizedLinear, memory_of, pack_int8, why_not
from malmoi.model import Network, initialise
from malmoi.model.families import albert, bert, gpt1, gpt2, gpt3, llama
from malmoi.tokenizer import train_tokenizer
from malmoi.training.losses import ForwardPass, lm
from malmoi.training.losses.task import classification_loss

SIZES: dict[str, Any] = dict(vocab=300, context=40, width=64, depth=3, heads=4)
LLAMA = llama(**SIZES, kv_heads=2, hidden=96)
TEXT = "the state of the union is strong"
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def network(config: ModelConfig, heads: dict[str, int]) -> Network:
    torch.manual_seed(0)
    found = initialise(Network(config, heads), seed=0).eval()
    with torch.no_grad():
        for weight in found.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return found


def saved(folder: Path, config: ModelConfig, heads: dict[str, int], **more: Any) -> Path:
    words = train_tokenizer([TEXT] * 20, kind="byte-bpe", vocab=290)
    write_checkpoint(Checkpoint(network(config, heads), words, **more), folder)
    return folder


# ------------------------------------------------------------------ fewer bits


@given(st.sampled_from((4, 8)), st.integers(1, 9), st.integers(1, 70), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_packing_is_reversible_and_equals_compressed_tensors(
    bits: int, rows: int, columns: int, seed: int
) -> None:
    half = 1 << bits - 1
    drawn = torch.randint(
        -half, half, (rows, columns), generator=torch.Generator().manual_seed(seed)
    )
    numbers = drawn.to(torch.int8)
    words = to_words(numbers, bits)
    assert torch.equal(from_words(words, bits, columns), numbers)
    inside = columns * bits // 32  # what fills up the last word is of no meaning
    assert torch.equal(words[:, :inside], pack_to_int32(numbers, bits)[:, :inside])


@given(st.integers(1, 9), st.integers(1, 70), st.floats(1e-6, 1e6), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_eight_bits_are_off_by_half_a_step_and_are_rounded_once(
    rows: int, columns: int, size: float, seed: int
) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    numbers, scale = rounded(weight, 8)
    step = scale.float()[:, None]
    assert ((numbers * step - weight).abs() <= 0.5001 * step).all()
    again, same = pack_int8(numbers * step)
    assert torch.equal(again, numbers)
    assert torch.equal(same, scale)


def test_four_bits_are_at_least_as_near_as_without_cutting_off() -> None:
    weight = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))
    numbers, scale = rounded(weight, 4)
    step = (weight.abs().amax(1) / 7).bfloat16().float()[:, None]
    plain = ((weight / step).round().clamp(-8, 7) * step - weight).square().sum(1)
    found = (numbers * scale.float()[:, None] - weight).square().sum(1)
    assert (found <= plain).all()
    assert found.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("config", "heads", "opens"),
    [
        (LLAMA, {"lm": 0}, "AutoModelForCausalLM"),
        (bert(**SIZES), {"classify": 3}, "AutoModelForSequenceClassification"),
        (bert(**SIZES), {"mlm": 0}, "AutoModelForMaskedLM"),
        (albert(**SIZES, embed_width=32), {"tag": 3}, "AutoModelForTokenClassification"),
    ],
)
@torch.no_grad()
def test_transformers_finds_the_same_numbers(
    config: ModelConfig, heads: dict[str, int], opens: str, bits: int, tmp_path: Path
) -> None:
    done = quantize_model(saved(tmp_path / "whole", config, heads), tmp_path / "small", bits=bits)
    ours = read_checkpoint(tmp_path / "small")
    theirs = (
        getattr(transformers, opens).from_pretrained(tmp_path / "small", dtype=torch.float32).eval()
    )
    (scores,) = ours.network(TOKENS).values()
    torch.testing.assert_close(theirs(TOKENS).logits, scores, rtol=0, atol=1e-6)
    assert ours.notes == ()
    assert done.size[1] < done.size[0] * (0.42 if bits == 8 else 0.36)


@pytest.mark.parametrize("config", [gpt2(**SIZES), gpt3(**SIZES), gpt1(**SIZES)])
@torch.no_grad()
def test_transformers_opens_other_quantized_folders_after_import_malmoi(
    config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, small = saved(tmp_path / "whole", config, {"lm": 0}), tmp_path / "small"
    (tmp_path / "text.txt").write_text(TEXT * 3)
    asked = [
        "--model",
        str(whole),
        "--out",
        str(small),
        "--data",
        str(tmp_path / "text.txt"),
        "--json",
    ]
    assert run_command(["compress", "quantize", *asked]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    assert "opens the folder after `import malmoi`" in told.err
    assert ("malmoi export gguf" in told.err) == (config == gpt2(**SIZES))
    found = json.loads(told.out)
    lm = malmoi.load(small, device="cpu")
    assert found["perplexity"][1] == pytest.approx(lm.perplexity(TEXT * 3))
    assert found["perplexity"][1] == pytest.approx(found["perplexity"][0], rel=0.01)
    assert found["bytes"][1] < 0.45 * found["bytes"][0]
    assert (found["memory"][1] < found["memory"][0]) == (why_not() is None)
    assert min(found["tokens_per_second"]) > 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(small)
    tokens = torch.arange(12)[None]
    ours = malmoi.load(small, device="cpu", dtype="fp32").network(tokens)["lm"]
    assert torch.allclose(theirs(tokens).logits, ours, atol=1e-4)


@pytest.mark.skipif(why_not() is not None, reason="there is no int8 kernel for this machine")
def test_stored_rows_are_the_rows_of_int8(tmp_path: Path) -> None:
    quantize_model(saved(tmp_path / "whole", LLAMA, {"lm": 0}), tmp_path / "small")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    down = (
        malmoi.load(tmp_path / "small", device="cpu", dtype="int8").network.trunk.blocks[1].mlp.down
    )
    assert isinstance(down, QuantizedLinear)
    numbers, scale = down.weight.signed()
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(numbers, from_words(stored[f"{name}.weight_packed"], 8, 96))
    assert torch.equal(scale, stored[f"{name}.weight_scale"])


@pytest.mark.skipif(why_not() is not None, reason="there is no int8 kernel for this machine")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (LLAMA, {"lm": 0}),
        (gpt2(**SIZES), {"lm": 0}),
        (bert(**SIZES), {"classify": 3}),
        (albert(**SIZES, embed_width=32), {"mlm": 0}),
    ],
)
@torch.no_grad()
def test_a_quantised_folder_runs_in_its_bits(
    config: ModelConfig, heads: dict[str, int], bits: int, tmp_path: Path
) -> None:
    quantize_model(saved(tmp_path / "whole", config, heads), tmp_path / "small", bits=bits)
    opened = malmoi.load(tmp_path / "small", device="cpu")
    maps = [
        part for part in opened.network.trunk.blocks.modules() if isinstance(part, QuantizedLinear)
    ]
    assert {part.weight.bits for part in maps} == {bits}
    assert memory_of(opened.network) < memory_of(read_checkpoint(tmp_path / "whole").network) / (
        2.5 if bits == 8 else 3
    )
    (found,), (want,) = (
        opened.network(TOKENS).values(),
        read_checkpoint(tmp_path / "small").network(TOKENS).values(),
    )
    assert (found - want).norm() < 0.02 * want.norm()  # embedding and head have 8 bits too
    opened.save(tmp_path / "again")
    (again,) = malmoi.load(tmp_path / "again", device="cpu").network(TOKENS).values()
    torch.testing.assert_close(again, found, rtol=0, atol=1e-5)


def test_a_quantised_folder_is_computed_in_the_type_that_is_named(tmp_path: Path) -> None:
    quantize_model(saved(tmp_path / "whole", LLAMA, {"lm": 0}), tmp_path / "small")
    again = malmoi.load(tmp_path / "small", device="cpu", dtype="bf16")
    assert {weight.dtype for weight in again.network.parameters()} == {torch.bfloat16}


def lost(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name + ".weight_scale"]


def cut(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name + ".weight_packed"] = tensors[name + ".weight_packed"][:, :-1].contiguous()


def huge(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name + ".weight_shape"] = torch.tensor([64, 1 << 50])


def shifted(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name + ".weight_zero_point"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lost, "layers.0.mlp.down_proj.weight_scale is missing"),
        (cut, "do not fit together; the folder is damaged"),
        (huge, "do not fit together; the folder is damaged"),
        (shifted, "without zero points"),
    ],
)
def test_damaged_folders_are_refused(
    harm: Callable[[dict[str, Tensor], str], None], sentence: str, tmp_path: Path
) -> None:
    quantize_model(saved(tmp_path / "whole", LLAMA, {"lm": 0}), tmp_path / "small")
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    harm(tensors, "model.layers.0.mlp.down_proj")
    save_file(tensors, file)
    with pytest.raises(MalmoiError, match=sentence):
        read_checkpoint(tmp_path / "small")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quant_method": "gptq"}, "by 'gptq'"),
        ({"config_groups": {"a": {"weights": {"num_bits": 3}}}}, r"to \[3\] bits"),
        ({"config_groups": {"a": {}}}, "is not understood"),
    ],
)
def test_unsupported_quantisation_is_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    quantize_model(saved(tmp_path / "whole", LLAMA, {"lm": 0}), tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalmoiError, match=sentence):
        read_checkpoint(tmp_path / "small")


# ------------------------------------------------------------------ fewer parts


def scores(one: Network) -> Tensor:
    (found,) = one(TOKENS).values()
    return found


FAMILIES = {
    "llama": (LLAMA, {"lm": 0}),
    "bert": (bert(**SIZES), {"classify": 3}),
    "gpt2": (gpt2(**SIZES), {"lm": 0}),
    "embedding residuals": (gpt2(**SIZES, embedding_residual=True), {"lm": 0}),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_neurons_that_contribute_nothing_are_pruned_first(name: str) -> None:
    whole = network(*FAMILIES[name])
    hidden = whole.config.mlp_width
    for block in whole.trunk.blocks:
        gone = torch.randperm(hidden)[: hidden // 2]
        block.mlp.down.weight[:, gone] = 0
    small = with_neurons(whole, 0.5)
    assert small.config.hidden == hidden // 2
    torch.testing.assert_close(scores(small), scores(whole), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_heads_that_contribute_nothing_are_pruned_first(name: str) -> None:
    whole = network(*FAMILIES[name])
    c = whole.config
    for block in whole.trunk.blocks:
        gone = torch.randperm(c.key_heads)[: c.key_heads // 2]
        block.attend.out.weight.view(c.width, c.key_heads, -1)[:, gone] = 0
    small = with_heads(whole, 0.5)
    assert (small.config.heads, small.config.key_heads) == (c.heads // 2, c.key_heads // 2)
    torch.testing.assert_close(scores(small), scores(whole), rtol=0, atol=1e-5)


def test_layers_paired_by_skip_connections_cannot_be_pruned() -> None:
    whole = network(gpt2(**SIZES, skip_connections=True), {"lm": 0})
    with pytest.raises(UsageError, match="Skip connections pair the layers"):
        with_layers(whole, "1,2")


@torch.no_grad()
def test_kept_layers_keep_their_weights_and_patterns() -> None:
    whole = network(gpt3(**SIZES, attention=("causal", "causal & local:3")), {"lm": 0})
    small = with_layers(whole, "1,2")
    assert small.config.attention == ("causal & local:3", "causal")
    for part in (whole.trunk.blocks[0].attend.out, whole.trunk.blocks[0].mlp.down):
        part.weight.zero_()
        part.bias.zero_()
    torch.testing.assert_close(scores(small), scores(whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", ["heads", "neurons"])
@pytest.mark.parametrize("name", FAMILIES)
def test_importance_is_the_gradient_of_a_gate(part: str, name: str) -> None:
    whole = network(*FAMILIES[name])
    objective, batch = lm(), {"tokens": TOKENS[:, :-1], "lm_labels": TOKENS[:, 1:]}
    if "classify" in whole.heads:
        objective, batch = classification_loss(), {"tokens": TOKENS, "labels": torch.tensor([0, 2])}
    found = dict(gradients(whole, part, objective, batch))
    count = whole.config.key_heads if part == "heads" else whole.config.mlp_width
    writer = whole.trunk.blocks[1].attend.out if part == "heads" else whole.trunk.blocks[1].mlp.down
    gate = torch.ones(count, requires_grad=True)
    gates = gate.repeat_interleave(writer.in_features // count)
    writer.register_forward_pre_hook(lambda module, given: given[0] * gates)
    (slope,) = torch.autograd.grad(objective.terms[0].total(ForwardPass.of(whole, batch)), gate)
    near = found[1].sum(0).unflatten(0, (count, -1)).sum(-1)
    torch.testing.assert_close(near, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["heads", "neurons"])
@torch.no_grad()
def test_parts_the_loss_does_not_need_are_pruned_first(part: str, tmp_path: Path) -> None:
    whole = network(LLAMA, {"lm": 0})
    # large weights that nothing comes of: their values, or their gates, are zero
    for block in whole.trunk.blocks:
        if part == "heads":
            block.attend.qkv.weight[-16:] = 0
            block.attend.out.weight[:, -32:] *= 100
        else:
            block.mlp.up.weight[:48] = 0
            block.mlp.down.weight[:, :48] *= 100
    write_checkpoint(
        Checkpoint(whole, train_tokenizer([TEXT] * 20, kind="byte-bpe", vocab=290)),
        tmp_path / "whole",
    )
    (tmp_path / "text.txt").write_text(TEXT * 9)
    shares: dict[str, Any] = {part: 0.5}
    prune_model(tmp_path / "whole", tmp_path / "small", **shares, train=tmp_path / "text.txt")
    torch.testing.assert_close(
        scores(read_checkpoint(tmp_path / "small").network), scores(whole), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("way", "family"),
    [
        (["--sparsity", "0.5"], True),
        (["--pattern", "2:4"], True),
        (["--layers", "0,2"], True),
        (["--neurons", "0.25"], True),
        (["--heads", "0.5"], False),
        (["--heads", "0.5", "--train", "rows.tsv"], False),
    ],
)
@torch.no_grad()
def test_a_pruned_classifier_is_judged_and_opened(
    way: list[str], family: bool, tmp_path: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = saved(
        tmp_path / "whole",
        bert(**SIZES),
        {"classify": 2},
        labels=("bad", "good"),
        extra={"length": 30},
    )
    (tmp_path / "rows.tsv").write_text("text\tside\n" + f"{TEXT}\tgood\nthe union\tbad\n" * 3)
    asked = [
        "--model",
        str(whole),
        "--out",
        str(tmp_path / "small"),
        "--data",
        str(tmp_path / "rows.tsv"),
        "--json",
    ]
    columns = ["--task", "classification", "--text", "text", "--label", "side", "--device", "cpu"]
    assert run_command(["compress", "prune", *asked, *columns, *way]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    assert "Train it again" in told.err
    assert ("by their weights alone" in told.err) == (
        way[0] in ("--heads", "--neurons") and "--train" not in way
    )
    assert ("after `import malmoi`" in told.err) != family
    found = json.loads(told.out)
    zeros = 0.5 if way[0] in ("--sparsity", "--pattern") else 0
    assert found["zeros"] == pytest.approx([0, zeros], abs=1e-3)
    assert (found["weights"][1] < found["weights"][0]) == (zeros == 0)
    task = malmoi.custom_task("classification", text="text", label="side")
    assert (
        found["accuracy"][1]
        == malmoi.evaluate(tmp_path / "small", task, tmp_path / "rows.tsv")["accuracy"]
    )
    if family:
        small = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
        torch.testing.assert_close(
            small(TOKENS).logits,
            scores(read_checkpoint(tmp_path / "small").network),
            rtol=0,
            atol=1e-5,
        )


@torch.no_grad()
def test_a_llama_with_pruned_heads_opens_in_transformers(tmp_path: Path) -> None:
    prune_model(saved(tmp_path / "whole", LLAMA, {"lm": 0}), tmp_path / "small", heads=0.5)
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    torch.testing.assert_close(
        small(TOKENS).logits, scores(read_checkpoint(tmp_path / "small").network), rtol=0, atol=1e-5
    )


def test_the_smallest_weights_become_zero_and_two_of_every_four(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", gpt2(**SIZES), {"lm": 0})
    prune_model(whole, tmp_path / "sparse", sparsity=0.3)
    prune_model(whole, tmp_path / "even", pattern="2:4")
    before, sparse, even = (
        read_checkpoint(folder).network
        for folder in (whole, tmp_path / "sparse", tmp_path / "even")
    )
    for name, module in before.trunk.blocks.named_modules():
        if isinstance(module, nn.Linear):
            mine = sparse.trunk.blocks.get_submodule(name).weight
            assert (mine == 0).float().mean() == pytest.approx(0.3, abs=1e-3)
            assert module.weight[mine == 0].abs().max() <= mine[mine != 0].abs().min()
            fours, kept = (
                part.trunk.blocks.get_submodule(name).weight.reshape(-1, 4)
                for part in (before, even)
            )
            assert ((kept == 0).sum(1) == 2).all()
            assert torch.equal(kept.abs().amax(1), fours.abs().amax(1))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["prune", "m"],
            "Choose one of sparsity, pattern, layers, heads and neurons to prune by, not none.",
        ),
        (["prune", "m", "--heads", "0.5", "--neurons", "0.5"], "by, not heads, neurons."),
        (
            ["prune", "m", "--heads", "0"],
            "heads is the share to keep, above 0 and at most 1, not 0",
        ),
        (["prune", "m", "--neurons", "1.5"], "neurons is the share to keep"),
        (["prune", "m", "--sparsity", "1"], "between 0 and 1, not 1"),
        (["prune", "m", "--pattern", "4:2"], "such as 2:4"),
        (["prune", "m", "--pattern", "1:7"], "does not divide 64 inputs"),
        (["prune", "m", "--layers", "0,3"], "from 0 to 2; not 0,3"),
        (["prune", "m", "--layers", "first"], "such as 0,2,4; not first"),
        (["prune", "shared", "--layers", "0"], "share their weights"),
        (["prune", "adapter", "--layers", "0"], "malmoi merge --model adapter --out DIR"),
        (["prune", "small", "--layers", "0"], "small is already quantised"),
        (["prune", "m", "--layers", "0", "--train", "text.txt"], "--train ranks heads and neurons"),
        (
            ["prune", "shared", "--heads", "0.5", "--train", "text.txt"],
            "Ranking by plain text needs a GPT",
        ),
        (
            ["prune", "m", "--heads", "0.5", "--train", "text.txt", "--task", "sst2"],
            "has no classify head",
        ),
        (["quantize", "small"], "small is already quantised"),
        (["quantize", "m", "--bits", "3"], "bits must be 8 or 4, not 3"),
        (["quantize", "m", "--group", "48"], "do not divide the 64 inputs"),
        (["quantize", "m", "--group", "-1"], "it cannot be -1"),
        (["quantize", "shared", "--data", "text.txt"], "give the --task of the rows"),
        (["quantize", "m", "--task", "sst2"], "give --data too"),
        (["quantize", "m", "--text", "a"], "name the --task too"),
    ],
)
def test_invalid_requests_give_a_clear_error(
    words: list[str], sentence: str, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, model, *rest = words
    with chdir(folders):
        assert run_command(["compress", verb, "--model", model, "--out", "out", *rest]) == 2
    assert sentence in capsys.readouterr().err
    assert not (folders / "out").exists()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    saved(folder / "m", gpt2(**SIZES), {"lm": 0})
    saved(folder / "shared", albert(**SIZES), {"mlm": 0})
    quantize_model(folder / "m", folder / "small")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_a_model_is_not_written_over_itself(folders: Path) -> None:
    with pytest.raises(UsageError, match="is the model itself"):
        quantize_model(folders / "m", folders / "m")
