"""Continuing prompts: many at once, left-padded, over one KV cache.

`Decoding` turns prompts into tokens, `write` turns those into text. B rows, T tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.infer.batch import batches, kept, pad
from malmoi.infer.fast import ROWS, Screen
from malmoi.infer.sample import Sampling, choose, generators
from malmoi.infer.stream import Writer, detokenizer, stop_strings
from malmoi.model import KVCache, Network
from malmoi.tokenizer import Tokenizer


@dataclass(frozen=True)
class Wish:
    """What a user asks of a continuation."""

    max_new_tokens: int = 40
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()  # tokens that end a text
    seed: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", stop_strings(self.stop))
        for name in ("max_new_tokens", "n"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, not {getattr(self, name)}.")


@dataclass(frozen=True)
class Request:
    """One continuation: its prompt, its random numbers, and how many tokens it may take."""

    prompt: tuple[int, ...]
    generator: torch.Generator
    limit: int


def requests(prompts: Sequence[Sequence[int]], wish: Wish, context: int) -> list[Request]:
    """Every sample of every prompt; generation ends with the context at the latest."""
    for prompt in prompts:
        if len(prompt) >= context:
            raise UsageError(
                f"The prompt has {len(prompt)} tokens and leaves no room in this model's context of {context}; "
                f"shorten it to {context - 1} or fewer."
            )
    return [
        Request(tuple(prompt), generator, min(wish.max_new_tokens, context - len(prompt)))
        for prompt in prompts
        for generator in generators(wish.seed, wish.n)
    ]


class Decoding:
    """Requests continued together, one token a step. Rows that are over leave when they are half of the batch."""

    def __init__(
        self, network: Network, wanted: Sequence[Request], sampling: Sampling, screen: Screen | None = None
    ) -> None:
        self.network, self.sampling, self.screen = network, sampling, screen
        self.wanted = wanted
        self.live = list(range(len(wanted)))  # which request each row serves
        self.over: set[int] = set()
        self.last: Tensor | None = None  # the newest token of each row [B], not yet shown to the network
        self._prefill()

    @torch.inference_mode()
    def step(self) -> dict[int, int]:
        """The next token of every request that still runs."""
        if self.last is not None:
            self._forward(self.last)
        self.last = self._choose()
        if self.sampling.remembers:
            self.seen.scatter_(1, self.last[:, None], True)
        tokens = zip(self.live, self.last.tolist(), strict=True)
        return {i: token for i, token in tokens if i not in self.over}

    @torch.inference_mode()
    def drop(self, finished: Iterable[int]) -> None:
        """These requests are over. Their rows go when many have gathered: moving the cache costs as much as a step."""
        self.over.update(finished)
        staying = [row for row, i in enumerate(self.live) if i not in self.over]
        if self.last is not None and 0 < len(staying) <= len(self.live) // 2:
            self._select(staying)
            self.last = self.last[torch.tensor(staying, device=self.last.device)]

    @property
    def running(self) -> bool:
        return len(self.over) < len(self.wanted)

    @torch.inference_mode()
    def _prefill(self) -> None:
        """Shows the network each distinct prompt once; the samples of a prompt share what it has seen."""
        distinct = list(dict.fromkeys(request.prompt for request in self.wanted))
        device = self.network.trunk.embed.token.weight.device
        keep = kept(distinct, left=True, device=device)
        self.cache = self._make_cache(len(distinct))
        tokens = pad(distinct, left=True, device=device)
        self.hidden = self.network.trunk(tokens, keep=keep, cache=self.cache)[:, -1]  # of the newest token [B, D]
        lengths = torch.tensor([[len(prompt)] for prompt in distinct], device=device)
        self.positions = None if keep is None else lengths  # of the next token [B, 1]; plain rows need none
        self.seen = self._seen(distinct)
        if len(distinct) < len(self.wanted):
            rows = {prompt: row for row, prompt in enumerate(distinct)}
            self._select([rows[request.prompt] for request in self.wanted])

    def _make_cache(self, batch: int) -> KVCache:
        longest = max(len(request.prompt) for request in self.wanted)
        capacity = longest + max(request.limit for request in self.wanted) - 1  # the last token is never read
        weight = self.network.trunk.embed.token.weight
        return KVCache(self.network.config, batch, capacity, dtype=weight.dtype, device=weight.device)

    def _seen(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Which tokens stand in each row [B, V], where a rule wants to know."""
        width = self.network.config.vocab if self.sampling.remembers else 0
        seen = torch.zeros(len(prompts), width, dtype=torch.bool, device=self.hidden.device)
        for row, prompt in zip(seen, prompts if width else [], strict=False):
            row[torch.tensor(prompt, device=row.device)] = True
        return seen

    def _choose(self) -> Tensor:
        plain = self.sampling.greedy and not self.sampling.remembers
        if plain and self.screen is not None and self.screen.fresh and len(self.hidden) <= ROWS:
            return self.screen.best(self.screen.head.features(self.hidden))
        drawing = [self.wanted[i].generator for i in self.live]
        return choose(self.network.read("lm", self.hidden), self.sampling, self.seen, drawing)

    def _forward(self, tokens: Tensor) -> None:
        self.hidden = self.network.trunk(tokens[:, None], cache=self.cache, positions=self.positions)[:, -1]
        if self.positions is not None:
            # a row that is over runs on until it is dropped; it must not run past the position table
            self.positions = (self.positions + 1).clamp(max=self.network.config.context - 1)

    def _select(self, rows: list[int]) -> None:
        at = torch.tensor(rows, device=self.hidden.device)
        self.cache.reorder(at)
        self.hidden, self.seen = self.hidden[at], self.seen[at]
        self.positions = None if self.positions is None else self.positions[at]
        self.live = [self.live[row] for row in rows] if self.last is not None else self.live


@dataclass(frozen=True)
class Speaker:
    """What writes: a network with an lm head, its tokenizer, and a screen where greedy decoding has one."""

    network: Network
    tokenizer: Tokenizer
    screen: Screen | None = None


def write(speaker: Speaker, prompts: Sequence[Sequence[int]], wish: Wish) -> Iterator[tuple[int, str]]:
    """Pieces of text as they come, each with the number of its continuation: prompt i's sample j is i · n + j."""
    return _write_all(speaker, requests(prompts, wish, speaker.network.config.context), wish)  # refuses at once


def _write_all(speaker: Speaker, wanted: Sequence[Request], wish: Wish) -> Iterator[tuple[int, str]]:
    for group in batches([len(request.prompt) + request.limit for request in wanted]):
        for i, text in _write_group(speaker, [wanted[i] for i in group], wish):
            yield group[i], text


def _write_group(speaker: Speaker, wanted: Sequence[Request], wish: Wish) -> Iterator[tuple[int, str]]:
    writers = [Writer(detokenizer(speaker.tokenizer, r.prompt), wish.stop, wish.ends, r.limit) for r in wanted]
    decoding = Decoding(speaker.network, wanted, wish.sampling, speaker.screen)
    while decoding.running:
        for i, token in decoding.step().items():
            if text := writers[i].push(token):
                yield i, text
        decoding.drop(i for i, writer in enumerate(writers) if writer.done)


def continuations(speaker: Speaker, prompts: Sequence[Sequence[int]], wish: Wish) -> list[list[str]]:
    """The continuations of every prompt, `n` each."""
    texts = [""] * (len(prompts) * wish.n)
    for i, text in write(speaker, prompts, wish):
        texts[i] += text
    return [texts[i : i + wish.n] for i in range(0, len(texts), wish.n)]
