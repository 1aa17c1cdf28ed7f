"""Log-probabilities of continuations, and of texts of any length with a sliding window.

Contexts that rows share are read once, then their branches: few-shot prompts share their examples,
and choices share their question. A context of 500 tokens with four choices of five tokens is 520
tokens to read, not 2,020, and the next question's examples are already cached.

B rows, T tokens, D width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from malmoi.errors import require_that
from malmoi.inference.batches import in_order, rows_by
from malmoi.inference.generation.prefix_cache import BLOCK_TOKENS, PrefixCache
from malmoi.inference.prompt import encode_prompts, encode_text
from malmoi.kernels.kv_slots import BranchCache, KVSlots, common_prefix_length, prefill_rows
from malmoi.model import KVCache, Network
from malmoi.model.recurrent import SegmentMemory
from malmoi.system.machine import per_device
from malmoi.system.progress import tracked
from malmoi.system.result import Result
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import BatchLimits, forward_limits, length_batches, pad

# tokens whose logits are held at once: 100 MB for GPT-2 on a CPU, 400 MB on a GPU
MAX_SCORED_TOKENS = {"cpu": 512, "cuda": 2048}
# of the tokens read without sharing; above this, sharing costs more than it saves
MAX_TOKEN_RATIO = 0.8

# each scored token's log-probability, and whether all were the most likely
RowLogprobs = tuple[list[float], bool]


@dataclass(frozen=True, repr=False)
class Score(Result):
    """log p(continuation | context), natural logarithm, and its per-token terms."""

    logprob: float
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    greedy: bool  # whether greedy decoding would have generated exactly this

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tokens: Iterable[int], logprobs: Sequence[float], *, greedy: bool
    ) -> "Score":
        return cls(sum(logprobs), tuple(map(tokenizer.token, tokens)), tuple(logprobs), greedy)


@dataclass(frozen=True)
class ScoredRow:
    """A sequence whose tokens from `first` on are scored."""

    tokens: list[int]
    first: int

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens read before the first predicting one."""
        return tuple(self.tokens[: self.first - 1])

    @property
    def branch(self) -> list[int]:
        """The tokens whose outputs predict the scored ones."""
        return self.tokens[self.first - 1 : -1]


# ------------------------------------------------------------------ continuations


def score_pairs(
    network: Network,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    prefixes: PrefixCache | None = None,
    *,
    cut: bool = False,
) -> list[Score]:
    """Scores every (context, continuation); `prefixes` caches contexts between calls."""
    longest = network.config.max_length
    rows = [fit_context(row, longest, cut=cut) for row in encode_pairs(tokenizer, pairs)]
    found = token_logprobs(network, rows, prefixes)
    return [
        Score.of(tokenizer, row.tokens[row.first :], logprobs, greedy=greedy)
        for row, (logprobs, greedy) in zip(rows, found, strict=True)
    ]


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[ScoredRow]:
    """Tokens of context + continuation if they split at a token boundary, else of each alone."""
    parted = [_parted(*pair) for pair in pairs]
    contexts = list(dict.fromkeys(context for context, _ in parted))
    before = dict(zip(contexts, encode_prompts(tokenizer, contexts), strict=True))
    whole = encode_prompts(tokenizer, [context + continuation for context, continuation in parted])
    return [
        _row(tokenizer, before[context], tokens if context else [], continuation)
        for (context, continuation), tokens in zip(parted, whole, strict=True)
    ]


def _parted(context: str, continuation: str) -> tuple[str, str]:
    """Moves trailing spaces of the context to the continuation, where tokenizers attach them."""
    require_that(continuation, "There is nothing to score: the continuation is empty.")
    bare = context.rstrip(" ")
    return bare, context[len(bare) :] + continuation


def _row(tokenizer: Tokenizer, before: list[int], whole: list[int], continuation: str) -> ScoredRow:
    if whole[: len(before)] != before or len(whole) == len(before):
        whole = before + tokenizer.encode(continuation, specials=False).tokens
    return ScoredRow(whole, len(before))


def fit_context(row: ScoredRow, context: int, *, cut: bool = False) -> ScoredRow:
    """Drops the oldest tokens of a context that is too long, with `cut` a continuation's too."""
    surplus = max(len(row.tokens) - 1 - context, 0)
    require_that(
        surplus < row.first or cut,
        "The continuation has {tokens} tokens, more than a context of {context}; use perplexity.",
        tokens=len(row.tokens) - row.first,
        context=context,
    )
    return ScoredRow(row.tokens[surplus:], max(1, row.first - surplus))


# ------------------------------------------------------------------ rows and their shared contexts


@dataclass(frozen=True)
class SharedPrefix:
    """A context, and the rows that continue it."""

    tokens: tuple[int, ...]
    rows: list[int]


