"""Commands: results on stdout, one sentence on stderr, the right exit code, never a traceback."""

import codecs
import contextlib
import csv
import gzip
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from typer.main import get_command
from typer.models import OptionInfo

import malmoi
from conftest import environment, standard_input
from malmoi.cli import run_command
from malmoi.cli.app import build_app
from malmoi.cli.bench import benchmarks
from malmoi.cli.finetune import task_and_files
from malmoi.cli.machines import EXTRAS
from malmoi.cli.predict import predictions
from malmoi.cli.recipes import approximate_parameters, with_vocab
from malmoi.cli.row_files import add_to_file
from malmoi.cli.shared import duration, whole_number
from malmoi.errors import UsageError
from malmoi.text.rows import any_rows
from malmoi.training.recipes import RECIPES
from tiny_models import tiny_bert, tiny_gpt

TEXTS = [
    "the state of the union is strong",
    "나는 오늘 학교에 갔다. 하늘이 맑다.",
    "a small model of small words",
] * 4
ROOT = Path(__file__).parents[2]
TINY = {"width": 32, "depth": 2, "heads": 2, "context": 48, "init_std": 0.3}


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def eighty_columns() -> Iterator[None]:
    with environment(COLUMNS="80"):
        yield


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process."""

    def calling(*arguments: object, stdin: str | bytes = b"") -> Done:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        with standard_input(content):
            code = run_command([str(a) for a in arguments])
        return Done(code, *capsys.readouterr())

    return calling


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpt(tmp_path_factory.mktemp("gpt"), TEXTS, 300, **TINY)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"), TEXTS, 120, **TINY)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sst2")
    two = dict(heads_of={"classify": 2}, labels=("negative", "positive"))
    return tiny_bert(folder, TEXTS, 120, **two, **TINY)


# ------------------------------------------------------------------ what the verbs print


def test_generate_streams_or_writes_json(call: Call, gpt: Path) -> None:
    same = ("--model", gpt, "--max-new-tokens", 8, "--seed", 3)
    alone = call("generate", *same, "the state")
    assert alone.code == 0
    assert call("generate", *same, stdin="the state\n").out == alone.out
    rows = [
        json.loads(line)
        for line in call("generate", *same, "--json", "the state", "a small").out.splitlines()
    ]
    assert [row["prompt"] for row in rows] == ["the state", "a small"]
    assert rows[0]["text"] + "\n" == alone.out
    several = call("generate", *same, "-n", 3, "the state")
    assert several.out.startswith(alone.out + "---\n")
    assert several.out.count("---\n") == 2


ASKED: dict[str, tuple[list[str], dict[str, object]]] = {  # options, and what Python calls them
    "beams": (
        ["--beams", "4", "--length-penalty", "0.3"],
        dict(beams=4, length_penalty=0.3, temperature=0),
    ),
    "drafts": (["--speculate"], dict(speculate=True, temperature=0)),
    "choices": (
        ["--choices", " yes, no,아마", "--seed", "1"],
        dict(choices=[" yes", " no", "아마"], seed=1),
    ),
    "a pattern": (
        ["--regex", "[0-9]{3}-[ab]+!", "--seed", "1"],
        dict(regex="[0-9]{3}-[ab]+!", seed=1),
    ),
    "penalties": (
        [
            "--frequency-penalty",
            "1.5",
            "--presence-penalty",
            "0.5",
            "--temperature",
            "0",
            "--min-tokens",
            "9",
        ],
        dict(frequency_penalty=1.5, presence_penalty=0.5, temperature=0, min_tokens=9),
    ),
    "a bias": (
        ["--logit-bias", "70=5", "--logit-bias", "71=-9", "--min-p", "0.2", "--seed", "1"],
        dict(logit_bias={70: 5.0, 71: -9.0}, min_p=0.2, seed=1),
    ),
    "banned words": (
        ["--banned", "D", "--banned", "\x10", "--temperature", "0"],
        dict(banned=["D", "\x10"], temperature=0),
    ),
}


@pytest.mark.parametrize("what", ASKED)
def test_generate_takes_the_options_of_python(call: Call, gpt: Path, what: str) -> None:
    import malmoi

    options, settings = ASKED[what]
    written = malmoi.load(gpt).generate("the state of the", max_new_tokens=24, **settings)
    same = ("generate", "--model", gpt, "--max-new-tokens", 24, *options, "the state of the")
    assert call(*same) == Done(0, f"{written}\n", "")


def test_a_default_folder_is_for_one_text(call: Call, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my.book.txt").write_text(f"{name} the state of the union\n" * 400)
    few = ("--steps", 2, "--set", "model.width=32", "--set", "model.heads=2")
    with contextlib.chdir(tmp_path):
        assert call("pretrain", "gpt-char", "a/my.book.txt", *few).code == 0
        again = call("pretrain", "gpt-char", tmp_path / "a" / "my.book.txt", *few)
        assert again.code == 0
        assert "runs/my.book" in again.err
        other = ("pretrain", "gpt-char", "b/my.book.txt", *few)
        refused(call(*other), 2, "runs/my.book holds a model of other text", "a/my.book.txt")
        assert call(*other, "--out", "runs/b").code == call(*other, "--overwrite").code == 0


def test_score_and_perplexity(call: Call, gpt: Path, workdir: Path) -> None:
    import malmoi

    lm = malmoi.load(gpt)
    done = call("score", "--model", gpt, "the state", " of", " union")
    logprobs = [float(line.split("\t")[0]) for line in done.out.splitlines()]
    assert logprobs == pytest.approx(
        [lm.score("the state", " of").logprob, lm.score("the state", " union").logprob], abs=1e-3
    )
    piped = call("score", "--model", gpt, "--json", stdin="the state\t of\n\nthe state\t union\n")
    assert [json.loads(line)["logprob"] for line in piped.out.splitlines()] == pytest.approx(
        logprobs, abs=1e-3
    )
    assert float(call("perplexity", "--model", gpt, TEXTS[0]).out) == pytest.approx(
        lm.perplexity(TEXTS[0]), abs=1e-3
    )
    bits = json.loads(
        call("perplexity", "--model", gpt, "--bits-per-byte", "--json", stdin=TEXTS[0] * 9).out
    )
    assert bits == {"bits_per_byte": pytest.approx(lm.bits_per_byte(TEXTS[0] * 9), rel=1e-5)}
    book = workdir / "book.txt.gz"
    book.write_bytes(gzip.compress(f"{TEXTS[0]}\n".encode()))
    same = call("perplexity", "--model", gpt, book, TEXTS[0]).out.splitlines()
    assert same[0] == same[1]
    refused(call("perplexity", "--model", gpt, "no-book.txt"), 2, "There is no file")
    assert call("score", "--model", gpt, "only a context").code == 2
    assert "no tab" in call("score", "--model", gpt, stdin="no tab here").err


def test_fill_embed_predict(call: Call, encoder: Path, classifier: Path, tmp_path: Path) -> None:
    done = call(
        "fill", "--model", encoder, "--top", 2, stdin="나는 [MASK] 갔다.\nthe [MASK] [MASK]\n"
    )
    assert [len(line.split("\t")) for line in done.out.splitlines()] == [3] * 6
    fills = json.loads(call("fill", "--model", encoder, "--json", "the [MASK]").out)["fills"]
    assert len(fills) == 1
    assert len(fills[0]) == 5
    lines = call("embed", "--model", encoder, "--layers=-2,-1", "a", "the state").out.splitlines()
    assert [len(line.split()) for line in lines] == [32, 32]
    assert call("embed", "--model", encoder, "--out", tmp_path / "v.npy", "a", "b").code == 0
    assert np.load(tmp_path / "v.npy").shape == (2, 32)
    vector = json.loads(call("embed", "--model", encoder, "--json", "--pool", "none", "a").out)[
        "vector"
    ]
    assert len(vector) == 3
    label, score, text = (
        call("predict", "--model", classifier, "small words").out.rstrip("\n").split("\t")
    )
    assert label in ("negative", "positive")
    assert 0.5 <= float(score) <= 1
    assert text == "small words"
    pair = json.loads(
        call("predict", "--model", classifier, "--pairs", "--json", stdin="a\tb\n").out
    )
    assert set(pair["prediction"]["scores"]) == {"negative", "positive"}


def test_tokenizers_are_trained_and_shown(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS), "utf-8")
    done = call(
        "tokenizer",
        "train",
        tmp_path / "text.txt",
        "--kind",
        "byte-bpe",
        "--vocab",
        280,
        "--out",
        tmp_path / "t",
    )
    assert done.code == 0, done.err
    shown = call("tokenizer", "show", "--tokenizer", tmp_path / "t", "the 하늘")
    assert shown.out.splitlines()[0].split("\t") == ["token", "id", "characters", "text"]
    cut = json.loads(
        call("tokenizer", "show", "--tokenizer", tmp_path / "t", "--json", stdin="the 하늘").out
    )
    assert len(cut["tokens"]) == len(cut["ids"]) == len(shown.out.splitlines()) - 1
    wrong = call(
        "tokenizer", "train", tmp_path / "text.txt", "--kind", "bite-bpe", "--out", tmp_path / "u"
    )
    assert wrong.code == 2
    assert "'byte-bpe'" in wrong.err
    assert call("tokenizer", "train", tmp_path / "nothing.txt", "--out", tmp_path / "u").code in (
        1,
        2,
    )
    assert not (tmp_path / "u").exists()


def test_recipes_and_doctor(call: Call) -> None:
    rows = [json.loads(line) for line in call("recipes", "--json").out.splitlines()]
    counts = {row["recipe"]: row["parameters"] for row in rows}
    assert set(RECIPES) == set(counts)
    assert counts["gpt2-small"] == 124_439_808
    assert counts["bert-base"] == 109_482_240
    assert "gpt2-small\t124M\t12 × 768\t1,024" in call("recipes").out
    for name, make in RECIPES.items():
        assert approximate_parameters(with_vocab(make())) == pytest.approx(counts[name], rel=0.02)
    for name, chosen in (("gpt", ("model.width",)), ("bert", ("model.width", "objective"))):
        settings = dict(
            line.split("\t")[:2] for line in call("recipes", name).out.split("\n")[3:-1]
        )
        assert {settings[one] for one in chosen} == {"auto"}
    shown = call("recipes", "bert-tiny").out
    assert "train.lr\t0.001\t" in shown
    assert "model.tied\tTrue\tThe vocabulary head reuses the token embedding." in shown
    found = json.loads(call("doctor", "--json").out)
    expected = {"python", "torch", "processor", "precision", "int8", "compiler"}
    assert expected | {"gpu", "memory", "disk", "tested on", "extras"} == set(found)
    assert f"torch {version('torch')}" in call("doctor").out


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS) == set(extras) - {"dev", "docs"}
    for name, modules in EXTRAS.items():
        packages = {re.split("[>[]", line)[0].replace("-", "_") for line in extras[name]}
        assert packages == set(modules)


# ------------------------------------------------------------------ what goes wrong


def broken(folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of a model's folder with something wrong in it."""
    copy = folder.parent / f"broken-{len(list(folder.parent.iterdir()))}"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy)
    return copy


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt22"}', "utf-8")


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def no_marks(folder: Path) -> None:
    """A tokenizer that does not say which of its tokens begins or ends a text, as GPT-1's."""
    (folder / "tokenizer_config.json").write_text("{}", "utf-8")
    words = json.loads((folder / "tokenizer.json").read_text("utf-8")) | {
        "added_tokens": [],
        "post_processor": None,
    }
    (folder / "tokenizer.json").write_text(json.dumps(words), "utf-8")


