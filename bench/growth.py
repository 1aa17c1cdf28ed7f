"""How time grows with length, batch, model and corpus, beside the growth that is expected.

    malmoi bench growth [--quick] [--svg growth.svg] [--json]

Processor time of one thread, the fewest of three rounds, so that a busy machine can be used. The
slope is that of a line through the logarithms of the upper half of the sizes: 1 is linear, 2 is
quadratic. What is fixed (calls, the vocabulary's head) makes slopes smaller at small sizes. The
last line is JSON.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from _timing import benchmark_parser, fewest
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.token_selection import new_sequences
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2
from malmoi.report.chart import chart, standalone_svg
from malmoi.text.documents import read_documents
from malmoi.tokenizer import train_tokenizer
from malmoi.training.data.encode import build_stores

LINE = "the state of the union and its people are strong because every one of them works"


@dataclass(frozen=True)
class Growth:
    """Seconds by size, and the exponents that are expected and found."""

    what: str
    unit: str
    expected: str
    sizes: list[int]
    seconds: list[float]

    @property
    def slope(self) -> float:
        """The exponent over the upper half of the sizes, by least squares of logarithms."""
        at = len(self.sizes) // 2
        x = torch.tensor(self.sizes[at - 1 :], dtype=torch.float64).log()
        y = torch.tensor(self.seconds[at - 1 :], dtype=torch.float64).log()
        return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def measure(
    what: str,
    unit: str,
    expected: str,
    sizes: Sequence[int],
    make: Callable[[int], Callable[[], object]],
) -> Growth:
    """Times `make(size)()`: rounds over all sizes, so that load spreads over them."""
    works = {str(size): make(size) for size in sizes}
    for work in works.values():
        work()
    best = fewest(works, 3, time.process_time)
    return Growth(what, unit, expected, list(sizes), list(best.values()))


def network(width: int = 128, depth: int = 2, context: int = 4096) -> Network:
    config = gpt2(vocab=512, context=context, width=width, depth=depth, heads=max(width // 64, 1))
    return initialise(Network(config, {"lm": 0}), 0).eval()


def reading(length: int) -> Callable[[], object]:
    model = network()
    tokens = torch.zeros(1, length, dtype=torch.long)
    return torch.inference_mode()(lambda: model.trunk(tokens))


def writing(batch: int) -> Callable[[], object]:
    model = network(256, 4, 256)
    wish = GenerationConfig(8, Sampling(temperature=0))

    def work() -> None:
        prompts = [[i % 500 + 1] * 8 for i in range(batch)]
        decoding = Decoding(model, new_sequences(prompts, wish, 256))
        for _ in range(8):
            decoding.step()

    return work


def training(width: int) -> Callable[[], object]:
    model = network(width, 2, 128).train()
    tokens = torch.zeros(4, 128, dtype=torch.long)

    def work() -> None:
        model.zero_grad()
        model(tokens)["lm"].square().mean().backward()

    return work


def encoding(kilobytes: int) -> Callable[[], object]:
    """Words with numbers in them, so that new ones never end."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "text.txt")
    lines = [f"{LINE} {number}" for number in range(kilobytes * 1000 // len(LINE))]
    path.write_text("\n".join(lines), "utf-8")
    tokenizer = train_tokenizer([LINE] * 50, kind="byte-bpe", vocab=400)

    def work(held: object = folder) -> None:
        with tempfile.TemporaryDirectory() as out:
            build_stores(read_documents(path, documents="line"), tokenizer, out)

    return work


def all_growth(*, quick: bool) -> list[Growth]:
    def sizes(first: int, count: int) -> list[int]:
        return [first << i for i in range(count - 2 if quick else count)]

    return [
        measure("reading by length", "tokens", "1 to 2", sizes(64, 7), reading),
        measure("writing by batch", "prompts", "0 to 1", sizes(1, 7), writing),
        measure("training by width", "width", "1 to 2", sizes(64, 5), training),
        measure("encoding by corpus", "kB", "1", sizes(250, 6), encoding),
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="without the two largest sizes")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = all_growth(quick=given.quick)
    for one in found:
        times = ", ".join(
            f"{size:,}: {1000 * spent:.3g} ms"
            for size, spent in zip(one.sizes, one.seconds, strict=True)
        )
        print(f"{one.what} ({one.unit}): {times}; slope {one.slope:.2f}, expected {one.expected}")
    if given.svg:
        series = {
            one.what: [
                (math.log2(size / one.sizes[0]), math.log2(spent / one.seconds[0]))
                for size, spent in zip(one.sizes, one.seconds, strict=True)
            ]
            for one in found
        }
        plot = chart(series, across="doublings of the size", up="doublings of the time")
        given.svg.write_text(standalone_svg(plot), "utf-8")
    print(json.dumps([asdict(one) | {"slope": one.slope} for one in found]))


if __name__ == "__main__":
    main()
