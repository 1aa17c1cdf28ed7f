"""Activations times 8- or 4-bit weights with our own kernel, compiled once for this CPU.

It targets AVX512-VNNI and ARM's dot-product instructions. Elsewhere, or without a compiler, there
is no kernel: fp32 is then faster, so int8 is not used for computing. O outputs, I inputs, G groups
of inputs, N rows of activations.
"""

import ctypes
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.messages import msg
from malmoi.system.machine import Machine, named_dtype, this_machine
from malmoi.system.native import compiled_library

LANES = 16  # outputs per block
STRIDE = 8  # inputs the kernel processes at once
WIDEST = 65_536  # most inputs whose sum is sure to fit into 32 bits
# -ffast-math by its parts: as one flag it would make the whole process flush denormal numbers
COMPILER_FLAGS = (
    *("-O3", "-fopenmp", "-fassociative-math", "-freciprocal-math", "-ffinite-math-only"),
    *("-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
SOURCES = ("int8_row.c", "decode_step.c", "encode_texts.c")  # one translation unit, in this order
FOR = {"avx512_vnni": "-march=native", "dotprod": "-march=armv8.2-a+dotprod"}


@dataclass(frozen=True)
class Packed:
    """A weight [O, I] laid out for the kernel: number · scale, one scale per group and output."""

    # uint8 [⌈O / 16⌉, I / 8, 2, 16, 4]; at 4 bits the two share a byte: [⌈O / 16⌉, I / 8, 16, 4]
    numbers: Tensor
    scale: Tensor  # bf16 as int16 [⌈O / 16⌉, G, 16]
    outputs: int
    inputs: int
    bits: int = 8

    @classmethod
    def of(cls, numbers: Tensor, scale: Tensor, bits: int = 8) -> "Packed":
        """Packs signed numbers [O, I] and bf16 scales [O, G]."""
        outputs, inputs = numbers.shape
        short = -outputs % LANES
        filled = F.pad(numbers, (0, -inputs % STRIDE, 0, short))
        laid_out = filled.view(-1, LANES, filled.size(1) // STRIDE, 2, 4).permute(0, 2, 3, 1, 4)
        if bits == 4:
            first, second = (laid_out + 8).to(torch.uint8).unbind(2)
            laid_out = first | second << 4
        scales = F.pad(scale.view(torch.int16), (0, 0, 0, short)).view(-1, LANES, scale.size(1))
        packed = laid_out.contiguous().view(torch.uint8)
        return cls(packed, scales.transpose(1, 2).contiguous(), outputs, inputs, bits)

    @property
    def groups(self) -> int:
        return self.scale.size(1)

    @property
    def group(self) -> int:
        """Inputs per scale, including those that pad the last stride."""
        return self.numbers.size(1) * STRIDE // self.groups

    def signed(self) -> tuple[Tensor, Tensor]:
        """Unpacks to the numbers [O, I] and bf16 scales [O, G]."""
        laid_out = self.numbers
        if self.bits == 4:
            laid_out = torch.stack((laid_out & 15, laid_out >> 4), 2).sub_(8)
        numbers = laid_out.view(torch.int8).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
        scale = self.scale.transpose(1, 2).flatten(0, 1).contiguous()
        return numbers[: self.outputs, : self.inputs], scale[: self.outputs].view(bf16())

    def rows(self, index: Tensor) -> Tensor:
        """Rows of an 8-bit weight with one scale per row, in fp32: [...] → [..., I]."""
        block = index // LANES
        lane = index % LANES
        numbers = self.numbers.view(torch.int8)[block, :, :, lane].flatten(-3)[..., : self.inputs]
        return numbers * self.scale[block, 0, lane].view(bf16()).float()[..., None]

    def dense(self) -> Tensor:
        """The weight [O, I] in fp32, which holds number · scale exactly."""
        numbers, scale = self.signed()
        return expanded(numbers, scale)

    @cached_property
    def size(self) -> int:
        return self.numbers.nbytes + self.scale.nbytes


def bf16() -> torch.dtype:
    """The dtype that scales are stored in; nothing is computed in it."""
    return named_dtype("bf16")


def expanded(numbers: Tensor, scale: Tensor) -> Tensor:
    """number · scale: [O, I] and [O, G] → fp32 [O, I]."""
    grouped = numbers.reshape(len(numbers), scale.size(1), -1).float()
    return (grouped * scale.float()[..., None]).flatten(1)


def fits(inputs: int, groups: int) -> bool:
    """Whether the kernel supports this shape: each group must be a whole number of strides."""
    return inputs <= WIDEST and (groups == 1 or inputs % (groups * STRIDE) == 0)


class LinearArgument(ctypes.Structure):
    """`Linear` in int8_row.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scale", "bias")),
        *((name, ctypes.c_long) for name in ("outputs", "inputs", "group", "groups", "bits")),
    )


def linear_argument(weight: Packed, bias: Tensor | None) -> LinearArgument:
    """A weight as the kernels take it: addresses, so the caller keeps the tensors alive."""
    return LinearArgument(
        weight.numbers.data_ptr(),
        weight.scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        weight.outputs,
        weight.inputs,
        weight.group,
        weight.groups,
        weight.bits,
    )


def product(
    weight: Packed, bias: Tensor | None, activation_bits: int = 15
) -> Callable[[Tensor], Tensor]:
    """A function x [N, I] → x Wᵀ + bias [N, O], both in fp32.

    Activations are rounded to 15 bits; to 8, with a step for each 128 of them or each group.
    """
    library = kernels()
    if library is None:
        raise MalmoiError(
            "Weights of {bits} bits cannot be used: {why_not}.", bits=weight.bits, why_not=why_not()
        )
    call = library.malmoi_quantized_linear
    argument = linear_argument(weight, bias)
    address = ctypes.addressof(argument)
    outputs = weight.outputs
    parts = {8: 1, 15: 2}[activation_bits]

    def multiply(x: Tensor, held: object = (weight, bias, argument)) -> Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), outputs)
        if call(address, x.data_ptr(), y.data_ptr(), len(x), parts):
            raise MemoryError("There is no memory for a row of activations.")
        return y

    return multiply


def why_not() -> str | None:
    """The reason why there is no kernel, as the end of a sentence; None if there is one."""
    machine = this_machine()
    if kernels() is not None:
        return None
    if machine.int8_instructions is not None:
        return msg("{compiler} could not compile the int8 kernel", compiler=machine.compiler)
    if machine.compiler is None:
        return msg(
            "there is no C compiler on this machine (gcc or clang) to build the int8 kernel with"
        )
    return msg("this processor has no int8 dot products (AVX512-VNNI, or ARM's dotprod)")


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None if the processor or a compiler is missing."""
    return _compiled(this_machine())


@cache
def _compiled(machine: Machine) -> ctypes.CDLL | None:
    if machine.compiler is None or machine.int8_instructions is None:
        return None
    source = "".join(files("malmoi.kernels").joinpath(name).read_text("utf-8") for name in SOURCES)
    flags = (*COMPILER_FLAGS, FOR[machine.int8_instructions])
    _share_threads()
    try:
        library = compiled_library(source, flags, machine)
        linear = library.malmoi_quantized_linear
        layers = (library.malmoi_decode_step, library.malmoi_encode_texts)
    except (OSError, subprocess.SubprocessError):
        return None
    linear.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_long, ctypes.c_int]
    for call in layers:
        call.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_long]
    return library


def _share_threads() -> None:
    """Exposes torch's OpenMP library to the kernel, since some builds of torch hide its symbols."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*")):
        with suppress(OSError):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
