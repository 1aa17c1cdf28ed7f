"""Log-likelihoods of many sentences: causal, or with each token masked in turn.

Sentences of equal length are batched, so that nothing is padded. S sentences, L tokens, M of them
masked, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.inference.prompt import start_token
from malmoi.model import Network
from malmoi.system.machine import per_device
from malmoi.tokenizer import Tokenizer

MAX_PASS_TOKENS = {"cpu": 4096, "cuda": 131_072}  # tokens per forward pass
MAX_PASS_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # logits held at once


@torch.inference_mode()
def sentence_logprobs(network: Network, tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """Returns log p of every text: the sum over its tokens, given those before.

    The first token follows the beginning-of-text token. For a masked model it is the
    pseudo-log-likelihood (Salazar et al. 2020 eq. 1).
    """
    masked = "lm" not in network.heads
    if masked and "mlm" not in network.heads:
        raise UsageError(
            "Only a causal or a masked language model can score the likelihood of a text."
        )
    rows = _framed_rows(tokenizer, texts) if masked else _started_rows(tokenizer, texts)
    lengths = [len(row) for row in rows]
    if max(lengths, default=0) > network.config.context:
        raise UsageError(
            f"A text has {max(lengths)} tokens, more than this model's context of "
            f"{network.config.context}."
        )
    found = [0.0] * len(rows)
    for group in _equal_lengths(network, lengths, masked=masked):
        tokens = torch.tensor([rows[i] for i in group], device=network.device)
        scores = _masked(network, tokenizer, tokens) if masked else _causal(network, tokens)
        for i, score in zip(group, scores.tolist(), strict=True):
            found[i] = score
    return found


def _started_rows(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    start = start_token(tokenizer)
    return [[start, *ids] for ids in tokenizer.ids(list(texts))]


def _framed_rows(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """BERT's input: the text between its two special tokens."""
    if tokenizer.specials.mask is None or len(tokenizer.encode("").tokens) != 2:
        raise UsageError(
            "A masked model's tokenizer needs a mask token and special tokens around each text."
        )
    return [row.tokens.tolist() for row in tokenizer.rows(list(texts))]


def _equal_lengths(
    network: Network, lengths: Sequence[int], *, masked: bool
) -> Iterator[list[int]]:
    """Yields indices of texts of equal length, as many as one pass can hold."""
    device = network.device.type
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        by_length[length].append(i)
    for length, places in by_length.items():
        predicted = max(1, length - 2 if masked else length - 1)
        tokens = length * (predicted if masked else 1)
        most = min(
            per_device(MAX_PASS_TOKENS, device) // tokens,
            per_device(MAX_PASS_LOGITS, device) // (predicted * network.config.vocab),
        )
        size = max(1, most)
        yield from (places[at : at + size] for at in range(0, len(places), size))


def _causal(network: Network, tokens: Tensor) -> Tensor:
    """Σ log p(token | those before it) of each row but its first token [S]."""
    logits = network.read("lm", network.hidden(tokens[:, :-1])).float()
    return _logprobs(logits, tokens[:, 1:]).sum(1)


def _masked(network: Network, tokenizer: Tokenizer, tokens: Tensor) -> Tensor:
    """Σ log p(token | all others) of each row but its first and last token [S]."""
    S, L = tokens.shape
    places = torch.arange(1, L - 1, device=tokens.device)
    if not len(places):
        return torch.zeros(S, device=tokens.device)
    rows = tokens.repeat_interleave(len(places), 0)
    at = places.repeat(S)
    order = torch.arange(len(rows), device=tokens.device)
    rows[order, at] = tokenizer.specials.mask or 0
    segments = torch.zeros_like(rows) if network.config.segments else None
    logits = network(rows, heads=("mlm",), slots=order * L + at, segments=segments)["mlm"].float()
    return _logprobs(logits.view(S, len(places), -1), tokens[:, 1:-1]).sum(1)


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)
