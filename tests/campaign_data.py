"""Files of data as people have them: tables of every shape, encoding and compression, whole and
damaged; and files that are made to fill the memory.
"""

import bz2
import gzip
import json
import lzma
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

from malmoi.errors import MalmoiError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.guess import guess_task
from malmoi.text.documents import read_documents
from malmoi.text.rows import has_rows
from malmoi.tokenizer import train_tokenizer
from mutations import Kind, mutate_bytes, mutate_json

with suppress(ImportError):
    import pyarrow as pa
    import pyarrow.parquet as pq
with suppress(ImportError):
    import zstandard

EXPECTED = "expected.json"  # what the whole file should be read as
ROWS = 40
LABELS = ("spam", "ham")
TEXTS = ("free entry in a weekly competition", "see you at the usual place", "무료 쿠폰을 받으세요")
# a first line, and whether it is a header
HEADERS = {"names": ("message", "spam"), "known": ("text", "label"), "none": ()}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "cp949")
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.compress(data),
}
UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".bz2": bz2.decompress,
    ".zst": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
}
BOMB_BYTES = int(os.environ.get("MALMOI_BOMB_BYTES", 80 << 20))


def rows() -> list[tuple[str, str]]:
    return [(f"{TEXTS[i % 3]} {i}", LABELS[i % 2]) for i in range(ROWS)]


def make_table(header: str, suffix: str, encoding: str, packing: str, folder: Path) -> None:
    names = HEADERS[header] or ("column1", "column2")
    if suffix == ".jsonl":
        records = (dict(zip(names, row, strict=True)) for row in rows())
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif suffix == ".json":
        text = json.dumps([dict(zip(names, row, strict=True)) for row in rows()])
    else:
        sign = "," if suffix == ".csv" else "\t"
        lines = [*([HEADERS[header]] if HEADERS[header] else []), *rows()]
        text = "".join(sign.join(line) + "\n" for line in lines)
    write(folder, f"rows{suffix}{packing}", PACKERS[packing](text.encode(encoding)), names)


def make_columns(suffix: str, folder: Path) -> None:
    """A file of pyarrow's, which compresses by itself."""
    names = HEADERS["names"]
    table = pa.table(dict(zip(names, zip(*rows(), strict=True), strict=True)))
    target = pa.BufferOutputStream()
    if suffix == ".parquet":
        pq.write_table(table, target)
    else:
        with pa.ipc.new_stream(target, table.schema) as stream:
            stream.write_table(table, max_chunksize=9)
    write(folder, f"rows{suffix}", target.getvalue().to_pybytes(), names)


