"""The public functions: their examples run, their types are exact, a wrong option is refused."""

import ast
import doctest
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir
from inspect import signature
from pathlib import Path
from typing import Any, Unpack

import pytest
from mypy import api as mypy

import malmoi
from malmoi.evaluation.tasks import TASKS
from malmoi.inference import Prediction
from malmoi.metrics import METRICS
from malmoi.model import PATTERNS
from malmoi.training.losses import OBJECTIVES
from malmoi.training.recipe import OBJECTIVE_SAMPLES, SCHEDULES
from tiny_runs import KINDS, write_corpus

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "user_script.py"
PAGES = ("README.md", "docs/guide.md")
LENIENT = "allow-untyped-defs, allow-incomplete-defs"
NAMES = [name for name in malmoi.__all__ if not name.startswith("_")]
REVIEWS = ["free and strong,good", "of the law,bad"] * 6


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the examples have it: a text, rows, and three small models."""
    folder = tmp_path_factory.mktemp("workshop")
    book = write_corpus(folder / "book.txt")
    rows = folder / "reviews.csv"
    rows.write_text("text,label\n" + "\n".join(REVIEWS) + "\n", "utf-8")
    for kind in ("gpt", "bert"):
        recipe, settings = KINDS[kind]
        settings = {**settings, "model.context": 128, "steps": 2}
        malmoi.pretrain(
            recipe, data=book, out=folder / f"runs/tiny-{kind}", device="cpu", settings=settings
        )
    malmoi.finetune(
        folder / "runs/tiny-bert",
        "classification",
        rows,
        folder / "runs/reviews",
        rows,
        steps=1,
        device="cpu",
    )
    return folder


@pytest.fixture(autouse=True)
def only_our_own_names() -> Iterator[None]:
    """Names that an example registers are forgotten after it."""
    yield
    for registry in (TASKS, METRICS, SCHEDULES, PATTERNS, OBJECTIVES, OBJECTIVE_SAMPLES):
        for name in list(registry.origins):
            del registry[name], registry.origins[name]  # type: ignore[attr-defined]


class AnyText(doctest.OutputChecker):
    """'...' stands for any text, in quotation marks of either kind."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if want == "'...'\n":
            return isinstance(ast.literal_eval(got), str)
        return super().check_output(want, got, optionflags)


