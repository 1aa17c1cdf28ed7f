"""Encoded texts as the inputs of a network, in batches of similar length."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from malmoi.model import Network
from malmoi.system.groups import grouped
from malmoi.system.threads import inference_threads
from malmoi.tokenizer import Encoding, TokenRow
from malmoi.tokenizer.padding import forward_limits, keep_mask, length_batches, pad

T = TypeVar("T")
K = TypeVar("K")


def rows_by(values: Iterable[K]) -> dict[K, list[int]]:
    """The numbers of the rows that share each value."""
    return grouped((value, i) for i, value in enumerate(values))


def in_order(batches: Iterable[tuple[Sequence[int], Iterable[T]]]) -> list[T]:
    """The results of batches, each with the numbers of its rows, in the order of the rows."""
    found = {i: one for group, some in batches for i, one in zip(group, some, strict=True)}
    return [found[i] for i in range(len(found))]


def model_batches(
    network: Network, rows: Sequence[Encoding | TokenRow], verb: str
) -> Iterator[tuple[list[int], dict[str, Tensor | None]]]:
    """Yields batches of rows of similar length: their indices, and the network's inputs."""
    from malmoi.system.progress import tracked

    batches = length_batches([len(row.tokens) for row in rows], forward_limits(network.device))
    with inference_threads(network.device) as threads:
        for group in tracked(batches, verb, len(rows)):
            yield group, model_inputs(network, [rows[i] for i in group])
            threads.step(sum(len(rows[i].tokens) for i in group))


def model_inputs(network: Network, rows: Sequence[Encoding | TokenRow]) -> dict[str, Tensor | None]:
    """The network's inputs for a batch of encoded texts, right-padded."""
    device = network.device
    tokens = [row.tokens for row in rows]
    return {
        "tokens": pad(tokens, device=device),
        "keep": keep_mask(tokens, device=device),
        "segments": (
            pad([row.segments for row in rows], device=device) if network.config.segments else None
        ),
    }
