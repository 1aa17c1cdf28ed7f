"""Files of strangers: an error names the file, the key and what it expected, before any harm."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli.app import run_command
from malmoi.errors import MalmoiError
from malmoi.model import Network, initialise, preset
from malmoi.system.machine import pretend, this_machine
from malmoi.system.untrusted import parse, parse_object
from malmoi.tokenizer import Tokenizer, train_tokenizer

TEXT = "the state of the union"


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_tokenizer([TEXT] * 3, kind="byte-bpe", vocab=280)


@pytest.fixture
def folder(words: Tokenizer, tmp_path: Path) -> Path:
    config = preset("gpt2-small", vocab=words.vocab_size, context=32, width=16, depth=2, heads=2)
    write_checkpoint(
        Checkpoint(initialise(Network(config, {"lm": 0}), 0), words),
        tmp_path / "gpt",
        shard_bytes=20_000,
    )
    return tmp_path / "gpt"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


# ------------------------------------------------------------------ the reader


def test_a_wrong_value_is_reported_with_file_key_and_expectation() -> None:
    found = parse_object(
        '{"a": "x", "b": {"c": true}, "d": null, "e": [1, "y"], "f": 1e999}', "here.json"
    )
    with pytest.raises(MalmoiError, match=r"^here\.json: a must be a whole number, not 'x'\.$"):
        found.whole("a")
    with pytest.raises(MalmoiError, match=r"here\.json: b\.c must be a number, not True"):
        found.object("b").number("c")
    with pytest.raises(MalmoiError, match=r"here\.json has no d, which must be a text"):
        found.text("d")
    with pytest.raises(MalmoiError, match=r"here\.json: e\[1\] must be a whole number, not 'y'"):
        found.list_of("e", int)
    with pytest.raises(MalmoiError, match=r"f must be a number, not inf"):
        found.number("f")
    assert (found.text("a"), found.flag("d", default=None), found.object("b").flag("c")) == (
        "x",
        None,
        True,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON: .* line 1"),
        ("[" * 100_000, "levels deep"),
        ("[" * 80 + "]" * 80, "levels"),
        ("9" * 5000, "digits"),
    ],
)
def test_invalid_json_is_reported(text: str, said: str) -> None:
    with pytest.raises(MalmoiError, match=said):
        parse(text, "here.json")


# ------------------------------------------------------------------ models


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers that are not there": ({"n_layer": 2**31}, "depth must lie in"),
    "more layers than tensors": (
        {"n_layer": 4000},
        r"config\.json says that the model has 4,000 layers",
    ),
    "a width that overflows": (
        {"n_embd": 2**31 - 1, "n_head": 1},
        r"config\.json describes a model of at least",
    ),
    "a text for a number": (
        {"n_head": "two"},
        r"config\.json: n_head must be a whole number, not 'two'",
    ),
    "a list for a word": ({"activation_function": []}, r"activation_function = \[\]"),
    "a number for a list": (
        {"architectures": 5},
        r"config\.json: architectures must be a list, not 5",
    ),
    "labels that are numbers": (
        {"id2label": {"0": 1}},
        r"config\.json: id2label\.0 must be a text, not 1",
    ),
    "a context without end": ({"n_positions": 10**12}, "context must lie in"),
    "no number": (
        {"layer_norm_epsilon": float("nan")},
        "layer_norm_epsilon must be a number, not nan",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_impossible_configs_are_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, said = CONFIGS[name]
    change(folder / "config.json", **changes)
    with pytest.raises(MalmoiError, match=said):
        malmoi.load(folder)
    assert run_command(["generate", "--model", str(folder), "the"]) == 1
    assert "Internal error" not in capsys.readouterr().err


def retyped(folder: Path, **types: torch.dtype) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        changed = {
            k: t.to(next((d for end, d in types.items() if k.endswith(end)), t.dtype))
            for k, t in tensors.items()
        }
        save_file(changed, path, {"format": "pt"})


def test_non_float_weights_are_refused_and_mixed_ones_become_fp32(folder: Path) -> None:
    want = malmoi.load(folder, device="cpu").logits(TEXT)
    retyped(folder, weight=torch.float16, bias=torch.bfloat16)
    mixed = malmoi.load(folder, device="cpu")
    assert any("converted to float32" in note for note in mixed.notes)
    assert abs(mixed.logits(TEXT) - want).max() < 0.01
    for dtype in (torch.int64, torch.float8_e4m3fn):
        retyped(folder, weight=dtype)
        with pytest.raises(
            MalmoiError,
            match=f"is kept as {str(dtype).removeprefix('torch.')}; Malmoi reads float32",
        ):
            malmoi.load(folder, device="cpu")


def test_a_malformed_index_and_nan_weights_are_refused(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    kept = index.read_text("utf-8")
    change(index, weight_map={"transformer.wte.weight": 5})
    with pytest.raises(
        MalmoiError, match=r"weight_map\.transformer\.wte\.weight must be a text, not 5"
    ):
        malmoi.load(folder)
    index.write_text(kept, "utf-8")
    path = next(folder.glob("*.safetensors"))
    save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path)
    with pytest.raises(MalmoiError, match="holds values that are NaN"):
        malmoi.load(folder)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(folder: Path) -> None:
    with (
        pretend(replace(this_machine(), memory=10_000)),
        pytest.raises(MalmoiError, match=r"needs .* KB of memory, but .* KB is free"),
    ):
        malmoi.load(folder)


def test_running_out_of_memory_gives_a_clear_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def starve(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
        )

    monkeypatch.setattr("malmoi.inference.load", starve)
    assert run_command(["generate", "--model", str(tmp_path), "the"]) == 1
    assert "Out of memory" in capsys.readouterr().err


# ------------------------------------------------------------------ tokenizers


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    return found


def with_huge_id(s: dict[str, Any]) -> None:
    s["model"]["vocab"]["<huge>"] = 2**32 - 2


def with_huge_added_id(s: dict[str, Any]) -> None:
    s["added_tokens"].append({**s["added_tokens"][0], "id": 2**32 - 2, "content": "<huge>"})


def with_replace_bomb(s: dict[str, Any]) -> None:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
    s["normalizer"] = {"type": "Sequence", "normalizers": [one] * 8}


def with_unknown_frame(s: dict[str, Any]) -> None:
    single = [
        {"SpecialToken": {"id": "nope", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    s["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {},
    }


def with_backtracking(s: dict[str, Any]) -> None:
    s["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (with_huge_id, "a token has the id 4,294,967,294"),
        (with_huge_added_id, r"added_tokens\[\d+\]: id must be a whole number from 0"),
        (with_replace_bomb, "its normalizer may make a text 39,062,500,000,000 times as long"),
        (with_unknown_frame, "cannot be used"),
        (with_backtracking, "could not be encoded"),
    ],
)
def test_a_tokenizer_that_ends_the_process_is_refused(
    spoil: Callable[[dict[str, Any]], None], said: str, folder: Path
) -> None:
    found = state(folder)
    spoil(found)
    (folder / "tokenizer.json").write_text(json.dumps(found), "utf-8")
    with pytest.raises(MalmoiError, match=said):
        Tokenizer.load(folder).encode("a" * 60 + "b")


def test_settings_beside_a_tokenizer_are_typed(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token=5)
    with pytest.raises(
        MalmoiError, match=r"tokenizer_config\.json: eos_token must be a token.*, not 5"
    ):
        Tokenizer.load(folder)
