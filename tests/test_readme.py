"""What the README and the guide promise: every command parses, every name exists, both languages
say the same; and, with `-m heavy`, every line runs.

A fenced block of `sh` or `python` is meant to run as it is; anything else is fenced `text`.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

import malmoi
from conftest import korean_bills
from malmoi.cli.app import build_app, run_command
from malmoi.inference.generation.keywords import GenerationSettings
from malmoi.text.documents import read_documents

ROOT = Path(__file__).parents[1]
SHORT = tuple(
    str(page.relative_to(ROOT))
    for folder in ("ideas", "recipes")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
)
PAGES = (
    "README.md",
    "docs/features.md",
    "docs/guide.md",
    "CONTRIBUTING.md",
    "docs/newcomers.md",
    *SHORT,
)
PAIRS = tuple((f"{page}.md", f"{page}.ko.md") for page in ("README", "docs/features", "docs/guide"))
RESULTS = tuple(f"docs/results/{page.name}" for page in (ROOT / "docs" / "results").glob("*.md"))
LINKING = (
    *PAGES,
    *RESULTS,
    *(korean for _, korean in PAIRS),
    "docs/architecture.md",
    "docs/performance.md",
    "docs/decisions.md",
    "CHANGELOG.md",
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The words after `malmoi` of every line that calls it, under `torchrun` and after a pipe
    too.
    """
    lines = (line for block in blocks(page, "sh") for line in block.splitlines())
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("malmoi") + 1 :] for line in words if "malmoi" in line]


COMMANDS = [
    pytest.param(words, id=" ".join(words)[:60]) for page in PAGES for words in commands(page)
]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that these words call and its values, by the app's own parser; nothing is run."""
    command: Any = get_command(build_app())
    name = "malmoi"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    return name, command.make_context(name, list(words)).params


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_pages_parses(words: list[str]) -> None:
    if "--help" in words:
        with pytest.raises(typer.Exit):
            parsed(words)
        return
    name, values = parsed(words)
    if name == "pretrain":
        from malmoi.cli.shared import changes_of
        from malmoi.training.recipes import RECIPES, resolve_recipe

        budget = {n: values[n] for n in ("minutes", "tokens", "steps") if values[n] is not None}
        for recipe in RECIPES.keys() & set(values["words"]):
            resolve_recipe(recipe, changes_of(values["settings"]) | budget)


def test_the_readme_is_short() -> None:
    assert (
        len(re.sub(r"^```text.*?^```$", "", text_of("README.md"), flags=re.M | re.S).split()) <= 900
    )


def test_the_features_show_every_command() -> None:
    app: Any = get_command(build_app())
    shown = {words[0] for words in commands("docs/features.md") if words}
    assert set(app.commands) - {"demo"} <= shown  # `make demo` is the first line of all


# ------------------------------------------------------------------ Python