def refused(done: Done, code: int, *words: str) -> None:
    assert done.code == code, done
    assert done.out == ""
    assert done.err.startswith("malmoi: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("change", "word"), [(unknown_type, "'gpt22'"), (truncated, "model.safetensors")]
)
def test_broken_folders(call: Call, gpt: Path, change: Callable[[Path], object], word: str) -> None:
    refused(call("generate", "--model", broken(gpt, change), "the"), 1, word)


def test_wrong_requests(call: Call, gpt: Path, encoder: Path, tmp_path: Path) -> None:
    refused(call("generate", "--model", tmp_path / "nowhere", "the"), 2, "nowhere")
    refused(call("generate", "--model", gpt, "state union " * 60), 2, "context of 48")
    refused(call("generate", "--model", gpt, "--temperature", "-1", "the"), 2, "temperature")
    wrong = call("generate", "--model", gpt, "--top-k", "many", "the")
    refused(wrong, 2, "--top-k", ". See: malmoi generate --help")
    refused(call("generate", "--model", gpt, "--logit-bias", "a", "the"), 2, "50256=-100")
    refused(call("generate", "--model", gpt, "--device", "gpu", "the"), 2, "'gpu'")
    refused(call("generate", "--model", gpt, "--dtype", "fp33", "the"), 2, "'fp32'")
    refused(call("generate", "--model", encoder, "the"), 2, "cannot generate", "fill")
    refused(call("embed", "--model", encoder, "--layers", "last", "the"), 2, "'last'")
    refused(call("embed", "--model", encoder, "--pool", "men", "the"), 2, "'mean'")
    refused(call("fill", "--model", encoder, "no gap"), 2, "[MASK]")
    refused(call("predict", "--model", encoder, "a"), 2, "malmoi finetune rows.csv --model")
    refused(call("tokenizer", "show", "--tokenizer", tmp_path, "a"), 1, str(tmp_path))


