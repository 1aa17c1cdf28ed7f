"""The `malmoi` command: collects the subcommands and turns errors into a message and exit code.

0 success, 1 failure, 2 usage error, 130 and 143 stopped by Ctrl-C and SIGTERM. Nothing here imports
torch.
"""

import atexit
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, cleandoc, signature
from itertools import islice, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from malmoi import __version__
from malmoi.cli import shared as cli
from malmoi.errors import MalmoiError, UsageError, is_out_of_memory, require_known
from malmoi.messages import Message, language, msg, sections, translate
from malmoi.pair import shipped
from malmoi.report.console import Console
from malmoi.system.files import disk_error
from malmoi.system.paths import local_model, require_path
from malmoi.system.plugins import load_plugin
from malmoi.system.storage import remote_url, working_copy
from malmoi.system.threads import sleep_soon
from malmoi.training.signals import Stopped

T = TypeVar("T")
# Commands and groups of commands in the order they are used. What they do is said here once more,
# for the help of Malmoi itself: it imports none of them.
PANELS = {
    "Train": {
        "demo": "Train and try a GPT and a BERT on built-in text, in minutes.",
        "corpus": "Build a training corpus from raw text.",
        "tokenizer": "Train a tokenizer, or see how one splits a text.",
        "recipes": "List the recipes, or the settings of one.",
        "pretrain": "Train a model from raw text.",
        "tasks": "List the tasks, their kinds and the files they read.",
        "finetune": "Fine-tune a BERT or a GPT on your rows, or on a known task.",
        "merge": "Merge a LoRA into its base model.",
    },
    "Use": {
        "generate": "Continue prompts with a GPT.",
        "chat": "Chat with a language model through its own chat template.",
        "translate": "Translate texts, or every line of a file.",
        "fill": "Fill in the [MASK] of each text with a BERT.",
        "embed": "Turn each text into a vector.",
        "predict": "Predict labels, spans or answers with a fine-tuned model.",
    },
    "Evaluate": {
        "evaluate": "Evaluate a model on a task, fine-tuned or in context.",
        "score": "Score continuations of a context with a GPT.",
        "perplexity": "Compute a GPT's perplexity on a text or a file of any length.",
        "trace": "Find the words of a text in the text a model was trained on.",
        "probe": "Probe every layer for parts of speech or your own labels.",
        "study": "Reproduce a published table or figure and compare the numbers.",
        "records": "List the records, or run a track and evaluate it.",
    },
    "Compress": {"compress": "Make a model smaller: quantize, prune, distil, share."},
    "Serve": {
        "export": "Write a model for ONNX Runtime or llama.cpp.",
        "serve": "Serve models: OpenAI's API under /v1, the studio page at /.",
    },
    "This machine": {
        "doctor": "Show what this machine can do, and what is missing.",
        "plan": "Estimate memory, days and cost of a run on any GPUs.",
        "launch": "Start a run on several GPUs or machines.",
        "bench": "Benchmark Malmoi against other libraries on this machine.",
    },
}
# each is in a module of its name, but for those that share one
HOMES = {
    **dict.fromkeys(("chat", "fill", "generate", "perplexity", "probe"), "models"),
    **dict.fromkeys(("score", "trace", "translate"), "models"),
    **dict.fromkeys(("study", "records"), "studies"),
    **dict.fromkeys(("doctor", "plan", "launch"), "machines"),
    "tasks": "recipes",
    "embed": "predict",
    "merge": "finetune",
}
OUTLINE = ("", "-h", "--help", "--version")  # first words that need no command
SUFFIX = "_command"  # suffix of the functions that are commands
INPUTS = ("data", "dev", "train", "test", "calibration", "pairs")  # options for files that exist
METAVARS = {"str": "TEXT", "int": "N", "float": "N", "Path": "FILE", "bool": ""}


