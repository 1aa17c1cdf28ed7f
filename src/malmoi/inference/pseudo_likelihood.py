"""Likelihoods of sentences, and pseudo-likelihoods under a masked model.

Tokens are masked one at a time, or a whole part at once. Masked rows of equal length are batched,
so that nothing is padded.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from malmoi.errors import UsageError
from malmoi.inference.likelihood import ScoredRow, score_separately
from malmoi.inference.prompt import mask_token, start_token, text_too_long
from malmoi.inference.score import Score
from malmoi.model import Network
from malmoi.system.machine import per_device
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import BatchLimits

MAX_PASS_TOKENS = {"cpu": 4096, "cuda": 131_072}  # tokens per forward pass
MAX_PASS_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # logits held at once
Row = tuple[int, ...]


@dataclass(frozen=True)
class SplitText:
    """A text in three parts; the middle one is scored."""

    before: str
    middle: str
    after: str = ""


def sentence_logprobs(network: Network, tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """Returns log p of every text: the sum over its tokens, given those before.

    The first token follows the beginning-of-text token. For a masked model it is the
    pseudo-log-likelihood (Salazar et al. 2020 eq. 1).
    """
    if "lm" not in network.heads:
        if "mlm" not in network.heads:
            raise UsageError(
                "Only a causal or a masked language model can score the likelihood of a text."
            )
        parts = [SplitText("", text) for text in texts]
        return [score.logprob for score in pseudo_scores(network, tokenizer, parts)]
    start = start_token(tokenizer)
    rows = [ScoredRow([start, *ids], 1) for ids in tokenizer.ids(list(texts))]
    longest = max((len(row.tokens) for row in rows), default=0)
    if longest > network.config.context:
        raise text_too_long(longest, network.config.context)
    limit = per_device(MAX_PASS_TOKENS, network.device.type)
    found = score_separately(network, rows, BatchLimits(limit, limit, limit // 8))
    return [sum(logprobs) for logprobs, _ in found]


def pseudo_scores(
    network: Network, tokenizer: Tokenizer, parts: Sequence[SplitText], *, together: bool = False
) -> list[Score]:
    """Σ log p(token | all others) of every part's middle (Salazar et al. 2020 eq. 1).

    `together` masks all its tokens at once, as a cloze with a verbalizer does (Schick & Schütze
    2021 §3).
    """
    mask = mask_token(tokenizer)
    texts = [_fit(*one, network.config.context) for one in _encoded(tokenizer, parts)]
    queries = []
    for tokens, places in texts:
        for place in places:
            hidden = places if together else [place]
            row = tuple(mask if i in hidden else token for i, token in enumerate(tokens))
            queries.append((row, place, tokens[place]))
    found = iter(_logprobs(network, queries))
    scores = []
    for tokens, places in texts:
        logprobs, best = zip(*(next(found) for _ in places), strict=True)
        names = tuple(tokenizer.token(tokens[place]) for place in places)
        scores.append(Score(sum(logprobs), names, logprobs, all(best)))
    return scores


def _encoded(
    tokenizer: Tokenizer, parts: Sequence[SplitText]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the tokens of each whole text, and the positions of its middle."""
    encodings = tokenizer.encode_batch([part.before + part.middle + part.after for part in parts])
    for part, encoding in zip(parts, encodings, strict=True):
        start = len(part.before)
        end = start + len(part.middle)
        inside = [
            i
            for i, (first, last) in enumerate(encoding.offsets)
            if not encoding.specials[i] and last > start and first < end
        ]
        if not inside:
            raise UsageError(f"There is nothing to score: {part.middle!r:.60} has no tokens.")
        yield encoding.tokens, inside


def _fit(tokens: list[int], places: list[int], context: int) -> tuple[list[int], list[int]]:
    """Drops the oldest tokens of a text that is too long, all but the first ([CLS])."""
    surplus = max(len(tokens) - context, 0)
    if surplus >= places[0]:
        raise text_too_long(len(tokens), context)
    return tokens[:1] + tokens[1 + surplus :], [place - surplus for place in places]


@torch.inference_mode()
def _logprobs(
    network: Network, queries: Sequence[tuple[Row, int, int]]
) -> list[tuple[float, bool]]:
    """log p of each (row, place, token), and whether the token is the likeliest there.

    Rows that several queries share are computed once.
    """
    by_row: dict[Row, list[int]] = defaultdict(list)
    for i, (row, _, _) in enumerate(queries):
        by_row[row].append(i)
    found: list[tuple[float, bool]] = [(0.0, False)] * len(queries)
    for rows in _equal_lengths(network, by_row):
        positions = [(at, i) for at, row in enumerate(rows) for i in by_row[row]]
        slots = [at * len(rows[0]) + queries[i][1] for at, i in positions]
        given = (slots, rows, [[queries[i][2]] for _, i in positions])
        where, tokens, targets = (torch.tensor(one, device=network.device) for one in given)
        segments = torch.zeros_like(tokens) if network.config.segments else None
        logits = network(tokens, heads=("mlm",), slots=where, segments=segments)["mlm"].float()
        chosen = (logits.gather(1, targets)[:, 0] - logits.logsumexp(-1)).tolist()
        best = (logits.argmax(-1) == targets[:, 0]).tolist()
        for (_, i), *one in zip(positions, chosen, best, strict=True):
            found[i] = (one[0], one[1])
    return found


def _equal_lengths(network: Network, by_row: Mapping[Row, Sequence[int]]) -> Iterator[list[Row]]:
    """Yields rows of equal length, as many as one pass can hold."""
    kind = network.device.type
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in by_row:
        by_length[len(row)].append(row)
    for length, rows in by_length.items():
        slots = max(len(by_row[row]) for row in rows)
        tokens = per_device(MAX_PASS_TOKENS, kind) // length
        logits = per_device(MAX_PASS_LOGITS, kind) // (slots * network.config.vocab)
        size = max(1, min(tokens, logits))
        yield from (rows[at : at + size] for at in range(0, len(rows), size))
