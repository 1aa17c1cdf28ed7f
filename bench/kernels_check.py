"""Our C kernels on this processor: equal to plain torch and numpy, and how much faster.

    python bench/kernels_check.py [--cpu-time] [--json]

Needs malmoi, torch, numpy and a compiler alone. `off by` is the distance between the kernel's
result and that of the code it replaces, as a share of the latter; the exit code is 1 if it exceeds
the tolerance. bf16 is measured where the processor has instructions for it.
"""

import copy
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from _timing import Work, benchmark_parser, timed
from malmoi.corpus.clean import clean_texts
from malmoi.corpus.columns import TextColumn
from malmoi.corpus.duplicates import signature
from malmoi.corpus.filter import text_stats
from malmoi.corpus.ngrams import HashedTexts, hash_words
from malmoi.kernels.decode_step import fused_step
from malmoi.kernels.encode_texts import encode_texts
from malmoi.kernels.int8 import QuantizedLinear, packed, quantize_int8
from malmoi.kernels.int8_row import Packed, bf16, product, why_not
from malmoi.kernels.kv_slots import KVSlots, SlotView, prefill_rows
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.system.machine import parse_machine, pretend, this_machine
from malmoi.training.data.word_numbers import word_numbers

EXACT = 0.0
ROUNDED_15_BITS = 1e-3
ROUNDED_8_BITS = 3e-2


@dataclass(frozen=True)
class Check:
    """One kernel: milliseconds, those of what it replaces, and the distance of their results."""

    what: str
    kernel: float
    fallback: float | None  # None: what it replaces is torch's fp32
    off_by: float
    tolerance: float
    fp32: float | None = None
    bf16: float | None = None

    @property
    def passed(self) -> bool:
        return self.off_by <= self.tolerance

    def cells(self) -> list[str]:
        times = [self.kernel, self.fallback, self.fp32, self.bf16]
        shown = ["–" if one is None else f"{one:.3g}" for one in times]
        return [self.what, *shown, f"{self.off_by:.1e}", "ok" if self.passed else "DIFFERS"]


HEAD = ["milliseconds", "kernel", "without", "fp32", "bf16", "off by", ""]


class Clock:
    """The fewest milliseconds of a call, the works in turn."""

    def __init__(self, *, cpu_time: bool) -> None:
        self.now = time.process_time if cpu_time else time.perf_counter

    def __call__(self, works: dict[str, Work]) -> dict[str, float]:
        found = dict.fromkeys(works, float("inf"))
        rounds = 0
        began = time.perf_counter()
        while rounds < 3 or (rounds < 200 and time.perf_counter() - began < 1.5):
            for name, work in works.items():
                found[name] = min(found[name], 1000 * timed(work, self.now)[0])
            rounds += 1
        return found


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def native_bf16() -> bool:
    return this_machine().native_bf16("cpu")


def product_checks(clock: Clock) -> Iterator[Check]:
    """A linear map of 768 × 3,072, which is what most of GPT-2's weights are in."""
    weight = torch.randn(3072, 768) * 0.02
    bias = torch.randn(3072)
    numbers = torch.randint(-8, 8, weight.shape, dtype=torch.int8)
    scales = (torch.rand(3072, 6) * 0.01).to(bf16())
    kinds = [
        ("8 bits", packed(weight), 15, ROUNDED_15_BITS),
        ("4 bits", Packed.of(numbers, scales, 4), 15, ROUNDED_15_BITS),
        ("8 bits, activations of 8", packed(weight), 8, ROUNDED_8_BITS),
    ]
    for label, small, activation_bits, tolerance in kinds:
        dense = small.dense()
        multiply = product(small, bias, activation_bits)
        for rows in (1, 8, 64, 100):
            x = torch.randn(rows, 768)
            fp32 = partial(F.linear, x, dense, bias)
            works: dict[str, Work] = {"kernel": partial(multiply, x), "fp32": fp32}
            if native_bf16():
                works["bf16"] = partial(F.linear, *(t.to(bf16()) for t in (x, dense, bias)))
            ms = clock(works)
            off_by = distance(multiply(x), fp32())
            what = f"{label}, {rows} rows"
            yield Check(what, ms["kernel"], None, off_by, tolerance, ms["fp32"], ms.get("bf16"))


def tile_checks(clock: Clock) -> Iterator[Check]:
    """AMX's tiles through oneDNN, which take over from 32 rows on."""
    layer = QuantizedLinear(packed(torch.randn(3072, 768) * 0.02))
    if not layer.amx:
        return
    x = torch.randn(64, 768)
    ms = clock({"tiles": partial(layer._by_tiles, x), "kernel": partial(layer._multiply, x)})
    off_by = distance(layer._by_tiles(x), layer._multiply(x))
    yield Check("AMX tiles, 64 rows", ms["tiles"], ms["kernel"], off_by, ROUNDED_15_BITS)


def networks(config: object, heads: dict[str, int]) -> dict[str, Network]:
    """The same weights in fp32, in 8 bits and, where it has instructions, in bf16."""
    torch.manual_seed(0)
    exact = initialise(Network(config, heads), 0).eval()
    found = {"fp32": exact, "int8": quantize_int8(copy.deepcopy(exact))}
    found["int8"].trunk.fused_blocks = encode_texts
    if native_bf16():
        found["bf16"] = copy.deepcopy(exact).to(bf16())
    return found


