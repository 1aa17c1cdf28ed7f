"""The state of a run in train_state/step-N/, so that it can be killed at any moment.

Every process writes the rows that only it holds, as safetensors; `state.json` has a checksum of
each file and of itself. Any number of processes can read it back; nothing is unpickled.
"""

import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, Self, get_args, get_origin

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from malmoi.checkpoint.weights import write_tensors
from malmoi.errors import MalmoiError, ensure, explained, required
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.settings import field_types
from malmoi.system.files import explain_disk_errors, file_checksum, flush_to_disk, write_text
from malmoi.system.untrusted import MAX_SIZE, JsonObject, read_object
from malmoi.training.parallel import ProcessGroup, cuts, local_part, row_order

STATE_FORMAT = 1
SPIKE_DEVIATIONS = 8.0  # a spike is this many standard deviations above the running mean, and …
SPIKE_NATS = 1.0  # … at least this much
SPIKE_WARMUP_STEPS = 100  # before this step the loss falls too fast to detect spikes


class CorruptState(MalmoiError):
    """A saved state that is corrupt."""


@dataclass
class RunState:
    """What the next step depends on besides tensors; what an old state lacks has defaults."""

    step: int = 0
    samples_seen: list[int] = field(default_factory=list)  # in each phase
    tokens: int = 0
    seconds: float = 0.0
    phase: int = 0  # that `mean` and `spread` belong to
    mean: float = 0.0  # running mean of the loss, to detect spikes
    spread: float = 0.0
    rollbacks: int = 0  # spikes close to one another
    spiked: int = 0  # the step of the last spike
    valid_loss: float | None = None
    expected: int = 0  # updates that a budget in minutes was measured to hold
    compiled: bool | None = None  # whether steps are compiled; None: not yet decided
    threads: int = 0  # of the CPU; sums in another order differ in their last bits
    threads_used: int = 0  # fewer than `threads` while other programs keep the machine busy
    averaged: int = 0  # steps in the weight average
    row_steps: int = 0  # since the last row of the log, …
    row_losses: dict[str, float] = field(default_factory=dict)  # … and the sums of their losses
    best: float | None = None  # the metric that the best weights have
    evaluations_since: int = 0  # evaluations since the best one

    def is_spike(self, loss: float, phase: int) -> bool:
        """Whether a loss is not finite or far above its phase's mean; if not, the mean takes it."""
        # Losses of another length do not compare: BERT's jumps when it goes from 128 to 512 tokens.
        if self.phase != phase:
            self.phase = phase
            self.mean = 0.0
            self.spread = 0.0
        limit = self.mean + max(SPIKE_NATS, SPIKE_DEVIATIONS * self.spread**0.5)
        settled = self.step > SPIKE_WARMUP_STEPS and self.mean
        if not math.isfinite(loss) or (settled and loss > limit):
            return True
        self.spread = 0.98 * self.spread + 0.02 * (loss - self.mean) ** 2 if self.mean else 0.0
        self.mean = 0.98 * self.mean + 0.02 * loss if self.mean else loss
        return False


def tensors_of(
    network: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Every tensor that training depends on, by name."""
    named = dict(network.named_parameters())
    names = {id(p): name for name, p in named.items()}
    tensors = {f"weights.{name}": p.data for name, p in named.items()}
    for i, optimizer in enumerate(optimizers):
        for p, slots in optimizer.state.items():
            prefix = f"optimizer{i}.{names[id(p)]}."
            tensors |= {prefix + slot: torch.as_tensor(v) for slot, v in slots.items()}
    return tensors


def weights_are_finite(network: nn.Module, group: ProcessGroup) -> bool:
    """Whether every weight is finite, on every process."""
    norms = torch._foreach_norm([local_part(p.data) for p in network.parameters()])
    return not group.max((~torch.stack(norms).isfinite()).any().int()).item()


class StateParts(NamedTuple):
    """What this process writes of a state: its parts of the tensors, and what all of them are."""

    local: dict[str, Tensor]
    rows: dict[str, int]  # the first of each
    columns: dict[str, int]
    shapes: dict[str, list[int]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], group: ProcessGroup) -> Self:
        own = {name: t for name, t in tensors.items() if _is_written_here(t, group)}
        local = {name: local_part(t).detach() for name, t in own.items()}
        rows, columns = ({name: _start(t)[i] for name, t in own.items()} for i in (0, 1))
        return cls(local, rows, columns, {name: list(t.shape) for name, t in tensors.items()})

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.local.values())

    def copied(self, buffers: dict[str, Tensor]) -> Self:
        """A copy in the processor's memory, in buffers that are used again."""
        for name, tensor in self.local.items():
            if name not in buffers or buffers[name].shape != tensor.shape:
                buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in self.local.values()):
            torch.cuda.synchronize()
        return self._replace(local={name: buffers[name] for name in self.local})


