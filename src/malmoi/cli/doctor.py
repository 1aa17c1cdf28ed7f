"""`malmoi doctor`: capabilities of this machine."""

import math
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from malmoi import __version__
from malmoi.cli import options as opt
from malmoi.cli.output import print_facts, print_json
from malmoi.messages import joined, msg, plural
from malmoi.system.machine import GIB, free_memory, this_machine

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


def doctor_command(json: opt.Json = False) -> None:
    """Show what this machine can do, and what is missing.

    Example: malmoi doctor
    """
    found = {topic: look() for topic, look in CHECKS.items()}
    extras = _extras()
    if json:
        print_json({**found, "extras": extras})
        return
    print_facts(
        ("what", "found"),
        [
            *found.items(),
            *((msg("extra {name}", name=name), status) for name, status in extras.items()),
        ],
    )


def _python() -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"Python {platform.python_version()}, malmoi {__version__}, {system}"


def _torch() -> str:
    """torch's version, read from its metadata because importing it takes seconds."""
    return f"torch {version('torch')}"


def _processor() -> str:
    machine = this_machine()
    instructions = ", ".join(sorted(machine.features)) or msg("no known vector instructions")
    return joined(", ", (machine.architecture, plural(machine.cores, "core"), instructions))


def _precision() -> str:
    """The precision the machine computes in, and why."""
    machine = this_machine()
    kind = machine.default_device()
    if machine.fast_bf16(kind):
        return msg("bf16 on the {names}'s matrix units", names=msg(NAMES[kind]))
    if machine.native_bf16(kind):
        return msg(
            "fp32 for training; bf16 weights are used as they are on the {names}",
            names=msg(NAMES[kind]),
        )
    return msg(
        "fp32: the {names} has no bf16 units, and emulated bf16 is many times slower",
        names=msg(NAMES[kind]),
    )


def _int8() -> str:
    machine = this_machine()
    if machine.int8_instructions:
        return msg(
            "a kernel for {instructions}, compiled with {compiler}",
            instructions=machine.int8_instructions,
            compiler=machine.compiler,
        )
    if machine.compiler is None:
        return "slower than fp32 here: no C compiler to build the kernel with"
    return "slower than fp32 here: no int8 dot-product instructions"


def _compiler() -> str:
    machine = this_machine()
    if machine.compiler is None:
        return "none; torch.compile is not used on the processor"
    pays = machine.compile_pays(machine.default_device(), math.inf)
    return msg(
        "{compiler}; torch.compile is {runs}",
        compiler=machine.compiler,
        runs=msg("used in long runs" if pays else "not used"),
    )


def _gpu() -> str:
    found = this_machine().accelerators
    if not found:
        return "none; models run on the processor"
    return joined(
        "; ",
        (
            msg(
                "{count} × {gpu}, {memory:.0f} GiB each ({kind})",
                count=gpu.count,
                gpu=gpu.name,
                memory=gpu.memory / GIB,
                kind=gpu.kind,
            )
            for gpu in found
        ),
    )


def _memory() -> str:
    return msg(
        "{memory:.1f} GiB, {memory2:.1f} GiB free",
        memory=this_machine().memory / GIB,
        memory2=free_memory() / GIB,
    )


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return msg(
        "{free:.0f} of {total:.0f} GiB free here",
        free=usage.free / 2**30,
        total=usage.total / 2**30,
    )


def _tested() -> str:
    return "Linux on x86 and ARM, NVIDIA GPUs; never run on Windows, macOS or an Apple GPU"


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "torch": _torch,
    "processor": _processor,
    "precision": _precision,
    "int8": _int8,
    "compiler": _compiler,
    "gpu": _gpu,
    "memory": _memory,
    "disk": _disk,
    "tested on": _tested,
}


def _extras() -> dict[str, str]:
    """Each optional part: installed, or the line that installs it."""
    found = {}
    for name, modules in EXTRAS.items():
        missing = [part for part in modules if find_spec(part) is None and _exists_here(part)]
        found[name] = (
            msg("missing: pip install {missing}", missing=" ".join(missing))
            if missing
            else "installed"
        )
    return found


def _exists_here(module: str) -> bool:
    return (module, sys.platform) != ("uvloop", "win32")
