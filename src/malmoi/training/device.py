"""Precision, compilation, measured speed and batch size for this machine."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from statistics import median

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from malmoi.config import ModelConfig
from malmoi.errors import first_line
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.system.machine import hush_emulation, named_dtype, this_machine
from malmoi.system.native import cache_or_temporary
from malmoi.system.threads import ThreadTuner, tuned_threads
from malmoi.training.recipe import TrainConfig

# On an H200 cuDNN's attention takes 1.30 ms where FlashAttention takes 2.11 (GPT-2 small, forward
# and backward).
SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

PROBE_SECONDS = 0.3  # a pass this long is not doubled
MAX_PROBE_SECONDS = 5.0  # a pass longer than this is not repeated
COMPILED_PAYS = 0.95  # compile only if a step takes at most this share of the eager time


@dataclass(frozen=True)
class Execution:
    """How this run computes: device, precision and compilation."""

    device: torch.device
    dtype: torch.dtype  # of matrix products; the weights are fp32
    compiled: bool
    varied: bool = False  # batches have many shapes, so cuDNN would replan its attention

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32

    def synchronize(self) -> None:
        """Waits until the device has finished its queue, so that timings are right."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def free_cache(self) -> None:
        """Releases memory that torch caches."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).empty_cache()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Autocasts to bf16 if chosen, and selects the fastest attention kernel."""
        with ExitStack() as stack:
            if self.half:
                stack.enter_context(torch.autocast(self.device.type, self.dtype))
            if self.device.type == "cuda":
                backends = SDPA_BACKENDS[1:] if self.varied else SDPA_BACKENDS
                stack.enter_context(sdpa_kernel(backends, set_priority=True))
            yield


def choose_execution(device: torch.device, c: TrainConfig) -> Execution:
    """Chooses bf16 and compilation where they pay, unless the recipe sets them."""
    automatic = c.precision == "auto"
    machine = this_machine()
    dtype = machine.training_dtype(device.type) if automatic else named_dtype(c.precision)
    if dtype != torch.float32 and not machine.native_bf16(device.type):
        hush_emulation()
    pays = machine.compile_pays(device.type, c.minutes * 60 if c.minutes else math.inf)
    return Execution(device, dtype, pays if c.compile is None else c.compile)


@cache
def matmul_rate(execution: Execution, size: int, threads: int) -> float:
    """FLOP/s of a square matrix product with this many threads: the reference for utilisation.

    A processor's is an average beside other programs, as a run will have; a GPU's its best.
    """
    a, b = (torch.randn(size, size, device=execution.device).to(execution.dtype) for _ in range(2))

    def products() -> float:
        for _ in range(5):
            a @ b
        execution.synchronize()
        return 10.0 * size**3

    if execution.device.type == "cpu":
        with thread_count(execution.device, threads, 0, lambda _: None) as tuner:
            return tuner.measure(products)
    return products() / min(_seconds(products) for _ in range(4))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured_flops(execution: Execution) -> float:
    if this_machine().flops:
        return this_machine().flops
    # a processor without matrix units reaches its peak at a smaller size
    cpu = 1024 if execution.half else 512
    size = 8192 if execution.device.type == "cuda" else cpu
    return matmul_rate(execution, size, torch.get_num_threads())


def known_flops(execution: Execution) -> tuple[float, str]:
    """The measured FLOP/s, or 0 and the reason why nothing could be measured."""
    try:
        flops = measured_flops(execution)
    except RuntimeError as error:
        return 0.0, first_line(error)
    return (flops, "") if 0 < flops < math.inf else (0.0, msg("a speed of {flops:g}", flops=flops))


