"""Settings: each is declared once, as a field of a record, with its default, bounds and help.

A record is a dataclass: `lr: float = setting(1e-4, "Peak learning rate.", gt=0)`. The options of a
command, the keywords of a Python function, the fields of a request, `malmoi recipes NAME` and the
docs come from it; the Korean help is found in system/ko.toml by the English one. `Config` is the
base of records that are written to files: it checks types and choices on construction, suggests the
nearest field for a misspelt one, and takes typed overrides such as {"train.lr": "3e-4"}.
"""

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from types import UnionType
from typing import (
    Any,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from malmoi.errors import MalmoiError, UsageError, nearest, require_known, require_that
from malmoi.messages import joined, logger, msg
from malmoi.system.result import PlainValue, plain
from malmoi.system.untrusted import is_a, parse, parse_object, shown

T = TypeVar("T")
HOLDS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a record says of one setting; its name, type and default are the field's."""

    help: str
    name: str = ""
    kind: Any = None
    default: Any = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    shown: str = ""  # the default in words, where the rows, the model or the machine decide it
    unit: Literal["", "minutes", "seconds"] = ""  # of a time, which may be written 90s or 2h
    option: bool = False  # whether a command has an option for it; others are changed by --set
    flags: tuple[str, ...] = ()  # the option's names; none: the setting's
    metavar: str = ""
    env: str = ""  # environment variable that may hold it
    typed: Any = None  # type of the option's value, if not the field's
    accepts: str = ""  # type of the Python keyword, if wider than the field's

    @cached_property
    def bounds(self) -> dict[str, float]:
        """The limits of its value, under pydantic's names."""
        found = {name: getattr(self, name) for name in HOLDS}
        return {name: limit for name, limit in found.items() if limit is not None}

    @property
    def shown_default(self) -> str:
        """The default that is used, in words; empty if it does nothing: None, 0, False, …"""
        value = self.default
        if self.shown or not value or value is True or is_dataclass(value):
            return self.shown
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        # as a message's value it is not translated: a column may be called text
        return joined("", [f"{value:g}" if isinstance(value, float) else str(value)])

    def bounded(self, name: str) -> str:
        """The name of its value between the bounds: 1≤N, 0<N≤1."""
        limits = (("gt", "{:g}<"), ("ge", "{:g}≤"), ("", name), ("lt", "<{:g}"), ("le", "≤{:g}"))
        within = {"": 0.0, **self.bounds}
        return "".join(shape.format(within[key]) for key, shape in limits if key in within)

    def problem(self, value: Any, name: str) -> str:
        """What is wrong with a value, in a sentence; empty if it lies within the bounds."""
        kind = int if self.kind in (int, int | None) else float
        number = is_a(value, kind)
        within = number and all(HOLDS[key](value, limit) for key, limit in self.bounds.items())
        if value is None or within or not self.bounds:
            return ""
        if kind is int and None not in (self.ge, self.le):
            return msg(
                "{name} must be a whole number from {low:,} to {high:,}, not {value}.",
                name=name,
                low=self.ge,
                high=self.le,
                value=shown(value),
            )
        return self._limits(name=name, value=shown(value)) if number else _not_a(kind, name, value)

    def _limits(self, **about: str) -> str:
        """Says the bounds to which a number does not keep."""
        if self.le is not None or self.lt is not None:
            least = -math.inf if self.ge is None else self.ge
            begin = f"[{least:g}" if self.gt is None else f"({self.gt:g}"
            end = f"{self.le:g}]" if self.le is not None else f"{self.lt:g})"
            return msg(
                "{name} must lie in {begin}, {end}, not {value}.", begin=begin, end=end, **about
            )
        if self.gt == 0:
            return msg("{name} must be positive, not {value}.", **about)
        if self.ge == 0:
            return msg("{name} must not be negative, but is {value}.", **about)
        return msg("{name} must be at least {low:g}, not {value}.", low=self.ge, **about)


def setting(default: T, help_: str, **about: Any) -> T:
    return field(default=default, metadata=described(help_, **about))


def option(default: T, help_: str, **about: Any) -> T:
    """Declares a field of a record as a setting that is an option of its command too."""
    return setting(default, help_, option=True, **about)


def described(help_: str, **about: Any) -> dict[str, Setting]:
    """The metadata of a field that is a setting."""
    return {"setting": Setting(help=help_, **about)}


def _settings_of(*records: Any) -> dict[str, Setting]:
    """The settings of records by name, those of records inside them too; the first record wins."""
    found: dict[str, Setting] = {}
    for one in (one for record in records for one in fields(record)):
        if about := one.metadata.get("setting"):
            about = replace(about, name=one.name, kind=one.type, default=one.default)
            found.setdefault(one.name, about)
        elif is_dataclass(one.default_factory):
            for name, inner in _settings_of(one.default_factory).items():
                found.setdefault(name, inner)
    return found


settings_of: Callable[..., dict[str, Setting]] = cache(_settings_of)


def require_bounds(record: Any, what: str = "", prefix: str = "") -> None:
    """Refuses a record whose value is out of bounds, in a sentence that may begin with `what`."""
    problem = next(filter(None, _problems(record, prefix)), "")
    require_that(not problem, joined(": ", filter(None, (msg(what), problem))))


def _problems(record: Any, prefix: str) -> Iterator[str]:
    known = settings_of(type(record))
    for one in fields(record):
        value = getattr(record, one.name)
        if is_dataclass(value):
            yield from _problems(value, f"{prefix}{one.name}.")
        elif one.name in known:
            yield known[one.name].problem(value, f"{prefix}{one.name}")


def keyword_types(name: str, settings: Mapping[str, Setting], example: str = "") -> Any:
    """A TypedDict of settings as the keywords of a function, with an example of its use."""
    found = TypedDict(name, {k: s.kind for k, s in settings.items()}, total=False)  # type: ignore[misc]
    found.__doc__ = keywords_doc(name, example)
    return found


def keywords_doc(name: str, example: str) -> str:
    shown = f"\n\n    Examples:\n        >>> options: malmoi.{name} = {example}\n    "
    return "Keyword options, each with its type." + (shown if example else "")


RENAMED_FIELDS = {  # old names, accepted for one more release
    "TrainConfig": {"rematerialise": "gradient_checkpointing", "matrix_lr": "muon_lr"},
    "FinetuneConfig": {"untrained": "from_scratch"},
    "options": {"restart": "overwrite"},  # of the public functions
}


def current_fields(record: str, values: Mapping[str, object]) -> dict[str, Any]:
    """The values under the current field names; an old name is reported on stderr."""
    return {current_field(record, name): value for name, value in values.items()}


def current_field(record: str, name: str) -> str:
    new = RENAMED_FIELDS.get(record, {}).get(name)
    if new:
        _note_renamed(name, new)
    return new or name


@cache
def _note_renamed(old: str, new: str) -> None:
    logger.warning(
        "The setting {old} is now {new}; the old name will be removed.", old=old, new=new
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A frozen record whose fields are checked against their annotations."""

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            object.__setattr__(
                self, name, coerce(getattr(self, name), kind, f"{type(self).__name__}.{name}")
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Builds the record from JSON values; suggests the nearest name for an unknown field."""
        values = current_fields(cls.__name__, values)
        kinds = field_types(cls)
        for name in values:
            require_known(name, kinds, "{type} has no field {name!r:.60}.{hint}", type=cls.__name__)
        optional = {f.name for f in fields(cls) if (f.default, f.default_factory) != (MISSING,) * 2}
        missing = ", ".join(name for name in kinds if name not in optional | values.keys())
        require_that(
            not missing, "{type} needs a value for {missing}.", type=cls.__name__, missing=missing
        )
        return cls(**values)

    def to_dict(self) -> dict[str, PlainValue]:
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_object(text, msg("The text of a {type}", type=cls.__name__)))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def override(self, changes: Mapping[str, object]) -> Self:
        """A copy with changes such as {"train.lr": "3e-4"}; text is parsed as the field's type."""
        kinds = field_types(type(self))
        here: dict[str, Any] = {}
        inside: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            name, _, rest = path.partition(".")
            name = current_field(type(self).__name__, name)
            require_known(name, kinds, "There is no setting {name!r:.60}.{hint}")
            if rest:
                inside.setdefault(name, {})[rest] = value
            else:
                here[name] = _read(value, kinds[name]) if isinstance(value, str) else value
        for name, parts in inside.items():
            inner = here.get(name, getattr(self, name))
            require_that(
                isinstance(inner, Config),
                "{type}.{name} is a single value, it has no field {next!r}.",
                type=type(self).__name__,
                name=name,
                next=next(iter(parts)),
            )
            here[name] = inner.override(parts)
        return replace(self, **here)


def field_types(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def coerce(value: Any, kind: Any, where: str) -> Any:
    """The value in its annotation's type (an int as a float, a list as a tuple), or an error."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        if value not in args:
            raise UsageError(
                "{where} must be one of {choices}, not {value}.{hint}",
                where=where,
                choices=", ".join(map(repr, args)),
                value=shown(value),
                hint=nearest(str(value), map(str, args)),
            )
        return value
    if origin in (Union, UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if value is None else coerce(value, inner, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(coerce(v, args[0], where) for v in value)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return kind.from_dict(value)  # type: ignore[union-attr]
    if not is_a(value, origin or kind):
        raise UsageError(_not_a(kind, where, value))
    return float(value) if kind is float else value


def _not_a(kind: Any, where: str, value: object) -> str:
    """Says that a value has another type."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names[tuple] = "a list"
    called = names.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
    return msg(
        "{where} must be {called}, not {value}.",
        where=where,
        called=msg(called),
        value=shown(value),
    )


def _read(text: str, kind: Any) -> Any:
    """Parses command-line text as JSON unless the field is text; a list may omit its brackets."""
    if kind is str or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [_read(part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip()]
    try:
        value = parse(text, "The value")
    except MalmoiError:
        words = {"none": None, "yes": True, "no": False, "true": True, "false": False}
        value = words[text.lower()] if text.lower() in words else parse_number(text)
    # 1e5 for an integer
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def parse_number(text: str) -> float | str:
    """Parses .5, 1e9, 10M, 1.5B; anything else stays text."""
    scale = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    try:
        return float(text if scale == 1 else text[:-1]) * scale
    except ValueError:
        return text
