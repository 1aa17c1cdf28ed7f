"""How a file is damaged, by a seed; and a kind of file with all that is tried on it."""

import atexit
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    2**31,
    2**31 - 1,
    2**63,
    2**70,
    -(2**63),
    10**400,
    0.5,
    -0.5,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "1",
    "[MASK]",
    "../../etc/passwd",
    "a\0b",
    "\ud800",
    "가" * 10_000,
    [],
    [0],
    [None],
    ["x"],
    [[]],
    [1, "a", {}],
    {},
    {"x": 1},
    {"type": "x"},
    {"0": "x"},
    {"content": 5},
]
MUTATIONS_OF_JSON = (
    "replace",
    "replace",
    "replace",
    "replace",
    "delete",
    "rename",
    "swap",
    "deepen",
    "raw",
)


def mutate_json(path: Path, rng: random.Random) -> str:
    """Changes a JSON file in one place; returns what was done."""
    how = rng.choice(MUTATIONS_OF_JSON)
    if how == "raw":
        return mutate_bytes(path, rng)
    values = json.loads(path.read_text("utf-8"))
    places = list(_places(values))
    if not places:
        return mutate_bytes(path, rng)
    parent, key = rng.choice(places)
    said = f"{how} {key!r}"
    if how == "replace":
        parent[key] = rng.choice(HOSTILE)
        said += f" by {parent[key]!r:.40}"
    elif how == "swap":
        other, name = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[name]))
        said += f" by {name!r}"
    elif how == "deepen":
        for _ in range(rng.choice((1, 3, 100))):
            parent[key] = [parent[key]] if rng.random() < 0.5 else {"x": parent[key]}
    elif isinstance(parent, dict):
        value = parent.pop(key)
        if how == "rename":
            parent[rng.choice(("x", "", key.upper(), "0"))] = value
    else:
        del parent[key]
    path.write_text(json.dumps(values), "utf-8")
    return said


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value; of a long list or object a few."""
    if isinstance(values, dict | list):
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))
        for key in keys if len(keys) < 60 else keys[:5] + keys[-5:]:
            yield values, key
            yield from _places(values[key])


def mutate_bytes(path: Path, rng: random.Random) -> str:
    """Cuts a file, turns some of its bytes, or puts some in."""
    data = bytearray(path.read_bytes())
    how, at = (
        rng.choice(("cut", "turn", "insert", "empty", "digits", "brackets")),
        rng.randrange(max(1, len(data))),
    )
    if how == "cut":
        del data[at:]
    elif how == "turn":
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == "insert":
        data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 64))))
    elif how == "empty":
        data.clear()
    else:
        data[at:at] = b"9" * 6000 if how == "digits" else b"[" * 200_000
    path.write_bytes(data)
    return f"{how} at {at}"


def mutate_header(path: Path, rng: random.Random) -> str:
    """Changes what a safetensors file says of its tensors."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = path.with_suffix(".header")
    header.write_bytes(data[8 : 8 + size])
    said = mutate_json(header, rng)
    text = header.read_bytes()
    header.unlink()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return f"header: {said}"


TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
)


def mutate_tensors(path: Path, rng: random.Random) -> str:
    """Other types, shapes or numbers for some tensors, in a file that is whole."""
    tensors = load_file(path)
    names = rng.sample(sorted(tensors), min(len(tensors), rng.choice((1, 2, 1000))))
    how = rng.choice(("type", "type", "shape", "nan", "huge", "missing", "scalar"))
    dtype = rng.choice(TYPES)
    for name in names:
        changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "type": lambda t: t.to(dtype),
            "shape": lambda t: t.flatten()[: rng.randrange(t.numel() + 1)],
            "nan": lambda t: t.float().fill_(float("nan")),
            "huge": lambda t: t.float().fill_(3e38),
            "scalar": lambda t: t.flatten()[0].clone(),
        }
        if how == "missing":
            del tensors[name]
        else:
            tensors[name] = changes[how](tensors[name]).contiguous()
    save_file(tensors, path, {"format": "pt"})
    return f"{how} ({dtype}) of {len(names)} tensors, such as {names[0] if names else None}"


# ------------------------------------------------------------------ kinds


class Kind:
    """One kind of file: folders to begin with, how they are damaged, and how they are then used."""

    def __init__(
        self, makers: dict[str, Callable[[Path], None]], damage: Any, use: Callable[[Path], None]
    ) -> None:
        self.makers, self.damage, self.use = makers, damage, use

    @cache  # noqa: B019
    def base(self, name: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="campaign-")) / "base"
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
        with quiet():
            self.makers[name](folder)
        return folder

    def run(self, seed: int, scratch: Path) -> tuple[str, Callable[[], None]]:
        """A damaged copy; what was done to it, and what to try."""
        rng = random.Random(seed)
        base = self.base(rng.choice(sorted(self.makers)))
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(base, scratch)
        said = self.damage(scratch, rng)
        return said, lambda: self.use(scratch)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what training and the Rust library write to stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