def test_conflicting_options_are_refused(call: Call, gpt: Path) -> None:
    def asked(*options: object) -> Done:
        return call("generate", "--model", gpt, *options, "the")

    refused(asked("--beams", 3, "--temperature", 0.8), 2, "beams", "temperature=0")
    refused(asked("--beams", 3, "-n", 2), 2, "beams", "n=1")
    refused(asked("--speculate", "--choices", "a,b"), 2, "speculate", "constraint")
    refused(asked("--speculate", "--beams", 2), 2, "cannot be combined")
    refused(asked("--length-penalty", 0.8), 2, "--beams")
    refused(asked("--beams", 0), 2, "beams must be a whole number from 1 to 256")
    refused(asked("--choices", "yes,"), 2, "choices")
    refused(asked("--regex", "(a"), 2, "(a")


def test_empty_and_undecodable_input(call: Call, gpt: Path, encoder: Path) -> None:
    refused(call("generate", "--model", gpt, stdin=b""), 2, "empty")
    refused(call("embed", "--model", encoder, stdin=b" \n\n"), 2, "empty")
    refused(
        call("fill", "--model", encoder, stdin=b"ok\n\xb0\xa1 [MASK]"),
        2,
        "not UTF-8",
        "0xb0",
        "line 2",
        "iconv",
    )


