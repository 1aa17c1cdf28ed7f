"""How fast near-duplicates are found, beside datasketch and rensa (those that are installed), in
one run.

    malmoi bench corpus --text reviews.txt.xz [--megabytes 20] [--planted 500]

Every tool compares sets of runs of 5 words by 128 hashes on one core, and drops a document that an
earlier one is like. Two stages are timed apart: cutting texts into runs (ours; a Python expression
for the others, which leave that to their users), and signatures with the search. Some documents are
planted a second time with two words changed: how many of those each tool finds is beside its
speed. Seconds are of the processor; ratios count: megabytes per second are this machine's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from _timing import benchmark_parser, processor_time, timed
from malmoi.corpus.columns import text_columns
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.duplicates import minhash, near_duplicates
from malmoi.corpus.ngrams import HashArray, hash_each
from malmoi.text.documents import read_documents

HASHES, RUN, THRESHOLD = 128, 5, 0.8
Shingle = Callable[[list[str]], Sequence[Any]]  # from texts to each one's runs of words
Find = Callable[[Sequence[Any]], set[int]]  # from those to the numbers of the texts that go


def prepare(source: str, megabytes: int, planted: int) -> tuple[list[str], int]:
    """So many megabytes of documents that are long enough, then changed copies of the first;
    where those begin.
    """
    texts, left = [], megabytes * 1_000_000
    for document in read_documents(source):
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


def our_shingles(texts: list[str]) -> list[HashArray]:
    return [found.ngrams(min(RUN, len(found))) for found in hash_each(text_columns(texts))]


def our_duplicates(shingles: Sequence[HashArray]) -> set[int]:
    config = CorpusConfig()
    counts = np.array([len(runs) for runs in shingles])
    begins = counts.cumsum() - counts
    signatures = minhash(np.concatenate(shingles), begins, counts, config.hashes)
    return set(
        np.flatnonzero(near_duplicates(signatures, config.rows, config.similar) >= 0).tolist()
    )


def python_shingles(texts: list[str]) -> list[list[str]]:
    """What users of the other two write: neither package cuts texts into runs of words."""
    found = [re.findall(r"\w+", text.lower()) for text in texts]
    return [
        list({" ".join(words[at : at + RUN]) for at in range(max(len(words) - RUN + 1, 1))})
        for words in found
    ]


def datasketch(shingles: Sequence[list[str]]) -> set[int]:
    from datasketch import MinHash, MinHashLSH

    index, gone = MinHashLSH(threshold=THRESHOLD, num_perm=HASHES), set()
    for number, runs in enumerate(shingles):
        sketch = MinHash(num_perm=HASHES)
        sketch.update_batch([run.encode() for run in runs])
        if index.query(sketch):
            gone.add(number)
        else:
            index.insert(number, sketch)
    return gone


def rensa(shingles: Sequence[list[str]]) -> set[int]:
    from rensa import RMinHash, RMinHashLSH

    index, gone = RMinHashLSH(threshold=THRESHOLD, num_perm=HASHES, num_bands=16), set()
    for number, runs in enumerate(shingles):
        sketch = RMinHash(num_perm=HASHES, seed=0)
        sketch.update(runs)
        if index.query(sketch):
            gone.add(number)
        else:
            index.insert(number, sketch)
    return gone


def tools() -> Iterator[tuple[str, Shingle, Find]]:
    yield "malmoi", our_shingles, our_duplicates
    for name, find in (("datasketch", datasketch), ("rensa", rensa)):
        if find_spec(name) is None:
            print(f"{name} is not installed: left out")
        else:
            yield name, python_shingles, find


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--planted", type=int, default=500)
    chosen = parser.parse_args()
    texts, begin = prepare(chosen.text, chosen.megabytes, chosen.planted)
    size = sum(len(text.encode()) for text in texts) / 1e6
    our_duplicates(our_shingles(texts[:2]))  # tables are made once
    for name, shingle, find in tools():
        cutting, shingles = timed(partial(shingle, texts), processor_time)
        finding, gone = timed(partial(find, shingles), processor_time)
        found = sum(number >= begin for number in gone)
        print(
            f"{name:12s}{size / cutting:8.1f} MB/s shingles"
            f"{size / finding:8.1f} MB/s signatures and search"
            f"{size / (cutting + finding):8.1f} MB/s both   "
            f"found {found:,} of {len(texts) - begin:,} planted, {len(gone) - found:,} others"
        )


if __name__ == "__main__":
    main()