def save_state(root: Path, state: RunState, parts: StateParts, group: ProcessGroup) -> Path:
    """Writes train_state/step-N atomically: to a temporary folder, flushed, then renamed."""
    final = root / f"step-{state.step}"
    beside = root / f".step-{state.step}.tmp"
    with explain_disk_errors(final), ExitStack() as on_failure:
        on_failure.callback(_remove, beside)
        if group.first:
            _remove(beside)
            beside.mkdir(parents=True)
        group.barrier()
        file = beside / f"rank-{group.rank:05}.safetensors"
        starts = {"rows": json.dumps(parts.rows), "columns": json.dumps(parts.columns)}
        write_tensors(file, parts.local, starts)
        group.barrier()
        if group.first:
            _publish(beside, final, state, {"tensor": group.tensor, "shapes": parts.shapes})
        on_failure.pop_all()
    group.barrier()
    return final


def _remove(path: Path) -> None:
    """Removes a folder with its contents, or a file of that name."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _publish(beside: Path, final: Path, state: RunState, tensors: Mapping[str, Any]) -> None:
    """Renames a written state into place; an old state of the same step stays until then."""
    files = {path.name: _checksum(path) for path in sorted(beside.glob("rank-*.safetensors"))}
    about = {"format": STATE_FORMAT, "position": asdict(state), **tensors, "files": files}
    write_text(beside / "state.json", json.dumps({**about, "checksum": _json_checksum(about)}))
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    beside.rename(final)
    flush_to_disk(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_state(
    folder: Path,
    network: Network,
    optimizers: list[torch.optim.Optimizer],
    average: Mapping[str, Tensor] | None = None,
    tensor: int = 1,
) -> None:
    """Loads a state's tensors, by however many processes it was written."""
    saved = _read(folder)
    files = [SavedFile(_open(folder / name)) for name in saved.files]
    known = saved.shapes
    named = dict(network.named_parameters())

    def fetch(name: str, like: Tensor) -> Tensor:
        shape = known.get(name)
        ensure(
            shape == list(like.shape),
            "{folder} holds another model: {name} has the shape {shape}.",
            folder=folder,
            name=name,
            shape=shape,
        )
        now, then = (row_order(name, network.config, n) for n in (tensor, saved.tensor))
        if now is None or then is None or tensor == saved.tensor or not like.dim():
            return _gather(name, _start(like), local_part(like), files)
        whole = _gather(name, (0, 0), torch.empty(like.shape), files)[then.argsort()[now]]
        row, _ = _start(like)  # weights of several products are cut by rows
        return whole[row : row + len(local_part(like))]

    with torch.no_grad():
        for name, p in named.items():
            local_part(p.data).copy_(fetch(f"weights.{name}", p))
        for name, mean in (average or {}).items():
            local_part(mean).copy_(fetch(name, mean))
    for i, optimizer in enumerate(optimizers):
        _load_optimizer(i, optimizer, named, known, fetch)


def read_state(folder: Path) -> RunState:
    """The progress of a saved run."""
    saved = _read(folder)
    state = saved.state
    if "judged" in saved.shapes:  # what fine-tuning once saved as tensors
        tensors = other_tensors(folder)
        losses = tensors["pending"].tolist()
        state.evaluations_since = int(tensors["judged"][1])
        state.row_steps = len(losses)
        state.row_losses = {"loss": sum(losses)}
        state.samples_seen = [0]
    return state