def test_an_empty_prompt_reports_its_start_token(call: Call, gpt: Path, encoder: Path) -> None:
    same = ("generate", "--model", gpt, "--max-new-tokens", 3, "--temperature", 0)
    done = call(*same, "")
    assert done.code == 0
    assert done.err == "note: The prompt is empty, so the text starts after <|endoftext|>.\n"
    assert done.out == call(*same, "--parse-special", "<|endoftext|>").out
    assert call(*same, "--json", "the", "").err == done.err
    assert call(*same, "the").err == ""
    refused(call("generate", "--model", encoder, ""), 2, "cannot generate")
    refused(call("generate", "--model", broken(gpt, no_marks), ""), 2, "no token to start from")


def test_help_fits_eighty_columns_and_names_no_python_type(
    call: Call, eighty_columns: None
) -> None:
    screen = call().out
    assert max(len(line) for line in screen.splitlines()) <= 80
    panels = re.findall(r"─ ([A-Z][a-z ]+) ─", screen)
    assert panels == ["Options", "Train", "Use", "Evaluate", "Compress", "Serve", "This machine"]
    assert "Start with malmoi demo" in screen
    # one line a command
    for name in get_command(build_app()).commands:
        line = next(line for line in screen.splitlines() if line.startswith(f"│ {name} "))
        assert line.rstrip("│ ").endswith(".")
        shown = call(name, "--help").out
        assert not re.search(r"<(str|int|float|bool|path|list)", shown)


def test_the_outline_says_what_each_command_says_of_itself() -> None:
    whole, outline = (get_command(build_app(only)).commands for only in (None, "--help"))  # type: ignore[attr-defined]
    assert sorted(outline) == sorted(whole)
    for name, command in whole.items():
        assert outline[name].help == command.help.partition("\n")[0]
        assert outline[name].rich_help_panel == command.rich_help_panel


def test_every_option_has_its_name_written_out() -> None:
    """typer 0.27 called options without one --MINUTES, --KIND and --TASK, after their metavar."""
    written: list[object] = []
    for command in commands(get_command(build_app())):
        for parameter in inspect.signature(command.callback).parameters.values():
            if isinstance(parameter.default, OptionInfo):
                written.append((parameter.default.param_decls or ["none"])[0])
            for shared in getattr(parameter.annotation, "__metadata__", ()):
                written += [shared.default] if isinstance(shared, OptionInfo) else []
    assert len(written) > 300
    assert [name for name in written if not re.match("--[a-z][a-z-]*", str(name))] == []


def commands(group: Any) -> Iterator[Any]:
    yield group
    for command in getattr(group, "commands", {}).values():
        yield from commands(command)


