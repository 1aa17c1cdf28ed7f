"""`malmoi bench`: Malmoi and other libraries, measured in one run."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from malmoi.cli.options import argument, option
from malmoi.cli.output import say
from malmoi.errors import UsageError, nearest

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench_command(
    ctx: typer.Context,
    name: str | None = argument(
        None,
        "Benchmark to run, followed by its own options; omit it for one table of all hot paths.",
        metavar="[NAME]",
    ),
    list_: bool = option(False, "List the benchmarks and what they compare.", "--list"),
    gpu: bool = option(False, "Benchmark the GPU.", "--gpu"),
) -> None:
    """Benchmark Malmoi against other libraries on this machine.

    Without a name, prints one table of all hot paths next to other installed libraries and the
    limits of this machine. Its options: --quick, --rows decode predict, --without prefix,cache
    (graphs,kernel with --gpu), --cpu-time on a busy machine.

    The other libraries must be installed: pip install transformers accelerate

    Example: malmoi bench decode --tokens 32
    """
    known = scripts()
    if list_:
        for script in known.values():
            typer.echo(f"{script.stem}\t{_about(script)}")
        return
    # without a name, the table's first option is read as one
    given = [*filter(None, [name]), *ctx.args]
    named = bool(given) and not given[0].startswith("-")
    chosen = given.pop(0) if named else "gpu_table" if gpu else "table"
    if chosen not in known:
        raise UsageError(
            "There is no benchmark {chosen!r}.{hint} `malmoi bench --list` lists them.",
            chosen=chosen,
            hint=nearest(chosen, known),
        )
    if find_spec("transformers") is None:
        raise UsageError(
            "The libraries to compare with are not installed: pip install transformers accelerate"
        )
    if named:
        say(f"{chosen}: {_about(known[chosen])}")
    raise typer.Exit(
        subprocess.run([sys.executable, known[chosen], *given], check=False).returncode
    )


def scripts() -> dict[str, Path]:
    """The benchmark scripts by name, in the package or next to its sources."""
    package = Path(__file__).parents[1]
    folder = next(
        place for place in (package / "bench", package.parents[1] / "bench") if place.is_dir()
    )
    return {script.stem: script for script in sorted(folder.glob("[!_]*.py"))}


def _about(script: Path) -> str:
    """The first line of a benchmark's docstring."""
    return script.read_text("utf-8").split('"""')[1].partition("\n")[0]
