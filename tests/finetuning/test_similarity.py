"""Sentence encoders: scored pairs, ranked pairs and triplets, plain text; the written folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import malmoi
from malmoi.checkpoint.sentence_pooling import SentencePooling, write_sentence_pooling
from malmoi.cli import run_command
from malmoi.cli.predict import predictions
from malmoi.cli.row_files import add_to_file
from malmoi.errors import UsageError
from malmoi.evaluation.guess import guess_task
from malmoi.metrics.registry import mrr, recall_at_1, recall_at_10
from malmoi.training.losses import ForwardPass
from malmoi.training.losses.task import cosine_loss, ranking_loss
from tiny_models import tiny_bert

ANIMALS = ("cat", "dog", "cow", "hen", "pig", "fox")
SOUNDS = ("meows", "barks", "moos", "clucks", "grunts", "yelps")
PAIRS = [
    {"anchor": f"what does the {animal} do", "positive": f"it {sound} all day"}
    for animal, sound in zip(ANIMALS, SOUNDS, strict=True)
]
QUICK: dict[str, Any] = dict(epochs=25, lr=3e-3, batch=6, precision="fp32", device="cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text for row in PAIRS for text in row.values()]
    sizes = dict(context=16, width=32, heads=2, depth=1, dropout=0.0)
    return tiny_bert(tmp_path_factory.mktemp("bert"), texts, 120, **sizes)


@torch.no_grad()
def by_definition(folder: Path, texts: list[str]) -> Any:
    """Vectors by transformers and the folder's files alone: mean over the tokens, length 1."""
    modules = [one["type"] for one in json.loads((folder / "modules.json").read_text())]
    assert [one.rsplit(".", 1)[-1] for one in modules] == ["Transformer", "Pooling", "Normalize"]
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert [name for name, on in pooling.items() if on is True] == ["pooling_mode_mean_tokens"]
    given = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, return_tensors="pt"
    )
    hidden = transformers.AutoModel.from_pretrained(folder)(**given).last_hidden_state
    keep = given["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1).numpy()


def test_pairs_are_found_and_the_folder_is_sentence_transformers(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PAIRS * 2))
    options = ["--model", str(bert), "--dev", str(rows), "--json", "--device", "cpu"]
    settings = [
        word
        for name, value in (("lr", 3e-3), ("epochs", 25), ("batch", 6))
        for word in (f"--{name}", str(value))
    ]
    out = tmp_path / "out"
    command = ["finetune", "similarity", str(rows), "-o", str(out), *options, *settings]
    assert run_command(command) == 0
    shown = capsys.readouterr()
    assert "text = anchor, pair = positive" in shown.err
    assert "always predicting" not in shown.err  # a rank has no most frequent label
    found = json.loads(shown.out.splitlines()[-1])
    assert found["recall_at_1"] > 0.6  # by chance: 1/6
    model = malmoi.load(out, device="cpu")
    texts = [row["anchor"] for row in PAIRS]
    assert abs(model.embed(texts) - by_definition(out, texts)).max() < 1e-5
    judged = malmoi.evaluate(model, "retrieval", rows)
    assert judged["mrr"] == pytest.approx(found["mrr"])
    assert malmoi.evaluate(model, data=rows) == judged
    assert malmoi.evaluate(model, data=rows, limit=3)["examples"] == 3
    scored = [{**row, "score": i % 2} for i, row in enumerate(PAIRS)]
    assert "spearman" in malmoi.evaluate(model, data=scored)
    right = model.predict((PAIRS[0]["anchor"], PAIRS[0]["positive"]))
    wrong = model.predict((PAIRS[0]["anchor"], PAIRS[1]["positive"]))
    assert right.scores["cosine"] > wrong.scores["cosine"]  # type: ignore[union-attr]


