"""A decoding step on a GPU: fused kernels beside torch's modules, in one run.

    PYTHONPATH=src python bench/fused_step.py [--shapes gpt2 xl gpt llama] [--rows 1 8]
        [--seconds 45] [--steps 128] [--limit tiny]

Random weights in bf16, prompts of 32 tokens, each step one CUDA graph: microseconds of a step,
tokens a second, the share of the memory's bandwidth at which it reads the weights (MBU), the number
of its kernels, and how far its logits are from the modules'. "overlapping" kernels read their
weights while the one before still runs. For GPT-2 124M also one request through the engine, text
included. The last line is JSON. What does not fit into the seconds is not measured. `--limit tiny`
is a dry run on a CPU, where kernels need TRITON_INTERPRET=1.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from malmoi.config import ModelConfig
from malmoi.inference.generation.decode_steps import DecodeSteps
from malmoi.inference.generation.token_selection import TokenSelector
from malmoi.kernels.kv_slots import KVSlots, prefill_rows
from malmoi.model import Network, count_parameters, initialise
from malmoi.model.families import gpt2, preset
from malmoi.system.machine import pretend, this_machine
from malmoi.training.device import Execution
from malmoi.training.recipes import MODERN_GPT
from table import bandwidth

PROMPT = 32  # tokens
CAPACITY = 512
SHAPES: dict[str, Callable[..., ModelConfig]] = {
    "gpt2": gpt2,
    "xl": lambda **changes: preset("gpt2-xl", **changes),
    "gpt": lambda **changes: gpt2(**(MODERN_GPT | changes)),
    "llama": lambda **changes: preset("smollm2-135m", **changes),
}
TINY: dict[str, Any] = dict(width=48, depth=1, heads=3, kv_heads=3, hidden=64, vocab=90)
WAYS = {"modules": None, "fused": False, "fused, overlapping": True}
Result = dict[str, Any]


class Bench:
    """The device, its bandwidth and what remains of the time."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.tiny = bool(given.limit)
        self.steps: int = given.steps
        self.end = time.monotonic() + given.seconds
        self.device = torch.device("cpu" if self.tiny else "cuda")
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.execution = Execution(self.device, self.dtype, compiled=False)
        self.bandwidth = bandwidth(self.execution, 1 << (24 if self.tiny else 31))

    @property
    def ways(self) -> dict[str, bool | None]:
        """`overlap` of each way that this device has; None: the modules."""
        if self.device.type == "cuda":
            new = torch.cuda.get_device_capability() >= (9, 0)
            return {name: overlap for name, overlap in WAYS.items() if new or not overlap}
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return {name: WAYS[name] for name in ("modules", "fused") if interpreted or name != "fused"}

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end


def network_of(bench: Bench, shape: str) -> Network:
    config = SHAPES[shape](**(TINY if bench.tiny else {}))
    with torch.device(bench.device):  # drawing 124M weights on a CPU takes seconds
        network = initialise(Network(config, {"lm": 0}), 0)
    with torch.no_grad():
        for weight in network.parameters():  # `gpt` starts with zeros in half of its matrices
            weight.add_(torch.randn_like(weight), alpha=0.01)
    return network.eval().to(bench.device, bench.dtype)


@torch.inference_mode()
def prepared(network: Network, rows: int, overlap: bool | None) -> DecodeSteps:
    """Rows that have read their prompts; `overlap` None: a step of modules."""
    slots = KVSlots(network, rows, CAPACITY)
    draw = torch.Generator().manual_seed(rows)
    prompts = torch.randint(0, network.config.vocab, (rows, PROMPT), generator=draw).tolist()
    prefill_rows(network, slots, list(range(rows)), prompts, [0] * rows)
    with pretend(replace(this_machine(), fused=False)):
        steps = DecodeSteps(network, slots, TokenSelector(network, None), "captured")
    if overlap is not None:
        from malmoi.kernels.triton_step import FusedStep

        steps.gpu_fused = FusedStep(network, slots, overlap=overlap)
    steps.at[:] = PROMPT
    steps.decoding[:] = True
    return steps