def test_human_readable_numbers_and_durations_parse(call: Call, tmp_path: Path) -> None:
    assert [whole_number(text) for text in ("250", "10M", "1.5B", "2k", "1e3")] == [
        250,
        10_000_000,
        1_500_000_000,
        2000,
        1000,
    ]
    assert [duration(text) for text in ("3", "3m", "90s", "2h")] == [3, 3, 1.5, 120]
    (tmp_path / "a.txt").write_text("text", "utf-8")
    same = ("pretrain", "gpt-char", tmp_path / "a.txt", "--dry-run", "--json")
    made = json.loads(call(*same, "--tokens", "10M").out)
    assert made["recipe"]["train"]["tokens"] == 10_000_000
    assert (
        json.loads(call(*same, "--minutes", "90s", "--seed", 3).out)["recipe"]["train"]["seed"] == 3
    )
    assert len(call(*same[:-1]).out.splitlines()) <= 10
    refused(call(*same, "--tokens", "10Q"), 2, "--tokens", "10M or 1.5B")
    refused(call(*same, "--minutes", "soon"), 2, "--minutes", "90s")


def test_existing_output_is_overwritten_only_on_request(
    call: Call, encoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS), "utf-8")
    words = ("tokenizer", "train", tmp_path / "text.txt", "--vocab", 120, "-o", tmp_path / "t")
    vectors = ("embed", "-m", encoder, "-o", tmp_path / "v.npy", "a")
    for command in (words, vectors):
        assert call(*command).code == 0
        refused(call(*command), 2, "already exists", "--overwrite")
        assert call(*command, "--overwrite").code == 0


def test_a_shell_completes_names() -> None:
    def completed(words: str) -> list[str]:
        shell = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        environment = os.environ | {"_MALMOI_COMPLETE": "complete_bash", **shell}
        done = subprocess.run(
            [sys.executable, "-m", "malmoi"], env=environment, capture_output=True, text=True
        )
        return done.stdout.split()

    assert "finetune" in completed("malmoi fine")
    assert "gpt2-xl" in completed("malmoi pretrain gpt2")
    assert completed("malmoi finetune ss") == ["sst2"]


def test_unknown_names_offer_the_nearest(call: Call) -> None:
    refused(call("finetune", "clasification"), 2, "'classification'")
    refused(call("pretrain", "gpt2"), 2, "'gpt2-small'")
    refused(call("recipes", "gpt2"), 2, "'gpt2-large'")
    refused(call("tasks", "sst"), 2, "'sst2'")
    refused(call("genrate"), 2, "'generate'")
    refused(call("tokenizer", "trian"), 2, "'train'")
    refused(call("generate", "--modle", "x"), 2, "--model")
    refused(call("chat"), 2, "--model", "malmoi chat --help")
    assert "generate" in call().out
    assert call("--version").out.startswith("malmoi ")


def test_system_errors_give_a_clear_message(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: BaseException) -> Done:
        def disk_fails(path: Path) -> NoReturn:
            raise error

        monkeypatch.setattr("shutil.disk_usage", disk_fails)
        return call("doctor")

    refused(fails(OSError(28, "No space left on device", "/full")), 1, "The disk is full", "/full")
    refused(fails(ZeroDivisionError("by zero")), 1, "ZeroDivisionError", "--debug")
    assert fails(KeyboardInterrupt()).code == 130
    fails(ValueError("x"))
    assert "Traceback" in call("--debug", "doctor").err


# ------------------------------------------------------------------ as a process


def process(code: str, *arguments: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, encoding="utf-8"
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_help_imports_no_library_that_computes() -> None:
    """Which is what takes time; a clock would judge the machine."""
    code = (
        "import atexit, sys; from malmoi.cli import main; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    )
    done = process(code, "--help")
    assert done.code == 0
    assert "generate" in done.out
    loaded = set(done.err.split())
    assert not loaded & {
        "torch",
        "numpy",
        "tokenizers",
        "safetensors",
        "multiprocessing",
        "asyncio",
    }
    ours = sum(name.startswith("malmoi.") for name in loaded)
    assert ours < 90  # the commands, and the records of their settings


def test_a_closed_pipe_is_not_an_error() -> None:
    leaves = (
        "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from malmoi.cli import "
        "main; main()"
    )
    assert process(leaves, "--help") == Done(1, "", "")


def test_sigterm_ends_with_143() -> None:
    stopped = (
        "import os, signal; from malmoi.cli import app; "
        "app.run_command = lambda arguments: os.kill(os.getpid(), signal.SIGTERM) or "
        "signal.pause(); app.main()"
    )
    assert process(stopped) == Done(143, "", "")


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "--list"]) == 0
    assert {line.split("\t")[0] for line in capsys.readouterr().out.splitlines()} == set(
        benchmarks()
    )
    assert run_command(["bench", "decod"]) == 2
    assert "Did you mean 'decode'?" in capsys.readouterr().err


