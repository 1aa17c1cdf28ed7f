"""Interventions on a 124M model: a head switched off, and the map of all heads.

    python bench/interventions.py             # both; --threads N, --rows N, --tokens N

A random GPT-2 small reads random tokens: the time does not depend on the weights.
"""

import statistics
import time

import torch

from _timing import Work, benchmark_parser, timed
from malmoi import Intervention
from malmoi.checkpoint import Checkpoint
from malmoi.inference import Model
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2
from malmoi.tokenizer import train_tokenizer

REPEATS = 5
ROW_TOKENS = 32


def medians(work: Work, repeats: int) -> tuple[float, float]:
    """The median seconds on the clock, and of the processor."""
    wall, cpu = [], []
    for _ in range(repeats):
        used = time.process_time()
        wall.append(timed(work)[0])
        cpu.append(time.process_time() - used)
    return statistics.median(wall), statistics.median(cpu)


def text_of(count: int, first: int = 0) -> str:
    """A text of exactly this many tokens: a tokenizer of characters reads it."""
    return "".join(chr(ord("a") + (first + 7 * i) % 26) for i in range(count))


def main() -> None:
    asked = benchmark_parser(__doc__)
    asked.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked.add_argument("--rows", type=int, default=200)
    asked.add_argument("--tokens", type=int, default=64)
    given = asked.parse_args()
    torch.set_num_threads(given.threads)
    words = train_tokenizer(["abcdefghijklmnopqrstuvwxyz"], kind="byte-bpe", vocab=260)
    config = gpt2(vocab=50_257, width=768, depth=12, heads=12, context=1024)
    model = Model(Checkpoint(initialise(Network(config, {"lm": 0}), seed=0).eval(), words))
    text = text_of(given.tokens)
    found = {}
    for layer in range(config.depth):
        off = [Intervention("head", layer, head=3)]
        model.run(text, off)  # the undisturbed pass of the text is kept from here on
        found[layer] = medians(lambda off=off: model.run(text, off), REPEATS)
    name = f"a head off, {len(model.tokens(text))} tokens, {given.threads} threads"
    mean = [sum(times) / len(found) for times in zip(*found.values(), strict=True)]
    for where, times in (("layer 1", found[0]), ("mean of 12", mean), ("layer 12", found[11])):
        print(f"{name}, {where}: {1000 * times[0]:.0f} ms ({1000 * times[1]:.0f} ms of processor)")
    rows = [text_of(ROW_TOKENS, first=i) for i in range(given.rows)]
    wall, cpu = medians(lambda: model.head_importance(rows, method="gradient"), 1)
    print(f"map of 144 heads, {given.rows} rows of {ROW_TOKENS} tokens: {wall:.1f} s ({cpu:.1f} s)")


if __name__ == "__main__":
    main()
