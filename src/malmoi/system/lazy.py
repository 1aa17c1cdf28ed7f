"""Names of a package that are imported when they are first used."""

import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str, **modules: str) -> Callable[[str], object]:
    """A package's `__getattr__`: `lazy_names(__name__, network="Network initialise")` imports
    `package.network` when one of its names is asked for, so that a table of sizes needs no torch.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
