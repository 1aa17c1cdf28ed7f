"""How fast text becomes a token store, beside tokenizers' encode_batch and datasets.map, in one
run.

    malmoi bench encode --text books.txt.xz --tokenizer gpt2/ [--megabytes 20] [--sentences]

Each way reads the same documents from one plain file; ours also reads, splits and writes to disk.
Ratios count: the megabytes per second are this machine's at this moment.
"""

import os
import resource
import tempfile
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

from _timing import benchmark_parser, timed
from malmoi.text.documents import read_documents
from malmoi.text.sentences import split_sentences
from malmoi.tokenizer import Tokenizer
from malmoi.training.data.encode import build_stores


def prepare(source: str, megabytes: int, folder: Path) -> tuple[Path, float]:
    """A plain file of about this many megabytes, a document a line, repeated where the source is
    shorter.
    """
    path, left = folder / "text.txt", megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        for document in chain.from_iterable(repeat(read_documents(source, documents="line"))):
            left -= len(document.text.encode()) + 1
            file.write(" ".join(document.text.split()) + "\n")
            if left <= 0:
                break
    return path, path.stat().st_size / 1e6


def peers(path: Path, tokenizer: Tokenizer, folder: Path) -> dict[str, Callable[[], object]]:
    """The other ways to the same ids: in memory by tokenizers, to disk by datasets (if it is
    installed).
    """
    from tokenizers import Tokenizer as Fast

    tokenizer.save(folder / "tokenizer")
    fast = Fast.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    texts = path.read_text(encoding="utf-8").splitlines()
    ways: dict[str, Callable[[], object]] = {
        "tokenizers.encode_batch": lambda: [
            [
                encoding.ids
                for encoding in fast.encode_batch(
                    texts[first : first + 1000], add_special_tokens=False
                )
            ]
            for first in range(0, len(texts), 1000)
        ]
    }
    try:
        import datasets
    except ImportError:
        print("datasets is not installed: left out")
        return ways

    def mapped() -> None:
        data = datasets.load_dataset(
            "text", data_files=str(path), split="train", cache_dir=str(folder / "cache")
        )
        data.map(
            lambda rows: {
                "ids": [e.ids for e in fast.encode_batch(rows["text"], add_special_tokens=False)]
            },
            batched=True,
            remove_columns=["text"],
        )

    return ways | {"datasets.map": mapped}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument(
        "--sentences", action="store_true", help="ours also splits sentences, as BERT needs"
    )
    parser.add_argument(
        "--alone", action="store_true", help="only ours: its peak memory is then its own"
    )
    chosen = parser.parse_args()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, size = prepare(chosen.text, chosen.megabytes, folder)
        tokenizer = Tokenizer.load(chosen.tokenizer)
        reader = read_documents(path, documents="line")
        sentences = split_sentences if chosen.sentences else None
        store = folder / "store"
        ours, _ = timed(lambda: build_stores(reader, tokenizer, store, sentences=sentences))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{'malmoi.training.data.encode.build_stores':26s}{size / ours:8.2f} MB/s   peak RSS "
            f"{peak:.0f} MiB, {size:.0f} MB of text"
        )
        for label, way in ({} if chosen.alone else peers(path, tokenizer, folder)).items():
            theirs, _ = timed(way)
            print(f"{label:26s}{size / theirs:8.2f} MB/s   ours {theirs / ours:.2f}x")


if __name__ == "__main__":
    main()
