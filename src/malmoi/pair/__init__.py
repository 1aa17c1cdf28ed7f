"""The pair that comes with the package: malmoi-bert and malmoi-gpt, English and Korean.

They are stored in 8 bits: a matrix as signed numbers and a scale a row, all else in fp16. What is
opened is an ordinary folder in fp32 that any tool reads, unpacked once into the user's cache.
`models/` in the repository has the text, the recipes and the commands that make them again.
"""

import shutil
import tempfile
import zlib
from pathlib import Path

from malmoi.messages import msg
from malmoi.system.native import cache_or_temporary

BERT = "malmoi-bert"
GPT = "malmoi-gpt"
STORED = Path(__file__).parent
NUMBERS = "numbers.safetensors"
WEIGHTS = "model.safetensors"
SCALE = ".scale"


def shipped(source: str | Path) -> Path | None:
    """The folder of a model that comes with the package; None if it is another's name."""
    name = str(source)
    if name not in (BERT, GPT) or Path(name).exists():
        return None
    return _unpacked(STORED / name, cache_or_temporary("models"))


def introduction(name: str) -> str:
    """Which model this is, and which would be better where there is a network."""
    if name == BERT:
        return msg(
            "Using malmoi-bert, which comes with Malmoi (11M weights, English and Korean). Larger "
            "ones, where there is a network: -m google-bert/bert-base-uncased, -m klue/bert-base."
        )
    return msg(
        "Using malmoi-gpt, which comes with Malmoi (11M weights, English and Korean). Larger "
        "ones, where there is a network: -m openai-community/gpt2, -m skt/kogpt2-base-v2."
    )


def _unpacked(stored: Path, cached: Path) -> Path:
    """A stored model as a folder in the cache, by the checksum of its numbers."""
    checksum = zlib.crc32((stored / NUMBERS).read_bytes())
    folder = cached / f"{checksum:08x}" / stored.name
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            _unpack(stored, Path(unfinished) / stored.name)
            try:
                (Path(unfinished) / stored.name).rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def _unpack(stored: Path, out: Path) -> None:
    from safetensors.numpy import load_file, save_file

    numbers = {name: some.astype("float32") for name, some in load_file(stored / NUMBERS).items()}
    weights = {
        name: some * numbers.get(name + SCALE, 1)
        for name, some in numbers.items()
        if not name.endswith(SCALE)
    }
    out.mkdir()
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    for path in (*stored.glob("*.json"), stored / "README.md"):  # what is no number
        shutil.copy(path, out)
