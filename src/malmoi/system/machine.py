"""This machine: CPU instructions, cores, memory, compiler and accelerators.

Everything else asks here which device, precision and kernels to use, so that a chip without bf16
units or a laptop without a compiler is handled in one place.
`MALMOI_MACHINE=no-bf16,no-compiler,cores=1,memory=2G` (or `pretend` in Python) describes another
machine: tests run the main paths under each.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from malmoi.errors import UsageError, explained, nearest, require_known, require_that, required

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")

ENVIRONMENT = "MALMOI_MACHINE"
GIB = 1 << 30

# Names of instruction sets in Linux and macOS → ours.
SAME_NAMES = ("avx2", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
LINUX_FEATURES = {
    **{name: name for name in (*SAME_NAMES, "i8mm", "sve")},
    "avx512bw": "avx512",
    "asimd": "neon",
    "asimddp": "dotprod",
    "bf16": "arm_bf16",
}
MACOS_FEATURES = {"FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm", "FEAT_BF16": "arm_bf16"}
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "arm_bf16")
# Instructions that our kernels in C are written for, the fastest first.
KERNEL_FEATURES = ("avx512_vnni", "avx512", "avx2", "dotprod")
INT8_FEATURES = (*KERNEL_FEATURES, "avx_vnni", "amx_int8", "i8mm")
AVX512_FEATURES = ("avx512", "avx512_vnni", "avx512_bf16")


@dataclass(frozen=True)
class Accelerator:
    """A GPU that torch can use: CUDA's, or an Apple chip's (`mps`)."""

    kind: str  # cuda | mps
    name: str = ""
    count: int = 1
    memory: int = 0  # bytes of one
    bf16: bool = False  # in hardware; emulation does not count


@dataclass(frozen=True)
class Machine:
    """A computer as Malmoi sees it."""

    architecture: str = "x86_64"  # x86_64 | aarch64
    features: frozenset[str] = frozenset()  # values of LINUX_FEATURES
    cores: int = 1  # available to this process
    memory: int = 8 * GIB  # bytes
    compiler: str | None = None  # path of a C compiler; torch.compile needs one for C++
    triton: bool | None = False  # None, likewise: as installed
    fused: bool = True  # all layers of quantised weights are one call; a GPU decodes in few kernels
    flops: float = 0.0  # matmul FLOP/s of training; 0: measured when needed
    accelerators: tuple[Accelerator, ...] = ()

    # -------------------------------------------------------------- devices

    def count(self, kind: str) -> int:
        """How many devices of this kind there are."""
        found = self._accelerator(kind)
        return found.count if found else int(kind == "cpu")

    def has(self, kind: str) -> bool:
        return self.count(kind) > 0

    def default_device(self) -> str:
        """The fastest device: CUDA, then an Apple GPU, then the processor."""
        return next((kind for kind in ("cuda", "mps") if self.has(kind)), "cpu")

    def _accelerator(self, kind: str) -> Accelerator | None:
        return next((found for found in self.accelerators if found.kind == kind), None)

    # -------------------------------------------------------------- precision

    def fast_bf16(self, kind: str) -> bool:
        """Whether bf16 matmuls run on matrix units, in which case training uses bf16.

        Decided by instruction set, not by timing, which on a busy machine would make two runs with
        one seed differ. AMX multiplies in bf16 4.4 times as fast as in fp32; AVX512-BF16 alone does
        not make up for the casts of training, and no ARM server with BF16 has been measured.
        """
        if kind == "cpu":
            return "amx_bf16" in self.features
        return kind == "cuda" and self.native_bf16(kind)

    def native_bf16(self, kind: str) -> bool:
        """Whether bf16 has native instructions; emulation is 270 times slower."""
        if kind == "cpu":
            return any(name in self.features for name in BF16_FEATURES)
        found = self._accelerator(kind)
        return found is not None and found.bf16

    def training_dtype(self, kind: str) -> "torch.dtype":
        """The precision of matmuls in training; weights are always fp32."""
        return named_dtype("bf16" if self.fast_bf16(kind) else "fp32")

    def inference_dtype(self, kind: str, stored: "torch.dtype") -> "torch.dtype":
        """The dtype to compute in for weights stored as `stored`.

        Half precision on a CPU that emulates it would be many times slower than fp32.
        """
        if stored == named_dtype("bf16") and not self.native_bf16(kind):
            return named_dtype("fp16" if kind == "cuda" else "fp32")
        return named_dtype("fp32") if stored == named_dtype("fp16") and kind == "cpu" else stored

    # -------------------------------------------------------------- kernels

    @property
    def int8_instructions(self) -> str | None:
        """The instructions that our kernels in C use on this CPU; None: they are not compiled."""
        if self.compiler is None:
            return None
        return next((name for name in KERNEL_FEATURES if name in self.features), None)

    @property
    def has_triton(self) -> bool:
        """Whether GPU kernels written in Triton can be used."""
        return find_spec("triton") is not None if self.triton is None else self.triton

    @property
    def bf16_screening_pays(self) -> bool:
        """Whether a bf16 copy of a vocabulary head is read in half the time."""
        return "avx512_bf16" in self.features

    def compile_pays(self, kind: str, seconds: float) -> bool:
        """Whether `torch.compile` pays off in a run of `seconds`.

        On x86 the 20 s or so of compiling pay off from ten minutes on; on an ARM server compiled
        steps were no faster (1.9 s against 1.7), and Apple's GPU backend is incomplete.
        """
        if kind == "cuda":
            return True
        x86 = self.architecture == "x86_64"
        return kind == "cpu" and x86 and (self.compiler or "").endswith("++") and seconds >= 600


# ------------------------------------------------------------------ which machine


_pretended: list[Machine] = []  # innermost last; visible to all threads of the process


def this_machine() -> Machine:
    """The machine to compute on: as detected, changed by `MALMOI_MACHINE` or `pretend`."""
    return _pretended[-1] if _pretended else parse_machine(os.environ.get(ENVIRONMENT, ""))


@contextmanager
def pretend(machine: Machine) -> Iterator[Machine]:
    """Makes `this_machine()` return `machine` inside the `with` block."""
    _pretended.append(machine)
    try:
        yield machine
    finally:
        _pretended.remove(machine)


@cache
def parse_machine(text: str) -> Machine:
    """This machine with changes, as `MALMOI_MACHINE` writes them: "no-bf16,memory=2G"."""
    machine = detect()
    for word in filter(None, (part.strip() for part in text.split(","))):
        machine = _changed(machine, word)
    return machine


def _changed(machine: Machine, word: str) -> Machine:
    name, _, value = word.partition("=")
    require_known(name, CHANGES, "{environment} has {name!r}.{hint}", environment=ENVIRONMENT)
    with explained(
        ValueError,
        "{environment} has {word!r}, which is not a number.",
        raises=UsageError,
        environment=ENVIRONMENT,
        word=word,
    ):
        return CHANGES[name](machine, value)


def _without(*names: str) -> Callable[[Machine, str], Machine]:
    return lambda machine, _: replace(machine, features=machine.features - set(names))


def parse_bytes(text: str) -> int:
    """ "2G", "512M" or a plain number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


