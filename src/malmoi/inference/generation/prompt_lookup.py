"""Prompt lookup (Saxena 2023): what followed the same words earlier in the text is a draft of what
follows now.

The network reads a whole draft in one pass and keeps as much as it would have written itself, so
greedy text comes out token for token the same, only sooner where it repeats itself: summaries,
answers from a context, code.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from malmoi.inference.generation.fast_argmax import MAX_SCREENED_ROWS, FastArgmax
from malmoi.inference.generation.kv_slots import check_causal
from malmoi.model import KVCache, Network

MATCH_TOKENS = 3  # tokens that must be the same; down to 1 where no more are
DRAFT_TOKENS = 8  # tokens read ahead at most


class PromptLookup:
    """A prompt's greedy continuation, as tokens; `drafted` and `accepted` count what was tried
    and what held.
    """

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
            self.drafted = self.drafted + len(draft)
            self.accepted = self.accepted + len(right) - 1
            cache.truncate(len(text) + len(right) - 1)
            text += right
            unread = right[-1:]
            yield from right

    @torch.inference_mode()
    def _verify(self, cache: KVCache, unread: list[int], draft: list[int]) -> list[int]:
        """The draft as far as the network agrees, and the token that it writes after that."""
        tokens = torch.tensor([unread + draft], device=cache.keys.device)
        hidden = self.network.trunk(tokens, cache=cache)[0, len(unread) - 1 :]
        self.passes += 1
        best = self._best(hidden)
        agreed = next(
            (i for i, (a, b) in enumerate(zip(draft, best, strict=False)) if a != b), len(draft)
        )
        return best[: agreed + 1]

    def _best(self, hidden: Tensor) -> list[int]:
        if (
            self.fast_argmax is not None
            and self.fast_argmax.is_current
            and len(hidden) <= MAX_SCREENED_ROWS
        ):
            return self.fast_argmax.argmax(self.fast_argmax.head.features(hidden)).tolist()
        return self.network.read("lm", hidden).argmax(-1).tolist()


def find_draft(text: Sequence[int], most: int) -> list[int]:
    """What followed the last place where the newest tokens stood before; at most so many tokens."""
    for size in range(min(MATCH_TOKENS, len(text) - 1), 0, -1) if most > 0 else ():
        newest = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == newest:
                return list(text[start + size : start + size + most])
    return []
