"""Attention patterns: predicates (batch, head, query, key) → bool, written as text.

`"causal & local:256"` is a band, `"causal & (local:16 | column:16)"` is Child's strided pattern in
every head, and `"causal & local:16 ; causal & column:16"` gives the first half of the heads one set
and the second half the other. The same predicate makes the SDPA mask, the FlexAttention block mask,
the KV-cache mask and the plot in the studio.

Indices in a predicate are *slots*: indices into the query and key tensors. A `Layout` maps each
slot to a position and a document, so that padding, packing and KV caches need no patterns of their
own.
"""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import UsageError, explained, require_that
from malmoi.system.plugins import Registry

# (batch, head, query, key) → bool; the arguments are tensors that broadcast
Predicate = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Layout:
    """B rows of T query slots and K key slots; with None for positions, slot i holds position i."""

    batch: int
    queries: int  # T
    keys: int  # K
    offset: int = 0  # position of the first query, if positions are consecutive
    query_positions: Tensor | None = None  # [B, T]
    key_positions: Tensor | None = None  # [B, K]
    keep: Tensor | None = None  # [B, K] bool: slots that may be attended to
    query_documents: Tensor | None = None  # [B, T]
    key_documents: Tensor | None = None  # [B, K]
    prefix: int = 0  # keys before position 0, visible to every query
    tokens: Tensor | None = None  # [B, T] bool: queries that are not padding

    @property
    def plain(self) -> bool:
        """Whether rows are single unpadded documents, in order: only the pattern matters."""
        return self.keep is None and self.query_positions is None and self.query_documents is None

    def query(self, b: Any, q: Any) -> Any:
        return q + self.offset if self.query_positions is None else self.query_positions[b, q]

    def key(self, b: Any, k: Any) -> Any:
        return k - self.prefix if self.key_positions is None else self.key_positions[b, k]

    def distances(self, device: torch.device) -> Tensor:
        """How far each key lies before each query: [B or 1, 1, T, K]."""
        b = torch.arange(self.batch if not self.plain else 1, device=device)[:, None, None]
        q = torch.arange(self.queries, device=device)[:, None]
        k = torch.arange(self.keys, device=device)
        found: Tensor = self.query(b, q) - self.key(b, k)
        return found.expand(-1, self.queries, self.keys)[:, None] if found.dim() == 3 else found

    def with_prefix(self, prefix: int) -> "Layout":
        """The same layout with this many more prefix keys."""
        padding = {"keep": True, "key_positions": -1, "key_documents": -1}
        changes: dict[str, Any] = {
            name: F.pad(getattr(self, name), (prefix, 0), value=value)
            for name, value in padding.items()
            if getattr(self, name) is not None
        }
        return replace(self, keys=self.keys + prefix, prefix=prefix, **changes)


BAND = re.compile(r"causal & local:(?P<window>\d+)")
PATTERNS: Registry[Callable[..., Predicate]] = Registry("attention pattern", {})


def pattern(make: Callable[..., Predicate]) -> Callable[..., Predicate]:
    """Registers a pattern under its function's name; numbers after the colon are its arguments."""
    PATTERNS[make.__name__] = make
    return make


@pattern
def full(at: Layout) -> Predicate:
    """Every token sees every other: BERT."""
    return lambda b, h, q, k: k >= 0


@pattern
def causal(at: Layout) -> Predicate:
    """No token sees a later one: GPT."""
    return lambda b, h, q, k: at.key(b, k) <= at.query(b, q)


@pattern
def local(at: Layout, window: int) -> Predicate:
    """Positions less than `window` apart: GPT-3 §2.1's band, Child et al. 2019's first head set."""
    return lambda b, h, q, k: abs(at.query(b, q) - at.key(b, k)) < window


@pattern
def column(at: Layout, stride: int) -> Predicate:
    """Every stride-th earlier position: the second head set of Child et al. 2019, strided."""
    return lambda b, h, q, k: (at.query(b, q) - at.key(b, k)) % stride == 0


@pattern
def strided(at: Layout, stride: int) -> Predicate:
    """Child et al. 2019, strided, merged: the last `stride` positions, and every stride-th."""
    return any_of(local(at, stride), column(at, stride))


@pattern
def block(at: Layout, stride: int) -> Predicate:
    """Positions in the same block: Child et al. 2019, fixed, first head set: ⌊j/l⌋ = ⌊i/l⌋."""
    return lambda b, h, q, k: at.query(b, q) // stride == at.key(b, k) // stride


@pattern
def summary(at: Layout, stride: int, columns: int) -> Predicate:
    """The last columns of every block: Child et al. 2019, fixed, second set: j mod l ≥ l − c."""
    return lambda b, h, q, k: at.key(b, k) % stride >= stride - columns


@pattern
def fixed(at: Layout, stride: int, columns: int) -> Predicate:
    """Child et al. 2019, fixed, both head sets merged."""
    return any_of(block(at, stride), summary(at, stride, columns))


@pattern
def prefix(at: Layout, length: int) -> Predicate:
    """The first `length` positions are visible to all: `causal | prefix:32` is a prefix LM."""
    return lambda b, h, q, k: at.key(b, k) < length


@pattern
def padding(at: Layout) -> Predicate:
    """Only slots that hold a token; added automatically to padded batches."""
    keep = at.keep
    return (lambda b, h, q, k: k >= 0) if keep is None else (lambda b, h, q, k: keep[b, k])


@pattern
def document(at: Layout) -> Predicate:
    """Only tokens of the same document; added automatically to packed batches."""
    query = at.query_documents
    key = at.key_documents
    if query is None or key is None:
        raise UsageError("The pattern 'document' needs a batch with the document of each token.")
    return lambda b, h, q, k: query[b, q] == key[b, k]