CHANGES: dict[str, Callable[[Machine, str], Machine]] = {
    "no-bf16": _without(*BF16_FEATURES),
    "no-int8": _without(*INT8_FEATURES),
    "no-amx": _without("amx_bf16", "amx_int8"),
    "no-vnni": _without("avx512_vnni", "avx_vnni"),
    "no-avx512": _without(*AVX512_FEATURES),
    "no-compiler": lambda machine, _: replace(machine, compiler=None),
    "no-triton": lambda machine, _: replace(machine, triton=False),
    "no-fused": lambda machine, _: replace(machine, fused=False),
    "no-gpu": lambda machine, _: replace(machine, accelerators=()),
    "cores": lambda machine, value: replace(machine, cores=max(1, int(value))),
    "memory": lambda machine, value: replace(machine, memory=parse_bytes(value)),
    "flops": lambda machine, value: replace(machine, flops=float(value)),
}


# ------------------------------------------------------------------ asking the system


@cache
def detect() -> Machine:
    """The machine that this process runs on; torch is imported only if there may be a GPU."""
    return Machine(
        architecture=_architecture(),
        features=_features(),
        cores=_cores(),
        memory=_total_memory(),
        compiler=_compiler(),
        triton=None,
        accelerators=tuple(_accelerators()) if _may_have_gpu() else (),
    )


