"""A disk that is full, whatever is being written: one sentence, nothing half-written, and the same
command works after.

Everywhere the disk is a limit on the size of a file, which the kernel refuses as it refuses a full
disk; where the tests may mount one, a real disk of a few kilobytes.
"""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from malmoi.adapters.attach import attach_adapter
from malmoi.adapters.config import AdapterConfig
from malmoi.adapters.store import write_adapter
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.cli import run_command
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer
from tiny_runs import WORDS, write_corpus

SIZES = dict(context=32, width=32, depth=2, heads=2, dropout=0.0, attention_dropout=0.0)
QUICK = "--set steps=2 --set batch=4 --set precision=fp32"
# what is run, and the most bytes a file may have meanwhile
COMMANDS: dict[str, tuple[str, int]] = {
    "merge": ("merge --model IN/lora --out OUT/model", 30_000),
    "share": ("compress share --model IN/bert --out OUT/model", 30_000),
    "quantize": ("compress quantize --model IN/gpt --out OUT/model", 30_000),
    "prune": ("compress prune --model IN/gpt --out OUT/model --layers 0", 30_000),
    "gguf": ("export gguf --model IN/gpt --out OUT/model/gpt.gguf", 30_000),
    "finetune": (
        f"finetune classification --data IN/rows.tsv --model IN/gpt --out OUT/model {QUICK}",
        30_000,
    ),
    "adapter": (
        f"finetune classification --data IN/rows.tsv --model IN/gpt --out OUT/model {QUICK} "
        "--adapter lora "
        "--set adapter.rank=8",
        5_000,
    ),
    "tokenizer": ("tokenizer train IN/text.txt --kind byte-bpe --vocab 400 --out OUT/model", 2_000),
    "embed": ("embed --model IN/bert --out OUT/vectors.npy good", 100),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT, a BERT, an adapter, rows and text."""
    root = tmp_path_factory.mktemp("in")
    texts = [" ".join(WORDS)] * 3
    for name, kind, heads in (
        ("gpt2-small", "byte-bpe", {"lm": 0}),
        ("bert-tiny", "wordpiece", {"mlm": 0}),
    ):
        tokenizer = train_tokenizer(texts, kind=kind, vocab=330)
        network = initialise(Network(preset(name, vocab=tokenizer.vocab_size, **SIZES), heads), 0)
        write_checkpoint(
            Checkpoint(network, tokenizer), root / ("gpt" if name == "gpt2-small" else "bert")
        )
    base, adapter = read_checkpoint(root / "gpt"), AdapterConfig(kind="lora", rank=2)
    patched = read_checkpoint(root / "gpt")
    attach_adapter(patched.network, adapter, patched.tokenizer)
    write_adapter(patched, base, adapter, root / "lora")
    rows = [f"{word} {word}\t{i % 2}\n" for i, word in enumerate(WORDS)]
    (root / "rows.tsv").write_text("text\tlabel\n" + "".join(rows), "utf-8")
    write_corpus(root / "text.txt")
    return root


@contextmanager
def small_files(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it would keep half a file
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def command(name: str, models: Path, out: Path) -> list[str]:
    if name == "gguf":
        pytest.importorskip("gguf", reason="what writes such files")
    return [
        part.replace("IN/", f"{models}/").replace("OUT/", f"{out}/")
        for part in COMMANDS[name][0].split()
    ]


def half_written(out: Path) -> list[str]:
    """Temporary files, and folders that are a model by name only."""
    halves = [path.name for path in out.rglob(".*") if path.name.endswith(".tmp")]
    return halves + [
        path.name
        for path in out.rglob("config.json")
        if not (path.parent / "model.safetensors").exists()
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_cannot_be_written_is_one_sentence(
    name: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command(name, models, tmp_path)
    with small_files(COMMANDS[name][1]):
        code = run_command(argv)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert (code, half_written(tmp_path)) == (1, [])
    assert said.startswith("malmoi: ")
    assert "could not be written. " in said
    assert "run the same command again" in said
    assert run_command(argv) == 0, capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("these tests may not mount a disk; the limit on a file's size replaces it")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["merge", "gguf", "finetune", "tokenizer"])
def test_a_full_disk_is_one_sentence(
    name: str, models: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 12_000))
    assert run_command(command(name, models, small_disk)) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("malmoi: The disk is full: ")
    assert half_written(small_disk) == []
