"""What sparse and linear attention save in one layer, by length and pattern.

    PYTHONPATH=src python bench/gpu_sparse.py --out results [--limit tiny] [--seconds 60]
        [--only NAME …]

Each is measured with and without the backward pass. On a GPU in bf16: FlashAttention over all
earlier tokens against FlexAttention's blocks. On a CPU in fp32, each measurement in a process of
its own so that its memory can be read: the flash kernel over all earlier tokens against tiles, and
against the same pattern as a whole mask. Writes OUT/sparse.json and the plots OUT/time.svg and
OUT/memory.svg. `--seconds` stops beginning new measurements; `--plot` draws the plots of an
OUT/sparse.json that is there.
"""

import argparse
import gc
import json
import os
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
from malmoi.model.attention_kernels import attend
from malmoi.model.attention_mask import Mask, build_mask
from malmoi.model.linear_attention import causal_linear_attention, feature_map
from malmoi.report.chart import LINE_COLOURS, chart, standalone_svg

GPU_PATTERNS = {
    "dense": "causal",
    "band 512": "causal & local:512",
    "fixed 128,8": "causal & fixed:128,8",
    "strided 128": "causal & strided:128",
    "two head sets": "causal & local:128 ; causal & column:128",
    "linear": "linear",
}
CPU_PATTERNS = {
    "dense": "causal",
    "band 256": "causal & local:256",
    "strided 128": "causal & strided:128",
    "fixed 128,8": "causal & fixed:128,8",
    "block 256 + 16 global": "causal & (block:256 | prefix:16)",
    "two head sets": "causal & local:128 ; causal & column:128",
    "linear": "linear",
    "band 256 as a whole mask": "masked causal & local:256",
}
# FlexAttention compiles for every pattern and length, so that few are measured
GPU_LENGTHS = {"dense": (1024, 4096, 8192, 16384, 32768), "linear": (1024, 8192, 32768)}
GPU_LENGTHS |= {"band 512": (1024, 8192, 16384, 32768)}
GPU_LENGTHS |= dict.fromkeys(("fixed 128,8", "strided 128"), (8192, 32768))
CHECKED_LENGTH = 2048  # tokens over which the kernels are compared with a whole mask
CPU_LENGTHS = (1024, 2048, 4096, 8192)
HEADS = 12
HEAD_WIDTH = 64


