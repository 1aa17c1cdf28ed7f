"""A model's folder in 8 bits, as the package carries it and `malmoi.pair` unpacks it."""

import argparse
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from malmoi.pair import NUMBERS, SCALE, WEIGHTS

LARGEST = 127  # of a signed number of 8 bits
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def store(folder: Path, out: Path) -> None:
    """Writes the numbers in 8 bits, and the configuration, the tokenizer and the card."""
    numbers = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        if weight.ndim == 2:
            full = weight.astype(np.float32)
            scale = np.abs(full).max(1, keepdims=True) / LARGEST
            numbers[name + SCALE] = np.maximum(scale, np.finfo(np.float16).tiny).astype(np.float16)
            steps = np.rint(full / numbers[name + SCALE].astype(np.float32))
            numbers[name] = steps.clip(-LARGEST, LARGEST).astype(np.int8)
        else:
            numbers[name] = weight.astype(np.float16)
    out.mkdir(parents=True, exist_ok=True)
    save_file(numbers, out / NUMBERS)
    for path in (folder / name for name in (*TEXTS, "README.md")):
        if path.is_file():
            shutil.copy(path, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    store(given.folder, given.out)