SNIPPETS = [
    pytest.param(code, id=f"{page}:{i}")
    for page in PAGES
    for i, code in enumerate(blocks(page, "python"), start=1)
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_compiles_and_its_names_exist(code: str) -> None:
    tree = ast.parse(code)
    for module, name in imported(tree):
        assert hasattr(import_module(module), name), f"{module} has no {name}"
    models = set(bound_to_models(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"malmoi": malmoi}.get(
                node.value.id, malmoi.Model if node.value.id in models else None
            )
            assert owner is None or hasattr(owner, node.attr), f"{node.value.id} has no {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            check_keywords(node, models)


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "malmoi":
            yield from ((str(node.module), alias.name) for alias in node.names)


def bound_to_models(tree: ast.Module) -> Iterator[str]:
    """Variables that hold what `malmoi.load` or `malmoi.pretrain` returned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(
            ("malmoi.load(", "malmoi.pretrain(")
        ):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def check_keywords(call: ast.Call, models: set[str]) -> None:
    """A keyword of a method of a model is one that it takes."""
    function = call.func
    assert isinstance(function, ast.Attribute)
    if isinstance(function.value, ast.Name) and function.value.id in models:
        taken = {
            *signature(getattr(malmoi.Model, function.attr)).parameters,
            *GenerationSettings.__annotations__,
        }
        assert {str(keyword.arg) for keyword in call.keywords} <= taken


# ------------------------------------------------------------------ languages and links


@pytest.mark.parametrize(("english", "korean"), PAIRS)
@pytest.mark.parametrize("language", ["sh", "python"])
def test_both_languages_have_the_same_code(english: str, korean: str, language: str) -> None:
    assert blocks(english, language)
    assert blocks(english, language) == blocks(korean, language)


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(page))
    commands: Any = get_command(build_app())
    made = {f"{name}.md" for name in commands.commands}  # pages that tools/site_commands.py makes
    missing = [
        target
        for target in targets
        if not (ROOT / page).parent.joinpath(target).exists()
        and not ("commands/" in target and target.rpartition("/")[2] in made)
    ]
    assert not missing


# ------------------------------------------------------------------ run, line by line

# what makes a line small enough for a test
SMALLER = (
    (r"builtin:sotu", "small.txt"),
    (r"bills\.ko\.txt", "small.ko.txt"),
    (r"--minutes \d+", "--minutes 3s"),
    (r"minutes=\d+", "minutes=0.05"),
    (r"--steps \d+", "--steps 2"),
    (r"--epochs \d+", "--epochs 1"),
    (r"--limit \d+", "--limit 3"),
    (r"--vocab \d+", "--vocab 600"),
    (r"malmoi study in-context", "malmoi study in-context --scale tiny"),
    (r" --open", ""),
)
SETUP = ("make ", "pip ", ". ")  # done before a test can run
# files that the pages name and do not make, and what comes of them
NOT_PROVIDED = ("SmolLM2-135M-Instruct.gguf", "train.en", "runs/en-de", "captions", "runs/answers")
DEMO = """
from malmoi.demo.demo import run_demo
from malmoi.demo.story import DemoConfig
size = {"model.width": 128, "model.depth": 2, "model.context": 128, "train.batch": 4}
run_demo("demo", DemoConfig(3, 3, settings=size, updates=8, seeds=1, labelled=64, judged=32))
"""


def steps_of(page: str) -> Iterator[tuple[str, str]]:
    """What the page asks a reader to run, in order: (language, code)."""
    for language, code in re.findall(
        r"^```(sh|python)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL
    ):
        if language == "python":
            yield language, code
            continue
        for line in code.splitlines():
            if not line.startswith(SETUP) and not any(file in line for file in NOT_PROVIDED):
                yield language, line


def smaller(code: str) -> str:
    for pattern, replacement in SMALLER:
        code = re.sub(pattern, replacement, code)
    return code


QUICK = ("--help", "tasks", "recipes", "records", "plan", "--list")


@pytest.mark.parametrize(
    "line",
    [
        line
        for language, line in steps_of("docs/features.md")
        if language == "sh" and line.split()[0] == "malmoi" and set(line.split()) & set(QUICK)
    ],
)
def test_a_line_that_needs_no_training_runs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", ["README.md", "docs/features.md", "docs/guide.md", *SHORT])
def test_every_line_runs_in_order_from_a_clean_clone(page: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    folder = tmp_path / "reader"
    (folder / "guide").mkdir(parents=True)
    sotu = [document.text for document in read_documents("builtin:sotu")]
    (folder / "small.txt").write_text("\n\n\n".join(sotu[:12]), "utf-8")
    (folder / "small.ko.txt").write_text("\n\n".join(korean_bills(200)), "utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(clone / "src"),
        "PATH": path,
        "MALMOI_LANG": "en",
    }
    first = [] if page in SHORT else [("python", DEMO)]
    for language, code in [*first, *steps_of(page)]:
        run_step(language, smaller(code), folder, environment)
    assert page in SHORT or (folder / "demo" / "report.html").is_file()


def run_step(language: str, code: str, folder: Path, environment: dict[str, str]) -> None:
    """Runs a line or a snippet as a reader would; a server until it answers."""
    words = [sys.executable, "-c", code] if language == "python" else shlex.split(code)
    if words[:2] == ["malmoi", "serve"]:
        serve(words, folder, environment)
        return
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr, code


def serve(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    command = [*words, "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        address = next(
            found[0] for line in server.stderr if (found := re.search(r"http://[^ ]+", line))
        )
        try:
            with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
                assert answer.status == 200
        finally:
            server.terminate()