def _architecture() -> str:
    name = platform.machine().lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def _compiler() -> str | None:
    """A compiler whose libraries can be loaded here; those of Windows were never tried."""
    names = () if sys.platform == "win32" else ("g++", "clang++", "gcc", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def _features() -> frozenset[str]:
    if sys.platform == "darwin":
        arm = {"neon"} if _architecture() == "aarch64" else set()
        return frozenset(arm | {name for key, name in MACOS_FEATURES.items() if _sysctl(key)})
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    flags = next(
        (line.partition(":")[2] for line in lines if line.startswith(("flags", "Feat"))), ""
    )
    return frozenset(LINUX_FEATURES[flag] for flag in flags.split() if flag in LINUX_FEATURES)


def _sysctl(feature: str) -> bool:
    """Whether macOS reports an ARM feature."""
    import ctypes

    value = ctypes.c_int(0)
    size = ctypes.c_size_t(4)
    name = f"hw.optional.arm.{feature}".encode()
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value == 1


def _cores() -> int:
    """Cores available to this process: a container or `taskset` may allow fewer than exist."""
    allowed = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if allowed else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of work in each period
    work, _, period = (quota.read_text().strip() if quota.exists() else "").partition(" ")
    return min(cores, max(1, round(int(work) / int(period)))) if work.isdigit() else cores


def _total_memory() -> int:
    """Bytes of memory, or of the container's share of it."""
    if sys.platform == "win32":
        return 8 * GIB  # Windows has no sysconf; the value only bounds batch sizes
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def _may_have_gpu() -> bool:
    """Whether to ask torch: it is there already, or a driver's device is.

    Those are NVIDIA's, Jetson's, AMD's and WSL's.
    """
    devices = ("nvidiactl", "nvidia0", "nvhost-ctrl", "nvgpu", "kfd", "dxg")
    known = "torch" in sys.modules or sys.platform != "linux"
    return known or any(Path("/dev", name).exists() for name in devices)


def _accelerators() -> Iterator[Accelerator]:
    import torch

    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        bf16 = torch.cuda.get_device_capability(0) >= (8, 0) or torch.version.hip is not None
        yield Accelerator("cuda", about.name, torch.cuda.device_count(), about.total_memory, bf16)
    if torch.backends.mps.is_available():
        yield Accelerator("mps", "Apple GPU", memory=torch.mps.recommended_max_memory(), bf16=True)


# ------------------------------------------------------------------ what callers ask most


def named_dtype(name: str) -> "torch.dtype":
    """The dtype of this name: fp32, bf16, fp16, or torch's own."""
    import torch

    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    names |= {str(dtype).removeprefix("torch."): dtype for dtype in names.values()}
    hint = nearest(name, [*names, "int8"])
    return required(names.get(name), "There is no dtype {name!r}.{hint}", name=name, hint=hint)


def hush_emulation() -> None:
    """Suppresses the C++ stack that torch prints when it emulates half precision on ARM."""
    import warnings

    warnings.filterwarnings("ignore", message=r"mkldnn_\w+ failed, switching to")


def per_device(values: Mapping[str, Value], kind: str) -> Value:
    """The value for this kind of device, else the CPU's, which is the most conservative."""
    return values.get(kind, values["cpu"])


def float64_device(device: "torch.device") -> "torch.device":
    """Where to compute in float64: Apple's GPU has none, so the CPU."""
    return pick_device("cpu") if device.type == "mps" else device


def free_memory() -> int:
    """Bytes of main memory available for a new allocation."""
    pretended = this_machine().memory
    if pretended != detect().memory:
        return pretended
    meminfo = Path("/proc/meminfo")
    text = meminfo.read_text() if meminfo.exists() else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return min(pretended, int(found[1]) * 1024) if found else pretended


def pick_device(name: "torch.device | str | None" = None) -> "torch.device":
    """The given device, if it exists; by default the fastest one."""
    import torch

    machine = this_machine()
    with explained(
        RuntimeError,
        "There is no device {name!r}: give cpu, cuda, cuda:1 and so on, or mps.",
        raises=UsageError,
        name=str(name),
    ):
        device = torch.device(name or machine.default_device())
    require_that(
        machine.has(device.type) or device.type not in ("cuda", "mps"),
        "There is no device {name!r} on this machine that torch can use: omit it to use {device}.",
        name=str(name),
        device=machine.default_device(),
    )
    count = machine.count(device.type)
    require_that(
        device.type != "cuda" or (device.index or 0) < count,
        "There is no GPU {name!r}: this machine has {count}.",
        name=str(name),
        count=count,
    )
    return device
