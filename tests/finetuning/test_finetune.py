"""Fine-tuning: every kind of task by BERT's way and GPT-1's, in folders that transformers opens
with equal scores.
"""

import json
import math
import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import malmoi
from malmoi import Progress, evaluate, finetune
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.kinds import custom_task
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.config import FinetuneConfig, finetune_config
from malmoi.finetuning.finetune import FinetuneResult
from malmoi.finetuning.trainer import FinetuneTrainer
from malmoi.inference import Answer, Model
from malmoi.inference.answer import answer_questions
from malmoi.inference.predict import Predictor
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import BatchLimits
from malmoi.training.loss_module import LossModule
from malmoi.training.losses import ForwardPass, count_labels
from malmoi.training.losses.task import (
    choice_loss,
    choice_scores,
    classification_loss,
    multilabel_loss,
    regression_loss,
    span_loss,
    tagging_loss,
)
from malmoi.training.signals import Stopped
from tiny_models import tiny_bert, tiny_gpt

GOOD, BAD = "a good fine great film", "a bad poor weak film"
CONTEXT = "Alice lives in Seoul . Bob lives in Paris . Carol lives in Rome ."
VOCAB = [GOOD, BAD, CONTEXT, "where does Alice Bob Carol live", "the cat sat", "who knows why"]
QUICK: dict[str, Any] = dict(epochs=6, lr=5e-3, batch=8, warmup=0.1, precision="fp32")


def rows_of(kind: str) -> tuple[str, str]:
    """A name and the content of a file from which this kind can be learnt in seconds."""
    if kind == "classification":
        return "a.csv", "text,label\n" + "".join(
            f"{t},{n}\n" for t, n in [(GOOD, "yes"), (BAD, "no")] * 24
        )
    if kind == "regression":
        return "a.csv", "text,pair,label\n" + "".join(
            f"{GOOD},{t},{n}\n" for t, n in [(GOOD, 4), (BAD, 1)] * 24
        )
    if kind == "tagging":
        row = {"text": CONTEXT.split(), "label": [_tag(word) for word in CONTEXT.split()]}
        return "a.jsonl", (json.dumps(row) + "\n") * 32
    if kind == "choice":
        rows = [(GOOD, BAD, 0), (BAD, GOOD, 1)] * 16
        return "a.csv", "text,first,second,label\n" + "".join(
            f"the cat sat,{a},{b},{n}\n" for a, b, n in rows
        )
    people = [("Alice", "Seoul"), ("Bob", "Paris"), ("Carol", "Rome")] * 12
    return "a.jsonl", "".join(
        json.dumps(
            {"text": f"where does {who} live", "context": CONTEXT, "label": where, "id": str(i)}
        )
        + "\n"
        for i, (who, where) in enumerate(people)
    )


def _tag(word: str) -> str:
    return (
        "B-PER"
        if word in ("Alice", "Bob", "Carol")
        else "B-LOC"
        if word in ("Seoul", "Paris", "Rome")
        else "O"
    )


