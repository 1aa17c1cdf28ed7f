"""Candidates for [MASK] under a masked language model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.inference.batches import model_inputs
from malmoi.inference.prompt import mask_token, require_fit
from malmoi.model import Network
from malmoi.system.result import Result
from malmoi.tokenizer import Tokenizer


@dataclass(frozen=True, repr=False)
class Fill(Result):
    """A candidate for a mask: the token, its probability, and the text with it filled in."""

    token: str
    probability: float
    text: str


@torch.inference_mode()
def fills(network: Network, tokenizer: Tokenizer, text: str, top: int) -> list[list[Fill]]:
    """Returns the best tokens for each mask in the text, leaving the other masks in place."""
    if top < 1:
        raise UsageError("top must be 1 or more, not {top}.", top=top)
    encoding = tokenizer.encode_masked(text)
    require_fit(encoding, network.config.context)
    mark = mask_token(tokenizer)
    masks = [at for at, token in enumerate(encoding.tokens) if token == mark]
    if not masks:
        raise UsageError(
            "There is nothing to fill: write {word} for a missing word, as in 'Paris is {word}.'",
            code="no_mask",
            word=tokenizer.token(mark),
        )
    slots = torch.tensor(masks, device=network.device)
    inputs = model_inputs(network, [encoding])
    scores: Tensor = network(**inputs, heads=("mlm",), slots=slots)["mlm"]
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
