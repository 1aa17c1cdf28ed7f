"""A report as one HTML file that needs nothing else: templates, and their parts as functions."""

from functools import cache
from pathlib import Path
from typing import Any

from malmoi.messages import Message, language, msg, translate
from malmoi.system.machine import this_machine


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes a tenth of a second

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"say": _say, "shown": _shown, "language": language}
    return made


def _say(text: str, **values: object) -> str:
    return translate(msg(text, **values))


def _shown(cell: object) -> str:
    """A cell of a table: data as it is, a message in the user's language."""
    return translate(cell) if isinstance(cell, Message) else str(cell)


def render(template: str, **values: object) -> str:
    """A page from a template of the package, such as report/task_page.jinja."""
    return str(_templates().get_template(template).render(**values))


def machine_name() -> str:
    """The machine that a page was made on."""
    machine = this_machine()
    return ", ".join(f"{gpu.count} × {gpu.name}" for gpu in machine.accelerators) or translate(
        msg("{architecture}, {cores} cores", architecture=machine.architecture, cores=machine.cores)
    )
