"""Names from outside the package: registries that plugins add to, and how plugins are loaded.

A plugin is a Python file (`malmoi --plugin my_losses.py …`), a module that is imported, or an
installed package with an entry point in the group "malmoi.plugins". It calls
`malmoi.register_task` and its like. A run records the plugins that its names came from, so that
resuming can name a missing one; code named in a folder is never executed.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType
from typing import TypeVar

from malmoi.errors import MalmoiError, UsageError, explained, require_known, require_that

ENTRY_POINTS = "malmoi.plugins"
FILE_PREFIX = "malmoi_plugin."  # of the modules made from files
Value = TypeVar("Value")
_loaded: set[str] = set()  # plugins that registered something in this process


class Registry(dict[str, Value]):
    """Named values of one kind: the package's own, and those that plugins add."""

    def __init__(self, kind: str, values: Mapping[str, Value]) -> None:
        super().__init__(values)
        self.kind = kind
        self.origins: dict[str, str] = {}  # plugin of each name that is not the package's

    def register(self, name: str, value: Value) -> None:
        """Adds a value of a plugin; a name of the package itself cannot be replaced."""
        require_that(
            name not in self or name in self.origins,
            "The {kind} {name!r} is built in: choose another name for yours.",
            kind=self.kind,
            name=name,
        )
        self[name] = value
        self.origins[name] = _calling_plugin()
        _loaded.add(self.origins[name])

    def find(self, name: str) -> Value:
        """The value of a name, of an installed plugin too; an unknown name is an error."""
        if name not in self:
            load_installed_plugins()
        require_known(name, self, "There is no {kind} {name!r}.{hint}", kind=self.kind)
        return self[name]


def _calling_plugin() -> str:
    """The name of the first caller outside the package: its module's, or its file's stem."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).split(".")[0] == "malmoi":
        frame = frame.f_back
    name = _module(frame)
    if name == "__main__":
        return Path(frame.f_globals.get("__file__", name)).stem
    return name.removeprefix(FILE_PREFIX)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "__main__"))


def load_plugin(file: str | Path) -> None:
    """Runs a Python file that registers names."""
    path = Path(file)
    require_that(path.is_file(), "There is no plugin file {path}.", path=path)
    name = f"{FILE_PREFIX}{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("{path} is not a Python file: a plugin's name ends in .py.", path=path)
    module = module_from_spec(spec)
    sys.modules[name] = module  # its classes and functions name it as their module
    try:
        spec.loader.exec_module(module)
    except MalmoiError:
        raise
    except Exception as error:
        raise MalmoiError(
            "The plugin {path} failed: {type}: {error}. Fix it first.",
            path=path,
            type=type(error).__name__,
            error=error,
        ) from error


@cache
def load_installed_plugins() -> None:
    """Imports the plugins of installed packages, once."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    for point in entry_points(group=ENTRY_POINTS):
        with explained(
            Exception, "The installed plugin {value} failed: {type}: {error}.", value=point.value
        ):
            point.load()


def require_plugins(names: Iterable[str]) -> None:
    """Refuses a run whose plugins are not loaded, and names the first of them."""
    if missing := [name for name in names if name not in _loaded]:
        load_installed_plugins()
    for name in missing:
        require_that(
            name in _loaded,
            "This run uses the plugin {name}, which is not loaded: add --plugin FILE.py "
            "to the command, or import it first.",
            name=name,
        )
