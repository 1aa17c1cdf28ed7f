"""Log-probabilities of continuations, and of texts of any length with a sliding window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from malmoi.errors import UsageError
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.likelihood import ScoredRow
from malmoi.inference.prompt import encode_prompts, encode_text
from malmoi.inference.shared_prefix import token_logprobs
from malmoi.metrics import perplexity
from malmoi.model import Network
from malmoi.system.result import Result
from malmoi.tokenizer import Encoding, Tokenizer


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
) -> list[Score]:
    """Scores every (context, continuation); `prefixes` caches contexts between calls."""
    rows = [fit_context(row, network.config.max_length) for row in encode_pairs(tokenizer, pairs)]
    return [
        Score(
            sum(logprobs),
            tuple(map(tokenizer.token, row.tokens[row.first :])),
            tuple(logprobs),
            greedy,
        )
        for row, (logprobs, greedy) in zip(
            rows, token_logprobs(network, rows, prefixes), strict=True
        )
    ]


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> ScoredRow:
    """Encodes one pair: see `encode_pairs`."""
    return encode_pairs(tokenizer, [(context, continuation)])[0]


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


def fit_context(row: ScoredRow, context: int) -> ScoredRow:
    """Drops the oldest tokens of a context that is too long; the last token is never read."""
    surplus = max(len(row.tokens) - 1 - context, 0)
    if surplus >= row.first:
        raise UsageError(
            f"The continuation has {len(row.tokens) - row.first} tokens and does not fit into this "
            f"model's context of {context}; use perplexity, which slides over texts of any length."
        )
    return ScoredRow(row.tokens[surplus:], row.first - surplus)


def sliding_perplexity(
    network: Network, tokenizer: Tokenizer, text: str, stride: int | None
) -> float:
    """exp of the mean negative log-probability of every token but the first."""
    return perplexity(_sliding(network, _long_text(tokenizer, text).tokens, stride))


def sliding_bits_per_byte(
    network: Network, tokenizer: Tokenizer, text: str, stride: int | None
) -> float:
    """Bits per byte of the text: comparable between tokenizers."""
    encoding = _long_text(tokenizer, text)
    scored = text[encoding.offsets[1][0] :]  # the first token is given, not predicted
    return -sum(_sliding(network, encoding.tokens, stride)) / math.log(2) / len(scored.encode())


def _long_text(tokenizer: Tokenizer, text: str) -> Encoding:
    encoding = encode_text(tokenizer, text)
    if len(encoding.tokens) < 2:
        raise UsageError(
            "The perplexity of a text needs at least two tokens: the first is context only and "
            "is not predicted."
        )
    return encoding


def _sliding(network: Network, tokens: list[int], stride: int | None) -> list[float]:
    """Each token's log-probability given at least context − stride earlier tokens, if any."""
    context = network.config.context
    stride = context // 2 or 1 if stride is None else stride
    if not 1 <= stride < context:
        raise UsageError(
            f"stride must be between 1 and {context - 1}, less than this model's context, not "
            f"{stride}."
        )
    return [
        logprob
        for logprobs, _ in token_logprobs(network, score_windows(tokens, context, stride))
        for logprob in logprobs
    ]


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
