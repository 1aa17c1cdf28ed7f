"""Texts about features: rows and their lines, the prefix that all see, a run, and errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import malmoi
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.model import KVCache, Network, initialise, preset
from malmoi.training.data.captions import CaptionBatches, feature_rows
from malmoi.training.data.store import Store

SMALL: dict[str, Any] = {
    "model.width": 16,
    "model.heads": 2,
    "model.depth": 1,
    "model.context": 24,
    "tokenizer.vocab": 270,
    "train.batch": 4,
    "train.valid_every": 0,
    "data.valid": 0.2,
    "device": "cpu",
}


def write_rows(folder: Path, count: int = 20) -> tuple[Path, Path]:
    """Row i has features that begin with i, and the text "row i"."""
    features = np.random.default_rng(0).normal(size=(count, 3, 5)).astype(np.float32)
    features[:, 0, 0] = np.arange(count)
    np.save(folder / "rows.npy", features)
    (folder / "rows.txt").write_text("".join(f"row {i}\n" for i in range(count)))
    return folder / "rows.txt", folder / "rows.npy"


def train(text: Path, features: Path | str, out: Path, **changes: Any) -> malmoi.Model:
    settings = {**SMALL, "features": str(features), **changes}
    return malmoi.pretrain("caption-small", data=str(text), out=out, **settings)


def tiny() -> Network:
    config = preset(
        "gpt2-small", vocab=30, context=16, width=16, depth=2, heads=2, feature_count=3,
        feature_width=5, attention=("causal | prefix:3",),
    )  # fmt: skip
    return initialise(Network(config, {"lm": 0}), seed=0).eval()


@torch.no_grad()
def test_features_see_one_another_the_text_sees_before_it_and_a_cache_changes_nothing() -> None:
    network = tiny()
    features, tokens = torch.randn(2, 3, 5), torch.randint(0, 30, (2, 6))
    whole = network.hidden(tokens, features=features)
    assert whole.shape == (2, 6, 16)
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % 30
    changed = network.hidden(other, features=features)
    torch.testing.assert_close(changed[:, :4], whole[:, :4])
    assert not torch.allclose(changed[:, 4], whole[:, 4])
    last = features.clone()
    last[:, 2] += 1
    assert not torch.allclose(network.hidden(tokens, features=last)[:, 0], whole[:, 0])
    cache = KVCache(network.config, 2, 9, dtype=network.dtype, device="cpu")
    parts = [network.hidden(tokens[:, :2], features=features, cache=cache)]
    parts += [network.hidden(tokens[:, i : i + 1], cache=cache) for i in range(2, 6)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    with pytest.raises(UsageError, match="reads 3 vectors of 5 numbers"):
        network.hidden(tokens, features=torch.randn(2, 3, 4))


def test_every_text_keeps_its_row_in_training_and_in_validation(tmp_path: Path) -> None:
    text, features = write_rows(tmp_path)
    model = train(text, features, tmp_path / "run", steps=1)
    vectors = np.load(features)
    seen = []
    for part in ("train", "valid"):
        store = Store.open(tmp_path / "run" / "data" / part)
        rows = feature_rows(store, 20, 0.2, valid=part == "valid")
        batch = CaptionBatches(store, rows, vectors, 20, 0, seed=0).at(0, len(store))
        for labels, row in zip(batch["lm_labels"], batch["features"], strict=True):
            words = model.tokenizer.decode([t for t in labels.tolist() if t >= 0][:-1])
            assert words == f"row {int(row[0, 0])}"
        seen += batch["features"][:, 0, 0].tolist()
    assert sorted(seen) == list(range(20))


def test_a_folder_describes_features_in_python_and_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, features = write_rows(tmp_path)
    folder = tmp_path / "run"
    said = train(text, features, folder, steps=2).describe(np.load(features), max_new_tokens=5)
    assert len(said) == 20
    model = malmoi.load(folder, device="cpu")
    assert model.describe(np.load(features), max_new_tokens=5) == said
    command = ["generate", "-m", str(folder), "--features", str(features)]
    assert run_command([*command, "--max-new-tokens", "5", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 20
    assert run_command(["generate", "-m", str(folder), "text"]) == 2
    assert "it generates text from features" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"shape \[2, 3, 7\]; this model reads 3 vectors of 5"):
        model.describe(np.zeros((2, 3, 7)))


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda text, features: features.unlink(), "There is no feature file"),
        (lambda text, features: features.write_bytes(b"text"), "is not a .npy file of numbers"),
        (lambda text, features: np.save(features, np.zeros(4)), r"of the shape \[4\]; features"),
        (lambda text, features: np.save(features, np.full((20, 2), np.nan)), "NaN or infinite"),
        (lambda text, features: np.save(features, np.zeros((9, 2))), "20 lines, .* 9 texts"),
        (lambda text, features: text.write_text("row 0\n\n" * 10), "rows.txt:2 is empty"),
        (lambda text, features: text.write_text("long " * 50 + "\nrow" * 19), "there is room for"),
    ],
)
def test_what_does_not_fit_is_one_sentence(break_it: Any, sentence: str, tmp_path: Path) -> None:
    text, features = write_rows(tmp_path)
    break_it(text, features)
    with pytest.raises(MalmoiError, match=sentence):
        train(text, features, tmp_path / "run", steps=1)


def test_without_features_the_recipe_asks_for_them(tmp_path: Path) -> None:
    text, _ = write_rows(tmp_path)
    with pytest.raises(UsageError, match=r"--set data\.features=FILE\.npy"):
        train(text, "", tmp_path / "run", steps=1)