def the_task(kind: str) -> Any:
    more: dict[str, Any] = {
        "choice": {"choices": ("first", "second")},
        "regression": {"pair": "pair"},
    }.get(kind, {})
    return custom_task(kind, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(context=64, width=32, depth=2, heads=2, dropout=0.0)
    heads = {"mlm": 0, "nsp": 0}
    return tiny_bert(tmp_path_factory.mktemp("bert"), VOCAB * 3, 150, heads_of=heads, **sizes)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(context=96, width=32, depth=2, heads=2, dropout=0.0)
    return tiny_gpt(tmp_path_factory.mktemp("gpt"), VOCAB * 3, 330, **sizes)


@pytest.fixture
def data(tmp_path: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        name, content = rows_of(kind)
        path = tmp_path / name
        path.write_text(content, "utf-8")
        return path

    return make


KINDS = {
    "classification": ("accuracy", GOOD, "AutoModelForSequenceClassification"),
    "regression": ("pearson", (GOOD, BAD), "AutoModelForSequenceClassification"),
    "tagging": ("entity_f1", CONTEXT, "AutoModelForTokenClassification"),
    "choice": ("accuracy", ("the cat sat", (GOOD, BAD)), "AutoModelForMultipleChoice"),
    "answer": ("span_f1", ("where does Alice live", CONTEXT), "AutoModelForQuestionAnswering"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bert_learns_every_kind_and_transformers_reads_it(
    kind: str, bert: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    measure, text, theirs = KINDS[kind]
    path, out = data(kind), tmp_path / "out"
    chosen = the_task(kind)
    done = finetune(bert, chosen, path, out, path, **QUICK)
    # copying a span takes longer: `test_questions_without_an_answer_get_a_threshold` learns it
    assert kind == "answer" or done.metrics[measure] > 0.9
    ours = malmoi.load(out)
    assert evaluate(out, chosen, path)[measure] == pytest.approx(done.metrics[measure], abs=1e-6)
    assert scores_of(ours, text, kind).flatten().tolist() == pytest.approx(
        scores_there(out, text, theirs).flatten().tolist(), abs=1e-4
    )
    assert {
        "config.json",
        "model.safetensors",
        "metrics.jsonl",
        "predictions.jsonl",
        "report.html",
        "finetune.json",
    } <= {p.name for p in out.iterdir()}


def scores_of(model: Model, text: Any, kind: str) -> torch.Tensor:
    from malmoi.inference.predict import score_choices, score_classes, token_scores

    reading = Predictor.of(model.checkpoint)
    if kind in ("classification", "regression"):
        return score_classes(reading, [text])
    if kind == "choice":
        return torch.stack(score_choices(reading, [text]))
    encoding = model.tokenizer.encode(*([text] if isinstance(text, str) else text))
    found = token_scores(model.network, [encoding], "tag" if kind == "tagging" else "span")[0]
    return found if kind == "tagging" else found.T


def scores_there(out: Path, text: Any, name: str) -> torch.Tensor:
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(out)
    model = getattr(transformers, name).from_pretrained(out).eval()
    with torch.no_grad():
        if "Choice" in name:
            context, choices = text
            inputs = words(
                [context] * len(choices), list(choices), return_tensors="pt", padding=True
            )
            return model(**{key: value[None] for key, value in inputs.items()}).logits
        inputs = words(*([text] if isinstance(text, str) else text), return_tensors="pt")
        found = model(**inputs)
    return (
        torch.stack([found.start_logits[0], found.end_logits[0]])
        if "Question" in name
        else found.logits[0]
    )


@pytest.mark.parametrize("kind", ["classification", "choice", "regression"])
def test_a_gpt_is_fine_tuned_as_in_gpt1(
    kind: str, gpt: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path = data(kind)
    done = finetune(gpt, the_task(kind), path, tmp_path / "out", path, lm=0.5, **QUICK)
    assert done.metrics[KINDS[kind][0]] > 0.9
    words = done.model.tokenizer
    assert words.token(words.encode("a", "b").tokens[0]) == "<s>"
    assert done.model.config.vocab >= words.vocab_size
    if kind == "classification":
        ours = malmoi.load(tmp_path / "out")
        there = scores_there(tmp_path / "out", GOOD, KINDS[kind][2])
        assert scores_of(ours, GOOD, kind)[0].tolist() == pytest.approx(there.tolist(), abs=1e-4)
        assert ours.predict(GOOD).label == "yes"


def test_a_gpt_uses_gpt1s_defaults_and_a_bert_berts(
    gpt: Path, bert: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path = data("classification")
    for model, more, wanted in (
        (gpt, {}, (6.25e-5, 0.002, 0.5, 32, 3.0)),
        (gpt, {"lr": 1e-4, "lm": 0.0}, (1e-4, 0.002, 0.0, 32, 3.0)),
        (gpt, {"freeze": True}, (5e-5, 0.1, 0.0, 32, 3.0)),
        (bert, {}, (9.6e-4, 0.1, 0.0, 16, 30.0)),  # by the rows
    ):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        finetune(model, "classification", path, out, path, steps=1, **more)
        used = json.loads((out / "finetune.json").read_text())
        assert tuple(used[n] for n in ("lr", "warmup", "lm", "batch", "epochs")) == wanted


def test_a_pair_without_an_order_is_read_both_ways(gpt: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(
        "sentence1\tsentence2\tscore\n" + f"{GOOD}\t{BAD}\t1\n{GOOD}\t{GOOD}\t4\n" * 12, "utf-8"
    )
    model = finetune(gpt, "stsb", path, tmp_path / "out", path, **{**QUICK, "epochs": 2}).model
    assert model.checkpoint.extra["both"] is True
    there, back = (model.predict(pair).scores for pair in [(GOOD, BAD), (BAD, GOOD)])
    assert list(there.values()) == pytest.approx(list(back.values()), abs=1e-5)


# ------------------------------------------------------------------ objectives


def a_pass(head: str, classes: int, batch: dict[str, torch.Tensor]) -> ForwardPass:
    config = preset("bert-tiny", vocab=20, context=16, width=16, heads=2, depth=1, dropout=0.0)
    network = initialise(Network(config, {head: classes}), 0).eval()
    tokens = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    return ForwardPass(network, network.trunk(tokens), {"tokens": tokens, **batch})


def test_task_losses_equal_torchs() -> None:
    labels = torch.tensor([0, 2, 1, 2])
    done = a_pass("classify", 3, {"labels": labels})
    counts = count_labels(classification_loss(), done.batch)
    scores = done.scores("classify")
    assert classification_loss()(done, counts)[0].item() == pytest.approx(
        F.cross_entropy(scores, labels).item(), abs=1e-6
    )
    rare = torch.tensor([2.0, 1.0, 0.5])
    summed = F.cross_entropy(scores, labels, rare, reduction="sum").item() / 4
    assert classification_loss(rare.tolist())(done, counts)[0].item() == pytest.approx(
        summed, abs=1e-6
    )

    numbers = torch.tensor([0.5, 1.0, -2.0, 3.0])
    done = a_pass("classify", 1, {"labels": numbers})
    wanted = F.mse_loss(done.scores("classify").squeeze(-1), numbers).item()
    assert regression_loss()(done, count_labels(regression_loss(), done.batch))[
        0
    ].item() == pytest.approx(wanted, abs=1e-6)

    held = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    done = a_pass("classify", 3, {"labels": held})
    wanted = F.binary_cross_entropy_with_logits(done.scores("classify"), held).item()
    assert multilabel_loss()(done, count_labels(multilabel_loss(), done.batch))[
        0
    ].item() == pytest.approx(wanted, abs=1e-6)

    tags = torch.randint(0, 3, (4, 8))
    tags[:, 5:] = -100
    done = a_pass("tag", 3, {"labels": tags})
    wanted = F.cross_entropy(
        done.scores("tag").flatten(0, 1), tags.flatten(), ignore_index=-100
    ).item()
    assert tagging_loss()(done, count_labels(tagging_loss(), done.batch))[
        0
    ].item() == pytest.approx(wanted, abs=1e-6)


def test_the_span_loss_is_that_of_transformers() -> None:
    places = torch.tensor([[1, 3], [0, 0], [2, 2], [4, 6]])
    done = a_pass("span", 0, {"labels": places})
    start, end = done.scores("span").unbind(-1)
    wanted = (F.cross_entropy(start, places[:, 0]) + F.cross_entropy(end, places[:, 1])) / 2
    assert span_loss()(done, count_labels(span_loss(), done.batch))[0].item() == pytest.approx(
        wanted.item(), abs=1e-6
    )


def test_choices_of_unequal_number_are_scored_apart() -> None:
    places = torch.tensor([[0, 1, 2], [3, -1, -1]])
    done = a_pass("choice", 0, {"labels": torch.tensor([2, 0]), "places": places})
    scores = choice_scores(done)
    assert scores[1, 0].softmax(-1) == 1
    wanted = F.cross_entropy(done.scores("choice")[:3, 0][None], torch.tensor([2])).item() / 2
    assert choice_loss()(done, count_labels(choice_loss(), done.batch))[0].item() == pytest.approx(
        wanted, abs=1e-6
    )


# ------------------------------------------------------------------ ways of adapting


def test_a_frozen_trunk_stays_and_layers_can_be_frozen(
    bert: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path = data("classification")
    before = malmoi.load(bert).network.trunk.state_dict()
    after = finetune(
        bert, "classification", path, tmp_path / "a", path, freeze=True, epochs=1, lr=1e-2
    ).model
    assert all(
        torch.equal(before[name], weight)
        for name, weight in after.network.trunk.state_dict().items()
    )
    some = finetune(
        bert, "classification", path, tmp_path / "b", path, freeze_layers=1, epochs=1, lr=1e-2
    ).model
    same = {n: torch.equal(before[n], w) for n, w in some.network.trunk.state_dict().items()}
    assert same["blocks.0.mlp.up.weight"]
    assert same["embed.token.weight"]
    assert not same["blocks.1.mlp.up.weight"]
    with pytest.raises(UsageError, match="freeze_layers=9 is more than the 2 layers"):
        finetune(bert, "classification", path, tmp_path / "c", path, freeze_layers=9)


def test_the_same_seed_gives_the_same_weights(
    bert: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path = data("classification")
    one, two = (
        finetune(
            bert, "classification", path, tmp_path / name, path, epochs=2, lr=1e-3, layer_decay=0.8
        ).model
        for name in "ab"
    )
    pairs = zip(one.network.parameters(), two.network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_layers_further_down_learn_slower(bert: Path, tmp_path: Path) -> None:
    checkpoint = malmoi.load(bert).checkpoint
    settings = finetune_config({"layer_decay": 0.5, "lr": 1e-3})
    from malmoi.finetuning.trainer import _layered
    from malmoi.training.optim import make_optimizers

    optimizers = make_optimizers(checkpoint.network, settings.training(10))
    _layered(optimizers, checkpoint.network, 0.5)
    rates = {
        id(p): group["lr"] for o in optimizers for group in o.param_groups for p in group["params"]
    }
    trunk = checkpoint.network.trunk
    assert len(rates) == sum(1 for _ in checkpoint.network.parameters())
    assert rates[id(trunk.blocks[1].mlp.up.weight)] == pytest.approx(5e-4)  # type: ignore[union-attr]
    assert rates[id(trunk.blocks[0].mlp.up.weight)] == pytest.approx(2.5e-4)  # type: ignore[union-attr]
    assert rates[id(trunk.embed.token.weight)] == pytest.approx(1.25e-4)


def test_seeds_and_the_grid(
    bert: Path, data: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = data("classification")
    done = finetune(bert, "classification", path, tmp_path / "s", path, seeds=3, epochs=1)
    assert len(done.runs) == 3
    assert done.metrics["accuracy"] == sorted(run["accuracy"] for run in done.runs)[1]
    assert {p.name for p in (tmp_path / "s").glob("seed-*")} == {"seed-0", "seed-1", "seed-2"}
    assert "3 runs: accuracy" in caplog.text
    assert "Every run" in (tmp_path / "s" / "report.html").read_text("utf-8")
    assert malmoi.load(tmp_path / "s").labels == ("no", "yes")
    grid = FinetuneConfig(grid=True).variants()
    assert len(grid) == 18
    assert {v.lr for v in grid} == {5e-5, 3e-5, 2e-5}


def test_the_model_that_is_returned_knows_its_task(bert: Path, tmp_path: Path) -> None:
    rows = [{"review": f"a {word} film", "stars": word} for word in ("good", "bad") * 12]
    found = finetune(bert, None, rows, tmp_path / "o", epochs=1)
    assert dict(evaluate(found.model, data=rows))["examples"] == 24


def test_without_a_development_file_some_are_held_out(
    bert: Path, data: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = finetune(
        bert,
        "classification",
        data("classification"),
        tmp_path / "o",
        class_weights=True,
        from_scratch=True,
        patience=1,
        evaluations=4,
        epochs=1,
    )
    assert "evaluation on 5 rows (held out of the training rows)" in caplog.text
    assert "to hold some out for selection (epoch): nothing is selected" in caplog.text
    rows = [
        json.loads(line) for line in (done.out / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    assert {"step", "tokens", "seconds", "loss", "lr", "tokens_per_second"} <= set(rows[0]) | set(
        rows[1]
    )
    assert any("accuracy" in row for row in rows)


def test_questions_without_an_answer_get_a_threshold(bert: Path, tmp_path: Path) -> None:
    rows = [("where does Alice live", "Seoul"), ("who knows why", "")] * 16
    lines = [
        {"text": q, "context": CONTEXT, "label": a, "id": str(i)} for i, (q, a) in enumerate(rows)
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    done = finetune(
        bert, custom_task("answer"), path, tmp_path / "out", path, **{**QUICK, "epochs": 20}
    )
    assert done.metrics["span_f1"] >= done.metrics["span_f1_default_threshold"]
    assert done.metrics["span_f1"] > 0.9
    model = malmoi.load(tmp_path / "out")
    assert "threshold" in model.checkpoint.extra
    said = model.predict([("where does Alice live", CONTEXT), ("who knows why", CONTEXT)])
    assert [one.text for one in said] == ["Seoul", ""]
    official = json.loads((tmp_path / "out" / "predictions.json").read_text("utf-8"))
    assert official["0"] == "Seoul"


def test_the_best_span_is_the_best_of_all(bert: Path) -> None:
    """Against every span of a short context, over one window."""
    words = malmoi.load(bert).tokenizer
    config = preset("bert-tiny", vocab=words.vocab_size, context=64, width=32, depth=1, heads=2)
    network = initialise(Network(config, {"span": 0}), 3).eval()
    with torch.no_grad():
        network.heads["span"].linear.weight.mul_(30)  # type: ignore[union-attr, operator]
    (found,) = answer_questions(Predictor(network, words), [("where", CONTEXT)], top=3)
    assert isinstance(found, Answer)
    encoding = words.encode("where", CONTEXT)
    with torch.inference_mode():
        scores = network(
            torch.tensor([encoding.tokens]),
            segments=torch.tensor([encoding.segments]),
            heads=("span",),
        )["span"][0]
    places = [i for i, s in enumerate(encoding.segments) if s and not encoding.specials[i]]
    every = {
        (i, j): float(scores[i, 0] + scores[j, 1])
        for i in places
        for j in places
        if i <= j < i + 30
    }
    first, last = max(every, key=every.__getitem__)
    assert (found.start, found.end) == (encoding.offsets[first][0], encoding.offsets[last][1])
    assert found.text == CONTEXT[found.start : found.end]
    assert found.score == pytest.approx(every[first, last], abs=1e-4)
    assert len(found.candidates) == 3


def test_a_gpt_answers_too_and_the_command_shows_it(
    gpt: Path,
    bert: Path,
    data: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from malmoi.cli import run_command

    path = data("answer")
    model = finetune(gpt, custom_task("answer"), path, tmp_path / "a", path, **QUICK).model
    found = model.predict(("where does Alice live", CONTEXT))
    assert found.text == CONTEXT[found.start : found.end] == found.text.strip() != ""
    capsys.readouterr()
    ask = ["predict", "--model", str(tmp_path / "a"), "--pairs", "where does Alice live", CONTEXT]
    assert run_command(ask) == 0
    assert capsys.readouterr().out.split("\t")[0] == found.text
    assert run_command([*ask[:3], "--json", *ask[3:]]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"]["candidates"][0]["text"] == found.text
    path = data("choice")
    finetune(bert, the_task("choice"), path, tmp_path / "c", path, **QUICK)
    capsys.readouterr()
    call = [
        "predict",
        "--model",
        str(tmp_path / "c"),
        "--choice",
        GOOD,
        "--choice",
        BAD,
        "the cat sat",
    ]
    assert run_command(call) == 0
    assert capsys.readouterr().out.split("\t")[0] == GOOD
    assert model.predict(("where does Alice live", "")).text == ""
    with pytest.raises(UsageError, match="A question needs its context"):
        malmoi.load(tmp_path / "a").predict("where")


# ------------------------------------------------------------------ stopping, refusing


class Killed(BaseException):
    """Stands for a power cut: nothing is saved on the way out."""


def at_step(step: int, then: Callable[[], None], run: int = 1) -> Callable[[Progress], None]:
    """A progress callback that acts after this many updates of the first, second … run."""
    runs = count(1)

    def callback(event: Progress) -> None:
        if event.verb == "finetune" and event.done == step and next(runs) == run:
            then()

    return callback


def die() -> None:
    raise Killed


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return malmoi.load(folder).network.state_dict()


def judged_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.mark.parametrize(
    "way", [{}, {"features": "last", "batch": 8}, {"layer_decay": 0.8, "patience": 4}]
)
def test_a_stopped_run_resumes_and_ends_bit_equal(
    way: dict[str, Any], bert: Path, data: Callable[[str], Path], tmp_path: Path, cache_home: Path
) -> None:
    path, settings = (
        data("classification"),
        {"epochs": 4, "batch": 8, "lr": 1e-3, "evaluations": 2, **way},
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = finetune(bert, "classification", path, whole, path, **settings)
    for step, number in ((2, signal.SIGTERM), (20, signal.SIGINT)):
        stop = at_step(step, partial(os.kill, os.getpid(), number))
        with pytest.raises(Stopped) as stopped:
            finetune(bert, "classification", path, cut, path, progress=stop, **settings)
        assert stopped.value.code == 128 + number
        # what there is can be looked at
        assert malmoi.load(cut).predict(GOOD).label in ("yes", "no")
        assert (cut / "train_state" / f"step-{step}").is_dir()
    again = finetune(bert, "classification", path, cut, path, **settings)
    assert (again.metrics, again.steps) == (done.metrics, done.steps)
    assert all(
        torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(cut).items()
    )
    assert (cut / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    # at step 2 it was judged at once, to leave a model
    ours = [row for row in judged_rows(cut) if row["step"] != 2 or "loss" in row]
    assert ours == judged_rows(whole)
    assert [row["step"] for row in ours if "loss" in row][:3] == [1, 2, 3]  # a curve from the start
    assert not (cut / "train_state").exists()


def save_as_before(folder: Path) -> None:
    """Rewrites a state as versions wrote it that kept progress of fine-tuning in tensors."""
    path, file = folder / "state.json", folder / "rank-00000.safetensors"
    about, tensors = json.loads(path.read_text()), load_file(file)
    p = about["position"]
    assert not p.pop("row_steps")
    assert not p.pop("row_losses")
    tensors["pending"] = torch.tensor([])
    tensors["judged"] = torch.tensor([7, p.pop("evaluations_since")])
    del p["best"], about["checksum"]
    save_file(tensors, file, {"rows": json.dumps(dict.fromkeys(tensors, 0))})
    about["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    about["files"] = {file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())]}
    path.write_text(json.dumps(about | {"position": p | {"samples_seen": []}}))


def test_a_state_of_an_earlier_version_resumes_bit_equal(bert: Path, tmp_path: Path) -> None:
    path, whole, cut = tmp_path / "a.csv", tmp_path / "whole", tmp_path / "cut"
    rows = [f"{text} {i},{n}" for i in range(60) for text, n in ((GOOD, "yes"), (BAD, "no"))]
    path.write_text("\n".join(("text,label", *rows)), "utf-8")
    settings = dict(epochs=4, batch=8, lr=5e-3, patience=3, holdout=0.3, evaluations=2)
    finetune(bert, "classification", path, whole, **settings)
    stop = at_step(11, partial(os.kill, os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped):
        finetune(bert, "classification", path, cut, progress=stop, **settings)
    save_as_before(cut / "train_state" / "step-11")
    finetune(bert, "classification", path, cut, **settings)
    ours = weights_of(cut)
    assert all(torch.equal(ours[name], weight) for name, weight in weights_of(whole).items())
    assert [row for row in judged_rows(cut) if row.get("rows") == "held out"] == [
        row for row in judged_rows(whole) if row.get("rows") == "held out"
    ]


def test_a_batch_that_does_not_fit_is_divided(
    bert: Path, data: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path, forward = data("classification"), LossModule.forward
    settings: dict[str, Any] = dict(steps=6, batch=8, precision="fp32")
    whole = finetune(bert, "classification", path, tmp_path / "whole", path, **settings)

    def small(self: LossModule, batch: Any, counts: Any) -> Any:
        if len(batch["tokens"]) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return forward(self, batch, counts)

    monkeypatch.setattr(LossModule, "forward", small)
    divided = finetune(bert, "classification", path, tmp_path / "divided", path, **settings)
    assert "using micro-batches of 2 sequences" in caplog.text
    assert divided.steps == whole.steps
    ours, theirs = (
        [row["loss"] for row in judged_rows(tmp_path / name) if "loss" in row]
        for name in ("divided", "whole")
    )
    assert ours == pytest.approx(theirs, abs=1e-4)


# while the run is being, and after it was finished
@pytest.mark.parametrize("place", ["results.RunFolder.finish", "finetune.write_results"])
@pytest.mark.parametrize("way", [{"lm": 0.5}, {"seeds": 2}])
def test_a_kill_after_the_last_step_leaves_the_same_predictions(
    place: str, way: dict[str, Any], gpt: Path, data: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, settings = data("classification"), {"steps": 4, "batch": 8, "precision": "fp32", **way}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = finetune(gpt, "classification", path, whole, path, **settings)
    monkeypatch.setattr(FinetuneTrainer, "seconds_between_saves", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(f"malmoi.finetuning.{place}", lambda *arguments: die())
        with pytest.raises(Killed):
            finetune(gpt, "classification", path, cut, path, **settings)
    # whatever another reader of the same weights would say in the last digit
    monkeypatch.setattr(
        "malmoi.inference.batches.forward_limits", lambda device: BatchLimits(rows=1)
    )
    again = finetune(gpt, "classification", path, cut, path, **settings)
    assert again.metrics == done.metrics
    if place == "finetune.write_results":
        for name in ("predictions.jsonl", "report.json"):
            assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_a_killed_run_loses_what_came_after_its_last_state(
    bert: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path, settings = data("classification"), {"epochs": 3, "batch": 8, "lr": 1e-3}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = finetune(bert, "classification", path, whole, path, **settings)
    state = cut / "train_state" / "step-9" / "rank-00000.safetensors"
    stop = at_step(9, partial(os.kill, os.getpid(), signal.SIGTERM))
    for callback, end in ((stop, Stopped), (at_step(12, die), Killed)):
        with pytest.raises(end):
            finetune(bert, "classification", path, cut, path, progress=callback, **settings)
        assert state.is_file()
    for damaged in (False, True):  # and a bad disk
        other = shutil.copytree(cut, tmp_path / str(damaged))
        if damaged:
            (other / state.relative_to(cut)).write_bytes(b"half")
        again = finetune(bert, "classification", path, other, path, **settings)
        assert again.metrics == done.metrics
        ours = weights_of(other)
        assert all(torch.equal(ours[name], weight) for name, weight in weights_of(whole).items())


def test_a_finished_run_is_not_repeated(
    bert: Path, data: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = data("classification"), tmp_path / "out"

    def tune(**changes: Any) -> tuple[FinetuneResult, list[str]]:
        """The result, and the runs that took an update."""
        caplog.clear()
        done = finetune(bert, "classification", path, out, path, seeds=3, **changes)
        updates = [int(record.message.startswith("Running the first")) for record in caplog.records]
        finished = re.findall(r"(seed-\d) is finished", caplog.text)
        assert sum(updates) == 3 - len(finished)
        return done, finished

    stop = at_step(1, partial(os.kill, os.getpid(), signal.SIGTERM), run=2)
    with pytest.raises(Stopped):  # in the second of three runs
        tune(epochs=2, progress=stop)
    first, finished = tune(epochs=2)
    assert finished == ["seed-0"]
    same, finished = tune(epochs=2)
    assert finished == ["seed-0", "seed-1", "seed-2"]
    assert (same.metrics, same.runs, same.steps) == (first.metrics, first.runs, first.steps)
    assert f"{out / 'seed-1'} is finished (step 6)" in caplog.text
    with pytest.raises(
        UsageError, match=r"holds another fine-tuning \(epochs was 2\.0\).*--overwrite"
    ):
        tune(epochs=1)
    path.write_text("text,label\na,yes\nb,no\n", "utf-8")
    with pytest.raises(UsageError, match="of another model or other examples"):
        tune(epochs=2)
    assert tune(epochs=1, overwrite=True)[1] == []


@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_runs_share_their_tokens(
    model: str,
    request: Any,
    data: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, asked = Tokenizer.rows, list[int]()

    def rows(self: Tokenizer, texts: Any, *rest: Any, **more: Any) -> Any:
        asked.append(len(texts))
        return encode(self, texts, *rest, **more)

    monkeypatch.setattr(Tokenizer, "rows", rows)
    start, path = request.getfixturevalue(model), data("classification")
    for seeds in (1, 3):
        finetune(start, "classification", path, tmp_path / str(seeds), path, steps=2, seeds=seeds)
    assert sum(asked[: len(asked) // 2]) > 0
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]


def test_models_that_do_not_fit_the_task_are_refused(
    bert: Path, gpt: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path = data("classification")
    with pytest.raises(UsageError, match="auxiliary language model of GPT-1"):
        finetune(bert, "classification", path, tmp_path / "o", path, lm=0.5)
    with pytest.raises(UsageError, match=r"no option 'epoch'.* Did you mean 'epochs'"):
        finetune(bert, "classification", path, tmp_path / "o", path, epoch=2)
    with pytest.raises(UsageError, match="batch must be positive"):
        finetune(bert, "classification", path, tmp_path / "o", path, batch=0)
    with pytest.raises(UsageError, match="steps must not be negative"):
        finetune(bert, "classification", path, tmp_path / "o", path, steps=-1)
    with pytest.raises(UsageError, match="grid or several seeds, not both"):
        finetune(bert, "classification", path, tmp_path / "o", path, grid=True, seeds=2)
    with pytest.raises(UsageError, match=r"no classify head.*fine-tune it first"):
        evaluate(bert, "classification", path)
    with pytest.raises(MalmoiError, match="has no file"):
        finetune(bert, "sst2", tmp_path / "..", tmp_path / "o")
    finetune(bert, "classification", path, tmp_path / "yes", path, epochs=1)
    sst2 = tmp_path / "dev.tsv"
    sst2.write_text("sentence\tlabel\na\t1\n", "utf-8")
    with pytest.raises(
        UsageError, match=r"labels 0, 1; this model was fine-tuned to predict no, yes"
    ):
        evaluate(tmp_path / "yes", named_task("sst2"), sst2)


def test_a_very_long_text_is_truncated_with_a_note(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\n{'good ' * 20_000},1\n{'bad ' * 20_000},0\n,1\ngood,1\n", "utf-8")
    finetune(bert, "classification", path, tmp_path / "o", path, epochs=1)
    said = caplog.text
    assert "2 texts are longer than 64 tokens and are truncated" in said
    assert "1 empty text, the first at" in said


def test_the_commands(
    bert: Path, data: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from malmoi.cli import run_command

    path, out = data("classification"), tmp_path / "o"
    call = [
        "finetune",
        "classification",
        "--model",
        str(bert),
        "--data",
        str(path),
        "--dev",
        str(path),
    ]
    assert (
        run_command([*call, "--out", str(out), "--epochs", "1", "--set", "lr=1e-3", "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"accuracy", "f1_macro", "model", "protocol"}
    assert (told["protocol"]["selected_on"], told["protocol"]["judged_on"]) == (0, 48)
    assert (
        run_command(
            [
                "evaluate",
                "classification",
                "--model",
                str(out),
                "--data",
                str(path),
                "--text",
                "text",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("measure\tvalue\naccuracy\t")
    assert run_command(["tasks", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 20
    assert run_command([*call, "--out", str(out), "--text", "txt"]) == 1
    assert "has no column 'txt'. Did you mean 'text'?" in capsys.readouterr().err
    assert (
        run_command(
            [
                "finetune",
                "sst2",
                "--model",
                str(bert),
                "--data",
                str(path),
                "--out",
                str(out),
                "--text",
                "a",
            ]
        )
        == 2
    )
    assert "--text is for a kind" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [1e3, 1e12])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_is_far_too_high_ends_in_a_sentence_or_a_result(
    kind: str, rate: float, bert: Path, data: Callable[[str], Path], tmp_path: Path
) -> None:
    path, settings = data(kind), {**QUICK, "epochs": 2, "lr": rate, "clip": 0.0}
    try:
        done = finetune(bert, the_task(kind), path, tmp_path / "out", path, **settings)
    except MalmoiError as error:
        assert "diverged" in str(error)  # noqa: PT017  # both are right
    else:
        assert all(map(math.isfinite, done.metrics.values()))
