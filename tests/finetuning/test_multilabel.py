"""Texts with several labels, from the file to the folder: learnt, judged, predicted, opened by
transformers.
"""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

import malmoi
from conftest import standard_input
from malmoi import evaluate, finetune
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.kinds import custom_task
from malmoi.inference import MultiLabelPrediction
from malmoi.metrics import score_predictions
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import Tokenizer
from tiny_models import tiny_bert

WORDS = {"angry": "anger", "afraid": "fear", "glad": "joy"}
LABELS = ("anger", "fear", "joy")
QUICK: dict[str, Any] = dict(epochs=20, lr=3e-3, batch=16, precision="fp32")


def the_rows() -> list[tuple[str, tuple[str, ...]]]:
    """Every subset of the words, none of them too, in two orders; all texts are equally long."""
    rows = []
    for number in range(8):
        words = [word if number >> i & 1 else "calm" for i, word in enumerate(WORDS)]
        held = tuple(WORDS[word] for word in words if word in WORDS)
        rows += [(" ".join(("he is", *some)), held) for some in (words, words[::-1])]
    return rows * 6


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text for text, _ in the_rows()]
    sizes = dict(context=32, width=32, depth=1, init="fan_in")
    still = dict(dropout=0.0, attention_dropout=0.0)
    return tiny_bert(tmp_path_factory.mktemp("bert"), texts, 120, **sizes, **still)