def test_the_table_of_benchmarks_knows_its_switches(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="the peers that benchmarks compare with")
    assert run_command(["bench", "--quick", "--without", "prefix,nothing"]) == 2
    assert "'nothing' is none of kernel, prefix, cache, screen, graphs" in capfd.readouterr().err


def test_a_figure_slower_than_its_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    shared = importlib.import_module("_shared")

    def rows(rate: float, seconds: float) -> list[Any]:
        rated = shared.Row("decoding", "tok/s", rate, "", spread=0.04)
        return [rated, shared.Row("loading", "s", seconds, "")]

    machine = {"device": "one chip"}
    kept = tmp_path / "recorded.json"
    shared.record_rows(machine, rows(100.0, 1.0), kept)
    assert shared.slower_than_recorded(machine, rows(93.0, 1.02), kept) == []  # within the spreads
    first, second = shared.slower_than_recorded(machine, rows(90.0, 1.1), kept)
    assert "decoding: 90 tok/s, 100 ± 4%" in first
    assert "loading: 1.1 s" in second
    assert shared.slower_than_recorded({"device": "another"}, rows(1.0, 9.0), kept) == []


JOBS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from _shared import run_jobs

def work(job):
    folder = Path(job["folder"])
    with (folder / "begun").open("a") as log:
        log.write(f"{job['name']} {os.getpid()}\\n")
    while job["name"] == "slow" and not (folder / "quick").exists():
        time.sleep(0.01)
    return {"figure": 1}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    jobs = {name: {"name": name, "folder": sys.argv[1]} for name in ("first", "slow", "last")}
    print(*run_jobs(work, jobs, folder, lanes=[None], fresh=True), file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed")
def test_killed_jobs_end_with_their_parent_and_continue_where_it_stopped(tmp_path: Path) -> None:
    script, begun = tmp_path / "jobs.py", tmp_path / "begun"
    script.write_text(JOBS)
    command = [sys.executable, str(script), str(tmp_path), str(Path(__file__).parents[2] / "bench")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 60
        while not (begun.exists() and "slow" in begun.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.kill()
    lane = int(begun.read_text().split()[-1])
    while Path(f"/proc/{lane}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{lane}").exists()  # it would write into the folder of the next
    (tmp_path / "quick").touch()
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.stderr.split() == ["first", "slow", "last"]
    assert [line.split()[0] for line in begun.read_text().splitlines()] == [
        *("first", "slow", "slow", "last")
    ]


@pytest.mark.heavy
def test_a_benchmark_compares_with_its_peer(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="the peers that benchmarks compare with")
    assert run_command(["bench", "decode", "--limit", "tiny"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {row["peer"] for row in told["rows"]} == {"transformers fp32"}
    assert all(min(row["ours"], row["theirs"], row["ratio"]) > 0 for row in told["rows"])


def test_benchmarks_need_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("malmoi.cli.bench.FOLDER", tmp_path / "bench")
    assert run_command(["bench"]) == 2
    assert "not part of the installed package" in capsys.readouterr().err


def test_predict_writes_every_row_of_a_file(call: Call, classifier: Path, tmp_path: Path) -> None:
    data = tmp_path / "new.csv"
    data.write_text('id,words of it\n1,"small, words"\n2,\n3,the state\n', "utf-8")
    done = call("predict", "-m", classifier, "--data", data)
    assert done.out == f"{tmp_path}/new.predicted.csv: 3 rows\n"
    assert "text = words of it\n" in done.err
    assert "1 of the first 3 rows have no text; nothing is added to these." in done.err
    written = (tmp_path / "new.predicted.csv").read_text("utf-8")
    rows = list(csv.DictReader(written.splitlines()))
    assert [row["words of it"] for row in rows] == ["small, words", "", "the state"]
    assert [rows[1][name] for name in ("prediction", "score", "p_negative")] == ["", "", ""]
    alone = call("predict", "-m", classifier, "small, words").out.split("\t")
    assert [rows[0]["prediction"], f"{float(rows[0]['score']):.4f}"] == alone[:2]
    assert float(rows[0]["p_negative"]) + float(rows[0]["p_positive"]) == pytest.approx(1, abs=1e-4)
    same = ("predict", "-m", classifier, "--data", data, "--text", "words of it")
    assert call(*same, "-o", tmp_path / "new.jsonl").code == 0
    lines = (tmp_path / "new.jsonl").read_text("utf-8").splitlines()
    assert set(json.loads(lines[0])["probabilities"]) == {"negative", "positive"}
    assert isinstance(json.loads(lines[0])["score"], float)
    refused(call(*same, "-o", tmp_path / "new.jsonl"), 2, "--overwrite")
    refused(call(*same[:-1], "words", "--overwrite"), 2, "Did you mean 'words of it'?")
    refused(call("embed", data), 2, "holds rows: --out")
    text = tmp_path / "lines.txt"
    text.write_text("the state\nof the union\n", "utf-8")
    refused(call("predict", "-m", classifier, text), 2, "has lines, not columns")
    for wrong in ([tmp_path / "knew.csv"], ["--data", tmp_path / "knew.csv"]):
        refused(call("predict", "-m", classifier, *wrong), 2, "There is no file", "new.csv'?")


def test_a_workbook_is_predicted(call: Call, classifier: Path, tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="the package that reads Excel")
    book = openpyxl.Workbook()
    for row in (("n", "text"), (1, "the state"), (2, None), (3, "small words")):
        book.active.append(row)
    book.save(tmp_path / "new.xlsx")
    assert call("predict", "-m", classifier, tmp_path / "new.xlsx").code == 0
    sheet = openpyxl.load_workbook(tmp_path / "new.predicted.xlsx").active
    header, *rows = sheet.iter_rows(values_only=True)
    assert header[:4] == ("n", "text", "prediction", "score")
    assert [row[:2] for row in rows] == [(1, "the state"), (2, None), (3, "small words")]
    wanted = [one.label for one in malmoi.load(classifier).predict(["the state", "small words"])]  # type: ignore[union-attr]
    assert [row[2] for row in rows] == [wanted[0], None, wanted[1]]
    assert isinstance(rows[0][3], float)


def test_tables_of_every_kind_are_predicted(call: Call, classifier: Path, tmp_path: Path) -> None:
    """The same rows from each format, also quoted and with semicolons; and the same out of each."""
    pandas = pytest.importorskip("pandas", reason="a peer that writes tables")
    texts = ['small "words"; a\ttab', "the state,\nof the union", "plain"]
    table = pandas.DataFrame({"text": texts, "n": [1, 2, 3]})
    table.to_csv(tmp_path / "comma.csv", index=False)
    table.to_csv(tmp_path / "semicolon.csv", index=False, sep=";")
    table.to_csv(tmp_path / "quoted.tsv", index=False, sep="\t")
    table.to_json(tmp_path / "lines.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "table.parquet")
    wanted = [one.label for one in malmoi.load(classifier).predict(texts)]  # type: ignore[union-attr]
    for name in ("comma.csv", "semicolon.csv", "quoted.tsv", "lines.jsonl", "table.parquet"):
        done = call("predict", "-m", classifier, tmp_path / name)
        assert done.code == 0, done.err
        out = tmp_path / name.replace(".", ".predicted.")
        rows = [row.checked for row in any_rows(out)]
        assert [row["text"] for row in rows] == texts, name
        assert [row["prediction"] for row in rows] == wanted, name
    assert (tmp_path / "semicolon.predicted.csv").read_bytes().startswith(b"text;n;prediction;")
    bare = tmp_path / "glue.tsv"
    bare.write_text('text\tn\n"open quote\t1\nan "inner" one\t2\n', "utf-8")
    assert [row.text("text") for row in any_rows(bare)] == ['"open quote', 'an "inner" one']
    new = ("-o", tmp_path / "new.csv")
    missing = call("predict", "-m", classifier, tmp_path / "table.parquet", "--text", "txt", *new)
    refused(missing, 2, "table.parquet has no column 'txt'", "Did you mean 'text'?")


def test_excel_opens_a_predicted_csv(call: Call, classifier: Path, tmp_path: Path) -> None:
    """Without a byte-order mark it garbles Korean; pandas and our own readers take both."""
    pandas = pytest.importorskip("pandas", reason="a peer that reads tables")
    data = tmp_path / "new.csv"
    data.write_text("본문,n\n작은 말,1\n나라,2\n", "utf-8")
    assert call("predict", "-m", classifier, data).code == 0
    out = tmp_path / "new.predicted.csv"
    assert out.read_bytes().startswith(codecs.BOM_UTF8)
    assert list(pandas.read_csv(out)["본문"]) == ["작은 말", "나라"]
    assert [row["본문"] for row in any_rows(out)] == ["작은 말", "나라"]
    assert call("predict", "-m", classifier, data, "-o", tmp_path / "new.tsv").code == 0
    assert (tmp_path / "new.tsv").read_text("utf-8").startswith("본문\tn\tprediction\t")


def test_a_stopped_prediction_is_resumed(call: Call, classifier: Path, tmp_path: Path) -> None:
    data = tmp_path / "many.csv"
    data.write_text("text\n" + "".join(f"word {i}\n" for i in range(2500)), "utf-8")
    out = tmp_path / "out.csv"
    model = malmoi.load(classifier)
    predict = model.predict
    calls: list[int] = []

    def killed(texts: Any) -> Any:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return predict(texts)

    model.predict = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        add_to_file(predictions(model), data, out, {"text": "text"})
    assert not out.exists()
    with (tmp_path / "out.csv.partial").open("a") as file:
        file.write('{"prediction": "neg')  # a line that the kill cut
    assert add_to_file(predictions(model), data, out, {"text": "text"}) == 2500
    assert calls == [1000, 1000, 1000, 500]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.csv", "out.csv"]
    whole = tmp_path / "whole.csv"
    add_to_file(predictions(malmoi.load(classifier)), data, whole, {"text": "text"})
    assert whole.read_bytes() == out.read_bytes()


STORY = ",".join(
    ["InputStoryid", *(f"InputSentence{i}" for i in range(1, 5))]
    + [f"RandomFifthSentenceQuiz{i}" for i in (1, 2)]
)
# a task, a file of its own format without labels, and what the model must read of its first row
OWN_FORMATS: dict[str, tuple[str, str, Any]] = {
    "snli": (
        "a.jsonl",
        '{"gold_label": "-", "sentence1": "strong", "sentence2": "small"}\n',
        ("strong", "small"),
    ),
    "scitail": ("a.tsv", "a small\tmodel\tneutral\n" * 2, ("a small", "model")),
    "story-cloze": (
        "a.csv",
        f"{STORY}\nx,The,state,of,the,union,model\n",
        ("The state of the", ("union", "model")),
    ),
    "korquad": (
        "a.json",
        '{"data": [{"paragraphs": [{"context": "하늘이 맑다.", "qas": '
        '[{"id": "1", "question": "하늘이?"}]}]}]}',
        ("하늘이?", "하늘이 맑다."),
    ),
}


@pytest.mark.parametrize("task", OWN_FORMATS)
def test_predict_reads_the_format_of_the_models_task(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, wanted = OWN_FORMATS[task]
    heads: dict[str, Any] = {
        "story-cloze": {"choice": 1}, "korquad": {"span": 2}
    }.get(task, {"classify": 3})  # fmt: skip
    labels = ("a", "b", "c") if "classify" in heads else ()
    folder = tiny_bert(tmp_path / "bert", TEXTS, 200, heads_of=heads, labels=labels, **TINY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"malmoi": {"task": task}}))
    data = tmp_path / name
    data.write_text(content, "utf-8")
    model = malmoi.load(folder, device="cpu")
    out = tmp_path / "out.jsonl"
    add_to_file(predictions(model), data, out, {})
    found = json.loads(out.read_text("utf-8").splitlines()[0])
    answer: Any = model.predict(wanted)
    expected = answer.label if hasattr(answer, "label") else answer.text
    score = answer.scores[expected] if hasattr(answer, "scores") else answer.score
    assert (found["prediction"], found["score"]) == (expected, round(score, 4))
    if task == "story-cloze":
        assert list(found["probabilities"]) == ["1", "2"]
    if task == "snli":
        data.with_suffix(".csv").write_text("text\nstrong\n")
        with pytest.raises(UsageError, match="no column 'sentence1', which this model reads"):
            add_to_file(predictions(model), data.with_suffix(".csv"), out, {})


def test_a_folder_may_have_the_name_of_its_task(tmp_path: Path) -> None:
    (tmp_path / "snli").mkdir()
    with contextlib.chdir(tmp_path):
        assert task_and_files(["snli", "snli"], None) == ("snli", [Path("snli")])
