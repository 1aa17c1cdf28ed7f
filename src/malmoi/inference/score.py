"""Log-probabilities of continuations, and of texts of any length with a sliding window."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from malmoi.errors import UsageError
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.likelihood import ScoredRow, score_hidden
from malmoi.inference.prompt import encode_prompts, encode_text
from malmoi.inference.shared_prefix import token_logprobs
from malmoi.model import KVCache, Network
from malmoi.model.recurrent import SegmentMemory
from malmoi.system.result import Result
from malmoi.tokenizer import Tokenizer


@dataclass(frozen=True, repr=False)
class Score(Result):
    """log p(continuation | context), natural logarithm, and its per-token terms."""

    logprob: float
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    greedy: bool  # whether greedy decoding would have generated exactly this


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
    scores = []
    for row, (logprobs, greedy) in zip(rows, token_logprobs(network, rows, prefixes), strict=True):
        names = tuple(map(tokenizer.token, row.tokens[row.first :]))
        scores.append(Score(sum(logprobs), names, tuple(logprobs), greedy))
    return scores


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
    if not continuation:
        raise UsageError("There is nothing to score: the continuation is empty.")
    bare = context.rstrip(" ")
    return bare, context[len(bare) :] + continuation


def _row(tokenizer: Tokenizer, before: list[int], whole: list[int], continuation: str) -> ScoredRow:
    if whole[: len(before)] != before or len(whole) == len(before):
        whole = before + tokenizer.encode(continuation, specials=False).tokens
    return ScoredRow(whole, len(before))


def fit_context(row: ScoredRow, context: int, *, cut: bool = False) -> ScoredRow:
    """Drops the oldest tokens of a context that is too long; the last token is never read.

    With `cut` also those of a continuation that is too long by itself.
    """
    surplus = max(len(row.tokens) - 1 - context, 0)
    if surplus >= row.first and not cut:
        raise UsageError(
            "The continuation has {tokens} tokens and does not fit into this model's context "
            "of {context}; use perplexity, which slides over texts of any length.",
            tokens=len(row.tokens) - row.first,
            context=context,
        )
    return ScoredRow(row.tokens[surplus:], max(1, row.first - surplus))


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
    if len(tokens) < 2:
        raise UsageError(
            "The perplexity of a text needs at least two tokens: the first is context only and "
            "is not predicted."
        )
    if stride is not None and memory is not None:
        raise UsageError("Give either stride or memory, not both.")
    carries = network.config.memory or network.config.recurrent
    if memory is not None:
        found = _carried(network.with_memory(memory), tokens)
    elif stride is None and carries:
        found = _carried(network, tokens)
    else:
        found = _sliding(network, tokens, stride)
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
        shown = torch.tensor([part[:-1]], device=network.device)
        hidden = network.trunk(shown, cache=cache)
        found += score_hidden(network, hidden, [ScoredRow(part, 1)], [0])[0][0]
    return found


def _sliding(network: Network, tokens: list[int], stride: int | None) -> list[float]:
    """Each token's log-probability given at least context − stride earlier tokens, if any."""
    context = network.config.context
    stride = context // 2 or 1 if stride is None else stride
    if not 1 <= stride < context:
        raise UsageError(
            "stride must be between 1 and {context}, less than this model's context, not {stride}.",
            context=context - 1,
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
