"""Reversible tables: names of a family's config fields and weights in other libraries."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, ensure
from malmoi.settings import coerce, field_types
from malmoi.system.untrusted import JsonObject, flat_settings, named, shown


class Via(NamedTuple):
    """How tensors are converted: `load` makes ours from theirs, `save` theirs from ours."""

    load: Callable[..., Tensor]
    save: Callable[[Tensor, ModelConfig], tuple[Tensor, ...]]


COPY = Via(lambda t: t, lambda t, c: (t,))
TRANSPOSE = Via(lambda t: t.T, lambda t, c: (t.T,))  # GPT-1 and GPT-2 store [in, out]
ONE_ROW = Via(lambda t: t.flatten(), lambda t, c: (t[None],))  # a vector kept as [1, N]
HALVES = Via(lambda *ts: torch.cat(ts), lambda t, c: t.chunk(2))
# the first is used, the others only kept
TWICE = Via(lambda used, copy: used, lambda t, c: (t, t.clone()))
THRICE = Via(lambda used, *copies: used, lambda t, c: (t, t.clone(), t.clone()))


SPLIT_HEADS = Via(  # separate query, key and value
    lambda *ts: torch.cat(ts),
    lambda t, c: tuple(t.split([n * c.size_per_head for n in (c.heads, c.key_heads, c.key_heads)])),
)


class TensorRule(NamedTuple):
    """One of our tensors and its names there; `{}` is the layer, `head` the head that needs it."""

    ours: str
    theirs: tuple[str, ...]
    via: Via = COPY
    head: str | None = None  # applies only if the network has this head
    tied: bool | None = None  # applies only if the vocabulary head is tied, or only if it is not


def affine(ours: str, *theirs: str, via: Via = COPY, head: str | None = None) -> list[TensorRule]:
    """Rules for the weight and bias of a linear map or a norm."""
    bias = COPY if via is TRANSPOSE else via
    return [
        TensorRule(f"{ours}.{part}", tuple(f"{t}.{part}" for t in theirs), how, head)
        for part, how in (("weight", via), ("bias", bias))
    ]


class Field(NamedTuple):
    """A config field here and there; `names` translates its values."""

    ours: str
    theirs: str
    names: Mapping[Any, Any] = {}  # theirs → ours
    at_least: int | None = None  # lower ones can be read, but transformers fails on them

    def read(self, value: Any) -> Any:
        ensure(
            not self.names or (isinstance(value, str) and value in self.names),
            "config.json says {theirs} = {value}, which is not supported; it supports {names}.",
            theirs=self.theirs,
            value=shown(value),
            names=", ".join(self.names),
        )
        return self.names[value] if self.names else value

    def write(self, value: Any) -> Any:
        named = (theirs for theirs, ours in self.names.items() if ours == value)
        found = next(named, None) if self.names else value
        ensure(
            found is not None and (self.at_least is None or value >= self.at_least),
            "Hugging Face has no model with {theirs} = {value!r}.",
            theirs=self.theirs,
            value=value,
        )
        return found


class FieldGroup(NamedTuple):
    """Config fields that correspond only as a group; both directions see all fields."""

    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    write: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    names: tuple[str, ...] = ()  # their fields that it reads


# settings of transformers' base class under which layers differ from one another
WHOLE_MODEL: dict[str, Any] = {"per_layer_config": {}, "pruned_heads": {}}


@dataclass(frozen=True)
class Table:
    """Everything that Hugging Face names differently in one family."""

    model_type: str
    family: Callable[..., ModelConfig]
    prefix: str  # of the trunk's tensors; absent if a bare trunk was saved
    fields: tuple[Field, ...]
    rules: tuple[TensorRule, ...]
    architectures: Mapping[str, tuple[str, ...]]  # class → heads; the first is the bare trunk
    groups: tuple[FieldGroup, ...] = ()
    # their fields that we do not support varying: other values are refused
    only: Mapping[str, Any] = field(default_factory=dict)
    # the same, for networks with a certain head
    only_for: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # the same, but older versions' alone: not written
    legacy: Mapping[str, Any] = field(default_factory=dict)
    # their defaults for absent fields
    defaults: Mapping[str, Any] = field(default_factory=dict)
    write: Mapping[str, str] = field(default_factory=dict)  # their duplicates of our fields
    # other names of config fields: old ones, and those of transformers' `attribute_map`
    aliases: Mapping[str, str] = field(default_factory=dict)
    # two names of one tensor, of which a folder may have either or both; the first is computed with
    twins: Mapping[str, str] = field(default_factory=dict)
    # other names of a tensor: a folder in which they differ is refused
    copies: Mapping[str, str] = field(default_factory=dict)
    # ends of the names of tensors that are computed here, not read
    buffers: tuple[str, ...] = ()
    # the same, but a file's must be what is computed
    constants: Mapping[str, Callable[[ModelConfig], Tensor]] = field(default_factory=dict)
    free: tuple[str, ...] = ()  # heads without weights of their own if tied

    def read_config(self, theirs: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Our config from theirs; errors use their names and the file `where`."""
        given = self._under_one_name(theirs, where)
        classes = JsonObject(theirs, where).list_of("architectures", str, default=[])
        heads = {head for name in classes for head in self.architectures.get(name, ())}
        fixed = [self.only, self.legacy, WHOLE_MODEL]
        fixed += (fields for head, fields in self.only_for.items() if head in heads)
        for name, value in (item for fields in fixed for item in fields.items()):
            said = given.get(name, theirs.get(name))
            ensure(
                said is None or said == value,
                "{where} says {name} = {said}, and Malmoi has {model_type} only with {value!r}.",
                where=where,
                name=name,
                said=shown(said),
                model_type=self.model_type,
                value=value,
            )
        known = {**self.defaults, **given}
        kinds = field_types(ModelConfig)
        with named(where):
            ours = {
                f.ours: coerce(f.read(known[f.theirs]), kinds[f.ours], f.theirs)
                for f in self.fields
                if f.theirs in known
            }
            for group in self.groups:
                ours |= group.read(known)
            return self.family(**ours)

    def _under_one_name(self, theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Their fields by current names; two names of one field must agree."""
        found: dict[str, Any] = {}
        said: dict[str, str] = {}
        for name, value in flat_settings(theirs):
            today = self._today(name)
            if value is None:
                continue
            first = found.setdefault(today, value)
            ensure(
                first is value or first == value,
                "{where} says {said} = {first} and {name} = {value}, which are two names of one.",
                where=where,
                said=said.setdefault(today, name),
                first=shown(first),
                name=name,
                value=shown(value),
            )
        return found

    @property
    def known(self) -> set[str]:
        """Their fields that decide what a model computes, under all their names."""
        given = {f.theirs for f in self.fields} | {n for group in self.groups for n in group.names}
        fixed = (self.only, self.legacy, *self.only_for.values(), WHOLE_MODEL)
        return given.union(*fixed, self.defaults, self.write, self.aliases)

    def unread(self, theirs: Mapping[str, Any], where: str) -> list[str]:
        """Their fields that are not known; unknown parts of a known one are refused."""
        known = self.known
        objects = {name.partition(".")[0] for name in known if "." in name}
        unread = []
        for name, value in flat_settings(theirs):
            top = name.partition(".")[0]
            if value is None or known & {self._today(name), top}:
                continue
            ensure(
                top not in objects,
                "{where} says {name} = {value}, which Malmoi does not support.",
                where=where,
                name=name,
                value=shown(value),
            )
            unread.append(top)
        return list(dict.fromkeys(unread))

    def _today(self, name: str) -> str:
        """A field's current name, given an old name or a prefix ("rope_scaling.")."""
        for old, new in self.aliases.items():
            if name == old or (old.endswith(".") and name.startswith(old)):
                name = new + name[len(old) :]
        return name

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        full = resolve_rules(config)
        theirs = {
            **self.only,
            **{f.theirs: f.write(full[f.ours]) for f in self.fields},
            **{name: full[ours] for name, ours in self.write.items()},
        }
        for group in self.groups:
            theirs |= group.write(full)
        return _nested(theirs)

    def expresses(self, config: ModelConfig, heads: set[str]) -> bool:
        """Whether a model survives conversion there and back unchanged."""
        if self.architecture(heads, config) is None:
            return False
        try:
            back = self.read_config(self.write_config(config))
        except MalmoiError:
            return False
        return _by_layer(back) == _by_layer(config)

    def architecture(
        self, heads: set[str], config: ModelConfig, like: Sequence[str] = ()
    ) -> str | None:
        """Their class for these heads, `like` the one it came with; a tied head may be omitted."""
        free = config.tied and not config.lm_bias
        wanted = (heads, heads - set(self.free)) if free else (heads,)
        fitting = [
            name for some in wanted for name, has in self.architectures.items() if set(has) == some
        ]
        return next((name for name in like if name in fitting), next(iter(fitting), None))

    def expand(self, config: ModelConfig, heads: set[str]) -> Iterator[TensorRule]:
        """A network's tensor rules; of several for a tensor the last that applies wins."""
        chosen = {
            rule.ours: rule
            for rule in self.rules
            if (rule.head is None or rule.head in heads) and rule.tied in (None, config.tied)
        }
        for rule in chosen.values():
            encoder = rule.ours.startswith("trunk.encoder.")
            layers = config.encoder_depth if encoder else config.distinct
            for i in range(layers) if "{}" in rule.ours else [0]:
                theirs = tuple(name.format(i) for name in rule.theirs)
                yield rule._replace(ours=rule.ours.format(i), theirs=theirs)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        place = nested
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    return nested


def resolve_rules(config: ModelConfig) -> dict[str, Any]:
    """The config with its zeros ("as many as …") resolved."""
    return config.to_dict() | dict(
        kv_heads=config.key_heads,
        head_width=config.size_per_head,
        hidden=config.mlp_width,
        embed_width=config.token_width,
        groups=config.distinct,
        mlm_activation=config.mlm_activation or config.activation,
        local_rotary_base=config.local_rotary_base or config.rotary_base,
    )


def function_of(config: ModelConfig) -> dict[str, Any]:
    """The fields that decide which function a model computes: not initialisation or dropout."""
    training_only = {
        *("dropout", "attention_dropout", "init", "init_std", "residual_init"),
        *("generator_share", "generator_depth"),
    }
    values = {k: v for k, v in resolve_rules(config).items() if k not in training_only}
    unused = {"rotary_base": 0.0, "local_rotary_base": 0.0, "rotary_scaling": ""}
    return values | ({} if config.positions == "rotary" else unused)


def _by_layer(config: ModelConfig) -> dict[str, Any]:
    """The same with every layer's pattern written out, since a cycle can be written in two ways."""
    return function_of(config) | {"attention": layer_patterns(config.attention, config.depth)}


def layer_patterns(cycle: Sequence[str], depth: int) -> list[str]:
    """Every layer's pattern."""
    return [cycle[i % len(cycle)] for i in range(depth)]
