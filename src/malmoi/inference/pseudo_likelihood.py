"""Likelihoods of sentences, and pseudo-likelihoods under a masked model.

Tokens are masked one at a time together with the rest of their word, or a whole part at once.
Masked rows of equal length are batched, so that nothing is padded, and equal rows are computed
once: two choices for a mask share theirs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from malmoi.errors import require_that
from malmoi.inference.batches import in_order, model_inputs, rows_by
from malmoi.inference.prompt import (
    check_length,
    mask_token,
    require_fit,
    start_token,
    text_too_long,
)
from malmoi.inference.score import Score, ScoredRow, score_separately
from malmoi.model import Network
from malmoi.system.machine import per_device
from malmoi.system.result import Result
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import BatchLimits

MAX_PASS_TOKENS = {"cpu": 4096, "cuda": 131_072}  # tokens per forward pass
MAX_PASS_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # logits held at once
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SplitText:
    """A text in three parts; the middle one is scored."""

    before: str
    middle: str
    after: str = ""


@dataclass(frozen=True)
class _Text:
    """The tokens of a text, the positions of those that are scored, and the word of each."""

    tokens: list[int]
    places: list[int]
    words: list[int | None]


def sentence_logprobs(network: Network, tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """log p of every text, each token given those before; `pseudo_scores` of a masked model."""
    if "lm" not in network.heads:
        require_that(
            "mlm" in network.heads, "Only a causal or a masked language model scores texts."
        )
        parts = [SplitText("", text) for text in texts]
        return [score.logprob for score in pseudo_scores(network, tokenizer, parts)]
    start = start_token(tokenizer)
    rows = [ScoredRow([start, *ids], 1) for ids in tokenizer.ids(list(texts))]
    check_length(max((len(row.tokens) for row in rows), default=0), network.config.context)
    limit = per_device(MAX_PASS_TOKENS, network.device.type)
    found = score_separately(network, rows, BatchLimits(limit, limit, limit // 8))
    return [sum(logprobs) for logprobs, _ in found]


def pseudo_scores(
    network: Network,
    tokenizer: Tokenizer,
    parts: Sequence[SplitText],
    *,
    together: bool = False,
    cut: bool = False,
) -> list[Score]:
    """Σ log p(token | the other words, its own word so far) of every part's middle.

    The pseudo-log-likelihood (Salazar et al. 2020 eq. 1) with a word's later tokens masked too:
    they would give the earlier ones away (Kauf & Ivanova 2023 §2, "within-word l2r"). `together`
    masks all the middle's tokens at once, as a cloze with a verbalizer does (Schick & Schütze 2021
    §3). With `cut` a middle that is too long by itself loses its beginning.
    """
    mask = mask_token(tokenizer)
    texts = [_fit(one, network.config.context, cut=cut) for one in _encoded(tokenizer, parts)]
    answers = in_order(
        (some, _answers(network, [texts[i] for i in some], mask, together=together))
        for some in rows_by(len(text.tokens) for text in texts).values()
    )
    return [
        Score.of(tokenizer, (text.tokens[i] for i in text.places), logprobs, greedy=all(best))
        for text, (logprobs, best) in zip(texts, answers, strict=True)
    ]


def _encoded(tokenizer: Tokenizer, parts: Sequence[SplitText]) -> Iterator[_Text]:
    """Yields each whole text, its middle to be scored."""
    encodings = tokenizer.encode_batch([part.before + part.middle + part.after for part in parts])
    for part, encoding in zip(parts, encodings, strict=True):
        start = len(part.before)
        end = start + len(part.middle)
        places = enumerate(zip(encoding.offsets, encoding.specials, strict=True))
        inside = [i for i, ((a, b), special) in places if not special and b > start and a < end]
        require_that(
            inside, "There is nothing to score: {middle!r:.60} has no tokens.", middle=part.middle
        )
        yield _Text(encoding.tokens, inside, [encoding.words[i] for i in inside])


def _fit(text: _Text, context: int, *, cut: bool) -> _Text:
    """Drops the oldest tokens of a text that is too long, all but the first ([CLS])."""
    surplus = len(text.tokens) - context
    if surplus <= 0:
        return text
    if surplus >= text.places[-1 if cut else 0]:
        raise text_too_long(len(text.tokens), context)
    kept = text.tokens[:1] + text.tokens[1 + surplus :]
    places = [place - surplus for place in text.places if place > surplus]
    return _Text(kept, places, text.words[-len(places) :])


def _rest_of_word(texts: Sequence[_Text]) -> Ints:
    """For each scored token, how many tokens of its word follow it."""
    rest: list[int] = []
    for text in texts:
        counts = [0]
        for word, after in reversed(list(pairwise(text.words))):
            counts.append(counts[-1] + 1 if word is not None and word == after else 0)
        rest += reversed(counts)
    return np.array(rest)


def _masked_rows(
    texts: Sequence[_Text], mask: int, *, together: bool
) -> tuple[Ints, Ints, Ints, Ints]:
    """The masked rows of texts of one length, each of them once [R, T], and what is asked of them.

    A query [Q] is about a row, a place in it and the token there.
    """
    tokens = np.array([text.tokens for text in texts])
    place = np.concatenate([np.array(text.places) for text in texts])
    text = np.repeat(np.arange(len(texts)), [len(text.places) for text in texts])
    row = text if together else np.arange(len(text))
    rows = tokens.copy() if together else tokens[text]
    rest = _rest_of_word(texts)
    for later in range(int(rest.max()) + 1):  # tokens of a word follow one another
        some = rest >= later
        rows[row[some], place[some] + later] = mask
    rows, number = np.unique(rows, axis=0, return_inverse=True)
    return rows, number.reshape(-1)[row], place, tokens[text, place]


@torch.inference_mode()
def _answers(
    network: Network, texts: Sequence[_Text], mask: int, *, together: bool
) -> list[tuple[list[float], list[bool]]]:
    """For each text of one length: log p of its tokens, and whether each is the likeliest there."""
    rows, row, place, wanted = _masked_rows(texts, mask, together=together)
    width = int(rows.shape[1])
    kind = network.device.type
    scores = int(np.bincount(row).max()) * network.config.vocab  # of a row, at most
    size = per_device(MAX_PASS_TOKENS, kind) // width
    size = max(1, min(size, per_device(MAX_PASS_LOGITS, kind) // scores))
    order = np.argsort(row, kind="stable")
    ascending = row[order]
    logprobs = np.empty(len(row))
    best = np.empty(len(row), bool)
    for first in range(0, len(rows), size):
        start, stop = np.searchsorted(ascending, (first, first + size))
        some = order[start:stop]
        slots = (row[some] - first) * width + place[some]
        given = (slots, rows[first : first + size], wanted[some, None])
        where, tokens, right = (torch.from_numpy(one).to(network.device) for one in given)
        segments = torch.zeros_like(tokens) if network.config.segments else None
        logits = network(tokens, heads=("mlm",), slots=where, segments=segments)["mlm"].float()
        logprobs[some] = (logits.gather(1, right)[:, 0] - logits.logsumexp(-1)).cpu().numpy()
        best[some] = (logits.argmax(-1) == right[:, 0]).cpu().numpy()
    ends = np.cumsum([len(text.places) for text in texts])[:-1]
    both = zip(np.split(logprobs, ends), np.split(best, ends), strict=True)
    return [(each.tolist(), likeliest.tolist()) for each, likeliest in both]


# ------------------------------------------------------------------ filling masks


@dataclass(frozen=True, repr=False)
class Fill(Result):
    """A candidate for a mask: the token, its probability, and the text with it filled in."""

    token: str
    probability: float
    text: str


@torch.inference_mode()
def fills(network: Network, tokenizer: Tokenizer, text: str, top: int) -> list[list[Fill]]:
    """Returns the best tokens for each mask in the text, leaving the other masks in place."""
    require_that(top >= 1, "top must be 1 or more, not {top}.", top=top)
    encoding = tokenizer.encode_masked(text)
    require_fit(encoding, network.config.context)
    mark = mask_token(tokenizer)
    masks = [at for at, token in enumerate(encoding.tokens) if token == mark]
    require_that(
        masks,
        "There is nothing to fill: write {word} for a missing word, as in 'Paris is {word}.'",
        code="no_mask",
        word=tokenizer.token(mark),
    )
    slots = torch.tensor(masks, device=network.device)
    inputs = model_inputs(network, [encoding])
    scores: torch.Tensor = network(**inputs, heads=("mlm",), slots=slots)["mlm"]
    best = scores.float().softmax(-1).topk(min(top, tokenizer.vocab_size))
    return [
        [
            Fill(_shown(tokenizer, t), p, replace_mask(tokenizer, text, encoding.offsets[at], t))
            for p, t in zip(row, ids, strict=True)
        ]
        for at, row, ids in zip(masks, best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """A token's display form; tokens with spaces as decoded text ("state", not "Ġstate")."""
    name = tokenizer.token(token)
    return tokenizer.decode([token]).strip() or name if tokenizer.tokens_have_spaces else name


def replace_mask(tokenizer: Tokenizer, text: str, place: tuple[int, int], token: int) -> str:
    """Replaces one mask in the text; a word piece ("##s") is attached to the word before it."""
    before = text[: place[0]]
    after = text[place[1] :]
    word = tokenizer.token(token)
    if word.startswith("##"):
        return before.rstrip(" ") + word[2:] + after
    said = tokenizer.decode([token], skip_specials=False)
    if not tokenizer.tokens_have_spaces:  # else the mask included the space too
        said = said.strip()
    return before + (said or word) + after