@torch.inference_mode()
def token_logprobs(
    network: Network, rows: Sequence[ScoredRow], prefixes: PrefixCache | None = None
) -> list[RowLogprobs]:
    """Each row's log-probabilities of scored tokens, and whether all were the most likely."""
    results: dict[int, RowLogprobs] = {}
    alone: list[int] = []
    c = network.config
    shareable = network.trunk.is_causal and not c.recurrent and not c.memory
    for group in _groups(rows, forward_limits(network.device)):
        reading = _PrefixBatch(network, rows, group, prefixes)
        if shareable and reading.saves_time:
            results.update(reading.run())
        else:
            alone += [i for prefix in group for i in prefix.rows]
    results.update(zip(alone, score_separately(network, [rows[i] for i in alone]), strict=True))
    return [results[i] for i in range(len(rows))]


def _groups(rows: Sequence[ScoredRow], limits: BatchLimits) -> Iterator[list[SharedPrefix]]:
    """Yields sorted contexts, so that similar ones are adjacent, in groups that fit in one pass."""
    found = rows_by(row.prefix for row in rows)
    group: list[SharedPrefix] = []
    longest = 0
    for tokens in sorted(found):
        longest = max(longest, len(tokens))
        if group and (len(group) == limits.rows or (len(group) + 1) * longest > limits.tokens):
            yield group
            group = []
            longest = len(tokens)
        group.append(SharedPrefix(tokens, found[tokens]))
    if group:
        yield group