def decode_checks(clock: Clock) -> Iterator[Check]:
    """A new token after 100, 12 layers of 768."""
    found = networks(gpt2(vocab=512), {"lm": 0})
    for rows in (1, 8):
        positions = torch.full((rows,), 100)
        live = torch.ones(rows, dtype=torch.bool)
        token = torch.arange(rows)
        works: dict[str, Work] = {}
        for name, network in found.items():
            slots = KVSlots(network, rows, 120)
            torch.manual_seed(1)
            prompts = torch.randint(0, 512, (rows, 100)).tolist()
            prefill_rows(network, slots, list(range(rows)), prompts, [0] * rows)
            view = SlotView(slots, rows, 120)
            inputs = dict(keep=live[:, None], positions=positions[:, None], cache=view)
            works[name] = partial(network.trunk, token[:, None], **inputs)
            if name == "int8":
                step = fused_step(network.trunk, slots.keys, slots.values)
                assert step is not None
                works["kernel"] = partial(step, token, positions, live)
        ms = clock(works)
        off_by = distance(works["kernel"](), works["int8"]()[:, 0])
        what = f"decoding step of 124M, {rows} at once"
        times = (ms["kernel"], ms["int8"], off_by, ROUNDED_15_BITS, ms["fp32"], ms.get("bf16"))
        yield Check(what, *times)


def encode_checks(clock: Clock) -> Iterator[Check]:
    """Texts through BERT-base."""
    found = networks(bert(vocab=512), {"mlm": 0})
    for texts in (1, 4):
        tokens = torch.randint(0, 512, (texts, 128))
        works: dict[str, Work] = {
            name: partial(network.trunk, tokens) for name, network in found.items()
        }
        works["kernel"] = works["int8"]
        works["int8"] = partial(elsewhere, "no-fused", works["kernel"])
        ms = clock(works)
        off_by = distance(works["kernel"](), works["int8"]())
        what = f"BERT-base, {texts} × 128 tokens"
        times = (ms["kernel"], ms["int8"], off_by, ROUNDED_8_BITS, ms["fp32"], ms.get("bf16"))
        yield Check(what, *times)


def elsewhere(changes: str, work: Callable[[], object]) -> object:
    """The same work on a machine that lacks something."""
    with pretend(parse_machine(changes)):
        return work()


def text_checks(clock: Clock) -> Iterator[Check]:
    """What counts words must give the same numbers with C and without."""
    drawn = np.random.default_rng(0)
    letters = list("abcdefg한국어é1.,!'\n\t\u3000\xa0👍") + [" "] * 4
    texts = ["".join(drawn.choice(letters, 400)) for _ in range(500)]
    spaced = [
        " ".join(re.split("[\t\u3000\xa0👍]", text)) for text in texts
    ]  # plain but for spaces
    whole = "\n".join(texts)
    ngrams = hash_words(whole).ngrams(3)

    def ids_of_words() -> list[str]:
        found = word_numbers(1 << 20, 1 << 25).number(texts)
        assert found is not None
        names = np.array(found.new, object)
        return list(names[found.numbers])

    kinds: dict[str, Callable[[], object]] = {
        "words hashed, 200 kB": lambda: hash_words(whole).hashes.tolist(),
        "n-grams of 5": lambda: hash_words(whole).ngrams(5).tolist(),
        "what the filter counts": lambda: np.array(
            text_stats(HashedTexts.of(TextColumn.of(texts)), (0.2, 0.18, 0.16))[1:]
        ).tolist(),
        "texts cleaned": lambda: list(clean_texts(TextColumn.of(spaced))),
        "MinHash of 128": lambda: signature(ngrams, 128).tolist(),
        "words cut and numbered": ids_of_words,
    }
    for what, work in kinds.items():
        plain = partial(elsewhere, "no-compiler", work)
        same = work() == plain()
        ms = clock({"kernel": work, "plain": plain})
        yield Check(what, ms["kernel"], ms["plain"], 0.0 if same else 1.0, EXACT)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, one thread")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    given = parser.parse_args()
    if given.cpu_time:
        torch.set_num_threads(1)
    machine = this_machine()
    features = " ".join(sorted(machine.features))
    threads = torch.get_num_threads()
    print(f"{machine.architecture}, {threads} threads, torch {torch.__version__}: {features}")
    parts = [text_checks]
    if why_not() is None:
        parts = [product_checks, tile_checks, decode_checks, encode_checks, text_checks]
    else:
        print(f"No int8 kernels: {why_not()}.")
    if machine.compiler is None:
        raise SystemExit("Nothing to check: there is no compiler.")
    clock = Clock(cpu_time=given.cpu_time)
    widths = (34, 8, 8, 8, 8, 8, 0)
    print("  ".join(cell.ljust(width) for cell, width in zip(HEAD, widths, strict=True)))
    checks = []
    with torch.inference_mode():
        for check in (check for part in parts for check in part(clock)):
            checks.append(check)
            cells = zip(check.cells(), widths, strict=True)
            print("  ".join(cell.ljust(width) for cell, width in cells), flush=True)
    if given.json:
        print(json.dumps([asdict(check) for check in checks]))
    sys.exit(not all(check.passed for check in checks))


if __name__ == "__main__":
    main()
