"""The training text's own counts as a language model beside the network's.

An n-gram without a bound (Liu et al. 2024, "Infini-gram"): the next token as often as it followed
the longest end of the context that the training text has.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.inference.score import score_windows, token_logprobs
from malmoi.model import Network
from malmoi.tracing.index import TextIndex
from malmoi.training.data.store import Store

FITTED = 20_000  # tokens of held-out text that the weights are fitted to
ROUNDS = 20
EDGES = (1, 2, 3, 4, 5, 7, 10, 16)  # context lengths at which a weight begins
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Counted:
    """Each token's probability by the counts, and how many tokens of context they have."""

    probabilities: Numbers
    lengths: Numbers

    @classmethod
    def of(cls, index: TextIndex, tokens: list[int]) -> "Counted":
        """Of every token but the first."""
        array = index.array(tokens)
        reach = index.longest(array)
        first = 0
        found = []
        for place in range(1, len(tokens)):
            while first < place and first + reach[first] < place:
                first += 1
            context = index.count(array[first:place]) if first < place else index.size
            followed = first < place and first + reach[first] > place
            with_next = index.count(array[first : place + 1]) if followed or first == place else 0
            found.append((with_next / context, place - first))
        probabilities, lengths = np.array(found).T
        return cls(probabilities, lengths)

    @property
    def groups(self) -> Numbers:
        return np.digitize(self.lengths, EDGES)


@dataclass(frozen=True)
class CountMixture:
    """How much the counts weigh for each length of context; the network has the rest."""

    index: TextIndex
    weights: Numbers

    @classmethod
    def fit(cls, network: Network, index: TextIndex) -> "CountMixture":
        """Weights under which the run's held-out text is likeliest, by expectation maximisation."""
        weights = np.full(len(EDGES) + 1, 0.5)
        stores = [Store.open(part.store.folder.parent / "valid") for part in index.parts]
        tokens = [int(token) for store in stores for token in store.tokens[:FITTED]]
        if len(tokens) < 2:
            return cls(index, np.zeros_like(weights))
        rows = score_windows(tokens, network.config.context, network.config.context // 2 or 1)
        own = np.exp([p for some, _ in token_logprobs(network, rows) for p in some])
        counted = Counted.of(index, tokens)
        for _ in range(ROUNDS):
            share = weights[counted.groups] * counted.probabilities
            share = share / (share + (1 - weights[counted.groups]) * own)
            sums = np.bincount(counted.groups, share, len(weights))
            sizes = np.bincount(counted.groups, minlength=len(weights))
            weights = (sums + 0.5) / (sizes + 1)  # a half where nothing was held out
        return cls(index, weights)

    def logprobs(self, tokens: list[int], own: list[float]) -> list[float]:
        """The mixture's log-probabilities, from the network's own of every token but the first."""
        counted = Counted.of(self.index, tokens)
        weights = self.weights[counted.groups]
        mixed = weights * counted.probabilities + (1 - weights) * np.exp(own)
        found: list[float] = np.log(mixed).tolist()
        return found
