"""The built corpora as one compressed file for each kind of text, the largest kinds thinned out.

Next-sentence prediction draws its second sentences from the same file: a novel's from novels.
"""

import argparse
import bz2
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

GROUPS = {
    "books": ("books",),
    "prose": ("textbooks", "science", "dictionary", "factbook", "dialogues"),
    "speeches": ("speeches",),
    "korean": ("korean", "remarks", "manuals"),
    "bills": ("bills",),
    "reviews": ("reviews",),
}
PERCENT = {"books": 70, "bills": 70, "reviews": 80}  # of the documents; 100 of the others


def pack(corpora: list[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shards = sorted(shard for corpus in corpora for shard in corpus.glob("shard-*.jsonl"))
    for group, sources in GROUPS.items():
        sizes = dict.fromkeys(sources, 0)
        with bz2.open(out / f"{group}.jsonl.bz2", "wt", encoding="utf-8") as file:
            for source, text in _documents(shards, sources, PERCENT.get(group, 100)):
                sizes[source] += len(text.encode())
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        for source, size in sizes.items():
            print(group, source, size, sep="\t")


def _documents(
    shards: list[Path], sources: tuple[str, ...], percent: int
) -> Iterator[tuple[str, str]]:
    for shard in shards:
        for line in shard.open(encoding="utf-8"):
            row = json.loads(line)
            if row["source"] in sources and zlib.crc32(row["text"].encode()) % 100 < percent:
                yield row["source"], row["text"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpora", type=Path, nargs="+", help="folders of `malmoi corpus build`")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pack(given.corpora, given.out)