@contextmanager
def thread_count(
    device: torch.device, recorded: int, used: int, say: Callable[[str], None]
) -> Iterator[ThreadTuner]:
    """Computes with at most as many CPU threads as the run began with, within the context.

    Another number sums in another order: a resumed run continues with the number last `used`.
    """
    onednn = torch.backends.mkldnn.enabled
    cores = this_machine().cores
    on_cpu = device.type == "cpu"
    if on_cpu and recorded > cores:
        say(
            msg(
                "This run began with {recorded} threads and continues with {cores}: last digits "
                "may differ.",
                recorded=recorded,
                cores=cores,
            )
        )
    limit = min(recorded or torch.get_num_threads(), cores) if on_cpu else torch.get_num_threads()
    tuner = ThreadTuner(limit, say, fixed=not on_cpu)
    tuner.count = min(used, limit) or tuner.count
    try:
        with tuned_threads(tuner):
            yield tuner
    finally:
        # torch turns oneDNN off for good when a bf16 product fails, as on a chip without bf16:
        # later runs of this process would round differently from those of others
        torch.backends.mkldnn.enabled = onednn


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds the generators that a step on this device draws from.

    `torch.manual_seed` visits devices that are not there too, which takes a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "mps":
        torch.mps.manual_seed(seed)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)


def flops_per_token(config: ModelConfig, weights: int, length: int) -> float:
    """Forward and backward FLOPs per token: 6 per weight, plus attention (Kaplan et al. 2020)."""
    attention = 12.0 * config.depth * config.heads * config.size_per_head * length
    return 6.0 * weights + (attention if config.mixer == "attention" else 0.0)


def first_micro(config: ModelConfig, length: int, batch: int, device: torch.device) -> int:
    """Estimates how many sequences fit in one pass; the trainer halves it when they do not."""
    if device.type != "cuda":
        return max(1, min(batch, 16_384 // length))
    per_token = 2 * config.depth * (20 * config.width + 3 * config.mlp_width) + 40 * config.width
    free = torch.cuda.mem_get_info(device)[0] - 4 * (1 << 30)
    fits = max(1, int(0.7 * free / per_token / length))
    return max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(fits, 1))


def compile_for(
    execution: Execution, network: Network, *, dynamic: bool, whole: bool = False
) -> None:
    """Compiles one block, whose code all layers share, or all of them as one graph.

    One graph compiles longer and trains a fifth faster on an H200, which blocks cannot keep busy.
    """
    if not execution.compiled:
        return
    # kept between runs, unlike the compiler's own folder in /tmp
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_or_temporary("compiled")))
    cuda = execution.device.type == "cuda"
    # at once for all lengths of packed rows, not for the first of them alone
    shapes = (cuda or None) if dynamic else False
    for trunk in network.trunks:
        # uncompiled, norms that read bf16 and weigh in fp32 are slower
        trunk.stream = execution.dtype if execution.half and cuda else None
        if whole:
            trunk.compiled_blocks = torch.compile(trunk.run_blocks, dynamic=shapes)
    for block in _separate_blocks(network) if not whole else ():
        block.compile(dynamic=shapes)


def _separate_blocks(network: Network) -> set[nn.Module]:
    """Every block, an encoder's and a generator's too."""
    return {*network.blocks, *chain(*(trunk.blocks for trunk in network.trunks))}


def uncompiled() -> AbstractContextManager[object]:
    """Runs what is compiled as it was written; loads no compiler, which would take seconds."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def release_compiled(network: Network) -> None:
    """Drops compiled training code: decoding has other shapes and would recompile."""
    for trunk in network.trunks:
        trunk.compiled_blocks = trunk.stream = None
    for block in _separate_blocks(network):
        block._compiled_call_impl = None


def step_seconds(
    run_pass: Callable[[int], object],
    update: Callable[[], object],
    micro: int,
    threads: ThreadTuner,
    *,
    compiled: bool,
) -> tuple[float, float]:
    """Returns the seconds of one update and of one sequence.

    Both functions wait for the device; the trainer restores what they change. Passes are repeated
    until the threads are chosen: one hiccup of a busy machine must not decide on the batch.
    """

    def timed_pass() -> float:
        run_pass(size)
        return size

    size = micro if compiled else 1  # a compiled pass has a fixed size
    with nullcontext() if compiled else uncompiled():
        run_pass(size)  # warm-up: allocations and compilation
        took = _seconds(timed_pass)
        while took < PROBE_SECONDS and 2 * size <= micro:
            size *= 2
            took = _seconds(timed_pass)
        rate = size / took if took > MAX_PROBE_SECONDS else threads.measure(timed_pass)
    update()  # the first update allocates the moments
    return median(_seconds(update) for _ in range(3)), 1 / rate
