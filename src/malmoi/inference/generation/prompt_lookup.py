"""Prompt lookup (Saxena 2023): what followed the same tokens earlier in the text is the draft.

The network checks a whole draft in one pass and keeps what it would have written itself, so greedy
text is the same, only sooner where it repeats: summaries, answers from a context, code.
"""

from collections.abc import Iterator, Sequence

import torch

from malmoi.inference.generation.fast_argmax import FastArgmax, greedy_tokens
from malmoi.inference.generation.kv_slots import check_causal, common_prefix_length
from malmoi.model import KVCache, Network

MATCH_TOKENS = 3  # tokens that must be the same; down to 1 where no more are
DRAFT_TOKENS = 8  # tokens read ahead at most


class PromptLookup:
    """A prompt's greedy continuation; `drafted` and `accepted` count draft tokens."""

    def __init__(
        self,
        network: Network,
        prompt: Sequence[int],
        limit: int,
        fast_argmax: FastArgmax | None = None,
    ) -> None:
        check_causal(network)
        self.network = network
        self.prompt = list(prompt)
        self.limit = limit
        self.fast_argmax = fast_argmax
        self.drafted = self.accepted = self.passes = 0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __iter__(self) -> Iterator[int]:
        config = self.network.config
        text = list(self.prompt)
        end = min(len(text) + self.limit, config.context)
        cache = KVCache(config, 1, end, dtype=self.network.dtype, device=self.network.device)
        unread = list(text)
        while len(text) < end:
            draft = find_draft(text, min(DRAFT_TOKENS, end - len(text) - 1))
            right = self._verify(cache, unread, draft)
            self.drafted += len(draft)
            self.accepted += len(right) - 1
            cache.truncate(len(text) + len(right) - 1)
            text += right
            unread = right[-1:]
            yield from right

    @torch.inference_mode()
    def _verify(self, cache: KVCache, unread: list[int], draft: list[int]) -> list[int]:
        """The draft as far as the network agrees, and the token it writes after that."""
        tokens = torch.tensor([unread + draft], device=cache.keys.device)
        hidden = self.network.trunk(tokens, cache=cache)[0, len(unread) - 1 :]
        self.passes += 1
        best = greedy_tokens(self.network, self.fast_argmax, hidden)
        agreed = common_prefix_length(draft, best)
        return best[: agreed + 1]


def find_draft(text: Sequence[int], most: int) -> list[int]:
    """What followed the latest earlier occurrence of the newest tokens, at most `most` tokens."""
    for size in range(min(MATCH_TOKENS, len(text) - 1), 0, -1) if most > 0 else ():
        newest = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == newest:
                return list(text[start + size : start + size + most])
    return []