def test_a_text_is_truncated_where_the_folder_says(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(bert, tmp_path / "encoder")
    write_sentence_pooling(SentencePooling(), folder, 32)
    settings = folder / "tokenizer_config.json"  # where newer sentence-transformers write it
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 6}))
    model = malmoi.load(folder, device="cpu")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    add_to_file(predictions(model), pairs, tmp_path / "out.jsonl", {})
    found = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    wanted = model.predict((PAIRS[0]["anchor"], PAIRS[0]["positive"])).scores["cosine"]  # type: ignore[union-attr]
    assert found["score"] == pytest.approx(wanted, abs=1e-4)
    (tmp_path / "texts.csv").write_text("text,when\nthe cat,1\n")
    advice = r"two texts: give pairs.*\(--labels A,B\) or fine-tune"
    with pytest.raises(UsageError, match=advice):
        add_to_file(predictions(model), tmp_path / "texts.csv", tmp_path / "no.csv", {})
    with pytest.raises(UsageError, match=advice):
        model.predict("the cat")
    long = "the cat barks all day and the cow moos"
    assert (model.embed(long) == model.embed(f"{long} again", truncate=True)).all()
    model.embed("the cat")
    assert [one.message[:6] for one in caplog.records if one.levelname == "WARNING"] == ["1 of 1"]
    with pytest.raises(UsageError, match="context of 16"):
        malmoi.load(bert, device="cpu").embed(long * 3)


def test_scores_are_learnt(bert: Path, tmp_path: Path) -> None:
    rows = [
        {"sentence1": f"the {a}", "sentence2": f"the {b}", "score": 5.0 if a == b else i % 3}
        for i, (a, b) in enumerate((a, b) for a in ANIMALS[:4] for b in ANIMALS[:4])
    ]
    done = malmoi.finetune(bert, "similarity", rows, tmp_path / "out", rows, **QUICK)
    assert done.metrics["spearman"] > 0.6
    assert malmoi.evaluate(done.model, "similarity", rows)["spearman"] == pytest.approx(
        done.metrics["spearman"], abs=1e-4
    )


def test_plain_text_is_learnt_by_dropout(bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "lines.txt"
    text.write_text(
        "".join(
            f"the {a} {s} at the {b}\n"
            for a, s, b in zip(ANIMALS, SOUNDS, ANIMALS[::-1], strict=True)
        )
    )
    task, _ = guess_task("similarity", text)
    assert malmoi.evaluate(bert, task, text, device="cpu")["recall_at_10"] == 1
    done = malmoi.finetune(bert, task, text, tmp_path / "out", text, **(QUICK | {"epochs": 3}))
    assert done.metrics["recall_at_10"] == 1
    assert (tmp_path / "out" / "modules.json").is_file()


def test_the_losses_are_their_definitions() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 3, 4)
    keep = torch.tensor([[1, 1, 0]] * 7).bool()
    vectors = torch.nn.functional.normalize(hidden[:, :2].mean(1), dim=-1)
    network: Any = None
    scored = {
        "keep": keep[:4],
        "places": torch.tensor([[0, 1], [2, 3]]),
        "labels": torch.tensor([1.0, 0.25]),
    }
    cosines = [float(vectors[0] @ vectors[1]), float(vectors[2] @ vectors[3])]
    found = cosine_loss("mean").terms[0].total(ForwardPass(network, hidden[:4], scored))
    assert float(found) == pytest.approx((cosines[0] - 1) ** 2 + (cosines[1] - 0.25) ** 2, rel=1e-4)
    # three anchors; the first two share their positive's text, only the first has a negative
    ranked = {
        "keep": keep,
        "places": torch.tensor([[0, 1, 2], [3, 4, -1], [5, 6, -1]]),
        "labels": torch.tensor([7, 7, 8]),
    }
    found = ranking_loss("mean").terms[0].total(ForwardPass(network, hidden, ranked))
    expected = 0.0
    for anchor, positive, others in ((0, 1, (6, 2)), (3, 4, (6, 2)), (5, 6, (1, 4, 2))):
        scores = 20 * vectors[[positive, *others]] @ vectors[anchor]
        expected -= float(scores.log_softmax(0)[0])
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_ranks_and_mistakes(bert: Path, tmp_path: Path) -> None:
    ranks = [1, 2, 10, 11]
    assert (recall_at_1([1] * 4, ranks), recall_at_10([1] * 4, ranks)) == (0.25, 0.75)
    assert mrr([1] * 4, ranks) == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)
    with pytest.raises(UsageError, match="columns of two texts"):
        guess_task("similarity", [{"first": "a", "second": "b"}])
    triplets, _ = guess_task("similarity", [{**PAIRS[0], "negative": "no"}])
    assert triplets.kind == "retrieval"
    with pytest.raises(UsageError, match="trains the encoder itself"):
        malmoi.finetune(bert, "retrieval", PAIRS, tmp_path / "no", PAIRS, adapter="lora", **QUICK)
