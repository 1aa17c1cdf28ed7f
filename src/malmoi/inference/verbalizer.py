"""Verbalizers: each label has words, and the most likely words decide. N labels, Q queries."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores
from malmoi.inference.score import score_pairs
from malmoi.model import Network
from malmoi.system.progress import tracked
from malmoi.tokenizer import Tokenizer

CONTENT_FREE = ("N/A", "", "[MASK]")  # texts that say nothing (Zhao et al. 2021 §5)
MASKED_ENDING = "."  # a BERT reads what follows the words, and without it ends the sentence there


@dataclass(frozen=True)
class Verbalizer:
    """A prompt, the words for each label, and the calibration of their log-probabilities."""

    prompt: str  # with {text} and {pair}
    said: tuple[str, ...]  # in the order of the labels
    bias: tuple[float, ...] = ()  # added to each label's log-probability
    scale: float = 1.0  # multiplies them before
    # other prompts for the same labels, whose log-probabilities are averaged with this one's
    also: tuple["Verbalizer", ...] = ()

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
    """Calibrated log P(a label's words | the text in its prompt) [texts, N]."""
    asked = [(text, "") if isinstance(text, str) else text for text in texts]
    if not words.also or not asked:
        queries = [words.query(*one) for one in asked]
        return _calibrated(words, word_logprobs(network, tokenizer, queries, words.said))
    ways = (words, *words.also)
    found = []
    # one text at a time: its prompts share its tokens
    for [i] in tracked(([i] for i in range(len(asked))), "predict", len(asked)):
        queries = [way.query(*asked[i]) for way in ways]
        logs = word_logprobs(network, tokenizer, queries, words.said)
        scores = torch.stack([_calibrated(*pair) for pair in zip(ways, logs, strict=True)])
        found.append(scores.log_softmax(-1).mean(0))
    return torch.stack(found)


def _calibrated(words: Verbalizer, logprobs: Tensor) -> Tensor:
    """The scores of labels [..., N] by the log-probabilities of their words."""
    scores = words.scale * logprobs.log_softmax(-1)
    return scores + torch.tensor(words.bias) if words.bias else scores


def word_logprobs(
    network: Network, tokenizer: Tokenizer, queries: Sequence[str], said: Sequence[str]
) -> Tensor:
    """log P(words | query) of a GPT, or of a BERT whose words are masked together [Q, N]."""
    pairs = [(query, words) for query in queries for words in said]
    if "lm" in network.heads:
        found = score_pairs(network, tokenizer, pairs)
    else:
        parts = [SplitText(query, words, MASKED_ENDING) for query, words in pairs]
        found = pseudo_scores(network, tokenizer, parts, together=True)
    return torch.tensor([one.logprob for one in found]).view(len(queries), len(said))


def content_free_bias(logprobs: Tensor) -> Tensor:
    """−log of the labels' mean probability after content-free texts [N] (Zhao et al. 2021 §5)."""
    return -logprobs.softmax(-1).mean(0).log()