def as_lists(folder: Path) -> Path:
    path = folder / "lists.jsonl"
    lines = (json.dumps({"text": text, "label": held}) for text, held in the_rows())
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def tuned(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    rows = as_lists(folder)
    finetune(bert, "multilabel", rows, folder / "out", rows, holdout=0.1, **QUICK)
    return folder / "out"


def test_labels_may_be_lists_text_or_columns_of_0_and_1(tmp_path: Path) -> None:
    lists = load_examples(custom_task("multilabel"), as_lists(tmp_path)).rows
    joined = tmp_path / "joined.csv"
    joined.write_text(
        "text,label\n" + "".join(f"{text},{' | '.join(held)}\n" for text, held in the_rows())
    )
    columns = tmp_path / "columns.tsv"
    columns.write_text(
        "text\tanger\tfear\tjoy\n"
        + "".join(
            f"{text}\t" + "\t".join(str(int(name in held)) for name in LABELS) + "\n"
            for text, held in the_rows()
        )
    )
    pandas = tmp_path / "pandas.csv"  # a column of lists is written as Python shows them
    pandas.write_text("text,label\n" + "".join(f'{t},"{list(held)}"\n' for t, held in the_rows()))
    shown = load_examples(custom_task("multilabel"), pandas).rows
    with pytest.raises(MalmoiError, match="one label per row"):
        load_examples(custom_task("classification"), pandas)
    bars = load_examples(custom_task("multilabel", separator="|"), joined).rows
    flags = load_examples(custom_task("multilabel", label=LABELS), columns).rows
    wanted = [held for _, held in the_rows()]
    assert all([e.label for e in some] == wanted for some in (lists, bars, flags, shown))


def test_several_labels_are_trained_evaluated_and_predicted(tuned: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model = malmoi.load(tuned)
    found = model.predict("he is angry calm glad")
    assert isinstance(found, MultiLabelPrediction)
    assert found.labels == ("anger", "joy")
    assert set(found.scores) == set(LABELS)
    assert model.predict(["he is calm calm calm"])[0].labels == ()
    as_row = {"id": 7, "text": "he is angry calm glad", "label": "?"}
    assert model.predict([as_row])[0] == model.predict(as_row) == found
    table = model.predict(pandas.DataFrame([as_row, as_row]))
    assert [one.labels for one in table] == [found.labels] * 2
    with pytest.raises(UsageError, match="no text in column 'text', which this model reads"):
        model.predict(pandas.DataFrame({"review": ["good"]}))
    rows = [json.loads(line) for line in (tuned / "predictions.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["prediction"] == row["label"]
        assert set(row["probabilities"]) == set(LABELS)
        assert 0.5 < row["score"] <= 1
    judged = evaluate(tuned, "multilabel", as_lists(tmp_path), per_label=True)
    assert judged["f1_micro"] == judged["f1_macro"] == judged["accuracy"] == 1
    assert judged["labels"]["joy"] == {"precision": 1, "recall": 1, "f1": 1, "support": 48}
    report = (tuned / "report.html").read_text("utf-8")
    assert "Each label" in report
    assert "Confusion matrix" not in report


def test_thresholds_are_chosen_on_held_out_rows(tuned: Path) -> None:
    config = json.loads((tuned / "config.json").read_text())
    thresholds = config["malmoi"]["thresholds"]
    assert len(thresholds) == 3
    assert len(set(thresholds)) == 1  # one for all, unless label_thresholds asks for more
    model = malmoi.load(tuned)
    model.checkpoint.extra["thresholds"] = [0.0, 1.1, 1.1]
    assert model.predict("he is calm calm glad").labels == ("anger",)


def test_transformers_opens_the_folder_with_equal_logits_and_back(
    tuned: Path, tmp_path: Path
) -> None:
    import transformers

    from malmoi.inference.predict import Predictor, score_classes

    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tuned).eval()
    words = transformers.AutoTokenizer.from_pretrained(tuned)
    assert theirs.config.problem_type == "multi_label_classification"
    text = "he is angry afraid calm"
    with torch.no_grad():
        logits = theirs(**words(text, return_tensors="pt")).logits
    ours = score_classes(Predictor.of(malmoi.load(tuned).checkpoint), [text])
    assert (logits - ours).abs().max() <= 1e-5
    # theirs, read here: no thresholds of ours, so 0.5
    theirs.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("malmoi", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = malmoi.load(tmp_path).predict(text)
    assert found.labels == ("anger", "fear")
    assert list(found.scores.values()) == pytest.approx(logits[0].sigmoid().tolist(), abs=1e-5)
    config["problem_type"] = "several"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalmoiError, match="problem_type 'several'; Malmoi knows single_label"):
        malmoi.load(tmp_path).predict(text)


def test_on_the_command_line(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert run_command(list(words)) == 0
        return capsys.readouterr().out

    text = "he is calm afraid glad"
    assert said("predict", "-m", str(tuned), text).startswith("fear, joy\t0.")
    told = json.loads(said("predict", "-m", str(tuned), "--json", text))
    assert told["prediction"]["labels"] == ["fear", "joy"]
    with standard_input(f"{text}\n\n{text}\n".encode()):
        lines = said("predict", "-m", str(tuned)).splitlines()
    assert [line.split("\t")[0] for line in lines] == ["fear, joy", "-", "fear, joy"]
    rows = str(as_lists(tmp_path))
    table = said("evaluate", "multilabel", "-m", str(tuned), "--data", rows)
    assert "anger\t1.0000\t1.0000\t1.0000\t48" in table


@pytest.mark.parametrize(
    ("kind", "rows", "sentence"),
    [
        ("classification", [["a", "b"], ["b"]], "one label per row; for several use the kind"),
        ("multilabel", [3, 4], "'label' must hold a list of labels, not 3"),
        ("multilabel", [["a", ["b"]], []], "must hold a list of labels"),
        ("multilabel", [[], []], "have no label: there is nothing to learn"),
        ("multilabel", [["a"], ["a"]], "have the label ('a',): there is nothing to learn"),
    ],
)
def test_invalid_labels_are_refused(
    kind: str, rows: list[Any], sentence: str, bert: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps({"text": "he is", "label": row}) + "\n" for row in rows))
    with pytest.raises(MalmoiError) as told:
        finetune(bert, kind, path, tmp_path / "out", path)
    assert sentence in str(told.value)


def test_columns_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("text,anger,fear\nhe is,1,2\n")
    with pytest.raises(MalmoiError, match="the label 'fear' must be 0 or 1, not '2'"):
        load_examples(custom_task("multilabel", label=("anger", "fear")), path)
    with pytest.raises(MalmoiError, match="has no column 'joy'"):
        load_examples(custom_task("multilabel", label=("anger", "joy")), path)
    with pytest.raises(UsageError, match="'anger' is named twice"):
        custom_task("multilabel", label=("anger", "anger"))
    with pytest.raises(UsageError, match="are for multilabel; other kinds have one"):
        custom_task("classification", label=("anger", "fear"))
    path.write_text("text,anger,fear\nhe is,1,0\nhe is,0,1\n")
    notes = load_examples(custom_task("multilabel", label=("anger", "fear")), path).notes
    assert "1 repeated text with a different label: " in notes[0]
    assert notes[0].endswith("bad.csv:2 says 'anger', " + f"{path}:3 'fear'.")
    path.write_text("text,labels,anger,fear\nhe is,anger,1,0\nhe was,fear,0,0\nshe is,fear,0,1\n")
    listed = custom_task("multilabel", label="labels")
    with pytest.raises(MalmoiError, match="the column 'fear' holds 0, the list of labels"):
        load_examples(listed, path)
    assert len(load_examples(listed, path, skip_bad=True).rows) == 2


def test_a_label_that_no_training_row_has_is_a_warning(
    tuned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new.jsonl"
    rows = [("he is calm calm glad", ["joy", "hope"]), ("he is calm calm calm", [])]
    path.write_text("".join(json.dumps({"text": t, "label": held}) + "\n" for t, held in rows))
    found = evaluate(tuned, "multilabel", path, per_label=True)
    assert "1 evaluation row with the label 'hope', which no training row has" in caplog.text
    assert found["labels"]["hope"]["support"] == 1
    assert found["f1_micro"] == pytest.approx(2 / 3)


# ------------------------------------------------------------------ Korean hate speech


def unsmile(shared: Path, split: str, folder: Path, rows: int) -> Path:
    path = folder / f"{split}.tsv"
    with lzma.open(shared / f"data/ko/unsmile.{split}.tsv.xz", "rt", encoding="utf-8") as stream:
        path.write_text("".join(line for line, _ in zip(stream, range(rows + 1), strict=False)))
    return path


def learn_unsmile(
    shared: Path, folder: Path, rows: int, judged: int, **settings: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Ours, and what always saying the commonest label alone would reach."""
    train, dev = (unsmile(shared, s, folder, n) for s, n in (("train", rows), ("valid", judged)))
    labels = train.read_text("utf-8").splitlines()[0].split("\t")[1:]
    task = custom_task("multilabel", text="문장", label=labels)
    words = Tokenizer.load(shared / "tokenizers" / "kcbert-base")
    config = preset("bert-tiny", vocab=words.vocab_size, context=64)
    write_checkpoint(
        Checkpoint(initialise(Network(config, {"mlm": 0}), 0), words), folder / "start"
    )
    done = finetune(folder / "start", task, train, folder / "out", dev, **settings)
    gold = [e.label for e in load_examples(task, dev).rows]
    common = max(labels, key=lambda name: sum(name in held for held in gold))
    names = ("f1_micro", "f1_macro")
    return done.metrics, score_predictions(names, gold, [(common,)] * len(gold), labels)


@pytest.mark.heavy
def test_korean_comments_are_learnt_a_little_from_a_slice(shared: Path, tmp_path: Path) -> None:
    ours, constant = learn_unsmile(
        shared, tmp_path, 600, 200, epochs=3, lr=2e-3, length=32, precision="fp32"
    )
    assert ours["f1_macro"] > constant["f1_macro"]
    assert ours["f1_micro"] > ours["f1_micro_default_threshold"]


@pytest.mark.heavy
def test_korean_comments_are_learnt_beyond_one_label(shared: Path, tmp_path: Path) -> None:
    """A network that was never pre-trained, on all rows, in a few minutes on two cores."""
    settings: dict[str, Any] = dict(epochs=4, lr=4e-4, batch=16, length=48)
    ours, constant = learn_unsmile(shared, tmp_path, 15_004, 3_736, **settings)
    lines = (tmp_path / "out" / "predictions.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    likeliest = [(max(r["probabilities"], key=r["probabilities"].get),) for r in rows]
    one_label = score_predictions(
        ("f1_micro", "f1_macro"),
        [r["label"] for r in rows],
        likeliest,
        list(rows[0]["probabilities"]),
    )
    assert ours["f1_micro"] > one_label["f1_micro"]
    assert ours["f1_macro"] > one_label["f1_macro"]
    assert ours["f1_micro"] > constant["f1_micro"] + 0.1
    assert ours["f1_macro"] > constant["f1_macro"] + 0.15