class Command(TyperCommand):
    """A command whose help shows FILE, TEXT and N instead of Python types.

    A misspelt input is an error before the command runs, and so before torch is loaded.
    """

    def get_params(self, ctx: Any) -> Any:
        return [_tidy(param) for param in super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        # typer 0.27 makes paths of a list's words only after this
        for path in (*_values(ctx, INPUTS, Path), *map(Path, _values(ctx, ("dev",), str))):
            require_path(path)
        for source in _values(ctx, ("model",), str):
            shipped(source) or local_model(source)
        with ExitStack() as copies:
            if remote_url(ctx.params.get("out") or ""):
                ctx.params["out"] = copies.enter_context(working_copy(ctx.params["out"]))
            return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """A command group that suggests the nearest name for a misspelt command."""

    def get_params(self, ctx: Any) -> Any:
        return [_tidy(param) for param in super().get_params(ctx)]

    def list_commands(self, ctx: Any) -> list[str]:
        order = [name for modules in PANELS.values() for name in modules]
        return sorted(super().list_commands(ctx), key=lambda name: (*order, name).index(name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            require_known(args[0], self.commands, "There is no command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


def _values(ctx: Any, names: Sequence[str], kind: type[T]) -> list[T]:
    """The values of these options that have a type: each of those that are repeatable."""
    several = [v if isinstance(v, list | tuple) else [v] for v in map(ctx.params.get, names)]
    return [value for values in several for value in values if isinstance(value, kind)]


def _tidy(param: Any) -> Any:
    """The parameter with help in the user's language, and without names of Python types."""
    param.help = translate(getattr(param, "help", None) or "")
    shown = getattr(param, "show_default", None)
    if isinstance(shown, str):
        param._get_default_string = lambda **_: translate(shown)
    argument = param.param_type_name == "argument"
    if argument or param.is_flag:  # its name already describes it
        param.display_type_rich = lambda ctx: ""
    if argument:
        param._usage_display_name = lambda: param.metavar or param.name.upper()
    if argument and hasattr(param, "type"):  # typer before 0.29
        param.type = copy(param.type)
        param.type.get_metavar = lambda **_: ""
    return param


def build_app(only: str | None = None) -> typer.Typer:
    """The app with every command; with one of them, if the first word names it; or with the names
    of all and what they do, if the word asks for no more.
    """
    app = typer.Typer(
        cls=CommandGroup,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True, help=_about(malmoi))(_declare(malmoi))
    known = {name: (panel, about) for panel, some in PANELS.items() for name, about in some.items()}
    for name in [only] if only in known else known:
        panel, about = map(translate, known[name])
        if only in OUTLINE and "_MALMOI_COMPLETE" not in os.environ:  # no shell asks for options
            app.command(name, help=about, rich_help_panel=panel)(help_when_alone)
        else:
            _add(app, name, import_module(f"malmoi.cli.{HOMES.get(name, name)}"), panel)
    if language() != "en" or "typer.rich_utils" in sys.modules:
        _translate_titles()
    return app


def _add(app: typer.Typer, name: str, module: ModuleType, panel: str) -> None:
    """Adds a module's command of this name; or its commands as a group, if it has none."""
    verbs = {
        key.removesuffix(SUFFIX): _declare(_with_record_options(verb))
        for key, verb in vars(module).items()
        if key.endswith(SUFFIX) and verb.__module__ == module.__name__
    }
    if verb := verbs.get(name):
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        app.command(
            name, cls=Command, help=_about(verb), rich_help_panel=panel, context_settings=settings
        )(verb)
        return
    group = typer.Typer(cls=CommandGroup, help=_about(module))
    group.callback(invoke_without_command=True)(help_when_alone)
    for key, verb in verbs.items():
        group.command(key, cls=Command, help=_about(verb))(verb)
    app.add_typer(group, name=name, rich_help_panel=panel)


def _with_record_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its records instead of the parameters that stand for them."""
    own = signature(verb).parameters
    records = {
        name: one.default for name, one in own.items() if isinstance(one.default, cli.RecordOptions)
    }
    if not records:
        return verb
    spread = [
        one
        for name, parameter in own.items()
        for one in (records[name].parameters() if name in records else [parameter])
    ]

    @wraps(verb)
    def command(**values: Any) -> None:
        collected = {name: one.collect(values) for name, one in records.items()}
        verb(**values, **collected)

    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [one.replace(kind=Parameter.KEYWORD_ONLY) for one in spread]
    )
    return command


def _declare(verb: Callable[..., None]) -> Callable[..., None]:
    """Writes out each option's name and metavar, which versions of typer derive differently.

    Options that commands share have their names in `malmoi.cli.options`.
    """
    for name, parameter in signature(verb).parameters.items():
        own = parameter.default
        if isinstance(own, OptionInfo) and not own.param_decls:
            own.param_decls = (f"--{name.replace('_', '-')}",)
        for info in (own, *getattr(parameter.annotation, "__metadata__", ())):
            if isinstance(info, OptionInfo) and info.metavar is None:
                info.metavar = METAVARS.get(_type_name(parameter.annotation), "TEXT")
    return verb


def _type_name(annotation: Any) -> str:
    """ "int" for int, int | None, list[int] and Annotated[int, …]."""
    while parts := get_args(annotation):
        annotation = parts[0]
    return str(getattr(annotation, "__name__", ""))


def _about(thing: Callable[..., None] | ModuleType) -> str:
    """The command's docstring, one line per paragraph, to be wrapped at the terminal's width."""
    return "\n\n".join(
        _paragraph(" ".join(text.split())) for text in cleandoc(thing.__doc__ or "").split("\n\n")
    )


def _paragraph(text: str) -> str:
    word, colon, rest = text.partition(": ")
    return f"{translate(word)}{colon}{rest}" if word == "Example" else translate(text)


def _translate_titles() -> None:
    """Translates the titles and phrases that typer prints itself."""
    import typer.rich_utils as titles
    from rich.text import Text

    titles.ARGUMENTS_PANEL_TITLE = translate("Arguments")
    titles.OPTIONS_PANEL_TITLE = translate("Options")
    titles.DEFAULT_STRING = translate("[default: {}]")
    titles.REQUIRED_LONG_STRING = translate("[required]")
    # Its own counts characters where Hangul takes two cells, keeps the space at a line's end and
    # then cuts off a syllable to make room for it.
    Text.rstrip_end = lambda line, size: line.rstrip()  # type: ignore[assignment, method-assign]


def malmoi(
    ctx: typer.Context,
    version: bool = cli.option(False, "Print the version and exit.", "--version"),
    debug: bool = cli.option(False, "Show the full traceback of an error.", "--debug"),
    plugin: list[Path] | None = cli.option(
        None,
        "Python file that registers tasks, losses, schedules…; works with any command.",
        "--plugin",
    ),
) -> None:
    """Pretrain, finetune and serve BERT and GPT on your own text.

    Start with malmoi demo, then malmoi pretrain my_texts/ and malmoi finetune rows.csv
    """
    for file in plugin or ():
        load_plugin(file)
    if version:
        typer.echo(f"malmoi {__version__}")
    else:
        help_when_alone(ctx)


def help_when_alone(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> NoReturn:
    """The entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # replace characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Operations that an Apple GPU lacks fall back to the CPU, with a warning from torch; torch
    # reads this variable when it is loaded.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    sleep_soon()
    atexit.register(gc.freeze)  # looking through what torch has left takes half a second
    code = run_command(sys.argv[1:])
    # NCCL would wait for the other processes on exit
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
            plugins, others = split_plugins(arguments)
            app = build_app(next((word for word in others if word != "--debug"), ""))
            code = app([*plugins, *others], prog_name="malmoi", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Stopped as stopped:
        return stopped.code
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report_error(error)


def split_plugins(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every --plugin, which may also be given after the command, and all other words."""
    plugins: list[str] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":  # what follows are texts, not options
            others += [word, *words]
        elif word == "--plugin":
            plugins += [word, *islice(words, 1)]
        else:
            (plugins if word.startswith("--plugin=") else others).append(word)
    return plugins, others


def _report_error(error: Exception) -> int:
    """Prints one sentence on stderr and returns the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of our output closed the pipe
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # until the process ends
        return 1
    print(f"malmoi: {translate(_sentence(error))}", file=sys.stderr)
    return int(getattr(error, "exit_code", 2 if isinstance(error, UsageError) else 1))


def _sentence(error: Exception) -> str:
    if isinstance(error, MalmoiError):
        return str(error)
    if hasattr(error, "format_message"):  # typer's own: a missing option, a value of the wrong type
        context = getattr(error, "ctx", None)
        return msg(
            "{message}. See: {path} --help",
            message=_from_typer(error.format_message().rstrip("."), getattr(error, "message", "")),
            path=context.command_path if context else "malmoi",
        )
    if explained := disk_error(error, msg("the output")):
        return str(explained)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}."
    if is_out_of_memory(error):
        return (
            "Out of memory: close other programs, or use a smaller model, shorter texts or a "
            "smaller batch."
        )
    return msg(
        "Internal error: {type}: {error} (run malmoi --debug … to see where).",
        type=type(error).__name__,
        error=error,
    )


def _from_typer(text: str, problem: str) -> str:
    """What typer said as a message; the problem with a value may be one of ours."""
    if isinstance(problem, Message) and text == problem:
        return problem
    for template in sorted(sections()["typer"], key=len, reverse=True):
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(template))
        if match := re.fullmatch(pattern, text):
            return msg(
                template, **{n: _from_typer(v, problem) for n, v in match.groupdict().items()}
            )
    return msg(text)
