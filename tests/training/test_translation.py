"""Translation from pairs of files: reading, batches by tokens, the schedule, a run and its end."""

import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import malmoi
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.model.heads import VocabularyHead
from malmoi.studio.attention_view import translation_view
from malmoi.text.pairs import read_pairs, split_pair
from malmoi.training.data.loader import BertBatches, Masking
from malmoi.training.data.pairs import LanguageRows, PairUnits, TranslationBatches
from malmoi.training.data.store import Store
from malmoi.training.losses.base import linear_cross_entropy
from malmoi.training.recipe import DataConfig, rate_at
from malmoi.training.recipes import named_recipe
from malmoi.training.signals import Stopped
from tiny_runs import assert_equal_weights, losses, signalled

ENGLISH = ["the", "a", "dog", "cat", "sees", "likes", "big", "small", "red", "house"]
GERMAN = ["der", "ein", "Hund", "Katze", "sieht", "mag", "groß", "klein", "rot", "Haus"]
COLUMNS = ("source", "target")
TINY: dict[str, Any] = {
    "model.width": 16,
    "model.hidden": 32,
    "model.heads": 2,
    "model.depth": 1,
    "model.encoder_depth": 1,
    "model.context": 40,
    "tokenizer.vocab": 300,
    "data.lengths": (40,),
    "data.valid": 0.1,
    "train.batch": 2,
    "train.precision": "fp32",
    "train.compile": False,
    "train.log_every": 1,
    "train.valid_every": 0,
    "device": "cpu",
}


def write_pairs(folder: Path, count: int = 60) -> list[Path]:
    """Sentences of known words, translated word by word."""
    rng = random.Random(0)
    rows = [[rng.randrange(10) for _ in range(rng.randint(2, 6))] for _ in range(count)]
    files = [folder / "train.en", folder / "train.de"]
    for file, words in zip(files, (ENGLISH, GERMAN), strict=True):
        file.write_text("".join(" ".join(words[i] for i in row) + "\n" for row in rows))
    return files


def pairs_of(*files: Path) -> list[list[str]]:
    return [split_pair(document.text) for document in read_pairs(files, COLUMNS)]


def test_pairs_are_read_from_two_files_packed_or_not_and_from_tables(tmp_path: Path) -> None:
    files = write_pairs(tmp_path)
    expected = pairs_of(*files)
    assert len(expected) == 60
    (tmp_path / "a.gz").write_bytes(gzip.compress(files[0].read_bytes()))
    (tmp_path / "b.xz").write_bytes(lzma.compress(files[1].read_bytes()))
    assert pairs_of(tmp_path / "a.gz", tmp_path / "b.xz") == expected
    tsv = "".join(f"{a}\t{b}\n" for a, b in [COLUMNS, *expected])
    (tmp_path / "t.tsv").write_text(tsv)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in expected]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pairs_of(tmp_path / "t.tsv") == pairs_of(tmp_path / "t.jsonl") == expected


def test_lines_without_a_partner_are_an_error_and_empty_sides_are_counted(tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path, 3)
    target.write_text(target.read_text() + "übrig\n")
    with pytest.raises(MalmoiError, match=r"3 lines and .* 4: .*line 4 has no partner"):
        pairs_of(source, target)
    with pytest.raises(UsageError, match="has no partner: give two files"):
        pairs_of(source)
    source.write_text("one\n\nthree\n")
    target.write_text("eins\nzwei\n \n")
    reader = read_pairs([source, target], COLUMNS)
    assert [document.text for document in reader] == ["one\neins"]
    assert "2: the source is empty" in reader.describe()[0]
    assert "3: the target is empty" in reader.describe()[0]


