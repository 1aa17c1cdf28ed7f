"""What the machine can do is asked in one place, and a test can say what the machine is."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import malmoi
from malmoi.errors import UsageError
from malmoi.system.machine import (
    GIB,
    Accelerator,
    Machine,
    detect,
    free_memory,
    parse_bytes,
    pick_device,
    pretend,
    this_machine,
)

AMX = Machine(features=frozenset({"avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"}))
PLAIN_X86 = Machine(features=frozenset({"avx2"}))
ARM_SERVER = Machine(architecture="aarch64", features=frozenset({"neon", "dotprod"}))
ARM_WITH_BF16 = replace(ARM_SERVER, features=frozenset({"neon", "dotprod", "i8mm", "arm_bf16"}))
H200 = replace(AMX, accelerators=(Accelerator("cuda", "H200", memory=139 * GIB, bf16=True),))
T4 = replace(PLAIN_X86, accelerators=(Accelerator("cuda", "T4", memory=15 * GIB, bf16=False),))
LAPTOP = replace(ARM_WITH_BF16, accelerators=(Accelerator("mps", "Apple GPU", bf16=True),))


@pytest.mark.parametrize(
    ("machine", "device", "training", "bf16_folder"),
    [
        (AMX, "cpu", torch.bfloat16, torch.bfloat16),
        (PLAIN_X86, "cpu", torch.float32, torch.float32),
        (ARM_SERVER, "cpu", torch.float32, torch.float32),
        (ARM_WITH_BF16, "cpu", torch.float32, torch.bfloat16),
        (H200, "cuda", torch.bfloat16, torch.bfloat16),
        (T4, "cuda", torch.float32, torch.float16),
        (LAPTOP, "mps", torch.float32, torch.bfloat16),
    ],
)
def test_each_chip_computes_in_what_it_does_well(
    machine: Machine, device: str, training: torch.dtype, bf16_folder: torch.dtype
) -> None:
    assert machine.default_device() == device
    assert machine.training_dtype(device) == training
    assert machine.inference_dtype(device, torch.bfloat16) == bf16_folder
    assert machine.inference_dtype(device, torch.float32) == torch.float32
    assert machine.inference_dtype("cpu", torch.float16) == torch.float32


def test_a_described_machine_never_asks_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "device_count", lambda answer=answer: 8 * answer)
        assert not ARM_SERVER.has_triton
        with pretend(H200):
            assert pick_device("cuda:0").type == "cuda"
            with pytest.raises(UsageError, match="this machine has 1"):
                pick_device("cuda:1")


def test_kernels_follow_the_instructions_and_the_compiler() -> None:
    assert ARM_SERVER.int8_instructions is None  # no compiler
    assert replace(ARM_SERVER, compiler="g++").int8_instructions == "dotprod"
    assert replace(AMX, compiler="g++").int8_instructions == "avx512_vnni"
    assert replace(PLAIN_X86, compiler="g++").int8_instructions == "avx2"
    assert Machine(compiler="g++").int8_instructions is None
    assert replace(H200, triton=True).has_triton
    assert not replace(H200, triton=False).has_triton
    assert replace(AMX, compiler="g++").compile_pays("cpu", 3600)
    assert not replace(AMX, compiler="g++").compile_pays("cpu", 60)
    assert not replace(ARM_SERVER, compiler="g++").compile_pays("cpu", 3600)
    assert H200.compile_pays("cuda", 1)


def test_a_device_that_is_not_here_is_named() -> None:
    with pretend(LAPTOP):
        assert pick_device().type == "mps"
        with pytest.raises(UsageError, match="cuda"):
            pick_device("cuda")
    with pretend(PLAIN_X86):
        assert pick_device().type == "cpu"
        with pytest.raises(UsageError, match="'mps'"):
            pick_device("mps")
        with pytest.raises(UsageError, match="'toaster'"):
            pick_device("toaster")
    assert this_machine() == detect() or "MALMOI_MACHINE" in os.environ


def test_a_machine_can_be_described_to_a_command() -> None:
    code = "from malmoi.system.machine import this_machine; print(this_machine())"
    told = "no-bf16,no-compiler,cores=1,memory=1.5G"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MALMOI_MACHINE": told},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cores=1" in done.stdout
    assert "compiler=None" in done.stdout
    assert f"memory={3 * GIB // 2}" in done.stdout
    assert "bf16'" not in done.stdout
    wrong = {**os.environ, "MALMOI_MACHINE": "no-bf61"}
    done = subprocess.run(
        [sys.executable, "-m", "malmoi", "doctor"], env=wrong, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no-bf16" in done.stderr
    with pretend(replace(detect(), memory=parse_bytes("2G"))):
        assert free_memory() == 2 * GIB


def test_half_precision_is_chosen_in_one_place() -> None:
    """ruff refuses `torch.bfloat16`; a method of a tensor it cannot see."""
    source = Path(malmoi.__file__).parent
    files = [path for path in source.rglob("*.py") if path.name != "machine.py"]
    assert files
    assert [
        path.name for path in files if re.search(r"\.(bfloat16|half)\(\)", path.read_text("utf-8"))
    ] == []
