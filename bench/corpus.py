"""How fast near-duplicates are found, beside datasketch and rensa (those that are installed), in one run.

    malmoi bench corpus --text reviews.txt.xz [--megabytes 20] [--planted 500]

Every way compares sets of runs of 5 words by 128 hashes on one core, and drops a document that an earlier one is like.
Some documents are planted a second time with two words changed: how many of those each way finds is told beside its
speed, and how many others it drops. Ratios count: the megabytes per second are this machine's at this moment.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from malmoi.corpus import read
from malmoi.corpus.dedup import duplicates, marks
from malmoi.corpus.settings import CorpusConfig

Way = Callable[[list[str]], set[int]]  # from texts to the numbers of those that go
HASHES, RUN, THRESHOLD = 128, 5, 0.8


def prepare(source: str, megabytes: int, planted: int) -> tuple[list[str], int]:
    """So many megabytes of documents that are long enough, then changed copies of the first; where those begin."""
    texts, left = [], megabytes * 1_000_000
    for document in read(source):
        if 100 < len(document.text.split()) < 10_000:
            texts.append(document.text)
            left -= len(document.text.encode())
        if left <= 0:
            break
    random = np.random.default_rng(0)
    return texts + [changed(text, random) for text in texts[:planted]], len(texts)


def changed(text: str, random: np.random.Generator) -> str:
    words = text.split()
    for place in random.choice(len(words), 2, replace=False):
        words[place] = "otherwise"
    return " ".join(words)


def ours(texts: list[str]) -> set[int]:
    config = CorpusConfig()
    equal, nearly = duplicates(*marks(texts, config), config)
    return set(np.flatnonzero((equal >= 0) | (nearly >= 0)).tolist())


def runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[place : place + RUN]) for place in range(max(len(words) - RUN + 1, 1))}


def datasketch(texts: list[str]) -> set[int]:
    from datasketch import MinHash, MinHashLSH

    index, gone = MinHashLSH(threshold=THRESHOLD, num_perm=HASHES), set()
    for number, text in enumerate(texts):
        sketch = MinHash(num_perm=HASHES)
        sketch.update_batch([run.encode() for run in runs(text)])
        if index.query(sketch):
            gone.add(number)
        else:
            index.insert(number, sketch)
    return gone


def rensa(texts: list[str]) -> set[int]:
    from rensa import RMinHash, RMinHashLSH

    index, gone = RMinHashLSH(threshold=THRESHOLD, num_perm=HASHES, num_bands=16), set()
    for number, text in enumerate(texts):
        sketch = RMinHash(num_perm=HASHES, seed=0)
        sketch.update(list(runs(text)))
        if index.query(sketch):
            gone.add(number)
        else:
            index.insert(number, sketch)
    return gone


def peers() -> Iterator[tuple[str, Way]]:
    for name, way in (("datasketch", datasketch), ("rensa", rensa)):
        try:
            __import__(name)
        except ImportError:
            print(f"{name} is not installed: left out")
        else:
            yield name, way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--planted", type=int, default=500)
    chosen = parser.parse_args()
    texts, begin = prepare(chosen.text, chosen.megabytes, chosen.planted)
    size = sum(len(text.encode()) for text in texts) / 1e6
    ours(list(islice(texts, 2)))  # tables are made once
    our_seconds = 0.0
    for name, way in (("malmoi", ours), *peers()):
        began = time.perf_counter()
        gone = way(texts)
        seconds = time.perf_counter() - began
        our_seconds = our_seconds or seconds
        found = sum(number >= begin for number in gone)
        print(
            f"{name:12s}{size / seconds:8.2f} MB/s   found {found:,} of {len(texts) - begin:,} planted, "
            f"{len(gone) - found:,} others   ours {seconds / our_seconds:.2f}x"
        )


if __name__ == "__main__":
    main()
