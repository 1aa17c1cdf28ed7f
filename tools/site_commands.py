"""A hook of mkdocs: a page for each command, made from the command line's own help."""

import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from typer.main import get_command

from malmoi.cli.app import PANELS, build_app

FOLDER = "commands"
os.environ["MALMOI_LANG"] = "en"  # the help follows the locale, the site does not
EXAMPLE = re.compile(r"^Example: ", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Lists the pages under "Commands", by the panels of the help."""
    for entry in config["nav"]:
        if "Commands" in entry:
            entry["Commands"] = [
                {panel: [{f"malmoi {name}": f"{FOLDER}/{name}.md"} for name in names]}
                for panel, names in PANELS.items()
            ]
    return config


def on_files(files: Files, config: Any) -> Files:
    app: Any = get_command(build_app())
    for name in app.commands:
        path = str(PurePosixPath(FOLDER) / f"{name}.md")
        files.append(File.generated(config, path, content=command_page(name, app.commands[name])))
    return files


def command_page(name: str, command: Any) -> str:
    """What a command does, its arguments and options, its examples."""
    inner = getattr(command, "commands", None)
    if not inner:
        return f"# malmoi {name}\n\n{_described(f'malmoi {name}', command)}"
    parts = [f"# malmoi {name}\n\n{_text(command.help)}"]
    parts += [
        f"## malmoi {name} {verb}\n\n{_described(f'malmoi {name} {verb}', one)}"
        for verb, one in inner.items()
    ]
    return "\n\n".join(parts)


def _described(called: str, command: Any) -> str:
    context = command.make_context(called, [], resilient_parsing=True)
    params = [param for param in command.get_params(context) if "--help" not in param.opts]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    usage = " ".join([called, *(str(one.metavar or one.name.upper()) for one in arguments)])
    parts = [_text(EXAMPLE.split(command.help)[0]), f"```text\n{usage} [options]\n```"]
    if examples := [" ".join(one.split()) for one in EXAMPLE.split(command.help)[1:]]:
        parts.append("```text\n" + "\n".join(examples) + "\n```")
    if arguments:
        rows = [(f"`{one.metavar or one.name.upper()}`", one.help) for one in arguments]
        parts.append(_table(("argument", "what it is"), rows))
    if options:
        rows = [tuple(_option(one, context)) for one in options]
        parts.append(_table(("option", "what it does", "default"), rows))
    return "\n\n".join(parts)


def _option(param: Any, context: Any) -> Iterator[str]:
    kind = param.display_type_rich(context) if hasattr(param, "display_type_rich") else ""
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    yield f"{names} {kind}".strip()
    yield param.help or ""
    shown = param.show_default
    default = shown if isinstance(shown, str) else param.default
    yield "" if default in (None, False, [], ()) or callable(default) else str(default)


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


def _text(help: str | None) -> str:
    return re.sub(r"\[(/?\w+)\]", "", help or "").strip()
