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
from malmoi.system.language import translate
from malmoi.system.machine import GIB, free_memory, this_machine

NAMES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}
EXTRAS = {  # modules of each optional part of the installation
    "hub": ("huggingface_hub", "sentencepiece"),
    "data": ("datasets", "openpyxl", "pyarrow", "zstandard"),
    "web": ("trafilatura", "lxml_html_clean"),
    "cluster": ("ray",),
    "ko": ("kiwipiepy",),
    "eval": ("lm_eval",),
    "serve": ("fastapi", "uvicorn", "httptools", "uvloop", "jinja2"),
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
        [*found.items(), *((f"extra {name}", status) for name, status in extras.items())],
    )


def _python() -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"Python {platform.python_version()}, malmoi {__version__}, {system}"


def _torch() -> str:
    """torch's version, read from its metadata because importing it takes seconds."""
    return f"torch {version('torch')}"


def _processor() -> str:
    machine = this_machine()
    instructions = ", ".join(sorted(machine.features)) or "no known vector instructions"
    cores = translate("1 core" if machine.cores == 1 else f"{machine.cores} cores")
    return f"{machine.architecture}, {cores}, {instructions}"


def _precision() -> str:
    """The precision the machine computes in, and why."""
    machine = this_machine()
    kind = machine.default_device()
    if machine.fast_bf16(kind):
        return f"bf16 on the {NAMES[kind]}'s matrix units"
    if machine.native_bf16(kind):
        return f"fp32 for training; bf16 weights are used as they are on the {NAMES[kind]}"
    return f"fp32: the {NAMES[kind]} has no bf16 units, and emulated bf16 is many times slower"


def _int8() -> str:
    machine = this_machine()
    if machine.int8_instructions:
        return f"a kernel for {machine.int8_instructions}, compiled with {machine.compiler}"
    if machine.compiler is None:
        return "slower than fp32 here: no C compiler to build the kernel with"
    return "slower than fp32 here: no int8 dot-product instructions"


def _compiler() -> str:
    machine = this_machine()
    if machine.compiler is None:
        return "none; torch.compile is not used on the processor"
    pays = machine.compile_pays(machine.default_device(), math.inf)
    return f"{machine.compiler}; torch.compile is {'used in long runs' if pays else 'not used'}"


def _gpu() -> str:
    found = this_machine().accelerators
    if not found:
        return "none; models run on the processor"
    return "; ".join(
        f"{gpu.count} × {gpu.name}, {gpu.memory / GIB:.0f} GiB each ({gpu.kind})" for gpu in found
    )


def _memory() -> str:
    return f"{this_machine().memory / GIB:.1f} GiB, {free_memory() / GIB:.1f} GiB free"


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return f"{usage.free / 2**30:.0f} of {usage.total / 2**30:.0f} GiB free here"


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
        found[name] = f"missing: pip install {' '.join(missing)}" if missing else "installed"
    return found


def _exists_here(module: str) -> bool:
    return (module, sys.platform) != ("uvloop", "win32")
