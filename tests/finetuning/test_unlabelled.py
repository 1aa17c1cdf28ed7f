"""Rows without labels: clouds of sentence vectors, and teachers with a student."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.cli import run_command
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import custom_task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.from_names import capitalised_phrases
from malmoi.finetuning.task_data import read_unlabelled
from malmoi.finetuning.unlabelled import fit_clouds, upper_share
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer
from malmoi.training.losses.distil import divergence

GOOD = ("a warm film", "warm and funny", "funny people", "a funny warm story")
BAD = ("a dull film", "dull and slow", "slow people", "a slow dull story")
ROWS = [{"text": text, "label": "good"} for text in GOOD] + [
    {"text": text, "label": "bad"} for text in BAD
]
MORE = [f"{text} {end}" for text in (*GOOD, *BAD) for end in ("indeed", "again", "for people")]


def saved(folder: Path, sentence: SentencePooling | None) -> Path:
    words = train_tokenizer([*GOOD, *BAD, *MORE], kind="wordpiece", vocab=90)
    config = preset("bert-tiny", vocab=words.vocab_size, context=16, width=32, heads=2, depth=1)
    heads = {} if sentence else {"mlm": 0}
    network = initialise(Network(config, heads, pooler=True), 0)
    write_checkpoint(Checkpoint(network, words, sentence=sentence), folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("encoder"), SentencePooling())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("bert"), None)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("more") / "more.txt"
    path.write_text("\n".join(MORE) + "\n")
    return str(path)


def clouds_of(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of three labels: far apart in two directions, with noise in twenty others."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=random)
    middles = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 3.0]])
    noise = torch.randn(rows, 22, generator=random)
    noise[:, :2] += middles[labels]
    return noise.double(), labels


def test_clouds_find_what_three_labels_cannot() -> None:
    other, right = clouds_of(0, 600)
    test, wanted = clouds_of(1, 600)
    x, y = clouds_of(2, 9)
    none = torch.zeros(3, 22).double()
    weight, bias = fit_clouds(x, y, none, other)
    found = ((test @ weight + bias).argmax(1) == wanted).double().mean()
    few = LogisticRegression(C=10).fit(x, y).score(test, wanted)
    best = LinearDiscriminantAnalysis().fit(other, right).score(test, wanted)
    assert found > few + 0.05
    assert found > best - 0.03


def test_names_alone_start_clouds() -> None:
    other, _ = clouds_of(0, 600)
    test, wanted = clouds_of(1, 600)
    names = torch.zeros(3, 22).double()
    names[:, :2] = torch.tensor([[1.0, 0.2], [-1.0, 0.3], [0.2, 1.0]])
    none = (torch.zeros(0, 22).double(), torch.zeros(0, dtype=torch.long))
    weight, bias = fit_clouds(*none, names, other)
    assert ((test @ weight + bias).argmax(1) == wanted).double().mean() > 0.9


def test_few_labels_and_many_rows(encoder: Path, more: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(unlabelled=more, device="cpu")
    out = tmp_path / "out"
    done = malmoi.finetune(encoder, "classification", ROWS, out, ROWS, **options)
    assert done.protocol.unlabelled == len(MORE)
    tried = json.loads((out / "search.json").read_text())["trials"]
    assert [one["name"] for one in tried] == ["a new layer", "clouds of all rows"]
    assert tried[1]["gain"]["error"] > 0
    assert "more.txt" in (out / "finetune.json").read_text()
    assert str(Path(more).parent) not in (out / "finetune.json").read_text()
    again = malmoi.finetune(encoder, "classification", ROWS, out, ROWS, **options)
    assert again.metrics == done.metrics
    assert malmoi.load(out).predict("warm").label in ("good", "bad")


@pytest.mark.parametrize("kind", ["encoder", "bert"])
def test_names_and_rows_without_labels(
    kind: str, request: pytest.FixtureRequest, more: str, tmp_path: Path
) -> None:
    model: Path = request.getfixturevalue(kind)
    options: dict[str, Any] = dict(labels="good, bad", unlabelled=more, device="cpu")
    done = malmoi.finetune(model, out=tmp_path / "out", **options)
    assert done.metrics == {}  # there is nothing to evaluate on
    assert (done.protocol.judged_on, done.protocol.unlabelled) == (0, len(MORE))
    said = {one.label for one in done.model.predict(MORE)}
    assert said == {"good", "bad"}  # as many rows of each, or nearly
    judged = malmoi.finetune(model, out=tmp_path / "judged", dev=ROWS, **options)
    assert judged.metrics["accuracy"] == malmoi.evaluate(done.model, data=ROWS)["accuracy"]
    with pytest.raises(UsageError, match="--unlabelled FILE"):
        malmoi.finetune(model, out=tmp_path / "x", labels="good,bad")
    with pytest.raises(UsageError, match="at least two different labels"):
        malmoi.finetune(model, out=tmp_path / "x", labels="good,", unlabelled=more)


def test_the_command_names_its_folder_by_the_rows(
    encoder: Path,
    more: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    named = ["finetune", "--labels", "good,bad", "-m", str(encoder), "--device", "cpu"]
    run_command([*named, "--unlabelled", more])
    said = capsys.readouterr().err
    assert "nothing is evaluated." in said
    assert "evaluation rows" not in said
    assert "0 rows" not in said
    assert malmoi.load("runs/more").predict("warm").label in ("good", "bad")
    rows = "".join(f"{row['text']},{row['label']}\n" for row in ROWS)
    Path("rows.csv").write_text(f"text,label\n{rows}")
    run_command(["finetune", "rows.csv", "-m", str(encoder), "--steps", "1", "--device", "cpu"])
    assert malmoi.load("runs/rows").predict("warm").label in ("good", "bad")
    for wrong, said in ((named, "--unlabelled FILE"), ([*named, "rows.csv"], "Give rows (malmoi")):
        assert run_command(wrong) == 2
        assert said in capsys.readouterr().err


def test_teacher_and_student_share_the_minutes(bert: Path, more: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(unlabelled=more, minutes=0.05, device="cpu", contrastive=False)
    malmoi.finetune(bert, "classification", ROWS, tmp_path / "out", ROWS, **options)
    for folder in ("out", "out/teachers"):
        record = json.loads((tmp_path / folder / "finetune.json").read_text("utf-8"))
        assert record["minutes"] == 0.025


def test_a_teacher_and_its_student(bert: Path, more: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(unlabelled=more, lr=3e-3, batch=8, epochs=15, device="cpu")
    done = malmoi.finetune(bert, "classification", ROWS * 4, tmp_path / "out", ROWS, **options)
    assert done.metrics["accuracy"] == 1
    assert done.steps == 15 * (len(ROWS * 4) + len(MORE)) // 8
    teacher = malmoi.load(tmp_path / "out" / "teachers", device="cpu")
    student = malmoi.load(tmp_path / "out", device="cpu")
    said = [[one.label for one in model.predict(MORE)] for model in (teacher, student)]
    agreeing = sum(one == other for one, other in zip(*said, strict=True))
    assert agreeing >= 0.9 * len(MORE)


def test_tags_are_taught(bert: Path, tmp_path: Path) -> None:
    words = [text.split() for text in (*GOOD, *BAD)]
    tagged = [
        {"text": some, "label": ["B-X" if word in ("warm", "dull") else "O" for word in some]}
        for some in words
    ]
    path = tmp_path / "more.jsonl"
    path.write_text("".join(json.dumps({"text": text.split()}) + "\n" for text in MORE))
    options: dict[str, Any] = dict(unlabelled=str(path), lr=3e-3, epochs=20, device="cpu")
    done = malmoi.finetune(bert, "tagging", tagged, tmp_path / "out", tagged, **options)
    assert done.metrics["entity_f1"] > 0.9


def test_lines_of_text_are_words_to_tag(more: str) -> None:
    settings = FinetuneConfig(unlabelled=(more,))
    rows = read_unlabelled(custom_task("tagging"), settings, "cpu")
    assert [list(row.words) for row in rows] == [text.split() for text in MORE]
    paired = custom_task("classification", pair="pair")
    with pytest.raises(UsageError, match="one text a line, and a row here has two"):
        read_unlabelled(paired, settings, "cpu")


def test_a_number_has_no_name(bert: Path, more: str, tmp_path: Path) -> None:
    named: dict[str, Any] = dict(labels="good,bad", unlabelled=more)
    with pytest.raises(UsageError, match="texts, pairs and words; regression needs rows"):
        malmoi.finetune(bert, custom_task("regression"), out=tmp_path / "out", **named)


@pytest.mark.parametrize("kind", ["encoder", "bert"])
def test_names_teach_label_sets(
    kind: str, request: pytest.FixtureRequest, more: str, tmp_path: Path
) -> None:
    model: Path = request.getfixturevalue(kind)
    options: dict[str, Any] = dict(labels="good=warm, bad=dull, folk=people", device="cpu")
    rows = [{"text": row["text"], "label": [row["label"]]} for row in ROWS]
    done = malmoi.finetune(
        model, "multilabel", out=tmp_path / "out", dev=rows, unlabelled=more, **options
    )
    assert (done.protocol.trained_on, done.protocol.unlabelled) == (3, len(MORE))
    found = malmoi.load(tmp_path / "out")
    judged = malmoi.evaluate(found, data=rows)
    assert {name: judged[name] for name in done.metrics} == pytest.approx(done.metrics)
    # a longer vector changes no score's sign, so no label
    assert not found.network.heads["classify"].linear.bias.any()
    sets = {one.labels for one in found.predict(MORE)}
    assert len(sets) > 1
    assert {name for labels in sets for name in labels} <= {"good", "bad", "folk"}


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_the_share_of_rows_with_a_label(share: float) -> None:
    random = torch.Generator().manual_seed(0)
    held = torch.rand(3000, generator=random) < share
    score = torch.randn(3000, generator=random).double() + 3.5 * held
    assert upper_share(score, 0.2) == pytest.approx(share, abs=0.03)


NEWS = ("Funny People and Dull Indeed", "A slow for Funny Story", "slow again for a Warm Film")


def test_capitals_show_phrases() -> None:
    lines = ("The man met Ann Lee.", "Ann met the man in Paris, France", "THE MAN in ROME")
    rows = [line.split() for line in lines]
    found = [" ".join(rows[i][first:end]) for i, first, end in capitalised_phrases(rows)]
    # "the" and "man" are in lower case elsewhere; a comma ends a phrase
    assert found == ["Ann Lee.", "Ann", "Paris,", "France", "ROME"]
    assert capitalised_phrases([["서울의", "봄"] for _ in range(9)]) == []


@pytest.fixture(params=["txt", "csv", "conll"])
def news(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Untagged text as a user may have it: lines, a table, or CoNLL's format."""
    path = tmp_path / f"news.{request.param}"
    forms = {
        "txt": "\n".join(NEWS),
        "csv": "\n".join(("text", *NEWS)),
        "conll": "\n\n".join("\n".join(f"{word} O" for word in line.split()) for line in NEWS),
    }
    path.write_text(forms[request.param] + "\n")
    return str(path)


