"""The `malmoi` command: collects the subcommands; errors become one sentence and an exit code.

0 done, 1 failed, 2 wrong use, 130 and 143 stopped by Ctrl-C and SIGTERM. Nothing here imports
torch.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import takewhile
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from malmoi import __version__
from malmoi.cli.deprecated import current_options
from malmoi.errors import MalmoiError, UsageError, is_out_of_memory, nearest
from malmoi.report.console import Console
from malmoi.system.files import disk_error

# modules here; each adds its commands
COMMANDS = (
    "demo",
    "generate",
    "score",
    "perplexity",
    "chat",
    "fill",
    "embed",
    "predict",
    "tokenizer",
    "corpus",
    "plan",
    "pretrain",
    "finetune",
    "tasks",
    "merge",
    "compress",
    "export",
    "evaluate",
    "study",
    "serve",
    "bench",
    "recipes",
    "doctor",
)


class CommandGroup(TyperGroup):
    """A command group that suggests the nearest name for a misspelt command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(f"There is no command {args[0]!r}.{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def build_app() -> typer.Typer:
    """The app with every verb."""
    app = typer.Typer(
        cls=CommandGroup,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(malmoi)
    for module in COMMANDS:
        import_module(f"malmoi.cli.{module}").register(app)
    return app


def malmoi(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the full traceback of an error.")
    ] = False,
) -> None:
    """Build BERT and GPT from your own text: pre-train, fine-tune, evaluate, generate, compress,
    serve.

    Example: malmoi generate --model runs/tiny-gpt "The state of"
    """
    if version:
        typer.echo(f"malmoi {__version__}")
    else:
        help_when_alone(ctx)


def help_when_alone(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def add_group(app: typer.Typer, name: str, about: str, *verbs: Callable[..., None]) -> None:
    """Verbs under one name: `malmoi tokenizer train`, `malmoi tokenizer show`."""
    group = typer.Typer(cls=CommandGroup, help=about)
    group.callback(invoke_without_command=True)(help_when_alone)
    for verb in verbs:
        group.command(verb.__name__.removesuffix("_command").replace("_", "-"))(verb)
    app.add_typer(group, name=name)


def main() -> NoReturn:
    """The entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal that cannot show a character still shows the rest
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _stop)
    # What an Apple GPU cannot compute the processor does, and torch says so; it reads this when it
    # is loaded.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    code = run_command(sys.argv[1:])
    # NCCL would wait for the others on its way out
    if code and os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    debug = os.environ.get("MALMOI_DEBUG") == "1" or "--debug" in takewhile(
        lambda a: a.startswith("-"), arguments
    )
    try:
        with Console().attached():
            code = build_app()(
                current_options(arguments), prog_name="malmoi", standalone_mode=False
            )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _explain(error)


def _explain(error: Exception) -> int:
    """One sentence on stderr, and the exit code."""
    if isinstance(error, OSError) and error.errno == errno.EPIPE:  # whoever read us has read enough
        sys.stdout = _nowhere()
        return 1
    code = (
        error.exit_code
        if hasattr(error, "exit_code")
        else 2
        if isinstance(error, UsageError)
        else 1
    )
    print(f"malmoi: {_sentence(error)}", file=sys.stderr)
    return int(code)


def _sentence(error: Exception) -> str:
    if isinstance(error, MalmoiError):
        return str(error)
    if hasattr(error, "format_message"):  # typer's own: a missing option, a value of the wrong type
        context = getattr(error, "ctx", None)
        return (
            f"{error.format_message().rstrip('.')}. See: "
            f"{context.command_path if context else 'malmoi'} --help"
        )
    if explained := disk_error(error, "the output"):
        return str(explained)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}."
    if is_out_of_memory(error):
        return (
            "Memory ran out: close other programs, or take a smaller model, shorter texts or a "
            "smaller batch."
        )
    return f"Internal error: {type(error).__name__}: {error} (run malmoi --debug … to see where)."


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  (open until the process ends)


def _stop(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)
