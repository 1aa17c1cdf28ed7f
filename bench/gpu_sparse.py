"""What sparse and linear attention save: forward and backward of one layer, by length and pattern.

    PYTHONPATH=src python bench/gpu_sparse.py --out results [--limit tiny] [--seconds 60]

On a GPU in bf16: FlashAttention over all earlier tokens against FlexAttention's blocks. On a CPU in
fp32, each measurement in a process of its own so that its memory can be read: the flash kernel
over all earlier tokens against tiles, and against the same pattern as a whole mask. The last table
is also written to OUT/sparse.json. `--seconds` stops beginning new measurements.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.model import Layout, parse_pattern
from malmoi.model.attention import Mask, attend, build_mask
from malmoi.model.linear_attention import causal_linear_attention, feature_map

GPU_PATTERNS = {
    "dense": "causal",
    "band 512": "causal & local:512",
    "fixed 128,8": "causal & fixed:128,8",
    "strided 128": "causal & strided:128",
    "linear": "linear",
}
CPU_PATTERNS = {
    "dense": "causal",
    "band 256": "causal & local:256",
    "strided 128": "causal & strided:128",
    "fixed 128,8": "causal & fixed:128,8",
    "two head sets": "causal & local:128 ; causal & column:128",
    "linear": "linear",
    "band 256 as a whole mask": "masked causal & local:256",
}
# FlexAttention compiles for every pattern and length, so that few are measured
GPU_LENGTHS = {"dense": (1024, 4096, 8192, 16384, 32768), "linear": (1024, 8192, 32768)}
GPU_LENGTHS |= {"band 512": (1024, 8192, 16384, 32768)}
HEADS = 12
HEAD_WIDTH = 64


def step_of(text: str, length: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of one layer's attention."""
    shape = (1, HEADS, length, HEAD_WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    grad = torch.randn(shape, device=device, dtype=dtype)
    if text == "linear":
        return partial(_backward, lambda: _linear(q, k, v), inputs, grad)
    pattern = parse_pattern(text.removeprefix("masked "), HEADS)
    layout = Layout(1, length, length)
    if text.startswith("masked "):
        mask = Mask.of(pattern.mask(layout, device))
    else:
        mask = build_mask(pattern, layout, device, None, 0.0)
    return partial(_backward, lambda: attend(q, k, v, mask), inputs, grad)


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    read, _ = causal_linear_attention(feature_map(q.float()), feature_map(k.float()), v.float())
    return read.to(q.dtype)


def _backward(forward: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(forward(), inputs, grad)


def measure(text: str, length: int, device: torch.device) -> dict[str, float]:
    cuda = device.type == "cuda"
    step = step_of(text, length, device, torch.bfloat16 if cuda else torch.float32)
    step()  # compiles, and makes tiles that later steps share
    times = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(10 if cuda else 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter() if cuda else time.process_time()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() if cuda else time.process_time()) - start)
    peak = torch.cuda.max_memory_allocated() if cuda else _peak_bytes()
    return {"ms": 1000 * statistics.median(times), "mb": peak / 2**20}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure_apart(text: str, length: int) -> dict[str, float]:
    """In a process of its own, less the memory of one that computes next to nothing."""
    command = [sys.executable, __file__, "--one", text, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lengths = sorted({row["length"] for row in rows})
    lines = ["| pattern | " + " | ".join(f"{n:,}" for n in lengths) + " |"]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for name in dict.fromkeys(row["pattern"] for row in rows):
        cells = {
            row["length"]: f"{row['ms']:,.1f} ms, {row['mb']:,.0f} MB"
            for row in rows
            if row["pattern"] == name
        }
        lines.append(f"| {name} | " + " | ".join(cells.get(n, "–") for n in lengths) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", help="not used: the inputs are random")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--limit", choices=["tiny"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--one", nargs=2, metavar=("PATTERN", "LENGTH"))
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(given.one[0], int(given.one[1]), torch.device("cpu"))))
        return
    cuda = torch.cuda.is_available()
    patterns = GPU_PATTERNS if cuda else CPU_PATTERNS
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    base = 0.0 if cuda else measure_apart("causal", 64)["mb"]
    for name, text in patterns.items():
        lengths = GPU_LENGTHS.get(name, (32768,)) if cuda else (1024, 2048, 4096, 8192)
        for length in lengths[:1] if given.limit else lengths:
            if time.monotonic() - begin > given.seconds:
                break
            found = (
                measure(text, length, torch.device("cuda")) if cuda else measure_apart(text, length)
            )
            found["mb"] -= base
            rows.append({"pattern": name, "length": length, **found})
            print(rows[-1], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "sparse.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