class _PrefixBatch:
    """Some contexts in the rows of one cache, and their branches."""

    def __init__(
        self,
        network: Network,
        rows: Sequence[ScoredRow],
        shared: Sequence[SharedPrefix],
        prefixes: PrefixCache | None,
    ) -> None:
        self.network = network
        self.rows = rows
        self.shared = shared
        self.prefixes = prefixes
        first = shared[0].tokens
        last = shared[-1].tokens
        # contexts are sorted, so the first and the last share what all of them share
        self.common = first[: common_prefix_length(first, last)] if len(shared) > 1 else first

    @property
    def saves_time(self) -> bool:
        alone = sum(len(self.rows[i].tokens) - 1 for prefix in self.shared for i in prefix.rows)
        branches = sum(len(self.rows[i].branch) for prefix in self.shared for i in prefix.rows)
        known = self.prefixes.cached_length(self.common) if self.prefixes is not None else 0
        rests = sum(len(prefix.tokens) - len(self.common) for prefix in self.shared)
        read = len(self.common) - known + rests
        return bool(self.shared[-1].tokens) and read + branches < MAX_TOKEN_RATIO * alone

    def run(self) -> Iterator[tuple[int, RowLogprobs]]:
        self.slots = KVSlots(
            self.network, len(self.shared), max(len(prefix.tokens) for prefix in self.shared)
        )
        self._read_common()
        self._read_rests()
        pairs = [(row, i) for row, prefix in enumerate(self.shared) for i in prefix.rows]
        # each branch attends to its own prefix's keys and values
        limits = forward_limits(self.slots.device)
        longest = max(len(self.rows[i].tokens) for _, i in pairs)
        limits = replace(limits, rows=min(limits.rows, max(1, limits.tokens // longest)))
        for group in length_batches([len(self.rows[i].branch) for _, i in pairs], limits):
            some = [pairs[k] for k in group]
            yield from zip([i for _, i in some], self._branch(some), strict=True)

    def _read_common(self) -> None:
        """Reads the common prefix into the first row, from the cache if possible, and copies it."""
        common = self.common
        known = self.prefixes.load(common, self.slots, 0) if self.prefixes is not None else 0
        if known < len(common):
            prefill_rows(self.network, self.slots, [0], [list(common[known:])], [known])
        if self.prefixes is not None and len(common) - known >= BLOCK_TOKENS:
            self.prefixes.store({0: common}, self.slots)
        for row in range(1, len(self.shared)):
            self.slots.copy(0, row, len(common))

    def _read_rests(self) -> None:
        start = len(self.common)
        rests = [list(prefix.tokens[start:]) for prefix in self.shared]
        rows = [row for row, rest in enumerate(rests) if rest]
        lengths = [len(rests[row]) for row in rows]
        for group in length_batches(lengths, forward_limits(self.slots.device)):
            some = [rows[k] for k in group]
            parts = [rests[row] for row in some]
            prefill_rows(self.network, self.slots, some, parts, [start] * len(some))

    def _branch(self, some: Sequence[tuple[int, int]]) -> list[RowLogprobs]:
        device = self.slots.device
        rows = [self.rows[i] for _, i in some]
        tokens = pad([row.branch for row in rows], device=device)
        lengths = torch.tensor([row.first - 1 for row in rows], device=device)
        slots = torch.tensor([row for row, _ in some], device=device)
        cache = BranchCache(self.slots, slots, lengths)
        steps = torch.arange(tokens.size(1), device=device).expand_as(tokens)
        sizes = torch.tensor([[len(row.branch)] for row in rows], device=device)
        where = lengths[:, None] + steps.minimum(sizes - 1)
        hidden = self.network.trunk(tokens, keep=steps < sizes, positions=where, cache=cache)
        return score_hidden(self.network, hidden, rows, [0] * len(rows))


def score_separately(
    network: Network, rows: Sequence[ScoredRow], limits: BatchLimits | None = None
) -> list[RowLogprobs]:
    """Scores every row from its start, in batches of similar length."""
    device = network.device

    def scored(some: list[ScoredRow]) -> list[RowLogprobs]:
        # padded on the right, where no causal query attends
        hidden = read_segments(network, pad([row.tokens[:-1] for row in some], device=device))
        return score_hidden(network, hidden, some, [row.first - 1 for row in some])

    batches = length_batches([len(row.tokens) for row in rows], limits or forward_limits(device))
    groups = tracked(batches, "score", len(rows))
    return in_order((group, scored([rows[i] for i in group])) for group in groups)


def read_segments(network: Network, tokens: Tensor) -> Tensor:
    """Hidden states [B, T, D]; with a memory, segment by segment, since attention is quadratic."""
    c = network.config
    if not c.memory:
        return cast(Tensor, network.trunk(tokens))
    memory = SegmentMemory(c.memory)
    return torch.cat([network.trunk(part, cache=memory) for part in tokens.split(c.context, 1)], 1)


def score_hidden(
    network: Network, hidden: Tensor, rows: Sequence[ScoredRow], begins: Sequence[int]
) -> list[RowLogprobs]:
    """Log-probabilities from hidden states [B, T, D]; `begins`: each first predicting position."""
    width = hidden.size(1)
    device = hidden.device
    sizes = [len(row.tokens) - row.first for row in rows]
    slots = [
        i * width + begin + t
        for i, (begin, n) in enumerate(zip(begins, sizes, strict=True))
        for t in range(n)
    ]
    targets = torch.tensor([t for row in rows for t in row.tokens[row.first :]], device=device)
    flat = hidden.flatten(0, 1)[torch.tensor(slots, device=device)]
    size = per_device(MAX_SCORED_TOKENS, device.type)
    logprobs, best = [], []
    for part, target in zip(flat.split(size), targets.split(size), strict=True):
        logits = network.read("lm", part).float()
        logprobs.append(logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(-1))
        best.append(logits.argmax(-1) == target)
    # one transfer for all rows: a GPU synchronizes on each
    both = (torch.cat(some).cpu().split(sizes) for some in (logprobs, best))
    return [(one.tolist(), bool(right.all())) for one, right in zip(*both, strict=True)]


# ------------------------------------------------------------------ texts of any length


def long_text_logprobs(
    network: Network, tokenizer: Tokenizer, text: str, stride: int | None, memory: int | None
) -> tuple[list[float], int]:
    """Log-probabilities of every token of a text of any length but the first, and their bytes.

    It is read in windows that advance by `stride` (half the context). A model that carries a state
    or a memory reads segment after segment instead, unless a stride is given; `memory` is another
    one than its own.
    """
    encoding = encode_text(tokenizer, text)
    tokens = encoding.tokens
    require_that(len(tokens) >= 2, "The perplexity of a text needs at least two tokens.")
    require_that(stride is None or memory is None, "Give either stride or memory, not both.")
    network = network if memory is None else network.with_memory(memory)
    carries = network.config.memory or network.config.recurrent or memory is not None
    read_on = carries and stride is None
    found = _carried(network, tokens) if read_on else _sliding(network, tokens, stride)
    return found, len(text[encoding.offsets[1][0] :].encode())


@torch.inference_mode()
def _carried(network: Network, tokens: list[int]) -> list[float]:
    """Each token's log-probability, segment after segment with the state of those before."""
    c = network.config
    cache: KVCache | None = SegmentMemory(c.memory) if c.memory else None
    if c.recurrent:
        cache = KVCache(c, 1, len(tokens), dtype=network.dtype, device=network.device)
    found: list[float] = []
    for start in range(0, len(tokens) - 1, c.context):
        part = tokens[start : start + c.context + 1]
        hidden = network.trunk(torch.tensor([part[:-1]], device=network.device), cache=cache)
        found += score_hidden(network, hidden, [ScoredRow(part, 1)], [0])[0][0]
    return found


def _sliding(network: Network, tokens: list[int], stride: int | None) -> list[float]:
    """Each token's log-probability given at least context − stride earlier tokens, if any."""
    context = network.config.context
    stride = context // 2 or 1 if stride is None else stride
    require_that(
        1 <= stride < context,
        "stride must be at least 1 and less than the context of {context}, not {stride}.",
        context=context,
        stride=stride,
    )
    found = token_logprobs(network, score_windows(tokens, context, stride))
    return [logprob for logprobs, _ in found for logprob in logprobs]


def score_windows(tokens: list[int], context: int, stride: int) -> list[ScoredRow]:
    """Windows that together score every token after the first exactly once."""
    rows = []
    scored = 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        if end > scored:
            rows.append(ScoredRow(tokens[begin:end], scored - begin))
        scored = end
    return rows
