"""Fewer bits: the linear maps of a model as whole numbers with scales, in a folder that is as much smaller."""

from pathlib import Path

from malmoi.checkpoint import write
from malmoi.checkpoint.quantized import Packing
from malmoi.compress.opened import check_rows, measures, open_whole, paired
from malmoi.compress.shrunk import Shrunk
from malmoi.errors import UsageError
from malmoi.tasks import Task

GROUP = 32  # inputs that share a scale at 4 bits
BITS = (8, 4)


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    bits: int = 8,
    group: int = 0,
    task: str | Task | None = None,
    data: Path | None = None,
    device: str | None = None,
) -> Shrunk:
    """Writes a model whose linear maps have 8 or 4 bits a weight, and says what that saves and costs.

    At 8 bits a row has one scale, at 4 each 32 inputs of it; `group` is another number of inputs. Embeddings, norms and
    heads are kept in bf16. The weights are rounded to the nearest: no data is needed but to judge by.
    """
    if bits not in BITS:
        raise UsageError(f"A weight can have 8 or 4 bits, not {bits}.")
    if group < 0:
        raise UsageError(f"A group is a number of inputs, or 0 for a whole row; it cannot be {group}.")
    check_rows(task, data)
    out = Path(out)
    checkpoint = open_whole(model, out)
    source = checkpoint.source or out
    before = measures(source, task, data, device)
    write(checkpoint, out, packing=Packing(bits, group or (GROUP if bits == 4 else 0)))
    metrics = paired(before, measures(out, task, data, device))
    return Shrunk.of((checkpoint.network, source), (checkpoint.network, out), metrics)