@pytest.mark.parametrize("name", ["malmoi", *NAMES])
def test_the_example_of_each_name_runs(
    name: str, workshop: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    documented = malmoi if name == "malmoi" else getattr(malmoi, name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    example = doctest.DocTestParser().get_doctest(
        documented.__doc__ or "", {"malmoi": malmoi}, name, None, 0
    )
    assert example.examples, f"malmoi.{name} has no example"
    printed: list[str] = []
    with chdir(workshop):
        done = doctest.DocTestRunner(AnyText(), optionflags=flags).run(example, out=printed.append)
    assert not done.failed, "".join(printed)
    if "Traceback" not in (documented.__doc__ or ""):
        assert capfd.readouterr() == ("", "")  # a library user sees no prints


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of a user's script and of the pages' snippets, by file. The settings are those
    of the gate, so that it begins with the gate's cache. Functions in snippets need no annotations.
    """
    folder = tmp_path_factory.mktemp("snippets")
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)):
            name = f"{Path(page).stem.lower()}_{i}.py"
            (folder / name).write_text(f"# mypy: {LENIENT}\n{code}", "utf-8")
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--show-absolute-path"]
    settings.append(f"--cache-dir={ROOT / '.mypy_cache'}")
    said, wrong, _ = mypy.run([*settings, str(SCRIPT), *map(str, sorted(folder.iterdir()))])
    assert not wrong
    lines = [line for line in said.splitlines() if ".py:" in line]
    by_file: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        path = Path(line.partition(":")[0])
        by_file["script" if path == SCRIPT else "snippets"].append(line)
    return by_file


def test_the_pages_snippets_are_typed(checked: dict[str, list[str]]) -> None:
    """A reader's editor finds no mistake in them."""
    assert checked["snippets"] == []


def test_no_public_function_returns_any(checked: dict[str, list[str]]) -> None:
    revealed = [line for line in checked["script"] if "Revealed type is" in line]
    assert len(revealed) == SCRIPT.read_text("utf-8").count("reveal_type(")
    assert [line for line in revealed if re.search(r"\bAny\b", line)] == []


def test_a_misspelt_option_is_an_error_in_the_editor(checked: dict[str, list[str]]) -> None:
    mistakes = [line for line in checked["script"] if ": error: " in line]
    script = SCRIPT.read_text("utf-8").splitlines()
    begin = script.index("# mistakes that an editor shows") + 2
    assert sorted({int(line.split(":")[1]) for line in mistakes}) == [
        *range(begin, len(script) + 1)
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: malmoi.pretrain("gpt-char", data="x", out="y", minuts=3), "'minuts'.*'minutes'"),
        (lambda: malmoi.finetune("x", "sst2", "y", "z", epoch=2), "'epoch'.*'epochs'"),
        (lambda: malmoi.evaluate("x", "sst2", "y", seeds=2), "'seeds'.*'seed'"),
        (lambda: malmoi.compress("x", "y", bit=4), "'bit'.*'bits'"),
        (lambda: malmoi.compress("x", "y", "prun"), "'prun'.*'prune'"),
        (lambda: malmoi.plan("gpt2-small", prise=2), "'prise'.*'price'"),
        (lambda: malmoi.build_corpus(["x"], "y", worker=2), "'worker'.*'workers'"),
        (lambda: malmoi.serve("x", prot=1), "'prot'.*'port'"),
        (lambda: malmoi.study("in-context", data=["x"], out="y", seed=1), "'seed'.*'seeds'"),
        (lambda: malmoi.export("x", "model.onx"), "'onx'.*'onnx'"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest(call: Any, said: str) -> None:
    with pytest.raises(malmoi.UsageError, match=said):
        call()


def test_a_result_reads_well_and_becomes_plain_values(workshop: Path) -> None:
    score = malmoi.score(workshop / "runs/tiny-gpt", "The state", " of")
    assert re.fullmatch(r"Score\(logprob=-\d+\.?\d*, tokens=.*, greedy=(True|False)\)", repr(score))
    assert score.to_dict()["tokens"] == list(score.tokens)
    assert score.to_dict()["logprob"] == score.logprob


def test_progress_and_status_of_a_run(
    workshop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[malmoi.Progress] = []
    recipe, settings = KINDS["gpt"]
    malmoi.pretrain(
        recipe,
        data=workshop / "book.txt",
        out=tmp_path,
        steps=3,
        device="cpu",
        settings=settings,
        progress=events.append,
    )
    steps = [event for event in events if event.verb == "pretrain"]
    assert [(event.done, event.total, event.unit) for event in steps][-1] == (3, 3, "steps")
    assert steps[-1].metrics["loss"] > 0
    assert "encode" in {event.verb for event in events}
    assert "Training a byte-bpe tokenizer" in caplog.text
    assert all(record.name.startswith("malmoi.") for record in caplog.records)
    assert logging.getLogger("malmoi").level == logging.NOTSET


# ------------------------------------------------------------------ rows, help, starting over


@pytest.mark.parametrize("kind", ["dicts", "pandas", "datasets"])
def test_rows_in_memory_are_learnt_evaluated_and_predicted(
    kind: str, workshop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The columns are guessed, and the model is that of the same rows in a file."""
    caplog.set_level(logging.INFO, "malmoi")
    rows: Any = [dict(zip(("review", "stars"), row.split(","), strict=True)) for row in REVIEWS]
    if kind == "pandas":
        rows = pytest.importorskip("pandas", reason="a DataFrame is optional").DataFrame(rows)
    if kind == "datasets":
        module = pytest.importorskip("datasets", reason="a Dataset is optional")
        rows = module.Dataset.from_list(rows).class_encode_column("stars")
    tuned = malmoi.finetune(
        workshop / "runs/tiny-bert", data=rows, out=tmp_path, dev=rows, steps=1, device="cpu"
    )
    assert "classification: text = review, label = stars (2 labels), baseline 50%" in caplog.text
    weights = malmoi.load(workshop / "runs/reviews").network.state_dict()
    for name, tensor in tuned.model.network.state_dict().items():
        assert tensor.equal(weights[name]), name
    assert malmoi.evaluate(tmp_path, data=rows) == {**tuned.metrics, "examples": 12}
    first = malmoi.predict(tmp_path, rows)[0]
    assert isinstance(first, Prediction)
    assert first.label in ("good", "bad")


def test_a_file_is_predicted_by_its_path_and_not_by_its_name(workshop: Path) -> None:
    model = malmoi.load(workshop / "runs/reviews")
    file = workshop / "reviews.csv"
    assert model.predict(file) == model.predict([row.split(",")[0] for row in REVIEWS])
    with pytest.raises(malmoi.UsageError, match=r"is a file; .* predict\(pathlib\.Path\("):
        malmoi.predict(model, str(file))
    assert malmoi.predict(model, "free", malmoi.Prediction).label in ("good", "bad")
    with pytest.raises(malmoi.UsageError, match="predicts Prediction, not Answer"):
        malmoi.predict(model, ["free"], malmoi.Answer)
    with pytest.raises(malmoi.UsageError, match=r"splits: data\['train'\]"):
        malmoi.evaluate(model, data={"train": [{"text": "a", "label": "good"}]})  # type: ignore[call-overload]


def test_help_lists_every_option_with_what_it_does() -> None:
    assert "seeds" in signature(malmoi.finetune).parameters
    assert signature(malmoi.pretrain).parameters["minutes"].annotation is float
    said = malmoi.pretrain.__doc__ or ""
    assert "\n        overwrite: Discard what the output already has and start over." in said
    assert "\n        mask_rate: Share of the tokens that are predicted (MLM)." in said
    assert "\n        decay: Weight decay; default: 0.01." in (malmoi.finetune.__doc__ or "")


def test_overwrite_starts_a_run_over(workshop: Path, tmp_path: Path) -> None:
    def train(**options: Unpack[malmoi.PretrainOptions]) -> malmoi.Model:
        recipe, settings = KINDS["gpt"]
        return malmoi.pretrain(
            recipe,
            data=workshop / "book.txt",
            out=tmp_path,
            steps=1,
            device="cpu",
            settings=settings,
            **options,
        )

    train(seed=1)
    with pytest.raises(malmoi.UsageError, match=r"start over with --overwrite \(overwrite=True\)"):
        train(seed=2)
    train(seed=2, overwrite=True)
    assert malmoi.Recipe.from_json((tmp_path / "recipe.json").read_text()).train.seed == 2


def test_a_text_with_several_masks_is_for_fill_masks(workshop: Path) -> None:
    model = malmoi.load(workshop / "runs/tiny-bert")
    with pytest.raises(malmoi.UsageError, match=r"has 2 masks, .*: use fill_masks"):
        model.fill("the [MASK] of [MASK]")
    assert len(model.fill_masks("the [MASK] of [MASK]", top=3)) == 2


def test_a_callback_sees_the_metrics_and_can_end_a_run(workshop: Path, tmp_path: Path) -> None:
    seen: list[malmoi.Progress] = []

    def until_the_third(event: malmoi.Progress) -> None:
        seen.append(event)
        if event.verb == "pretrain" and event.done == 3:
            event.stop()

    recipe, settings = KINDS["gpt"]
    run = {"data": workshop / "book.txt", "out": tmp_path / "gpt", "device": "cpu"}
    for callback, steps in ((until_the_third, 3), (None, 6)):  # the same call resumes
        malmoi.pretrain(recipe, steps=6, settings=settings, progress=callback, **run)  # type: ignore[arg-type]
        rows = (tmp_path / "gpt" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["step"] == steps
    assert [event.metrics["valid_loss"] > 0 for event in seen if event.verb == "validate"] == [True]
    tuned = malmoi.finetune(
        workshop / "runs/tiny-bert",
        data=workshop / "reviews.csv",
        out=tmp_path / "bert",
        epochs=9,
        device="cpu",
        progress=lambda event: event.stop() if event.verb == "finetune" else None,
    )
    assert tuned.steps == 1
    assert "accuracy" in tuned.metrics  # what it has learnt so far is evaluated


def test_a_notebook_shows_small_escaped_tables(workshop: Path) -> None:
    model = malmoi.load(workshop / "runs/reviews")
    for thing in (model, model.tokenizer, model.predict("free")):
        shown = thing._repr_html_()  # type: ignore[union-attr]
        assert shown.startswith("<b>")
        assert "http" not in shown
        assert "<script" not in shown
    assert "can</td>" in model._repr_html_()
    made = Prediction("<b>&", {"<b>&": 0.75, "good": 0.25})
    assert made._repr_html_().count("&lt;b&gt;&amp;") == 2
    assert "width:75px" in made._repr_html_()