def write(folder: Path, name: str, data: bytes, names: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_bytes(data)
    (folder / EXPECTED).write_text(json.dumps({"names": names, "rows": ROWS}))


def file_in(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name != EXPECTED)


def damage_data(folder: Path, rng: random.Random) -> str:
    """The file as it is on disk, or its content before it was packed; some stay whole."""
    path = file_in(folder)
    packing = path.suffix if path.suffix in PACKERS else ""
    how = rng.choice(("nothing", "disk", "disk", "content", "content"))
    if how == "nothing":
        return f"{path.name}: nothing"
    (folder / EXPECTED).unlink()
    if how == "disk":
        return f"{path.name}: {mutate_bytes(path, rng)}"
    inner = path.with_name("inner")
    inner.write_bytes(UNPACKERS[packing](path.read_bytes()))
    is_json = ".json" in path.suffixes and inner.read_bytes().startswith(b"[")  # in UTF-8
    said = (mutate_json if is_json else mutate_bytes)(inner, rng)
    path.write_bytes(PACKERS[packing](inner.read_bytes()))
    inner.unlink()
    return f"{path.name}, unpacked: {said}"


def use_data(folder: Path) -> None:
    """Reads a file as finetune, pretrain and tokenizer train do; a whole one must be read right."""
    path = file_in(folder)
    known = json.loads((folder / EXPECTED).read_text()) if (folder / EXPECTED).is_file() else {}
    column = known["names"][0] if known else "message"
    if has_rows(path):
        task, found = guess_task(None, path)
        read = load_examples(task, path, skip_bad=not known)
        column = found.text if found is not None else column
        if known:
            assert found is not None
            assert [found.text, found.label, found.pair] == [*known["names"], None]
            assert set(found.labels) == set(LABELS)
            assert len(read.rows) == known["rows"]
    texts = [document.text for document in read_documents(path, text=column)]
    if known and ".txt" not in path.suffixes:  # which is a table for finetune only
        assert texts == [text for text, _ in rows()]
    train_tokenizer(texts[:100], kind="byte-bpe", vocab=300)


# ------------------------------------------------------------------ bombs


def bomb(name: str, *parts: tuple[bytes, int]) -> Callable[[Path], None]:
    """A gzip file of some bytes, each repeated."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        with gzip.open(folder / name, "wb", compresslevel=1) as file:
            for piece, times in parts:
                block = piece * max(1, min(times, (1 << 20) // len(piece)))
                for _ in range(max(1, times * len(piece) // len(block))):
                    file.write(block)

    return make


def make_parquet_bomb(folder: Path) -> None:
    folder.mkdir(parents=True)
    column = pa.array(["a" * BOMB_BYTES])
    pq.write_table(pa.table({"text": column, "label": ["x"]}), folder / "bomb.parquet")


def make_wide_table(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = ",".join(f"c{i}" for i in range(300_000))
    (folder / "wide.csv").write_text(f"{names}\n{names}\n{names}\n")


HEAD = (b"text,label\n", 1)
LINES = (b"a" * 1023 + b"\n", BOMB_BYTES >> 10)
BOMBS = {
    "field": bomb("bomb.csv.gz", HEAD, (b"a", BOMB_BYTES), (b",x\n", 1)),
    "quoted": bomb("bomb.csv.gz", HEAD, (b'"', 1), LINES, (b'",x\n', 1)),
    "tabs": bomb("bomb.tsv.gz", (b"text\tlabel\n", 1), (b"\t", BOMB_BYTES), (b"\n", 1)),
    "line": bomb("bomb.jsonl.gz", (b'{"text": "', 1), (b"a", BOMB_BYTES), (b'"}\n', 1)),
    "value": bomb("bomb.json.gz", (b'[{"text": "', 1), (b"a", BOMB_BYTES), (b'"}]', 1)),
    "zeros": bomb("bomb.json.gz", (b"[0", 1), (b",0", BOMB_BYTES // 2), (b"]", 1)),
    "brackets": bomb("bomb.json.gz", (b"[", BOMB_BYTES)),
    "columns": bomb("bomb.parquet.gz", (b"PAR1", BOMB_BYTES // 4)),
    "parquet": make_parquet_bomb,
    "wide": make_wide_table,
}


def use_bomb(folder: Path) -> None:
    """Reads it in each way; the first that refuses it ends here, and one must."""
    path = file_in(folder)
    told: list[MalmoiError] = []
    for read in (
        lambda: load_examples(guess_task(None, path)[0], path),
        lambda: list(read_documents(path)),
    ):
        try:
            read()
        except MalmoiError as error:
            told.append(error)
    if told:
        raise told[0]


TABLES = product(HEADERS, (".csv", ".tsv", ".txt", ".jsonl", ".json"), ENCODINGS, PACKERS)
DATA_KINDS = {
    "table": Kind(
        {" ".join(how): partial(make_table, *how) for how in TABLES}, damage_data, use_data
    ),
    "columns": Kind(
        {suffix: partial(make_columns, suffix) for suffix in (".parquet", ".arrow")},
        damage_data,
        use_data,
    ),
    "bomb": Kind(BOMBS, lambda folder, rng: file_in(folder).name, use_bomb),
}
