"""The cost of using a model: memory of its weights, and speed of generating or encoding."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from malmoi.inference import Model
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.sampling import new_sequences
from malmoi.kernels.fast_argmax import fast_argmax_for
from malmoi.kernels.int8 import memory_of

SECONDS = 1.0  # minimum measuring time; at least two rounds
# in tokens, if the context has room
PROMPT = 8
WRITTEN = 16
# the batch of an encoder
ROWS = 8
LENGTH = 64


@dataclass(frozen=True)
class Cost:
    """Bytes of weights in memory; tokens generated, or rows encoded, per second."""

    memory: int
    unit: str
    rate: float


def cost_of(model: Model) -> Cost:
    """Measures memory and speed: the best of several rounds after a warm-up."""
    writes = "generate" in model.abilities
    count, work = _writing(model) if writes else (ROWS, _reading(model))
    unit = "tokens/s" if writes else "rows/s"
    return Cost(memory_of(model.network), unit, count / _seconds(work))


def _writing(model: Model) -> tuple[int, Callable[[], object]]:
    context = model.config.context
    prompt = min(PROMPT, context // 2)
    count = min(WRITTEN, context - prompt)
    config = GenerationConfig(count, Sampling(temperature=0))
    fast_argmax = fast_argmax_for(model.network)
    shown = [i % model.config.vocab for i in range(prompt)]

    def work() -> None:
        decoding = Decoding(model.network, new_sequences([shown], config, context), fast_argmax)
        for _ in range(count):
            decoding.step()

    return count, work


def _reading(model: Model) -> Callable[[], object]:
    length = min(LENGTH, model.config.context)
    device = model.network.device
    tokens = (
        torch.arange(ROWS * length, device=device).remainder(model.config.vocab).view(ROWS, length)
    )

    @torch.inference_mode()
    def work() -> object:
        hidden = model.network.hidden(tokens)
        return hidden[0, 0, 0].item()  # synchronises with the GPU

    return work


def _seconds(work: Callable[[], object]) -> float:
    work()
    begun = time.perf_counter()
    found: list[float] = []
    while len(found) < 2 or time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
