"""Prompt lookup (Saxena 2023): drafts what followed the same tokens earlier in the text.

The network checks a whole draft in one pass and keeps the tokens it would have generated itself, so
greedy text is unchanged, only faster where it repeats: summaries, answers from a context, code.
"""

from collections.abc import Iterator, Sequence

import torch

from malmoi.errors import UsageError
from malmoi.kernels.fast_argmax import FastArgmax, greedy_tokens
from malmoi.kernels.kv_slots import check_causal, common_prefix_length
from malmoi.model import KVCache, Network

MATCH_TOKENS = 3  # longest match to look for; shorter ones, down to 1, if there is none
DRAFT_TOKENS = 8  # maximum length of a draft


class PromptLookup:
    """Greedily continues a prompt; `drafted` and `accepted` count draft tokens."""

    def __init__(
        self,
        network: Network,
        prompt: Sequence[int],
        limit: int,
        fast_argmax: FastArgmax | None = None,
    ) -> None:
        check_causal(network)
        if network.config.recurrent:
            raise UsageError(
                "speculate needs a cache that can be rolled back, and a recurrent model has only "
                "a state: omit speculate."
            )
        self.network = network
        self.prompt = list(prompt)
        self.limit = limit
        self.fast_argmax = fast_argmax
        self.drafted = self.accepted = self.passes = 0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted."""
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
        """The accepted part of the draft, and the token that the network generates after it."""
        tokens = torch.tensor([unread + draft], device=cache.keys.device)
        hidden = self.network.trunk(tokens, cache=cache)[0, len(unread) - 1 :]
        self.passes += 1
        best = greedy_tokens(self.network, self.fast_argmax, hidden)
        agreed = common_prefix_length(draft, best)
        return best[: agreed + 1]


def find_draft(text: Sequence[int], limit: int) -> list[int]:
    """What followed the latest earlier occurrence of the newest tokens, up to `limit` tokens."""
    for size in range(min(MATCH_TOKENS, len(text) - 1), 0, -1) if limit > 0 else ():
        newest = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == newest:
                return list(text[start + size : start + size + limit])
    return []
