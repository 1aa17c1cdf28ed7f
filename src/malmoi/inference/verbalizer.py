"""Verbalizers: each label has words, and the most likely words decide. N labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmoi.inference.score import score_pairs
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer


@dataclass(frozen=True)
class Verbalizer:
    """A prompt and the words for each label."""

    prompt: str  # with {text} and {pair}
    said: tuple[str, ...]  # in the order of the labels

    def query(self, text: str, pair: str = "") -> str:
        """Fills in only these two names: the prompt comes from an untrusted file."""
        known = {"{text}": text, "{pair}": pair, "{{": "{", "}}": "}"}
        return re.sub(r"\{\{|\}\}|\{text\}|\{pair\}", lambda found: known[found[0]], self.prompt)


def verbalizer_scores(
    network: Network,
    tokenizer: Tokenizer,
    words: Verbalizer,
    texts: Sequence[str | tuple[str, str]],
) -> Tensor:
    """log P(a label's words | the text in its prompt) [texts, N]."""
    queries = [words.query(*([text] if isinstance(text, str) else text)) for text in texts]
    found = score_pairs(
        network, tokenizer, [(query, said) for query in queries for said in words.said]
    )
    return torch.tensor([one.logprob for one in found]).view(len(queries), len(words.said))