def store(sides: list[tuple[int, int]]) -> Store:
    """Pairs of these many source and target tokens; tokens are numbered through."""
    lengths = np.array(sides).reshape(-1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(starts[-1]) + 10
    return Store(Path("store"), tokens, starts[::2], starts, {"bytes": 0, "end": None})


def test_units_hold_as_many_pairs_as_fit_and_an_epoch_holds_every_pair() -> None:
    rng = random.Random(1)
    sides = [(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(200)]
    units = PairUnits(store([*sides, (90, 3)]), length=60, group=4, seed=0)
    assert units.left_out == 1
    longest = np.array([max(pair) + 1 for pair in sides])
    for epoch in (0, 1):
        seen = [units.pairs(epoch * len(units) + n, 1) for n in range(len(units))]
        assert all(len(unit) * longest[unit].max() <= 60 for unit in seen)
        assert set(np.concatenate(seen).tolist()) == set(range(200))
        four = longest[units.pairs(4 * epoch, 4)]
        assert four.max() - four.min() <= 4  # similar lengths make a batch
    orders = [
        np.concatenate([units.pairs(e * len(units) + n, 1) for n in range(8)]) for e in (0, 1)
    ]
    assert not np.array_equal(*orders)
    assert np.array_equal(units.pairs(3, 2), np.concatenate([units.pairs(n, 1) for n in (3, 4)]))


def test_a_batch_has_the_end_after_the_source_and_before_the_target() -> None:
    units = PairUnits(store([(2, 3), (1, 1)]), length=40, group=1, seed=0)
    batch = TranslationBatches(units, end=1, pad=0).at(0, 1)
    rows = batch["source"].tolist(), batch["tokens"].tolist(), batch["lm_labels"].tolist()
    assert [row[:4] for row in rows[0]] == [[15, 1, 0, 0], [10, 11, 1, 0]]
    assert [row[:5] for row in rows[1]] == [[1, 16, 0, 0, 0], [1, 12, 13, 14, 0]]
    assert [row[:5] for row in rows[2]] == [[16, 1, -100, -100, -100], [12, 13, 14, 1, -100]]
    assert batch["source_keep"].sum(1).tolist() == [2, 3]


class Frame:
    cls, sep = 2, 3


def test_positions_restart_in_the_second_language_and_masks_fall_on_both() -> None:
    pairs = store([(2, 3), (1, 1)])
    both = LanguageRows(pairs, 32, 0, Frame(), together=1.0).batch([0, 1])
    rows = {tuple(row): i for i, row in enumerate(both["tokens"][:, :9].tolist())}
    i = rows[(2, 10, 11, 3, 2, 12, 13, 14, 3)]
    assert both["segments"][i].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert both["positions"][i].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    alone = LanguageRows(pairs, 32, 0, Frame(), together=0.0).batch(np.arange(40))
    languages = {
        (tuple(row[1:n]), s[0])
        for row, s, n in zip(
            alone["tokens"].tolist(),
            alone["segments"].tolist(),
            (alone["lengths"] - 1).tolist(),
            strict=True,
        )
    }
    assert languages == {((10, 11), 0), ((12, 13, 14), 1), ((15,), 0), ((16,), 1)}
    masking = Masking(4, np.arange(20) < 5, DataConfig(mask_rate=0.5))
    for packed in (False, True):
        source = LanguageRows(pairs, 32, 0, Frame(), together=1.0)
        batch = BertBatches(source, masking, 0, 0, packed).at(0, 2)
        assert batch["positions"].max() == 4
        assert (batch["mlm_labels"] >= 10).sum() == 3  # half of the tokens of each row


@pytest.mark.parametrize("name", ["transformer-base", "transformer-big"])
def test_the_rate_is_equation_3(name: str) -> None:
    recipe = named_recipe(name)
    c, width = recipe.train, recipe.model.width
    for step in (1, 100, 4000, 4001, 50_000, 100_000):
        expected = width**-0.5 * min(step**-0.5, step * 4000**-1.5)
        rate = c.lr * rate_at(step - 1, step / c.steps, c, c.steps)
        assert rate == pytest.approx(expected)


@pytest.mark.parametrize("bias", [False, True])
def test_smoothed_labels_give_torchs_loss_and_gradient(bias: bool) -> None:
    torch.manual_seed(0)
    config = malmoi.ModelConfig(vocab=12, width=8, heads=1)
    head = VocabularyHead(config, torch.nn.Embedding(12, 8), bias=bias)
    x = torch.randn(5, 8, requires_grad=True)
    y = torch.tensor([3, -100, 0, 11, 7])
    found = linear_cross_entropy(x, head, y, 0.1)
    wanted = F.cross_entropy(head(x), y, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found, (x, head.weight)),
        torch.autograd.grad(wanted, (x, head.weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def train(files: list[Path], out: Path, **changes: Any) -> malmoi.Model:
    return malmoi.pretrain("transformer-small", data=files, out=out, **{**TINY, **changes})


def test_a_stopped_run_ends_as_if_it_had_not_been_and_the_folder_is_used_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_pairs(tmp_path)
    model = train(files, tmp_path / "whole", steps=6)
    with signalled(3), pytest.raises(Stopped):
        train(files, tmp_path / "stopped", steps=6)
    train(files, tmp_path / "stopped", steps=6)
    assert_equal_weights(tmp_path / "stopped", tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")

    folder = str(tmp_path / "whole")
    texts = ["the dog sees a cat", "big house"]
    ours = model.translate(texts, beams=1)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    rows = words(texts, return_tensors="pt", padding=True)
    said = theirs.generate(
        input_ids=rows["input_ids"],
        attention_mask=rows["attention_mask"],
        max_new_tokens=39,
        do_sample=False,
    )
    assert [text.strip() for text in words.batch_decode(said, skip_special_tokens=True)] == ours

    seen = model.cross_attention(*texts)
    assert seen.weights.shape == (len(seen.target), len(seen.source))
    np.testing.assert_allclose(seen.weights.sum(1), 1, atol=1e-5)

    drawn = translation_view(model, texts[0], layer=0)
    assert len(drawn["weights"]) == len(drawn["target"])
    assert all(sum(row) == pytest.approx(1, abs=1e-2) for row in drawn["weights"])

    facts = malmoi.evaluate(folder, "translation", files, beams=1, limit=4)
    assert facts["examples"] == 4
    assert "tok:13a" in facts["signature"]
    assert run_command(["translate", "-m", folder, "--beams", "1", str(files[0])]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 60
    for verb in ("generate", "perplexity"):
        assert run_command([verb, "-m", folder, "text"]) == 2
        assert "it translates" in capsys.readouterr().err
    for words in (["export", "onnx"], ["compress", "quantize"]):
        assert run_command([*words, "-m", folder, "-o", str(tmp_path / "new.onnx")]) == 2
        assert "does not support translation models" in capsys.readouterr().err
    with pytest.raises(UsageError, match="more than this model's context of 40"):
        model.translate("dog " * 50)


def test_a_masked_model_of_two_languages_embeds_both(tmp_path: Path) -> None:
    small = {
        "model.width": 16,
        "model.heads": 2,
        "model.depth": 1,
        "tokenizer.vocab": 100,
        "train.batch": 4,
        "train.compile": False,
    }
    model = malmoi.pretrain(
        "xlm-small",
        data=write_pairs(tmp_path),
        out=tmp_path / "run",
        steps=2,
        device="cpu",
        **small,
    )
    vectors = [model.embed(["rot"], language=language) for language in (0, 1)]
    assert not np.allclose(*vectors)
    with pytest.raises(UsageError, match="has no language 2"):
        model.embed("rot", language=2)
    with pytest.raises(UsageError, match="an embedding for each language"):
        malmoi.pretrain("xlm-small", data=[], out=tmp_path / "no", steps=1, **{"model.segments": 0})


@pytest.mark.heavy
def test_a_small_transformer_learns_a_dictionary(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, 2000)
    small = {"model.width": 32, "model.dropout": 0.0, "model.attention_dropout": 0.0}
    model = train(files, tmp_path / "run", steps=600, **{"train.batch": 16}, **small)
    facts = malmoi.evaluate(model, "translation", files, limit=200)
    assert facts["bleu"] > 90
