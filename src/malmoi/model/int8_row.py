"""One row times int8 weights by a kernel of our own, compiled once for this processor: torch's reads cold weights at a
quarter of the memory's speed. Where there is no compiler or no VNNI there is no kernel, and torch's is used."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model.native import load_library

BLOCK = 16  # outputs that one instruction sums up
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-fopenmp")


def row_product(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """x [1, I] → x Wᵀ · scale + bias [1, O] in fp32, W laid out for the kernel once; none where there is no kernel."""
    call, (outputs, inputs) = kernel(), weight.shape
    if call is None or inputs % 8:
        return None
    short = -outputs % BLOCK
    padded = F.pad(weight, (0, 0, 0, short))
    laid_out = padded.view(-1, BLOCK, inputs // 4, 4).transpose(1, 2).contiguous()
    sums = padded.sum(1, dtype=torch.int32)
    scales = F.pad(scale.float(), (0, short))
    added = torch.zeros(outputs + short) if bias is None else F.pad(bias.float(), (0, short))
    held = (laid_out, scales, sums, added)
    places = tuple(tensor.data_ptr() for tensor in held)
    size = (outputs + short) // BLOCK

    def product(row: Tensor, held: tuple[Tensor, ...] = held) -> Tensor:  # held: alive as long as the product
        x, y = row.float().contiguous(), torch.empty(1, size * BLOCK)
        call(*places, x.data_ptr(), y.data_ptr(), size, inputs)
        return y[:, :outputs]

    return product


@cache
def kernel() -> Callable[..., int] | None:
    """The compiled function, where this processor and a compiler allow it."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    flags = _processor()
    if compiler is None or not {"avx512f", "avx512_vnni"} <= set(flags.split()):
        return None
    source = files("malmoi.model").joinpath("int8_row.c").read_text("utf-8")
    name = hashlib.sha256(f"{source}{flags}{FLAGS}".encode()).hexdigest()[:16]
    try:
        found = load_library(name, partial(_build, compiler, source)).malmoi_int8_row
    except (OSError, subprocess.SubprocessError):
        return None
    found.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_long] * 2
    found.restype = ctypes.c_int
    return found


def _processor() -> str:
    """The instructions that this processor has, as Linux names them."""
    told = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not told.exists():
        return ""
    lines = told.read_text("utf-8", "replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")


def _build(compiler: str, source: str, built: Path) -> None:
    """Linked without OpenMP's library, so that it takes the one that torch has loaded: two would each keep a thread for
    every core."""
    text, half = built.with_suffix(".c"), built.with_suffix(".o")
    text.write_text(source, "utf-8")
    for step in ((*FLAGS, "-c", str(text), "-o", str(half)), ("-shared", str(half), "-o", str(built), "-lm")):
        subprocess.run([compiler, *step], check=True, capture_output=True, timeout=60)
