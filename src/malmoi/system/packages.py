"""Packages that only some installations have."""

from importlib import import_module
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.messages import msg


def optional_package(name: str, what: object, install: str = "") -> Any:
    """Imports a package or a part of one; if it is missing, says what needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        facts = dict(what=msg(str(what)), package=package, install=install or package)
        needs = "{what} needs the package {package}: pip install {install}."
        raise MalmoiError(needs, **facts) from error
