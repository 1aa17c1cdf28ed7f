"""8- and 4-bit weights for CPU inference, which is bound by reading every weight once per step.

Each weight row has its own symmetric scale. Activations lose no more than in bfloat16: rounding
them to 8 bits as well, as the fastest kernels do, costs SmolLM2 4.6 % of perplexity.

Our own kernel is compiled once for this CPU: for AVX512-VNNI, any AVX-512 or AVX2, and for ARM's
dot-product instructions. Elsewhere, or without a compiler, there is no kernel: fp32 is then faster,
so int8 is not used for computing. O outputs, I inputs, G groups of inputs, N rows of activations,
V vocabulary, D width.
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
from torch import Tensor, nn

from malmoi.errors import MalmoiError, require_that, required
from malmoi.messages import msg
from malmoi.model.heads import VOCABULARY_HEADS, VocabularyHead
from malmoi.model.network import Network
from malmoi.system.machine import Machine, named_dtype, this_machine
from malmoi.system.native import compiled_library

INT8_MAX = 127  # largest magnitude of a signed byte, used symmetrically
MANY = 32  # rows that are many: AMX then multiplies whole tiles (int8_tiles.c)
TINY = 1e-30
INT8_DEVICES = ("cpu", "meta")
REFUSAL = "int8 weights run on the CPU; on a GPU use bf16, or pass device='cpu'."
LANES = 16  # outputs per block
STRIDE = 8  # inputs the kernel processes at once
TILE_INPUTS = 64  # of an instruction of AMX
WIDEST = 65_536  # most inputs whose sum is sure to fit into 32 bits
# -ffast-math by its parts: as one flag it would make the whole process flush denormal numbers
COMPILER_FLAGS = (
    *("-O3", "-fopenmp", "-fassociative-math", "-freciprocal-math", "-ffinite-math-only"),
    *("-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
# one translation unit, in this order
SOURCES = ("int8_row.c", "int8_tiles.c", "decode_step.c", "encode_texts.c")
FOR = {
    "avx512_vnni": ("-march=native", "-mprefer-vector-width=512"),
    "avx512": ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma"),
    "dotprod": ("-march=armv8.2-a+dotprod",),
}


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

    @property
    def fits_tiles(self) -> bool:
        """Whether AMX multiplies many rows by it in tiles."""
        return self.bits == 8 and self.groups == 1 and self.inputs % TILE_INPUTS == 0

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
        return expanded(*self.signed())


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


def linear_argument(weight: Packed | Tensor, bias: Tensor | None) -> LinearArgument:
    """A weight as the kernels take it: addresses, so the caller keeps the tensors alive."""
    moved = None if bias is None else bias.data_ptr()
    if isinstance(weight, Tensor):
        return LinearArgument(weight.data_ptr(), None, moved, *weight.shape, *weight.stride(), 32)
    return LinearArgument(
        weight.numbers.data_ptr(),
        weight.scale.data_ptr(),
        moved,
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

    Activations are rounded to 15 bits; to 8, with a step for each 128 of them or each group, where
    that is faster: x86 without VNNI keeps 15.
    """
    library = required(
        kernels(),
        "Weights of {bits} bits cannot be used: {why_not}.",
        raises=MalmoiError,
        bits=weight.bits,
        why_not=why_not(),
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
    return msg("this processor has neither AVX2 nor ARM's dotprod, which the int8 kernel needs")


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None if the processor or a compiler is missing."""
    return _compiled(this_machine())


@cache
def _compiled(machine: Machine) -> ctypes.CDLL | None:
    if machine.compiler is None or machine.int8_instructions is None:
        return None
    source = "".join(files("malmoi.kernels").joinpath(name).read_text("utf-8") for name in SOURCES)
    tiles = () if "amx_int8" in machine.features else ("-DNO_TILES",)
    flags = (*COMPILER_FLAGS, *FOR[machine.int8_instructions], *tiles)
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


# ------------------------------------------------------------------ modules


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each row to int8 [O, I] with a bf16 scale [O].

    The scale is rounded before the weights are, so that its error does not reach the result. The
    largest weight is 127 · (1 ± 2⁻⁹) steps, which rounds to 127: packing is idempotent.
    """
    weight = weight.detach().float()
    scale = (weight.abs().amax(1).clamp(min=TINY) / INT8_MAX).to(bf16())
    return (weight / scale.float()[:, None]).round().to(torch.int8).contiguous(), scale


def packed(weight: Tensor) -> Packed:
    """An 8-bit weight, laid out for the kernel."""
    numbers, scale = pack_int8(weight)
    return Packed.of(numbers, scale[:, None])


class QuantizedLinear(nn.Module):
    """x Wᵀ + b with W in 8 or 4 bits; faster than fp32 weights for few rows and for many."""

    bias: Tensor | None

    def __init__(self, weight: Packed, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        require_that(
            not x.requires_grad or not torch.is_grad_enabled(),
            "Quantised weights have no gradients: open the model with dtype='fp32'.",
        )
        rows = x.reshape(-1, self.weight.inputs).float()
        return self._multiply(rows).to(x.dtype).view(*x.shape[:-1], self.weight.outputs)

    @cached_property
    def _multiply(self) -> Callable[[Tensor], Tensor]:
        return product(self.weight, self.bias)

    def _apply(  # torch's signature
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002
    ) -> "QuantizedLinear":
        """Ignores `.to(dtype)`: quantised weights keep their types and stay on the CPU."""
        require_that(fn(torch.empty(0)).device.type in INT8_DEVICES, REFUSAL)
        return self


class QuantizedEmbedding(nn.Module):
    """Token embeddings from 8-bit rows, which a tied vocabulary head shares."""

    weight: Tensor

    def __init__(self, rows: Packed) -> None:
        super().__init__()
        self.packed = rows
        # Callers read an embedding's device and dtype from its weight; this one has no rows to be
        # read by mistake.
        self.register_buffer("weight", torch.empty(0, rows.inputs), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.packed.rows(tokens).to(self.weight.dtype)


class QuantizedVocabulary(nn.Module):
    """A vocabulary head whose last matmul, the largest of the network, is in int8."""

    def __init__(self, head: VocabularyHead, weight: Packed) -> None:
        super().__init__()
        self.product = QuantizedLinear(weight, head.bias)
        self.cap = head.cap
        head.weight = head.bias = None  # type: ignore[assignment]
        self.head = head

    def features(self, hidden: Tensor) -> Tensor:
        return self.head.features(hidden)

    def scores(self, features: Tensor) -> Tensor:
        logits = self.product(features)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scores(self.features(hidden))


@torch.no_grad()
def quantize_int8(network: Network) -> Network:
    """Quantises a network to 8 bits in place, for inference only.

    Covers the trunk's linear maps (unless they have fewer bits already), the token embedding and
    the last matmul of vocabulary heads. Weights are replaced one by one, so that two networks are
    never in memory.
    """
    check_place(network)
    for parent in list(network.trunk.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and fits(child.in_features, 1):
                setattr(parent, name, QuantizedLinear(packed(child.weight), child.bias))
    token = network.trunk.embed.token
    rows = packed(token.weight)
    for name in VOCABULARY_HEADS & set(network.heads):
        head = network.heads[name]
        if isinstance(head, VocabularyHead):
            own = rows if head.weight is token.weight else packed(head.weight)
            network.heads[name] = QuantizedVocabulary(head, own)
    network.trunk.embed.token = QuantizedEmbedding(rows)  # type: ignore[assignment]
    return network


def check_place(network: Network) -> None:
    """Raises unless this machine has a kernel for quantised weights: some CPUs do, no GPU does."""
    require_that(network.device.type in INT8_DEVICES, REFUSAL)
    reason = why_not()
    require_that(
        reason is None,
        "int8 would be slower than fp32 here: {reason}. Omit --dtype.",
        reason=reason,
    )


def is_quantized(network: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in network.modules())


def plain_state(network: Network) -> dict[str, Tensor | Packed]:
    """A network's weights under the names they have in an unquantised network."""
    found: dict[str, Tensor | Packed] = {**network.state_dict()}
    found |= {
        f"{name}.weight": module.weight if isinstance(module, QuantizedLinear) else module.packed
        for name, module in network.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedEmbedding)
    }
    for head_name, head in network.heads.items():
        prefix = f"heads.{head_name}."
        for part in ("product.", "head.") if isinstance(head, QuantizedVocabulary) else ():
            for name in [name for name in found if name.startswith(prefix + part)]:
                found[prefix + name.removeprefix(prefix + part)] = found.pop(name)
    return found


def memory_of(network: nn.Module) -> int:
    """Bytes that a network's weights take in memory; shared ones count once."""
    held = [*network.parameters(), *network.buffers()]
    for module in network.modules():
        weight = getattr(module, "packed", None) or getattr(module, "weight", None)
        if isinstance(weight, Packed):
            held += [weight.numbers, weight.scale]
    storages = (tensor.untyped_storage() for tensor in held)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
