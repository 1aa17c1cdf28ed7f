"""Pseudo-likelihood under a masked model: tokens masked one at a time, or a whole part at once.

B rows, T tokens, M masks, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.inference.prompt import mask_token, text_too_long
from malmoi.inference.score import Score
from malmoi.model import Network
from malmoi.system.progress import tracked
from malmoi.tokenizer import Encoding, Tokenizer
from malmoi.tokenizer.padding import length_batches, model_inputs

MAX_PARTS = 64  # parts whose logits are held at once


@dataclass(frozen=True)
class SplitText:
    """A text in three parts; the middle one is scored."""

    before: str
    middle: str
    after: str = ""


@dataclass(frozen=True)
class MaskedRow:
    """A sequence with masks and their positions."""

    tokens: tuple[int, ...]
    places: tuple[int, ...]


def pseudo_scores(
    network: Network, tokenizer: Tokenizer, parts: Sequence[SplitText], *, together: bool = False
) -> list[Score]:
    """Σ log p(token | all others) of every part's middle (Salazar et al. 2020 eq. 1).

    `together` masks all its tokens at once, as a cloze with a verbalizer does (Schick & Schütze
    2021 §3).
    """
    starts = range(0, len(parts), MAX_PARTS)
    return [
        score
        for i in starts
        for score in _some_scores(network, tokenizer, parts[i : i + MAX_PARTS], together=together)
    ]


def _some_scores(
    network: Network, tokenizer: Tokenizer, parts: Sequence[SplitText], *, together: bool
) -> list[Score]:
    texts = [_fit(*_encoded(tokenizer, part), network.config.context) for part in parts]
    wanted = [_masked(tokenizer, tokens, places, together=together) for tokens, places in texts]
    found = _logprobs(network, list(dict.fromkeys(one for some in wanted for one in some)))
    scores = []
    for (tokens, places), some in zip(texts, wanted, strict=True):
        rows = torch.cat([found[one] for one in some])
        targets = torch.tensor([tokens[place] for place in places])
        logprobs = rows.gather(1, targets[:, None]).squeeze(1).tolist()
        names = tuple(tokenizer.token(tokens[place]) for place in places)
        scores.append(
            Score(sum(logprobs), names, tuple(logprobs), bool((rows.argmax(1) == targets).all()))
        )
    return scores


def _encoded(tokenizer: Tokenizer, part: SplitText) -> tuple[list[int], list[int]]:
    """The tokens of the whole text, and the positions of the middle."""
    encoding: Encoding = tokenizer.encode(part.before + part.middle + part.after)
    start = len(part.before)
    end = len(part.before) + len(part.middle)
    inside = [
        i
        for i, (first, last) in enumerate(encoding.offsets)
        if not encoding.specials[i] and last > start and first < end
    ]
    if not inside:
        raise UsageError(f"There is nothing to score: {part.middle!r:.60} has no tokens.")
    return encoding.tokens, inside


def _fit(tokens: list[int], places: list[int], context: int) -> tuple[list[int], list[int]]:
    """Drops the oldest tokens of a text that is too long, all but the first ([CLS])."""
    surplus = max(len(tokens) - context, 0)
    if surplus >= places[0]:
        raise text_too_long(len(tokens), context)
    return tokens[:1] + tokens[1 + surplus :], [place - surplus for place in places]


def _masked(
    tokenizer: Tokenizer, tokens: Sequence[int], places: Sequence[int], *, together: bool
) -> list[MaskedRow]:
    mask = mask_token(tokenizer)
    groups = [tuple(places)] if together else [(place,) for place in places]
    return [
        MaskedRow(tuple(mask if i in some else t for i, t in enumerate(tokens)), some)
        for some in groups
    ]


@torch.inference_mode()
def _logprobs(network: Network, rows: Sequence[MaskedRow]) -> dict[MaskedRow, Tensor]:
    """log p over the vocabulary at each row's masks [M, V]; identical rows are computed once."""
    found: dict[MaskedRow, Tensor] = {}
    device = network.device
    batches = length_batches([len(row.tokens) for row in rows])
    for group in tracked(batches, "score", len(rows)):
        some = [rows[i] for i in group]
        read = model_inputs([_bare(row) for row in some], network.config, device)
        width = len(some[0].tokens)
        slots = torch.tensor(
            [i * width + p for i, row in enumerate(some) for p in row.places], device=device
        )
        logits = network(heads=("mlm",), slots=slots, **read)["mlm"].float().log_softmax(-1).cpu()
        found |= dict(zip(some, logits.split([len(row.places) for row in some]), strict=True))
    return found


def _bare(row: MaskedRow) -> Encoding:
    size = len(row.tokens)
    return Encoding(list(row.tokens), [0] * size, [(0, 0)] * size, [False] * size, [None] * size)