@pytest.mark.parametrize("task", ["tagging", "conll2003"])
def test_names_teach_tags(
    task: str, bert: Path, news: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = dict(lr=3e-3, epochs=100, batch=3, device="cpu")
    done = malmoi.finetune(
        bert, task, out=out, labels="PER=people,WORK=film", unlabelled=news, **options
    )
    assert "a few tagged sentences teach far more" in caplog.text
    assert (done.protocol.trained_on, done.protocol.unlabelled) == (0, len(NEWS))
    model = malmoi.load(out)
    assert model.labels == ("O", "I-PER", "I-WORK")
    said = {span.text for spans in model.predict(list(NEWS)) for span in spans}
    assert len(said) >= 2  # a tenth of the phrases has no tag
    assert said <= {"Funny People", "Dull Indeed", "Funny Story", "Warm Film"}


def test_without_capitals_most_words_have_no_tag(bert: Path, more: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(unlabelled=more, lr=3e-3, epochs=40, device="cpu")
    named = "X=warm,Y=slow"
    model = malmoi.finetune(bert, "tagging", out=tmp_path / "out", labels=named, **options).model
    tagged = sum(len(span.text.split()) for spans in model.predict(MORE) for span in spans)
    assert 0 < tagged < 0.5 * sum(len(text.split()) for text in MORE)


def test_a_model_without_a_language_head_says_no_tags(
    encoder: Path, more: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="which says what a phrase is"):
        malmoi.finetune(
            encoder, "tagging", out=tmp_path / "out", labels="X=warm,Y=slow", unlabelled=more
        )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    same = [f"{text},{text}" for text in MORE]
    other = [f"{one},{two}" for one, two in zip(MORE, reversed(MORE), strict=True)]
    path.write_text("\n".join(("text,pair", *same, *other)) + "\n")
    return str(path)


def test_names_teach_how_alike_two_texts_are(encoder: Path, pairs: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(unlabelled=pairs, lr=3e-3, epochs=20, device="cpu")
    words = malmoi.load(encoder).embed(["warm", "slow", "the same", "different"])
    like = words[:2] @ (words[2] - words[3])
    alike = "A" if like[0] > like[1] else "B"
    task = custom_task("classification", pair="pair")
    named = "A=warm,B=slow"
    done = malmoi.finetune(encoder, task, out=tmp_path / "out", labels=named, **options)
    assert (done.protocol.unlabelled, done.metrics) == (2 * len(MORE), {})
    model = malmoi.load(tmp_path / "out")
    equal = [model.predict((text, text)).label for text in MORE]
    others = [model.predict((one, two)).label for one, two in zip(MORE, MORE[::-1], strict=True)]
    assert equal.count(alike) > others.count(alike)


def test_a_masked_model_says_labels_between_two_texts(
    bert: Path, pairs: str, tmp_path: Path
) -> None:
    task = custom_task("classification", pair="pair")
    options: dict[str, Any] = dict(labels="yes=warm, no=slow", unlabelled=pairs, device="cpu")
    rows = [{"text": GOOD[0], "pair": BAD[0], "label": label} for label in ("yes", "no")]
    done = malmoi.finetune(bert, task, out=tmp_path / "out", dev=rows, **options)
    assert done.metrics["accuracy"] == 0.5  # one pair with both labels
    said = malmoi.load(tmp_path / "out").predict([(text, text) for text in MORE])
    assert {one.label for one in said} <= {"yes", "no"}


@pytest.mark.parametrize("kind", ["encoder", "bert"])
def test_pairs_are_taught(
    kind: str, request: pytest.FixtureRequest, pairs: str, tmp_path: Path
) -> None:
    rows = [
        {"text": one, "pair": two, "label": "same" if one == two else "other"}
        for one in (*GOOD, *BAD)
        for two in (*GOOD, *BAD)
    ]
    model: Path = request.getfixturevalue(kind)
    task = custom_task("classification", pair="pair")
    done = malmoi.finetune(
        model, task, rows, tmp_path / "out", rows, unlabelled=pairs, steps=4, device="cpu"
    )
    assert done.protocol.unlabelled == 2 * len(MORE)
    assert (tmp_path / "out" / "teachers").is_dir()


def test_label_sets_are_taught(bert: Path, more: str, tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": [row["label"], "film"]} for row in ROWS] * 2
    done = malmoi.finetune(
        bert, "multilabel", rows, tmp_path / "out", rows, unlabelled=more, steps=4, device="cpu"
    )
    assert done.protocol.unlabelled == len(MORE)
    assert set(done.model.labels) == {"good", "bad", "film"}


def test_two_teachers_are_their_mean() -> None:
    random = torch.Generator().manual_seed(0)
    student, *teachers = (torch.randn(4, 3, generator=random) for _ in range(3))
    student.requires_grad_()
    every = torch.stack([divergence(student, teacher, 2.0) for teacher in teachers]).mean(0).sum()
    mean = torch.stack([(teacher / 2).softmax(-1) for teacher in teachers]).mean(0)
    whole = -4 * (mean * (student / 2).log_softmax(-1)).sum()
    expected = torch.autograd.grad(whole, student)[0]
    torch.testing.assert_close(torch.autograd.grad(every, student)[0], expected)


def test_what_cannot_be_learnt_so(bert: Path, more: str, tmp_path: Path) -> None:
    rows = [{"text": "a warm film", "pair": "a film", "label": label} for label in (1, 2, 3)]
    with pytest.raises(UsageError, match="Rows without labels help"):
        malmoi.finetune(bert, "similarity", rows, tmp_path / "a", rows, unlabelled=more)
    with pytest.raises(malmoi.MalmoiError, match=r"no\.such"):
        malmoi.finetune(
            bert, "classification", ROWS, tmp_path / "b", ROWS, unlabelled="no.such.csv"
        )
