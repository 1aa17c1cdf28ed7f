"""What only training needs, kept so that a run can be killed at any moment: train_state/step-N/.

Every process writes the rows of the weights and of the optimizer that it holds, as plain safetensors; `state.json`
says what is where, with a checksum of each file. Any number of processes can read it back. Nothing is unpickled.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from malmoi.errors import MalmoiError
from malmoi.train.parallel import Group

FORMAT = 1


@dataclass
class Position:
    """Where a run stands: everything but the tensors."""

    step: int = 0
    positions: list[int] = field(default_factory=list)  # samples used in each phase
    tokens: int = 0
    seconds: float = 0.0
    mean: float = 0.0  # of the loss, running; a spike is told by it
    spread: float = 0.0
    rollbacks: int = 0
    valid_loss: float | None = None


def tensors_of(network: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor that decides how training goes on, by name."""
    named = dict(network.named_parameters())
    names = {id(p): name for name, p in named.items()}
    tensors = {f"weights.{name}": p.data for name, p in named.items()}
    for i, optimizer in enumerate(optimizers):
        for p, slots in optimizer.state.items():
            tensors |= {f"optimizer{i}.{names[id(p)]}.{slot}": torch.as_tensor(v) for slot, v in slots.items()}
    return tensors


def save_state(root: Path, position: Position, tensors: Mapping[str, Tensor], group: Group) -> Path:
    """Writes train_state/step-N beside, flushes it to the disk and renames it: it is whole or it is not there."""
    final, beside = root / f"step-{position.step}", root / f".step-{position.step}.tmp"
    if group.first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    group.barrier()
    file = beside / f"rank-{group.rank:05}.safetensors"
    local = {name: _local(t).detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(local, file, {"rows": json.dumps({name: _first_row(t) for name, t in tensors.items()})})
    _fsync(file)
    group.barrier()
    if group.first:
        _publish(beside, final, position, {name: list(t.shape) for name, t in tensors.items()})
    group.barrier()
    return final


def _publish(beside: Path, final: Path, position: Position, shapes: Mapping[str, list[int]]) -> None:
    files = {path.name: _checksum(path) for path in sorted(beside.glob("rank-*.safetensors"))}
    state = {"format": FORMAT, "position": asdict(position), "shapes": shapes, "files": files}
    (beside / "state.json").write_text(json.dumps(state), "utf-8")
    _fsync(beside / "state.json")
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    _fsync(final.parent)


def load_state(folder: Path, network: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Position:
    """Puts a saved state into the network and its optimizers, whatever number of processes wrote it."""
    state = _read(folder)
    files = [_open(folder / name) for name in state["files"]]
    rows = [json.loads(file.metadata()["rows"]) for file in files]
    known, named = state["shapes"], dict(network.named_parameters())

    def fetch(name: str, like: Tensor) -> Tensor:
        if known.get(name) != list(like.shape):
            raise MalmoiError(f"{folder} holds another model: {name} has the shape {known.get(name)}.")
        return _gather(name, like, files, rows)

    with torch.no_grad():
        for name, p in named.items():
            _local(p.data).copy_(fetch(f"weights.{name}", p))
    for i, optimizer in enumerate(optimizers):
        _load_optimizer(i, optimizer, named, known, fetch)
    return Position(**state["position"])


def _load_optimizer(
    i: int, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], known: Mapping[str, Any], fetch: Any
) -> None:
    names = {id(p): name for name, p in named.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for p in group["params"]:
            prefix = f"optimizer{i}.{names[id(p)]}."
            for key in [k for k in known if k.startswith(prefix)]:
                scalar = known[key] != list(p.shape)
                value = fetch(key, torch.zeros(known[key])) if scalar else _like(p, fetch(key, p))
                optimizer.state[p][key.removeprefix(prefix)] = value.to(p.device)


def _like(p: Tensor, local: Tensor) -> Tensor:
    """A local piece as the same kind of tensor as its parameter: plain, or cut over processes."""
    if not hasattr(p, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local.to(p.device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())  # type: ignore[attr-defined]


def _gather(name: str, like: Tensor, files: list[Any], rows: list[dict[str, int]]) -> Tensor:
    """This process's rows of a tensor, out of whichever files hold them."""
    local, first = _local(like), _first_row(like)
    if not local.dim():
        return files[0].get_tensor(name)
    pieces = []
    for file, starts in zip(files, rows, strict=True):
        part, start = file.get_slice(name), starts[name]
        a, b = max(first, start), min(first + len(local), start + part.get_shape()[0])
        if a < b:
            pieces.append((a, part[a - start : b - start]))
    found: dict[int, Tensor] = dict(sorted(pieces, key=lambda piece: piece[0]))
    whole = torch.cat(list(found.values())) if found else local[:0]
    return whole[: len(local)]  # replicated tensors are in every file


def latest(root: Path, note: Any) -> Path | None:
    """The newest state that is whole; a damaged one is named and passed over, never deleted."""
    for folder in sorted(_states(root), key=_number, reverse=True):
        try:
            _read(folder, verify=True)
            return folder
        except MalmoiError as error:
            note(f"{error} The state before it is used.")
    return None


def prune(root: Path, keep: int, best: Path | None) -> None:
    """Keeps the last few states and the best one."""
    states = sorted(_states(root), key=_number)
    for folder in states[:-keep] if keep else states:
        if folder != best:
            shutil.rmtree(folder, ignore_errors=True)
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _states(root: Path) -> list[Path]:
    return [p for p in root.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]


def _number(folder: Path) -> int:
    return int(folder.name[5:])


def _read(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text("utf-8"))
        fits = state["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MalmoiError(f"{folder} is damaged: its state.json does not read.") from error
    if not fits:
        raise MalmoiError(f"{folder} was written by another version (format {state['format']!r}, not {FORMAT}).")
    for name, checksum in state["files"].items() if verify else ():
        if not (folder / name).is_file() or _checksum(folder / name) != checksum:
            raise MalmoiError(f"{folder} is damaged: {name} is not what was written.")
    return state


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise MalmoiError(f"{path} is damaged: {error}.") from error


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _first_row(tensor: Tensor) -> int:
    """The first of this process's rows: FSDP2 cuts the rows like torch.chunk."""
    if not hasattr(tensor, "device_mesh") or not tensor.placements[0].is_shard():  # type: ignore[attr-defined]
        return 0
    size = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.shape[0], size * tensor.device_mesh.get_local_rank())


def _checksum(path: Path) -> list[int]:
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