def step_of(text: str, length: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Forward, and backward unless the text says otherwise, of one layer's attention."""
    only_forward = text.startswith("forward ")
    text = text.removeprefix("forward ")
    shape = (1, HEADS, length, HEAD_WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    run: Callable[[Callable[[], Tensor]], None] = _forward
    if not only_forward:
        run = partial(_backward, inputs=inputs, grad=torch.randn_like(q))
    if text == "linear":
        return partial(run, lambda: _linear(q, k, v))
    pattern = parse_pattern(text.removeprefix("masked "), HEADS)
    layout = Layout(1, length, length)
    if text.startswith("masked "):
        mask = Mask.of(pattern.mask(layout, device))
    else:
        mask = build_mask(pattern, layout, device, None, 0.0)
    return partial(run, lambda: attend(q, k, v, mask))


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    read, _ = causal_linear_attention(feature_map(q.float()), feature_map(k.float()), v.float())
    return read.to(q.dtype)


def _forward(forward: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        forward()


def _backward(forward: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(forward(), inputs, grad)


def largest_error(text: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of outputs and gradients from a whole mask in double precision."""
    torch.manual_seed(0)
    shape = (1, HEADS, CHECKED_LENGTH, HEAD_WIDTH)
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(shape, device=device, dtype=dtype)
    pattern = parse_pattern(text, HEADS)
    layout = Layout(1, CHECKED_LENGTH, CHECKED_LENGTH)
    mask = build_mask(pattern, layout, device, None, 0.0)
    out = attend(inputs[0], inputs[1], inputs[2], mask)
    truth = attend(exact[0], exact[1], exact[2], Mask.of(pattern.mask(layout, device)))
    found = (out, *torch.autograd.grad(out, inputs, grad))
    right = (truth, *torch.autograd.grad(truth, exact, grad.double()))
    pairs = zip(found, right, strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def measure(text: str, length: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step, and the most memory that its inputs, masks and results take."""
    if device.type == "cuda":
        return _measure_cuda(text, length, device)
    for small in ("causal", "causal & local:8", "linear"):  # loads the code of every path
        step_of(small, 1024, device, torch.float32)()
    before = _start_peak()
    step = step_of(text, length, device, torch.float32)
    times = []
    for _ in range(3 if length <= 2048 else 1):
        start = time.process_time()  # of one thread: other processes do not count
        step()
        times.append(time.process_time() - start)
    return {"ms": 1000 * statistics.median(times), "mb": (_memory("VmHWM") - before) / 1024}


def _measure_cuda(text: str, length: int, device: torch.device) -> dict[str, float]:
    step = step_of(text, length, device, torch.bfloat16)
    step()  # compiles
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated()
    return {"ms": 1000 * statistics.median(times), "mb": peak / 2**20}


def _start_peak() -> int:
    """Resets the peak that Linux keeps of this process's memory; returns the kB of now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure_apart(text: str, length: int) -> dict[str, float]:
    """In a process of its own, so that no other measurement's memory is reused."""
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


def lengths_of(name: str, *, cuda: bool) -> tuple[int, ...]:
    return GPU_LENGTHS.get(name, (32768,)) if cuda else CPU_LENGTHS


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Plots time and memory by length, forward and backward."""
    names = list(dict.fromkeys(row["pattern"] for row in rows))[: len(LINE_COLOURS)]
    chosen = [row for row in rows if row["passes"] == "both" and row["pattern"] in names]
    for name, unit, scale in (("time", "s", 1000), ("memory", "MB", 1)):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in chosen:
            lines.setdefault(row["pattern"], []).append(
                (row["length"], row["ms" if unit == "s" else "mb"] / scale)
            )
        picture = chart(lines, "tokens", unit, even=True)
        (out / f"{name}.svg").write_text(standalone_svg(picture))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", help="not used: the inputs are random")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--limit", choices=["tiny"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these patterns alone")
    parser.add_argument("--one", nargs=2, metavar=("PATTERN", "LENGTH"))
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(given.one[0], int(given.one[1]), torch.device("cpu"))))
        return
    if given.plot:
        draw(json.loads((given.out / "sparse.json").read_text()), given.out)
        return
    cuda = torch.cuda.is_available()
    patterns = GPU_PATTERNS if cuda else CPU_PATTERNS
    patterns = {name: patterns[name] for name in given.only or patterns}
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    dtype = torch.bfloat16 if cuda else torch.float32
    device = torch.device("cuda" if cuda else "cpu")
    for name, text in patterns.items() if cuda or given.limit else ():
        if text != "linear" and not text.startswith("masked"):
            print(f"{name}: largest error {largest_error(text, device, dtype):.2g}", flush=True)
    cases = [
        (name, text, length, passes)
        for name, text in patterns.items()
        for passes in ("both", "forward")
        for length in lengths_of(name, cuda=cuda)[: 1 if given.limit else None]
    ]
    for name, text, length, passes in cases:
        if time.monotonic() - begin > given.seconds:
            break
        asked = text if passes == "both" else f"forward {text}"
        found = (
            measure(asked, length, torch.device("cuda")) if cuda else measure_apart(asked, length)
        )
        rows.append({"pattern": name, "passes": passes, "length": length, **found})
        print(rows[-1], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "sparse.json").write_text(json.dumps(rows, indent=1))
    for passes in ("both", "forward"):
        print(f"\n{passes}\n\n{table([row for row in rows if row['passes'] == passes])}")
    draw(rows, given.out)


if __name__ == "__main__":
    main()
