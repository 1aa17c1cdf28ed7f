"""How likely a text is: continuations, and whole texts of any length by a sliding window.

B rows, T tokens, M scored tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.infer.batch import batches, pad
from malmoi.infer.prompt import encode_prompt, encode_text
from malmoi.model import Network
from malmoi.tokenizer import Encoding, Tokenizer

ROWS_OF_SCORES = 512  # tokens whose scores over the vocabulary are held at once: 100 MB for GPT-2


@dataclass(frozen=True)
class Score:
    """log p(continuation | context), natural logarithm, and its parts."""

    logprob: float
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    greedy: bool  # whether greedy decoding would have written exactly this


@dataclass(frozen=True)
class Row:
    """A sequence of which the tokens from `first` on are scored."""

    tokens: list[int]
    first: int


def scores(network: Network, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Score]:
    """The score of every (context, continuation)."""
    rows = [fit(split(tokenizer, *pair), network.config.context) for pair in pairs]
    return [
        Score(sum(logprobs), tuple(map(tokenizer.token, row.tokens[row.first :])), tuple(logprobs), greedy)
        for row, (logprobs, greedy) in zip(rows, token_logprobs(network, rows), strict=True)
    ]


def split(tokenizer: Tokenizer, context: str, continuation: str) -> Row:
    """Tokens of both as one text, where the cut falls between two of them; else of each by itself.

    Spaces at the end of the context go to the continuation: tokenizers attach a space to the word after it.
    """
    if not continuation:
        raise UsageError("There is nothing to score: the continuation is empty.")
    bare = context.rstrip(" ")
    context, continuation = bare, context[len(bare) :] + continuation
    before = encode_prompt(tokenizer, context).tokens
    whole = encode_text(tokenizer, context + continuation).tokens if context else []
    if whole[: len(before)] != before or len(whole) == len(before):
        whole = before + tokenizer.encode(continuation, specials=False).tokens
    return Row(whole, len(before))


def fit(row: Row, context: int) -> Row:
    """Drops the oldest tokens of a context that does not fit; the last token is only predicted, never read."""
    surplus = max(len(row.tokens) - 1 - context, 0)
    if surplus >= row.first:
        raise UsageError(
            f"The continuation has {len(row.tokens) - row.first} tokens and does not fit into this model's context "
            f"of {context}; use perplexity, which slides over texts of any length."
        )
    return Row(row.tokens[surplus:], row.first - surplus)


@torch.inference_mode()
def token_logprobs(network: Network, rows: Sequence[Row]) -> list[tuple[list[float], bool]]:
    """Of each row: the log-probability of every scored token, and whether each was the most likely one."""
    results: list[tuple[list[float], bool]] = [([], True)] * len(rows)
    for group in batches([len(row.tokens) for row in rows]):
        found = _group_logprobs(network, [rows[i] for i in group])
        for i, (logprobs, best) in zip(group, found, strict=True):
            results[i] = logprobs.tolist(), bool(best.all())
    return results


def _group_logprobs(network: Network, rows: Sequence[Row]) -> list[tuple[Tensor, Tensor]]:
    device = network.trunk.embed.token.weight.device
    shown = pad([row.tokens[:-1] for row in rows], device=device)  # padding on the right: no causal query sees it
    hidden = network.trunk(shown).flatten(0, 1)
    width = shown.size(1)
    slots = [i * width + t - 1 for i, row in enumerate(rows) for t in range(row.first, len(row.tokens))]
    targets = torch.tensor([t for row in rows for t in row.tokens[row.first :]], device=device)
    logprobs, best = _target_logprobs(network, hidden[torch.tensor(slots, device=device)], targets)
    sizes = [len(row.tokens) - row.first for row in rows]
    return list(zip(logprobs.split(sizes), best.split(sizes), strict=True))


def _target_logprobs(network: Network, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    parts = zip(hidden.split(ROWS_OF_SCORES), targets.split(ROWS_OF_SCORES), strict=True)
    found = [_logprobs_of(network.read("lm", part).float(), target) for part, target in parts]
    logprobs, best = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(best)


def _logprobs_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == targets


def sliding_perplexity(network: Network, tokenizer: Tokenizer, text: str, stride: int | None) -> float:
    """exp of the mean negative log-probability of every token but the first."""
    logprobs = _sliding(network, _long_text(tokenizer, text).tokens, stride)
    return math.exp(-sum(logprobs) / len(logprobs))


def sliding_bits_per_byte(network: Network, tokenizer: Tokenizer, text: str, stride: int | None) -> float:
    """Bits that the model needs for a byte of the text: comparable between tokenizers."""
    encoding = _long_text(tokenizer, text)
    scored = text[encoding.offsets[1][0] :]  # the first token is given, not predicted
    return -sum(_sliding(network, encoding.tokens, stride)) / math.log(2) / len(scored.encode())


def _long_text(tokenizer: Tokenizer, text: str) -> Encoding:
    encoding = encode_text(tokenizer, text)
    if len(encoding.tokens) < 2:
        raise UsageError(
            "The perplexity of a text needs at least two tokens: the first is only given, never predicted."
        )
    return encoding


def _sliding(network: Network, tokens: list[int], stride: int | None) -> list[float]:
    """Each token's log-probability given at least context − stride tokens before it, where there are as many."""
    context = network.config.context
    stride = context // 2 or 1 if stride is None else stride
    if not 1 <= stride < context:
        raise UsageError(f"stride must be between 1 and {context - 1}, less than this model's context, not {stride}.")
    return [
        logprob for logprobs, _ in token_logprobs(network, windows(tokens, context, stride)) for logprob in logprobs
    ]


def windows(tokens: list[int], context: int, stride: int) -> list[Row]:
    """Windows that together score every token after the first exactly once."""
    rows, scored = [], 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        if end > scored:
            rows.append(Row(tokens[begin:end], scored - begin))
        scored = end
    return rows
