"""`malmoi bench`: Malmoi and other libraries, measured in one run."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from malmoi.cli import shared as cli
from malmoi.errors import require_known, require_that

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
FOLDER = Path(__file__).parents[3] / "bench"  # beside src/, in a copy of the repository alone


def bench_command(
    ctx: typer.Context,
    name: str | None = cli.argument(
        None,
        "Benchmark to run, followed by its own options; omit it for one table of all hot paths.",
        metavar="[NAME]",
    ),
    list_: bool = cli.option(False, "List the benchmarks and what they compare.", "--list"),
    gpu: bool = cli.option(False, "Benchmark the GPU.", "--gpu"),
) -> None:
    """Benchmark Malmoi against other libraries on this machine.

    Without a name, prints one table of all hot paths next to other installed libraries and the
    limits of this machine. Its options: --quick, --rows decode predict, --without prefix,cache
    (graphs,kernel with --gpu), --cpu-time on a busy machine.

    The other libraries must be installed: pip install transformers accelerate

    Example: malmoi bench decode --quick
    """
    known = benchmarks()
    if list_:
        for each, about in known.items():
            typer.echo(f"{each}\t{about}")
        return
    # without a name, the table's first option is read as one
    arguments = [*filter(None, [name]), *ctx.args]
    named = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if named:
        require_known(
            named, known, "There is no benchmark {name!r}.{hint} `malmoi bench --list` lists them."
        )
    require_that(
        find_spec("transformers") is not None,
        "The libraries to compare with are not installed: pip install transformers accelerate",
    )
    if named:
        cli.say(f"{named}: {known[named]}")
    command = [sys.executable, *_script(named, arguments, gpu)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _script(named: str, arguments: list[str], gpu: bool) -> list[str]:
    """The script to run and its arguments: a script of that name, or a row of the table."""
    table = str(FOLDER / ("gpu_table.py" if gpu else "table.py"))
    script = FOLDER / f"{named}.py"
    if named and script.is_file():
        return [str(script), *arguments[1:], *(["--gpu"] if gpu else [])]
    return [table, *(["--rows"] if named else []), *arguments]


def benchmarks() -> dict[str, str]:
    """What can be run and what it measures: the scripts of bench/, and the rows of its table."""
    require_that(
        FOLDER.is_dir(),
        "The benchmarks are not part of the installed package: run this command in a copy of "
        "the repository, installed with pip install --editable .",
    )
    trees = {path.stem: ast.parse(path.read_text("utf-8")) for path in FOLDER.glob("[!_]*.py")}
    found = {name: _first_line(tree) for name, tree in sorted(trees.items())}
    rows = (part for part in trees["table"].body if isinstance(part, ast.FunctionDef))
    return found | {
        row.name.removesuffix("_rows"): _first_line(row)
        for row in rows
        if row.name.endswith("_rows") and row.name.removesuffix("_rows") not in found
    }


def _first_line(tree: ast.Module | ast.FunctionDef) -> str:
    return (ast.get_docstring(tree) or "").partition("\n")[0]
