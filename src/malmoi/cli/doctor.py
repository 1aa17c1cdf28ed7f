"""`malmoi doctor`: capabilities of this machine."""

import math
import platform
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from malmoi import __version__
from malmoi.cli import shared as cli
from malmoi.messages import joined, msg, plural
from malmoi.system.machine import GIB, Machine, free_memory, this_machine

NAMES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}
EXTRAS = {  # modules of each optional part of the installation
    "hub": ("huggingface_hub", "sentencepiece"),
    "data": ("datasets", "openpyxl", "pyarrow", "zstandard"),
    "web": ("trafilatura", "lxml_html_clean"),
    "cluster": ("ray",),
    "ko": ("kiwipiepy",),
    "eval": ("lm_eval",),
    "serve": ("httptools", "uvloop"),
    "track": ("tensorboard", "wandb", "mlflow", "trackio"),
    "export": ("onnx", "onnxscript", "onnxruntime", "gguf"),
}
ELSEWHERE = ("uvloop",) if sys.platform == "win32" else ()  # modules for other systems only


def doctor_command(json: cli.Json = False) -> None:
    """Show what this machine can do, and what is missing.

    Example: malmoi doctor
    """
    found = _facts(this_machine())
    extras = _extras()
    if json:
        cli.print_json({**found, "extras": extras})
        return
    named = ((msg("extra {name}", name=name), status) for name, status in extras.items())
    cli.print_facts(("what", "found"), [*found.items(), *named])


def _facts(machine: Machine) -> dict[str, str]:
    kind = machine.default_device()
    system = f"{platform.system()} {platform.machine()}"
    instructions = ", ".join(sorted(machine.features)) or msg("no known vector instructions")
    cores = plural(machine.cores, "core")
    free, total = free_memory() / GIB, machine.memory / GIB
    usage = shutil.disk_usage(Path.cwd())
    disk = dict(free=usage.free / GIB, total=usage.total / GIB)
    return {
        "python": f"Python {platform.python_version()}, malmoi {__version__}, {system}",
        "torch": f"torch {version('torch')}",  # its metadata: importing it takes seconds
        "processor": joined(", ", (machine.architecture, cores, instructions)),
        "precision": _precision(machine, kind),
        "int8": _int8(machine),
        "compiler": _compiler(machine, kind),
        "gpu": _gpu(machine),
        "memory": msg("{total:.1f} GiB, {free:.1f} GiB free", total=total, free=free),
        "disk": msg("{free:.0f} of {total:.0f} GiB free here", **disk),
        "tested on": (
            "Linux on x86 and ARM, NVIDIA GPUs; never run on Windows, macOS or an Apple GPU"
        ),
    }


def _precision(machine: Machine, kind: str) -> str:
    """The precision the machine computes in, and why."""
    name = msg(NAMES[kind])
    if machine.fast_bf16(kind):
        return msg("bf16 on the {name}'s matrix units", name=name)
    if machine.native_bf16(kind):
        return msg("fp32 for training; bf16 weights are used as they are on the {name}", name=name)
    return msg(
        "fp32: the {name} has no bf16 units, and emulated bf16 is many times slower", name=name
    )


def _int8(machine: Machine) -> str:
    if machine.int8_instructions:
        built = "a kernel for {machine.int8_instructions}, compiled with {machine.compiler}"
        return msg(built, machine=machine)
    if machine.compiler is None:
        return "slower than fp32 here: no C compiler to build the kernel with"
    return "slower than fp32 here: no int8 dot-product instructions"


def _compiler(machine: Machine, kind: str) -> str:
    if machine.compiler is None:
        return "none; torch.compile is not used on the processor"
    runs = msg("used in long runs" if machine.compile_pays(kind, math.inf) else "not used")
    return msg("{compiler}; torch.compile is {runs}", compiler=machine.compiler, runs=runs)


def _gpu(machine: Machine) -> str:
    if not machine.accelerators:
        return "none; models run on the processor"
    each = "{gpu.count} × {gpu.name}, {memory:.0f} GiB each ({gpu.kind})"
    return joined(
        "; ", (msg(each, gpu=gpu, memory=gpu.memory / GIB) for gpu in machine.accelerators)
    )


def _extras() -> dict[str, str]:
    """Each optional part: installed, or the line that installs it."""
    found = {}
    for name, modules in EXTRAS.items():
        missing = [part for part in modules if part not in ELSEWHERE and find_spec(part) is None]
        line = msg("missing: pip install {missing}", missing=" ".join(missing))
        found[name] = line if missing else "installed"
    return found
