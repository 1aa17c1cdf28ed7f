"""The keyword options of the public functions: checked when they are called, listed by help()."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from malmoi.api.records import SETTINGS
from malmoi.errors import require_known, require_that
from malmoi.settings import RENAMED_FIELDS, Setting, current_fields

PublicFunction = TypeVar("PublicFunction", bound=Callable[..., object])


class _Default:
    """Placeholder in a signature for a default that the recipe, the model or the server sets."""

    def __repr__(self) -> str:
        return "…"


def lists_options(
    options: type, *, defaults: bool = True
) -> Callable[[PublicFunction], PublicFunction]:
    """Adds every option to the signature and the docstring, for `help()` and notebooks.

    Without `defaults`, another setting has them: the recipe.
    """

    def listed(function: PublicFunction) -> PublicFunction:
        found = inspect.signature(function)
        own = [one for one in found.parameters.values() if one.kind is not one.VAR_KEYWORD]
        known = SETTINGS[options.__name__]
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_Default()
            )
            for name, kind in options.__annotations__.items()
        ]
        function.__signature__ = found.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        lines = [
            f"        {name}: {_meaning(one) if defaults else one.help}"
            for name, one in known.items()
        ]
        before, examples, after = (function.__doc__ or "").partition("    Examples:")
        function.__doc__ = "\n".join([f"{before}    Options:", *lines, "", f"{examples}{after}"])
        return function

    return listed


def _meaning(one: Setting) -> str:
    """What a setting does, and its default where it can be said."""
    default = one.shown_default
    return f"{one.help.removesuffix('.')}; default: {default}." if default else one.help


def check_options(verb: str, given: Iterable[str], known: type, *also: str) -> None:
    """Refuses an option that the function does not have, and names the nearest; `also` are those
    that are parameters of its own. Paths and former names are the settings' to check.
    """
    names = {*known.__annotations__, *also}
    former = {name for renamed in RENAMED_FIELDS.values() for name in renamed}
    for name in given:
        if name not in former and "." not in name:
            require_known(name, names, "{verb} has no option {name!r}.{hint}", verb=verb)


def merge_settings(given: Mapping[str, object]) -> dict[str, Any]:
    """Returns the options merged with those under `settings`."""
    given = current_fields("options", given)
    inner = given.pop("settings", None) or {}
    require_that(
        isinstance(inner, Mapping), 'settings must be a mapping, such as {"train.floor": 0.1}.'
    )
    return {**given, **inner}