def all_of(*predicates: Predicate) -> Predicate:
    return lambda b, h, q, k: reduce(lambda x, y: x & y, (p(b, h, q, k) for p in predicates))


def any_of(*predicates: Predicate) -> Predicate:
    return lambda b, h, q, k: reduce(lambda x, y: x | y, (p(b, h, q, k) for p in predicates))


def by_head(groups: Sequence[Predicate], heads: int) -> Predicate:
    """Assigns heads to groups in order: the first heads/n heads use the first predicate, etc."""

    def predicate(b: Any, h: Any, q: Any, k: Any) -> Any:
        group = h * len(groups) // heads
        return reduce(
            lambda x, y: x | y, ((group == i) & p(b, h, q, k) for i, p in enumerate(groups))
        )

    return predicate


# ------------------------------------------------------------------ text → predicate

NAME = re.compile(r"(?<!\w)[a-z_]\w*(?::[\d,\s]*\d)?")  # with its numbers
MAX_NAMES = 100  # of a head group: their predicates call one another
JOINS: dict[type[ast.operator], Callable[..., Predicate]] = {ast.BitAnd: all_of, ast.BitOr: any_of}


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern; `at(layout)` is its predicate. Patterns with equal text are equal."""

    text: str
    heads: int = 1

    def __post_init__(self) -> None:
        probe = torch.zeros(1, 1, dtype=torch.long)
        # fail early on a misspelt pattern
        self._read(Layout(1, 1, 1, query_documents=probe, key_documents=probe))

    @property
    def varies_by_head(self) -> bool:
        return ";" in self.text

    @property
    def is_local(self) -> bool:
        """Whether a window limits what is visible; such layers may have their own rotary base."""
        return "local" in self.text

    @property
    def window(self) -> int | None:
        """How many positions a causal band reaches back, the query's own included; else None."""
        band = BAND.fullmatch(self.text)
        return int(band["window"]) if band else None

    @property
    def is_causal(self) -> bool:
        """Whether no token ever sees a later one, so that the model can decode token by token.

        It must say so itself: every way to see a key goes through `causal`. What a pattern without
        it happens to see in some length proves nothing: periods meet again only at their least
        common multiple.
        """
        # whether anything but `causal` decides about later keys: any other name may allow them
        others = partial(_parse, named=lambda token: lambda b, h, q, k: token != "causal")
        return not any(see(0, 0, 0, 0) for see in map(others, self.text.split(";")))

    def at(self, layout: Layout) -> Predicate:
        """The predicate over this layout's slots, including its padding and documents."""
        terms = [self._read(layout)]
        terms += [padding(layout)] if layout.keep is not None else []
        terms += [document(layout)] if layout.query_documents is not None else []
        if not layout.prefix:
            return all_of(*terms)
        # prefix keys (soft tokens) are visible to every query
        return any_of(lambda b, h, q, k: k < layout.prefix, all_of(*terms))

    def mask(self, layout: Layout, device: torch.device | str = "cpu") -> Tensor:
        """A boolean mask that broadcasts to [B, H, T, K], for SDPA and for plots."""
        b = torch.arange(layout.batch, device=device)[:, None, None, None]
        heads = torch.arange(self.heads, device=device)[None, :, None, None]
        h = heads if self.varies_by_head else 0
        q = torch.arange(layout.queries, device=device)[None, None, :, None]
        k = torch.arange(layout.keys, device=device)[None, None, None, :]
        return cast(Tensor, self.at(layout)(b if not layout.plain else 0, h, q, k))

    def _read(self, layout: Layout) -> Predicate:
        groups = [_parse(text, partial(_named, layout)) for text in self.text.split(";")]
        require_that(
            len(groups) <= self.heads,
            "The pattern {text!r} has {n} head groups for {heads} heads.",
            text=self.text,
            n=len(groups),
            heads=self.heads,
        )
        return groups[0] if len(groups) == 1 else by_head(groups, self.heads)


@cache
def parse_pattern(text: str, heads: int = 1) -> Pattern:
    """Parses names with arguments (`fixed:16,2`), &, |, parentheses and ';' between head groups."""
    return Pattern(text, heads)


def _parse(text: str, named: Callable[[str], Predicate]) -> Predicate:
    """The predicate of names joined by & and |, which bind as in Python; `named` resolves one."""
    names = iter(NAME.findall(text)[:MAX_NAMES])

    def join(node: ast.expr) -> Predicate:
        if isinstance(node, ast.BinOp) and type(node.op) in JOINS:
            return JOINS[type(node.op)](join(node.left), join(node.right))
        if isinstance(node, ast.Name) and node.id == "x":
            return named(next(names))
        raise SyntaxError

    with explained(
        (SyntaxError, ValueError, RecursionError, MemoryError, StopIteration),
        "The attention pattern {text!r} must be names joined by & and |.",
        raises=UsageError,
        text=text,
    ):
        return join(ast.parse(NAME.sub("x", text).strip(), mode="eval").body)


def _named(layout: Layout, token: str) -> Predicate:
    name, _, numbers = token.partition(":")
    make = PATTERNS.find(name)
    arguments = [int(n) for n in numbers.replace(" ", "").split(",") if n]
    wanted = make.__code__.co_varnames[1 : make.__code__.co_argcount]
    require_that(
        len(arguments) == len(wanted) and all(n >= 1 for n in arguments),
        "The attention pattern {token!r} must be written {example!r}, with positive numbers.",
        token=token,
        example=name + (":" + ",".join(wanted) if wanted else ""),
    )
    return make(layout, *arguments)