@torch.inference_mode()
def step_rows(bench: Bench, shape: str, rows: int) -> Iterator[Result]:
    network = network_of(bench, shape)
    size = sum(weight.nbytes for weight in network.parameters())
    expected: torch.Tensor | None = None
    for name, overlap in bench.ways.items():
        steps = prepared(network, rows, overlap)
        steps.graphs.run(rows, CAPACITY)
        logits = steps.logits.float().clone()
        expected = logits if expected is None else expected
        seconds = seconds_a_step(bench, steps, rows)
        yield {
            "what": f"{shape}, {count_parameters(network) / 1e6:.0f}M, rows: {rows}, {name}",
            "us": round(1e6 * seconds, 1),
            "tok/s": round(rows / seconds),
            "MBU": round(size / seconds / bench.bandwidth, 3),
            "kernels": kernels_a_step(bench, steps, rows),
            "off by": float((logits - expected).norm() / expected.norm()),
        }


def seconds_a_step(bench: Bench, steps: DecodeSteps, rows: int) -> float:
    """The fewest of three series of steps."""
    found = []
    for _ in range(3):
        steps.at[:] = PROMPT
        bench.execution.synchronize()
        began = time.perf_counter()
        for _ in range(bench.steps):
            steps.graphs.run(rows, CAPACITY)
        bench.execution.synchronize()
        found.append((time.perf_counter() - began) / bench.steps)
    return min(found)


def kernels_a_step(bench: Bench, steps: DecodeSteps, rows: int) -> int | None:
    """The kernels of a replayed graph."""
    if bench.device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps.graphs.run(rows, CAPACITY)
        bench.execution.synchronize()
    kernels = (event for event in profile.events() if str(event.device_type).endswith("CUDA"))
    return sum(1 for _ in kernels)


def engine_rows(bench: Bench) -> Iterator[Result]:
    """One request of 128 tokens through the engine, text included; the best of three."""
    from engine import both, drawn, served
    from malmoi.inference.engine import Engine

    model, _ = both(bench.device.type)
    texts: list[list[list[int]]] = []
    for name, fused in (("modules", False), ("fused", True)):
        with (
            pretend(replace(this_machine(), fused=fused)),
            Engine(model, slots=1, capacity=CAPACITY) as engine,
        ):
            texts.append(served(engine, drawn(1, PROMPT, 0), 128))  # records the graph
            rates = []
            for i in range(1, 4):
                began = time.perf_counter()
                served(engine, drawn(1, PROMPT, i), 128)
                rates.append(128 / (time.perf_counter() - began))
        same = sum(a == b for a, b in zip(texts[0][0], texts[-1][0], strict=True))
        what = f"engine, GPT-2 124M, one request, {name}"
        yield {"what": what, "tok/s": round(max(rates)), "same tokens": f"{same} of 128"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=128, help="steps of a series, up to 480")
    parser.add_argument("--seconds", type=float, default=45, help="nothing begins later")
    parser.add_argument("--limit", choices=("tiny",), help="a dry run on a CPU")
    given = parser.parse_args()
    if not given.limit and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --limit tiny is a dry run on a CPU")
    bench = Bench(given)
    found: list[Result] = []
    parts = [step_rows(bench, shape, rows) for shape in given.shapes for rows in given.rows]
    if not bench.tiny and "gpt2" in given.shapes:
        parts.insert(1, engine_rows(bench))
    for part in parts:
        for row in () if bench.over else part:
            found.append(row)
            print(row, flush=True)
    machine = "dry run" if bench.tiny else torch.cuda.get_device_name()
    facts = {"device": machine, "GB/s": round(bench.bandwidth / 1e9), "rows": found}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
