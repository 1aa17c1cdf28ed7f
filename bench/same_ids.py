"""Whether our encoder gives the ids that tokenizers gives, on any amount of text.

    malmoi bench same_ids --tokenizer gpt2/ books.txt.xz site-packages/

Files are read whole, folders with every readable file below them, and cut into pieces of 20,000
characters. Special tokens in a text are text. The first piece that differs is printed, and the exit
status is 1; else the speed of both follows.
"""

import lzma
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers

from _shared import benchmark_parser, timed
from malmoi.tokenizer import Tokenizer

PIECE = 20_000  # characters
BATCH = 64  # pieces


def files(sources: Iterable[Path]) -> Iterator[Path]:
    for source in sources:
        yield from [source] if source.is_file() else sorted(source.rglob("*"))


def pieces(sources: Iterable[Path]) -> Iterator[str]:
    for path in files(sources):
        if not path.is_file():
            continue
        try:
            data = path.read_bytes()
            text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
        except (OSError, UnicodeDecodeError, lzma.LZMAError):
            continue
        yield from (text[i : i + PIECE] for i in range(0, len(text), PIECE))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=3600, help="compares no longer")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(given.tokenizer)
    oracle = tokenizers.Tokenizer.from_file(f"{given.tokenizer}/tokenizer.json")
    oracle.encode_special_tokens = True
    end = time.monotonic() + given.seconds
    compared = 0
    seconds = dict.fromkeys(("malmoi", "tokenizers"), 1e-9)
    found = pieces(given.sources)
    while compared < given.megabytes * 1e6 and time.monotonic() < end:
        batch = list(islice(found, BATCH))
        if not batch:
            break
        spent, (ids, lengths) = timed(partial(tokenizer.encode_texts, batch))
        seconds["malmoi"] += spent
        ours = np.split(ids, np.cumsum(lengths)[:-1])
        fast = partial(oracle.encode_batch_fast, batch, add_special_tokens=False)
        spent, theirs = timed(fast)
        seconds["tokenizers"] += spent
        for text, mine, other in zip(batch, ours, theirs, strict=True):
            if mine.tolist() != other.ids:
                sys.exit(f"after {compared / 1e6:,.0f} MB: the ids of {text[:200]!r} … differ")
            compared += len(text.encode())
    print(f"{given.tokenizer}: {compared / 1e6:,.0f} MB, all ids equal")
    for name, spent in seconds.items():
        print(f"{name}: {compared / 1e6 / spent:.1f} MB/s")


if __name__ == "__main__":
    main()
