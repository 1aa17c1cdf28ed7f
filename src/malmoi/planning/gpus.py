"""GPU specifications as published: dense, without sparsity. No torch here."""

from dataclasses import dataclass, replace

from malmoi.errors import require_known
from malmoi.settings import option, require_bounds


@dataclass(frozen=True)
class GPU:
    """One GPU: TFLOP/s of matrix products, GB of memory, GB/s of bandwidth, maximum watts."""

    name: str
    bf16: float  # with fp32 accumulation; 0: no bf16 units, so it trains in fp32
    fp32: float
    memory: float
    bandwidth: float = 0.0  # 0: not known, as with the next
    watts: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What `plan` assumes of the GPUs and the data centre."""

    gpu_memory: float | None = option(None, "Memory of one GPU in GB.", gt=0, metavar="GB")
    gpu_tflops: float | None = option(None, "Dense bf16 peak of one GPU.", gt=0, metavar="TFLOP/s")
    gpu_watts: float | None = option(None, "Power of one GPU in watts.", gt=0, metavar="W")
    # gpt2-small at 506k tokens/s on one H200 (docs/performance.md)
    utilisation: float = option(0.41, "Fraction of the peak FLOP/s.", gt=0, le=1)
    price: float | None = option(None, "Price of one GPU-hour; omit to leave the cost out.", ge=0)
    pue: float = option(1.2, "Power usage effectiveness (PUE) of the data centre.", ge=1)

    def __post_init__(self) -> None:
        require_bounds(self)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("b200", 2250, 75, 180, 8000, 1000),
        GPU("h200", 989, 67, 141, 4800, 700),
        GPU("h100", 989, 67, 80, 3350, 700),
        GPU("h100-pcie", 756, 51, 80, 2000, 350),
        GPU("a100-80", 312, 19.5, 80, 2039, 400),
        GPU("a100-40", 312, 19.5, 40, 1555, 400),
        GPU("l40s", 362, 91.6, 48, 864, 350),
        GPU("l4", 121, 30.3, 24, 300, 72),
        GPU("a10", 125, 31.2, 24, 600, 150),
        GPU("rtx5090", 209.5, 104.8, 32, 1792, 575),
        GPU("rtx4090", 165.2, 82.6, 24, 1008, 450),
        GPU("rtx3090", 71, 35.6, 24, 936, 350),
        GPU("v100", 0, 15.7, 32, 900, 300),
        GPU("t4", 0, 8.1, 16, 320, 70),
    )
}


def find_gpu(
    name: str,
    *,
    memory: float | None = None,
    tflops: float | None = None,
    watts: float | None = None,
) -> GPU:
    """A GPU by name, with overrides; any name is allowed if memory and speed are given."""
    PlanSettings(gpu_memory=memory, gpu_tflops=tflops, gpu_watts=watts)  # refuses what cannot be
    if memory is None or tflops is None:
        require_known(
            name,
            GPUS,
            "There is no GPU {name!r} here.{hint} `malmoi plan` lists them; describe any "
            "other with --gpu-memory and --gpu-tflops.",
        )
    known = GPUS.get(name, GPU(name, 0, 0, 0))
    known = replace(known, memory=memory or known.memory, watts=watts or known.watts)
    return replace(known, bf16=tflops, fp32=tflops) if tflops else known
