"""How much text there is, and how fast this machine trains: what a size is chosen from."""

import logging
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, takewhile

from malmoi.messages import msg
from malmoi.system.machine import this_machine
from malmoi.text.documents import DocumentReader, require_documents
from malmoi.text.sentences import split_sentences
from malmoi.tokenizer import Tokenizer
from malmoi.training.device import choose_execution, known_flops
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
    weights: tuple[float, ...]  # of each in the sample: its source is so many times as long
    exact: bool = True

    def tokens(self, tokenizer: Tokenizer) -> int:
        """Estimates the tokens of the text from the sample."""
        return max(1, round(self._total(map(len, tokenizer.ids(list(self.sample))))))

    def row_tokens(self, tokenizer: Tokenizer, context: int) -> int:
        """Tokens of a BERT's row on average, [CLS] and [SEP] too (`training.data.pairs.Pairs`).

        It begins with the sentence after a token drawn from the whole text, so a sentence counts by
        the length of the one before it, and does not go on into the next document.
        """
        sentences = [split_sentences(text) for text in self.sample]
        counts = iter([len(ids) for ids in tokenizer.ids(list(chain(*sentences)))])
        rows: list[int] = []
        drawn: list[float] = []
        for weight, pieces in zip(self.weights, sentences, strict=True):
            lengths = list(islice(counts, len(pieces)))
            left = list(accumulate(reversed(lengths)))[::-1]
            rows += [min(context, tokens + 2) for tokens in left]
            drawn += [weight * length for length in lengths]
        before = drawn[-1:] + drawn[:-1]
        mean = math.fsum(map(operator.mul, before, rows)) / max(1.0, math.fsum(before))
        return min(context, max(1, round(mean)))

    def _total(self, counts: Iterable[float]) -> float:
        """What is in the whole text, from counts of each in the sample."""
        return math.fsum(map(operator.mul, counts, self.weights))


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
    sampled = Counter[str]()
    sample: list[tuple[str, str]] = []
    documents = 0
    whole = 0
    for document in require_documents(readers):
        if whole > READ_BYTES:
            break
        size = len(document.text.encode("utf-8", "replace"))
        whole += size
        documents += 1
        found[document.source] += size
        room = each - taken[document.source]
        if room > 0:
            part = document.text[:room]
            sample.append((document.source, part))
            taken[document.source] += len(part)
            sampled[document.source] += len(part.encode("utf-8", "replace"))
    texts = tuple(text for _, text in sample)
    weights = [found[source] / max(1, sampled[source]) for source, _ in sample]
    if whole <= READ_BYTES:
        return TextSize(whole, documents, texts, tuple(weights))
    # the last of them was not read to its end
    done = list(takewhile(lambda name: name in found, sizes))[:-1]
    # of a single large file only the size on disk is known
    ratio = sum(found[n] for n in done) / sum(sizes[n] for n in done) if done else 1.0
    estimate = max(whole, round(sum(sizes.values()) * ratio))
    more = estimate / whole
    weights = [weight * more for weight in weights]
    return TextSize(estimate, round(documents * more), texts, tuple(weights), exact=False)


def measure_speed(group: ProcessGroup, c: TrainConfig) -> Speed:
    """FLOP/s of a matrix product over all devices of the run.

    If nothing can be measured, those of a slow core, with a warning.
    """
    execution = choose_execution(group.device, c)
    kind = group.device.type
    name = next(
        (a.name for a in this_machine().accelerators if a.kind == kind), msg("the processor")
    )
    flops, problem = known_flops(execution)
    if problem:
        logger.warning(
            msg(
                "The speed of {name} could not be measured ({problem}): the size is chosen "
                "for {slow_core:.0f} GFLOP/s, a slow core. --set model.width=… and "
                "model.depth=… choose another.",
                name=name,
                problem=problem,
                slow_core=SLOW_CORE / 1e9,
            )
        )
    return Speed((flops or SLOW_CORE) * group.world, kind, execution.half, name, bool(flops))