def other_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors besides those of `load_state`, of single-process runs."""
    loaded = ("weights.", "optimizer", "average.")
    names = [name for name in _read(folder).shapes if not name.startswith(loaded)]
    file = _open(folder / "rank-00000.safetensors")
    return {name: file.get_tensor(name) for name in names}


def _load_optimizer(
    i: int,
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    known: Mapping[str, Any],
    fetch: Any,
) -> None:
    names = {id(p): name for name, p in named.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for p in group["params"]:
            prefix = f"optimizer{i}.{names[id(p)]}."
            for key in [k for k in known if k.startswith(prefix)]:
                saved, shape = known[key], list(p.shape)
                ensure(
                    not saved or saved == shape,
                    "{key} is saved with the shape {saved}, for a weight of {shape}.",
                    raises=CorruptState,
                    key=key,
                    saved=saved,
                    shape=shape,
                )
                value = _like(p, fetch(key, p)) if saved == shape else fetch(key, torch.zeros(()))
                optimizer.state[p][key.removeprefix(prefix)] = value.to(p.device)


def _like(p: Tensor, local: Tensor) -> Tensor:
    """Gives a local tensor its parameter's form: sharded, or plain with its strides.

    Weights of a GPT-2 folder are transposed views, and a fused optimizer does not check strides.
    """
    if not hasattr(p, "device_mesh"):
        return torch.empty_like(p, dtype=local.dtype).copy_(local)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(p.device),
        p.device_mesh,
        p.placements,  # type: ignore[attr-defined]
        shape=p.shape,
        stride=p.stride(),
    )


class SavedFile:
    """A file of a state: parts of tensors, and where each begins."""

    def __init__(self, file: Any) -> None:
        self.tensors = file
        self.rows: dict[str, int] = json.loads(file.metadata()["rows"])
        self.columns: dict[str, int] = json.loads(file.metadata().get("columns", "{}"))


def _gather(name: str, start: tuple[int, int], like: Tensor, files: list[SavedFile]) -> Tensor:
    """Reads a part of a tensor, of the shape of `like`, from whichever files hold it."""
    if not like.dim():
        return torch.as_tensor(files[0].tensors.get_tensor(name))
    made = torch.empty_like(like, device="cpu")
    for file in files:
        if name in file.rows:
            part = file.tensors.get_slice(name)
            begins = (file.rows[name], file.columns.get(name, 0))
            sides = list(zip(begins, part.get_shape(), start, made.shape, strict=False))
            shared = [(max(b, s), min(b + n, s + m)) for b, n, s, m in sides]
            if all(low < high for low, high in shared):
                pairs = list(zip(shared, sides, strict=True))
                there = tuple(slice(low - b, high - b) for (low, high), (b, *_) in pairs)
                here = tuple(slice(low - s, high - s) for (low, high), (_, _, s, _) in pairs)
                made[here] = part[there]
    return made


def latest_state(root: Path, note: Callable[[str], None], group: ProcessGroup) -> Path | None:
    """The newest intact state, the same for all processes; damaged ones are moved aside."""
    number = group.broadcast(_newest(root, note) if group.first else -1)
    return None if number < 0 else root / f"step-{number}"


def _newest(root: Path, note: Callable[[str], None]) -> int:
    # killed between two renames: the old folder is still the state of that step
    for old in root.glob(".step-*.old"):
        if not (place := root / old.name[1:].removesuffix(".old")).exists():
            old.rename(place)
    for folder in reversed(_states(root)):
        try:
            _read(folder, verify=True)
            return _number(folder)
        except CorruptState as error:
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            note(msg("{error} It was moved to {aside}.", error=error, aside=aside.name))
    return -1


def prune_states(root: Path, keep: int) -> None:
    """Keeps the last few states, and the one with the best validation loss."""
    states = _states(root)
    losses = {folder: _valid_loss(folder) for folder in states}
    best = min(reversed(states), key=lambda folder: losses[folder], default=None)
    for folder in states[:-keep]:
        if folder != best or losses[folder] == math.inf:
            shutil.rmtree(folder, ignore_errors=True)
    for leftover in (*root.glob(".step-*.tmp"), *root.glob(".step-*.old")):
        shutil.rmtree(leftover, ignore_errors=True)


def discard_states(out: Path) -> None:
    """Removes the states of a run that is finished or starts over."""
    shutil.rmtree(out / "train_state", ignore_errors=True)


def _valid_loss(folder: Path) -> float:
    loss = None
    with suppress(CorruptState):
        loss = _read(folder).state.valid_loss
    return math.inf if loss is None else float(loss)


def _states(root: Path) -> list[Path]:
    """The folders of saved states, the newest last."""
    found = (p for p in root.glob("step-*") if p.is_dir() and p.name[5:].isdigit())
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name[5:])


def _read(folder: Path, *, verify: bool = False) -> "_Saved":
    """Reads state.json with checked types; `verify` also checks the files it describes."""
    path = folder / "state.json"
    with explained(
        MalmoiError,
        "{folder} is damaged: its state.json is invalid ({error})",
        raises=CorruptState,
        folder=folder,
    ):
        values = read_object(path)
        contents = {name: value for name, value in values.items() if name != "checksum"}
        # states of earlier versions have none
        ensure(
            values.get("checksum") in (None, _json_checksum(contents)),
            "{path} does not match its checksum.",
            path=path,
        )
        written = values.whole("format", high=MAX_SIZE)
        found = _Saved(values) if written == STATE_FORMAT else None
    saved = required(
        found,
        "{folder} was written by another version (format {written}).",
        raises=MalmoiError,
        folder=folder,
        written=written,
    )
    if verify:
        _verify(folder, saved)
    return saved


class _Saved:
    """The contents of state.json; each field of the position is parsed by its own type."""

    def __init__(self, values: JsonObject) -> None:
        shapes = values.object("shapes")
        files = values.object("files")
        position = values.object("position")
        kinds = {name: kind for name, kind in field_types(RunState).items() if name in position}
        self.state = RunState(**{name: _value(position, name, kinds[name]) for name in kinds})
        self.shapes = {name: shapes.list_of(name, int) for name in shapes}
        self.tensor = values.whole("tensor", default=1, low=1)
        # bytes and checksum of each
        self.files = {name: files.list_of(name, int) for name in files}


def _value(values: JsonObject, name: str, kind: Any) -> Any:
    if get_origin(kind) is list:
        return values.list_of(name, *get_args(kind))
    if get_origin(kind) is dict:
        return values.map_of(name, get_args(kind)[1])
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
        # the metric of a diverged run may be infinite
        if values.get(name) is None or (kind is float and isinstance(values[name], float)):
            return values.get(name)
    readers: Any = {int: values.whole, float: values.number, bool: values.flag}
    return readers[kind](name)


def _verify(folder: Path, saved: _Saved) -> None:
    """Checks every file's checksum, and that together they hold the tensors state.json lists."""
    for name, checksum in saved.files.items():
        ours = Path(name).name == name and (folder / name).is_file()
        ensure(
            ours and _checksum(folder / name) == checksum,
            "{folder} is damaged: {name} does not match its checksum.",
            raises=CorruptState,
            folder=folder,
            name=name[:80],
        )
    held: set[str] = set()
    for name in saved.files:
        with _open(folder / name) as file:
            held.update(file.keys())
    ensure(
        held == saved.shapes.keys() and saved.state.step == _number(folder),
        "{folder} is damaged: its state.json does not match its files.",
        raises=CorruptState,
        folder=folder,
    )


