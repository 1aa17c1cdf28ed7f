"""Interventions: a forward pass in which a part is switched off, replaced or masked differently.

An intervention lives in a view of the network, as an adapter lives in its linear maps: shallow
copies of the blocks it concerns, with a tap around the part. The network itself is not touched, so
that its graph, what was compiled of it, and passes in other threads stay as they are.

B batch, T tokens, C columns, H heads, E head width.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast, get_args

from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import require_known, require_that
from malmoi.model.network import Network
from malmoi.model.patterns import parse_pattern
from malmoi.model.transformer import Activations, Transformer

Site = Literal["head", "attention", "mlp", "layer", "residual", "embedding", "mask"]
Value = Literal["zero", "mean", "copy"]
Place = tuple[Site, int]  # a site of one layer; the embedding's layer is 0
Tap = Callable[[Tensor], Tensor]  # of activations [B, T, C]
Key = TypeVar("Key")
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class Intervention:
    """A change to one part of the forward pass.

    `site` is "head" (what one attention head reads, before the output projection), "attention" or
    "mlp" (what the sublayer adds to the residual stream), "layer" (the block is skipped),
    "residual" (the stream after the block), "embedding" (the stream before the first block) or
    "mask" (`pattern` says which tokens see which). The site gets zeros, the mean over the tokens of
    `source` (of the text itself without one), or a copy of its value when the model reads
    `source`.

    Examples:
        >>> malmoi.Intervention("head", layer=1, head=0)
        Intervention(site='head', layer=1, head=0)
        >>> malmoi.Intervention("mask", pattern="full")
        Intervention(site='mask', pattern='full')
    """

    site: Site
    layer: int | None = None  # from 0; None: every layer
    head: int | None = None  # from 0; only of site "head"
    positions: tuple[int, ...] | None = None  # tokens from 0, negative from the end; None: all
    value: Value = "zero"
    source: str | None = None  # the text whose activations are put there
    source_positions: tuple[int, ...] | None = None  # None: the same positions
    pattern: str = ""  # of site "mask", such as "causal" or "full"

    def __post_init__(self) -> None:
        for what, choices in (("site", get_args(Site)), ("value", get_args(Value))):
            given = str(getattr(self, what))
            require_known(
                given, choices, "An intervention has no {what} {name!r}.{hint}", what=what
            )
        self._check_parts()

    def _check_parts(self) -> None:
        require_that(
            (self.site == "head") == (self.head is not None),
            "An intervention on site 'head' needs head=, and no other site has it.",
        )
        require_that(
            (self.site == "mask") == bool(self.pattern),
            "An intervention on site 'mask' needs pattern=, and no other site has it.",
        )
        require_that(
            self.site not in ("mask", "layer") or self.value == "zero",
            "An intervention on site {site!r} takes no value.",
            site=self.site,
        )
        require_that(
            self.site != "mask" or self.positions is None,
            "An intervention on site 'mask' applies to every position.",
        )
        require_that(
            self.value == "mean" or (self.value == "copy") == (self.source is not None),
            "value='copy' needs source=, a text, and value='zero' takes none.",
        )
        given = self.source_positions
        require_that(
            given is None or (self.value == "copy" and len(given) == len(self.positions or ())),
            "source_positions needs value='copy' and as many positions.",
        )

    def __repr__(self) -> str:
        given = ((name, value) for name, value in vars(self).items() if value not in (None, ""))
        shown = (f"{name}={value!r}" for name, value in given if (name, value) != ("value", "zero"))
        return f"Intervention({', '.join(shown)})"

    @property
    def needs_one_text(self) -> bool:
        """Whether it depends on the positions of one text, so that it cannot hold for any other."""
        whole_copy = self.value == "copy"
        own_mean = self.value == "mean" and self.source is None
        return self.positions is not None or whole_copy or own_mean

    def layers(self, c: ModelConfig) -> range:
        """The layers that it concerns in a model of this shape."""
        if self.site == "embedding":
            return range(1)
        if self.layer is None:
            return range(c.depth)
        require_index("layer", self.layer, c.depth)
        return range(self.layer, self.layer + 1)

    def places(self, c: ModelConfig) -> list[Place]:
        """The places that it taps."""
        require_index("head", self.head or 0, c.heads)
        return [] if self.site == "mask" else [(self.site, i) for i in self.layers(c)]

    def tap(self, c: ModelConfig, source: Tensor | None) -> Tap:
        """The function that changes activations; `source` [1, S, C] is what is put there."""
        columns = slice(None)
        if self.head is not None:
            columns = slice(self.head * c.size_per_head, (self.head + 1) * c.size_per_head)

        def change(x: Tensor) -> Tensor:
            rows = _rows(self.positions, x.size(1))
            changed = x.clone()
            changed[:, rows, columns] = self._new(x, source)[:, :, columns]
            return changed

        return change

    def _new(self, x: Tensor, source: Tensor | None) -> Tensor:
        """What is put there: [1 or B, 1 or positions, C]."""
        if self.value == "zero":
            return x.new_zeros(1, 1, x.size(-1))
        if self.value == "mean":
            return (x if source is None else source).mean(1, keepdim=True)
        assert source is not None
        require_that(
            self.positions is not None or source.size(1) == x.size(1),
            "The text has {size} tokens and the source {size2}: give positions= (and "
            "source_positions=), or texts of the same length.",
            size=x.size(1),
            size2=source.size(1),
        )
        return source[:, _rows(self.source_positions or self.positions, source.size(1))]


def require_index(what: str, given: int, count: int, least: int = 0) -> None:
    require_that(
        least <= given < count,
        "This model has no {what} {given}: it has {count}, counted from 0.",
        what=what,
        given=given,
        count=count,
    )


def _rows(positions: tuple[int, ...] | None, length: int) -> slice | list[int]:
    return slice(None) if positions is None else [position_in(at, length) for at in positions]


def position_in(at: int, length: int) -> int:
    """A position counted from 0; negative ones are given from the end."""
    require_that(
        -length <= at < length,
        "There is no position {at} in a text of {length} tokens.",
        at=at,
        length=length,
    )
    return at % length


class Tapped(nn.Module):
    """A module with a tap on its first input, its output, or both."""

    def __init__(self, inner: nn.Module, before: Tap | None, after: Tap | None) -> None:
        super().__init__()
        self.inner = inner
        self.before = before
        self.after = after

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        y = self.inner(x if self.before is None else self.before(x), *rest)
        return cast(Tensor, y if self.after is None else self.after(y))


class Bypassed(nn.Module):
    """A block whose output is its input at some positions, as if it were not there."""

    def __init__(self, inner: nn.Module, positions: tuple[int, ...] | None) -> None:
        super().__init__()
        self.inner = inner
        self.positions = positions

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        y: Tensor = self.inner(x, *rest).clone()  # it still records its attention, if asked to
        rows = _rows(self.positions, x.size(1))
        y[:, rows] = x[:, rows]
        return y


def view_with_taps(
    network: Network,
    taps: Mapping[Place, Tap],
    bypassed: Mapping[int, tuple[int, ...] | None] | None = None,
    attention: Sequence[str] = (),
) -> Network:
    """A view of the network whose activations pass through `taps`; it shares every weight.

    `bypassed` maps a skipped layer to its positions; `attention` is a pattern for each layer.
    """
    network.require_attention("An intervention")
    require_that(
        not network.trunk.has_soft_tokens,
        "An intervention needs a model without soft prompts or prefixes.",
    )
    blocks = [_tap_block(block, i, taps) for i, block in enumerate(layer_blocks(network))]
    for i, positions in (bypassed or {}).items():
        blocks[i] = Bypassed(blocks[i], positions)
    embed = network.trunk.embed
    if tap := taps.get(("embedding", 0)):
        embed = rewired(embed, project=Tapped(embed.project, None, tap))
    return view_with_blocks(network, blocks, embed=embed, attention=attention)


def layer_blocks(network: Network) -> list[nn.Module]:
    """The block of each layer; layers may share one."""
    c = network.config
    return [network.trunk.blocks[i * c.distinct // c.depth] for i in range(c.depth)]


def view_with_blocks(
    network: Network,
    blocks: Iterable[nn.Module],
    *,
    embed: nn.Module | None = None,
    attention: Sequence[str] = (),
) -> Network:
    """A view of the network with other blocks, one for each layer."""
    c = network.config
    view = network._viewed(replace(c, groups=0, attention=tuple(attention) or c.attention))
    trunk = rewired(view.trunk, blocks=nn.ModuleList(blocks), embed=embed or view.trunk.embed)
    trunk.compiled_blocks = None
    return rewired(view, trunk=trunk)


def _tap_block(block: nn.Module, layer: int, taps: Mapping[Place, Tap]) -> nn.Module:
    at = {site: taps[site, i] for site, i in taps if i == layer and site != "embedding"}
    if "head" in at or "attention" in at:
        attend = cast(nn.Module, block.attend)
        out = Tapped(cast(nn.Module, attend.out), at.get("head"), at.get("attention"))
        block = rewired(block, attend=rewired(attend, out=out))
    if "mlp" in at:
        block = rewired(block, mlp=Tapped(cast(nn.Module, block.mlp), None, at["mlp"]))
    return Tapped(block, None, at["residual"]) if "residual" in at else block


def rewired(module: AnyModule, **parts: nn.Module) -> AnyModule:
    """A shallow copy with other submodules."""
    view = copy.copy(module)
    view._modules = {**module._modules, **parts}
    return view


def chained(first: Tap, second: Tap) -> Tap:
    """Two taps at one place, applied in order."""
    return lambda x: second(first(x))


def changed_patterns(c: ModelConfig, interventions: Iterable[Intervention]) -> tuple[str, ...]:
    """The attention pattern of every layer under interventions on the mask; () without any."""
    masks = [one for one in interventions if one.site == "mask"]
    if not masks:
        return ()
    found = [c.attention[i % len(c.attention)] for i in range(c.depth)]
    for one in masks:
        parse_pattern(one.pattern, c.heads)
        for i in one.layers(c):
            found[i] = one.pattern
    return tuple(found)


def recorder(into: dict[Key, Tensor], key: Key) -> Tap:
    """A tap that keeps the activations and changes nothing."""

    def record(x: Tensor) -> Tensor:
        into[key] = x
        return x

    return record


def run_layers(
    trunk: Transformer,
    inputs: Mapping[str, Tensor | None],
    states: Sequence[Tensor] = (),
    attention_out: list[Tensor] | None = None,
) -> list[Tensor]:
    """The embedding and each block's output, before the final norm: depth + 1 tensors [B, T, D].

    `states` are the first of these from an earlier pass, which are not computed again.
    """
    seen = Activations(attention=attention_out, begun=states)
    trunk(**inputs, activations=seen)
    return seen.blocks
