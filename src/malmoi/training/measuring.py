"""How much text there is, and how fast this machine trains: what a size is chosen from."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from malmoi.system.machine import this_machine
from malmoi.text.documents import DocumentReader
from malmoi.tokenizer import Tokenizer
from malmoi.training.device import choose_execution, known_flops, thread_count
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import TrainConfig

logger = logging.getLogger(__name__)

READ_BYTES = 256 << 20  # of text that is counted; the rest is extrapolated
SAMPLE_CHARACTERS = 1_000_000  # of text that tokens per byte are measured on
SLOW_CORE = 2e10  # FLOP/s, assumed if nothing can be measured
# The share of a matrix product's speed that a step reaches: width / (width + …). On a GPU from
# 655,000 tokens/s of 11 × 640 on an H200, on a processor from five widths, Muon's update counted
# (docs/lab.md). In bf16, two cores with AMX at 4 × 192, without it.
GPU_HALF_SPEED_WIDTH = 1250
CPU_HALF_SPEED_WIDTH = 90
CPU_BF16_UTILISATION = 0.16


@dataclass(frozen=True)
class TextSize:
    """The size of the text, and a sample of it."""

    bytes: int
    documents: int
    sample: tuple[str, ...]
    exact: bool = True

    def tokens(self, tokenizer: Tokenizer) -> int:
        """Estimates the tokens of the text from the sample."""
        sampled = sum(len(text.encode()) for text in self.sample)
        ids = sum(map(len, tokenizer.ids(list(self.sample))))
        return max(1, round(self.bytes * ids / max(1, sampled)))

    def row_tokens(self, tokenizer: Tokenizer, context: int) -> int:
        """Tokens of a BERT's row on average: a row does not go on into the next document."""
        lengths = [n for n in map(len, tokenizer.ids(list(self.sample))) if n]
        rows = sum(math.ceil(n / context) for n in lengths)
        return min(context, max(1, round(sum(lengths) / max(1, rows))))


@dataclass(frozen=True)
class Speed:
    """The measured speed of the machine."""

    flops: float  # of a large matrix product, per second
    device: str  # cpu, cuda, mps
    half: bool
    name: str
    measured: bool = True

    def reached(self, width: int) -> float:
        """FLOP/s that a training step of this width reaches."""
        if self.device == "cpu" and self.half:
            return self.flops * CPU_BF16_UTILISATION
        half_speed = CPU_HALF_SPEED_WIDTH if self.device == "cpu" else GPU_HALF_SPEED_WIDTH
        return self.flops * width / (width + half_speed)


def measure_text(readers: Sequence[DocumentReader]) -> TextSize:
    """Counts the text, all of it or 256 MB, and keeps a sample of every source."""
    sizes = {source.name: source.size for reader in readers for source in reader.sources}
    each = max(20_000, SAMPLE_CHARACTERS // max(1, len(sizes)))
    found = Counter[str]()
    taken = Counter[str]()
    sample: list[str] = []
    documents = 0
    whole = 0
    for document in (document for reader in readers for document in reader):
        if whole > READ_BYTES:
            break
        size = len(document.text.encode("utf-8", "replace"))
        whole += size
        documents += 1
        found[document.source] += size
        room = each - taken[document.source]
        if room > 0:
            sample.append(document.text[:room])
            taken[document.source] += len(sample[-1])
    if whole <= READ_BYTES:
        return TextSize(whole, documents, tuple(sample))
    # the last of them was not read to its end
    done = list(takewhile(lambda name: name in found, sizes))[:-1]
    # of a single large file only the size on disk is known
    ratio = sum(found[n] for n in done) / sum(sizes[n] for n in done) if done else 1.0
    estimate = max(whole, round(sum(sizes.values()) * ratio))
    return TextSize(estimate, documents * estimate // whole, tuple(sample), exact=False)


def measure_speed(group: ProcessGroup, c: TrainConfig) -> Speed:
    """FLOP/s of a matrix product over all devices of the run.

    If nothing can be measured, those of a slow core, with a warning.
    """
    execution = choose_execution(group.device, c)
    kind = group.device.type
    name = next((a.name for a in this_machine().accelerators if a.kind == kind), "the processor")
    with thread_count(group.device, 0, logger.info):
        flops, problem = known_flops(execution)
    if problem:
        logger.warning(
            f"The speed of {name} could not be measured ({problem}): the size is chosen for "
            f"{SLOW_CORE / 1e9:.0f} GFLOP/s, a slow core. --set model.width=… and model.depth=… "
            "choose another."
        )
    return Speed((flops or SLOW_CORE) * group.world, kind, execution.half, name, bool(flops))
