"""Models elsewhere: ONNX Runtime gives our scores, transformers and our own reader open our GGUF
files.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from test_gguf import TEMPLATE, TEXT, byte_vocabulary

import malmoi
from conftest import typed, without_package
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.export_gguf import export_gguf
from malmoi.checkpoint.export_onnx import OnnxModel, example_inputs, expected_scores, export_onnx
from malmoi.cli.app import run_command
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, UsageError
from malmoi.model import FeatureConfig, Network, initialise
from malmoi.model.families import albert, bert, electra, gpt2, gpt3, llama, modernbert, roberta
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.gguf import gguf_vocabulary, read_vocabulary

SIZES: dict[str, Any] = dict(vocab=352, context=40, width=32, depth=1, heads=4)
Case = tuple[ModelConfig, dict[str, int], FeatureConfig | None]


def network(
    config: ModelConfig, heads: dict[str, int], features: FeatureConfig | None = None
) -> Network:
    torch.manual_seed(0)
    found = initialise(Network(config, heads, features=features), seed=0).eval()
    with torch.no_grad():
        for weight in found.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return found


def words() -> Tokenizer:
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    return Tokenizer(byte_vocabulary(), settings)


# ------------------------------------------------------------------ ONNX

GPT: Case = (gpt2(**SIZES), {"lm": 0}, None)
MODERN = modernbert(**SIZES | dict(depth=2), hidden=48, attention=("full", "local:3"))
SLOW: dict[str, Case] = {
    "banded": (
        gpt3(**SIZES | dict(depth=2), attention=("causal", "causal & local:3")),
        {"lm": 0},
        None,
    ),
    "llama": (llama(**SIZES, kv_heads=2), {"lm": 0}, None),
    "a fast recipe": (
        gpt2(
            **SIZES,
            qk_norm=True,
            positions="rotary",
            activation="relu2",
            softcap=9.0,
            embedding_residual=True,
            skip_connections=True,
        ),
        {"lm": 0},
        None,
    ),
    "gpt classifier": (gpt2(**SIZES), {"classify": 3}, None),
    "choice by gpt": (gpt2(**SIZES), {"lm": 0, "choice": 0}, None),
    "bert": (bert(**SIZES), {"mlm": 0, "nsp": 0}, None),
    "bert classifier": (bert(**SIZES), {"classify": 3}, None),
    "bare": (bert(**SIZES), {}, None),
    "answers": (bert(**SIZES), {"span": 0}, None),
    "choice by bert": (bert(**SIZES), {"choice": 0}, None),
    "tags": (albert(**SIZES | dict(depth=2), embed_width=16), {"tag": 5}, None),
    "replaced": (electra(**SIZES, embed_width=16), {"detect": 0}, None),
    "roberta": (roberta(**SIZES), {"classify": 3}, None),
    "modernbert": (MODERN, {"mlm": 0}, None),
    "modernbert pools the mean": (replace(MODERN, pool="mean"), {"classify": 3}, None),
    "linear on frozen layers": (
        bert(**SIZES),
        {"tag": 3},
        FeatureConfig(layers=(0, 1), weighted=True),
    ),
    "BiLSTM on frozen layers": (
        bert(**SIZES),
        {"classify": 3},
        FeatureConfig(layers=(0, 1), recurrent=16),
    ),
}


def check(case: Case, path: Path, **options: int) -> None:
    """The same scores at every shape, with padding at the end and, where the model knows it, at
    the front.
    """
    graph = OnnxModel(network(*case))
    assert export_onnx(Checkpoint(graph.network), path, **options) < 1e-4
    session = onnxruntime.InferenceSession(path)
    assert [given.name for given in session.get_inputs()] == list(graph.inputs)
    assert all(given.shape == list(graph.shape) for given in session.get_inputs())
    assert [given.name for given in session.get_outputs()] == list(graph.outputs)
    for rows, length, left in [(1, 1, False), (1, 40, False), (4, 17, False), (5, 9, True)]:
        if left and graph.recurrent is not None:
            continue
        given = example_inputs(graph, rows, length)
        given = (given[0], given[1].flip(-1) if left else given[1], *given[2:])
        theirs = session.run(
            None, {name: part.numpy() for name, part in zip(graph.inputs, given, strict=True)}
        )
        mask = given[1].bool().numpy()
        with torch.inference_mode():
            ours = expected_scores(graph, given)
        for one, other in zip(ours, theirs, strict=True):
            places = mask if one.shape[: mask.ndim] == mask.shape else ...
            assert one.shape == other.shape
            np.testing.assert_allclose(other[places], one[places], rtol=0, atol=1e-4)


def test_onnx_runtime_gives_our_scores_at_any_shape_and_large_weights_lie_beside_the_file(
    tmp_path: Path,
) -> None:
    check(GPT, tmp_path / "model.onnx", inline_bytes=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


@pytest.mark.heavy
@pytest.mark.parametrize("name", SLOW)
def test_onnx_runtime_gives_the_scores_of_every_kind_of_model(name: str, tmp_path: Path) -> None:
    check(SLOW[name], tmp_path / "model.onnx")


def test_a_classifier_goes_to_onnx_with_its_labels_and_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = network(bert(**SIZES), {"classify": 3})
    write_checkpoint(
        Checkpoint(given, words(), ("나쁨", "so so", "good"), extra={"length": 30}),
        tmp_path / "model",
    )
    asked = typed(
        "export onnx --model", tmp_path / "model", "--out", tmp_path / "new" / "model.onnx"
    )
    assert run_command([*asked, "--dtype", "int8"]) == 0, capsys.readouterr().err
    assert " MB, scores within 0.0" in capsys.readouterr().out
    assert Tokenizer.load(tmp_path / "new").encode(TEXT) == words().encode(TEXT)
    file = onnx.load(tmp_path / "new" / "model.onnx")
    about = {entry.key: entry.value for entry in file.metadata_props}
    assert json.loads(about["labels"]) == ["나쁨", "so so", "good"]
    names = {"0": "나쁨", "1": "so so", "2": "good"}
    assert json.loads(about["id2label"]) == names
    assert json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))["id2label"] == names
    assert (about["head"], about["context"], json.loads(about["malmoi"])) == (
        "classify",
        "40",
        {"length": 30},
    )
    assert str(Path(malmoi.__file__).parent).encode() not in file.SerializeToString()
    weights = {tensor.data_type for tensor in file.graph.initializer if len(tensor.dims) == 2}
    assert onnx.TensorProto.INT8 in weights
    tokens = np.array([words().encode("the King").tokens])
    inputs = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "token_type_ids": np.zeros_like(tokens),
    }
    theirs = onnxruntime.InferenceSession(tmp_path / "new" / "model.onnx").run(None, inputs)[0]
    with torch.inference_mode():
        ours = given(torch.from_numpy(tokens))["classify"].numpy()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=0.05)
    before = (tmp_path / "new" / "model.onnx").read_bytes()
    assert run_command(asked) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "new" / "model.onnx").read_bytes() == before
    assert run_command([*asked[:-1], str(tmp_path / "new" / "other.onnx")]) == 2
    assert "tokenizer.json already exists" in capsys.readouterr().err


# ------------------------------------------------------------------ GGUF

WIDE = SIZES | dict(width=64, depth=2)
LLAMAS = {
    "tied": llama(**WIDE, kv_heads=2, hidden=96, tied=True),
    "biased": llama(**WIDE, hidden=96, bias=True),
    "llama3": llama(**WIDE, rotary_base=500_000.0, rotary_scaling="llama3:8,1,4,8192"),
    "linear": llama(**WIDE, head_width=32, rotary_scaling="linear:4"),
    "yarn": llama(**WIDE, rotary_scaling="yarn:4,16,32,1"),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_our_reader_finds_a_llama_bit_for_bit(name: str, tmp_path: Path) -> None:
    given = network(LLAMAS[name], {"lm": 0})
    export_gguf(Checkpoint(given, words()), tmp_path / "model.gguf")
    back = malmoi.load(tmp_path / "model.gguf", device="cpu")
    weights = back.network.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in given.state_dict().items())
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(back.network(tokens)["lm"], given(tokens)["lm"], rtol=0, atol=1e-5)
    assert back.config.rotary_scaling == LLAMAS[name].rotary_scaling
    assert back.tokenizer.encode(TEXT) == words().encode(TEXT)
    assert back.tokenizer.specials == words().specials


@pytest.mark.parametrize(
    "config", [gpt2(**WIDE), gpt2(**WIDE, tied=False), LLAMAS["tied"], llama(**WIDE)]
)
@torch.no_grad()
def test_transformers_opens_the_file(config: ModelConfig, tmp_path: Path) -> None:
    given = network(config, {"lm": 0})
    export_gguf(Checkpoint(given, words()), tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    tokens = torch.randint(0, 320, (2, 40))
    torch.testing.assert_close(theirs(tokens).logits, given(tokens)["lm"], rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer(TEXT).input_ids == words().encode(TEXT).tokens
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("dtype", "bits", "size"), [("f16", 11, 2), ("bf16", 8, 2), ("q8_0", 8, 1.0625)]
)
def test_weights_are_packed(dtype: str, bits: int, size: float, tmp_path: Path) -> None:
    given = network(LLAMAS["tied"], {"lm": 0})
    for name in ("f32", dtype):
        export_gguf(Checkpoint(given, words()), tmp_path / f"{name}.gguf", name)
    weights = {
        name: weight
        for name, weight in given.state_dict().items()
        if weight.dim() > 1 and "heads" not in name
    }
    saved = (tmp_path / "f32.gguf").stat().st_size - (tmp_path / f"{dtype}.gguf").stat().st_size
    assert saved == pytest.approx(
        sum(weight.numel() for weight in weights.values()) * (4 - size), rel=1e-2
    )
    back = malmoi.load(tmp_path / f"{dtype}.gguf", device="cpu").network.state_dict()
    for name, weight in weights.items():
        assert (back[name] - weight).abs().max() <= weight.abs().max() / (2**bits - 2), name


def test_a_row_that_fits_no_block_is_kept_as_f16(tmp_path: Path) -> None:
    given = network(llama(**SIZES | dict(width=40), hidden=64), {"lm": 0})
    write_checkpoint(Checkpoint(given, words()), tmp_path / "model")
    out = tmp_path / "new" / "model.gguf"
    assert (
        run_command(typed("export gguf --model", tmp_path / "model", "--out", out, "--dtype q8_0"))
        == 0
    )
    back = malmoi.load(out, device="cpu").network.state_dict()
    up, down = (f"trunk.blocks.0.mlp.{part}.weight" for part in ("up", "down"))
    assert torch.equal(back[up], given.state_dict()[up].half().float())
    assert not torch.equal(back[down], given.state_dict()[down].half().float())


def test_a_sentencepiece_vocabulary_comes_back() -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcd",
        "ab",
        "▁ab",
        "cd",
        "abcd",
    ]
    given = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 264 + [-1.0, -2.0, -0.5, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 9],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = read_vocabulary(given, "here")
    described = gguf_vocabulary(tokenizer, len(tokens))
    assert described["tokenizer.ggml.token_type"] == given["tokenizer.ggml.token_type"]
    assert described["tokenizer.ggml.add_bos_token"]
    again = read_vocabulary(described, "here")
    for text in ("abcd", "ab cd", "dabc  b", "abz 한"):
        assert again.encode(text).tokens == tokenizer.encode(text).tokens


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("config", "heads", "sentence"),
    [
        (
            gpt2(**SIZES, activation="relu2", qk_norm=True),
            {"lm": 0},
            "from gpt2: qk_norm = True, activation = 'relu2'",
        ),
        (gpt2(**SIZES, activation="relu"), {"lm": 0}, "activation = 'relu'"),
        (gpt3(**SIZES, attention=("causal & local:3",)), {"lm": 0}, "attention = "),
        (llama(**SIZES, softcap=30.0), {"lm": 0}, "from llama: softcap = 30.0"),
        (
            llama(**SIZES, rotary_scaling="yarn:4,16,16,1"),
            {"lm": 0},
            "rotary_scaling = 'yarn:4,16,16,1'",
        ),
        (gpt2(**SIZES), {"classify": 2}, "this one has the heads classify"),
        (bert(**SIZES), {"mlm": 0}, "this one has the heads mlm"),
    ],
)
def test_models_that_llama_cpp_does_not_support_are_refused(
    config: ModelConfig, heads: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        export_gguf(Checkpoint(network(config, heads), words()), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_llama_cpp_does_not_support_is_refused(tmp_path: Path) -> None:
    lower = malmoi.tokenizer.train_tokenizer(
        ["a b c"] * 9, kind="byte-bpe", vocab=300, lowercase=True
    )
    for tokenizer in (
        lower,
        malmoi.tokenizer.train_tokenizer(["a b c"] * 9, kind="char", vocab=300),
    ):
        with pytest.raises(UsageError, match="does not split text as this tokenizer"):
            export_gguf(
                Checkpoint(network(gpt2(**SIZES), {"lm": 0}), tokenizer), tmp_path / "model.gguf"
            )
    with pytest.raises(UsageError, match="has no tokenizer"):
        export_gguf(Checkpoint(network(gpt2(**SIZES), {"lm": 0})), tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("words_", "sentence"),
    [
        (
            ["onx", "--model", "m", "--out", "a.onnx"],
            "There is no command 'onx'. Did you mean 'onnx'?",
        ),
        (["onnx", "--model", "m", "--out", "a.bin"], "should be a file whose name ends in .onnx"),
        (
            ["onnx", "--model", "m", "--out", "a.onnx", "--dtype", "int4"],
            "cannot be written as 'int4'. Did you mean 'int8'?",
        ),
        (
            ["gguf", "--model", "m", "--out", "a.gguf", "--dtype", "q4_0"],
            "cannot be written as 'q4_0'. Did you mean 'q8_0'?",
        ),
        (
            ["gguf", "--model", "adapter", "--out", "a.gguf"],
            "malmoi merge --model adapter --out DIR",
        ),
        (["gguf", "--model", "m", "--out", "there.gguf"], "there.gguf already exists"),
    ],
)
def test_invalid_requests_give_a_clear_error(
    words_: list[str],
    sentence: str,
    tmp_path: Path,
    workdir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_checkpoint(Checkpoint(network(gpt2(**SIZES), {"lm": 0})), tmp_path / "m")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "there.gguf").touch()
    assert run_command(["export", *words_]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "export"), [("onnxscript", export_onnx), ("gguf", export_gguf)]
)
def test_a_missing_package_names_the_extra(package: str, export: Any, tmp_path: Path) -> None:
    with (
        without_package(package),
        pytest.raises(
            MalmoiError,
            match=r"needs the package (gguf: pip install gguf|onnxscript: pip install onnx)",
        ),
    ):
        export(Checkpoint(network(gpt2(**SIZES), {"lm": 0}), words()), tmp_path / "model.onnx")
