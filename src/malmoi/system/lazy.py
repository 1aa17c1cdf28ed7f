"""Names of a package that are imported on first use."""

import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str, **modules: str) -> Callable[[str], object]:
    """A package's `__getattr__` that imports a submodule when one of its names is first used.

    `lazy_names(__name__, network="Network initialise")` imports `package.network` on demand, so
    that listing sizes needs no torch.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