def _open(path: Path) -> Any:
    kinds = (SafetensorError, OSError)
    with explained(kinds, "{path} is damaged: {error}.", raises=CorruptState, path=path):
        return safe_open(path, framework="pt")


def _is_written_here(tensor: Any, group: ProcessGroup) -> bool:
    """Whether this process is the first of those that hold the same part of a tensor."""
    if not cuts(tensor):
        return group.first
    mesh = tensor.device_mesh
    copies = [i for i, place in enumerate(tensor.placements) if not hasattr(place, "dim")]
    alone = "tensor" in (mesh.mesh_dim_names or ()) or group.rank % group.tensor == 0
    return alone and all(mesh.get_local_rank(i) == 0 for i in copies)


def _start(tensor: Tensor) -> tuple[int, int]:
    """Where this process's part begins, in rows and columns; pieces are those of torch.chunk."""
    starts = [0, 0]
    sizes = [*tensor.shape, 0, 0]
    for dim, pieces, here in cuts(tensor):
        each = -(-sizes[dim] // pieces)
        skipped = min(sizes[dim], each * here)
        starts[dim] += skipped
        sizes[dim] = min(each, sizes[dim] - skipped)
    return starts[0], starts[1]


def _checksum(path: Path) -> list[int]:
    return [path.stat().st_size, file_checksum(path)]


def _json_checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())
