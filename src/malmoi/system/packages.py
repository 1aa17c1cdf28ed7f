"""Packages that only some installations have, and the tables in our own."""

import tomllib
from importlib import import_module
from importlib.resources import files
from typing import Any

from malmoi.errors import explained
from malmoi.messages import msg


def optional_package(name: str, what: object, install: str = "") -> Any:
    """Imports a package or a part of one; if it is missing, says what needs it."""
    package = name.partition(".")[0]
    with explained(
        ImportError,
        "{what} needs the package {package}: pip install {install}.",
        what=msg(str(what)),
        package=package,
        install=install or package,
    ):
        return import_module(name)


def read_toml(package: str, name: str) -> dict[str, Any]:
    """A table that lies in a package of ours."""
    return tomllib.loads((files(package) / name).read_text("utf-8"))
