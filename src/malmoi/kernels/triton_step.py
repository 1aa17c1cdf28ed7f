"""A decoding step in five to seven GPU kernels a layer; torch takes twice to three times as many.

A step is one reading of the weights, in kernels so short that starting them takes longer than
running them. Here one kernel is a linear layer with the norm before it, its bias, the
activation, and the residual after it; attention also normalises and rotates queries and keys
(`triton_attention.py`). Intermediate results are rounded where the modules round them.

Of one or two rows, a program reads a few whole rows of the matrix, all of it in flight at once, and
normalises its input itself: 768 numbers from the L2 cache cost less than another kernel. More rows
are normalised by a kernel of their own and multiplied tile by tile on the tensor cores.
B rows, D width, H heads, G key/value heads, E width of a head, K inputs, N outputs, V vocabulary.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from malmoi.kernels.kv_slots import KVSlots
from malmoi.kernels.triton_attention import KERNEL_BLOCK, KERNEL_WARPS, decode_step, normalised
from malmoi.model import Network
from malmoi.model.attention import Attention
from malmoi.model.elementwise import RMSNorm
from malmoi.model.heads import LMHead
from malmoi.model.transformer import MLP, Block, GatedMLP

MAX_INPUTS = 16_384  # a program holds a whole row of the matrix in registers
MAX_TILE = 16_384  # weights of a program: 128 per thread
MIN_PROGRAMS = 4  # for each multiprocessor, of which an H200 has 132
FEW_ROWS_BLOCK = 128  # cached places processed together by a head, which has no others to wait for
FEW_ROWS_WARPS = 8
FEW_ROWS = 2
# of half precision; of more, torch's products are as fast (H200, 124M weights)
MANY_ROWS = 128
TILE_ROWS = 64
TENSOR_CORES = (8, 0)  # compute capability whose tensor cores have bf16
MIN_DEPTH = 16  # of a tensor core's tile
STAGES = 4  # tiles of a program that are on their way at once
SHARED_BYTES = 200_000  # of a processor's memory for them where nothing says how much it has
GATES = {"swiglu": "silu", "geglu": "gelu"}


@triton.jit
def _load_or(values, at, mask, default):  # type: ignore[no-untyped-def]
    """Values in fp32, or the default of a part that this layer does not have."""
    if values is None:
        return default
    else:  # Triton compiles what follows a return
        return tl.load(values + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """`ACTIVATIONS` of the model, in fp32."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(u) = 2 / (1 + exp(-2u)), u = √(2/π) (x + 0.0447 x³)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def _linear(weights, x, biases, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """weights [N, K] · x [K] + biases, rounded, in fp32."""
    return (tl.sum(weights.to(tl.float32) * x[None, :], 1) + biases).to(kind).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # Triton reads it
    x, gain, shift, weight, bias, residual, out, outputs, eps,
    ROWS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of all rows: activation(norm(x) · weightᵀ + bias) + residual."""
    kind = out.dtype.element_ty
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = column < outputs
    k = tl.arange(0, WIDE)
    inside = k < K
    at = column[:, None] * K + k[None, :]
    whole = valid[:, None] & inside[None, :]
    # No kernel writes weights, so with OVERLAP they are read while the one before still runs.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    weights = tl.load(weight + at, mask=whole, other=0.0)
    biases = _load_or(bias, column, valid, 0.0)
    gains = _load_or(gain, k, inside, 1.0)
    shifts = _load_or(shift, k, inside, 0.0)
    if GATED:  # one matrix holds the gate's rows, then those of `up`
        up_weights = tl.load(weight + at + outputs * K, mask=whole, other=0.0)
        up_biases = _load_or(bias, column + outputs, valid, 0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    else:
        tl.debug_barrier()  # or ptxas loads most weights after the norm, one latency later

    for row in tl.static_range(ROWS):
        place = row * outputs + column
        given = _load_or(x, row * K + k, inside, 0.0)
        before = _load_or(residual, place, valid, 0.0)
        if NORM != "":
            given = normalised(given, inside, K, eps, NORM) * gains + shifts
            given = given.to(kind).to(tl.float32)
        found = _activated(_linear(weights, given, biases, kind), ACTIVATION)
        if GATED:
            found = found.to(kind).to(tl.float32) * _linear(up_weights, given, up_biases, kind)
        tl.store(out + place, (found + before).to(kind), mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # Triton reads it
    x, gain, shift, out, eps,
    K: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The norm of one row."""
    k = tl.arange(0, WIDE)
    inside = k < K
    place = tl.program_id(0).to(tl.int64) * K + k
    gains = _load_or(gain, k, inside, 1.0)
    shifts = _load_or(shift, k, inside, 0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    found = normalised(_load_or(x, place, inside, 0.0), inside, K, eps, NORM) * gains + shifts
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # Triton reads it
    x, weight, bias, residual, out, rows, outputs,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of ROWS rows: activation(x · weightᵀ + bias) + residual."""
    kind = out.dtype.element_ty
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = column < outputs
    there = row < rows
    biases = _load_or(bias, column, valid, 0.0)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    if GATED:
        up_biases = _load_or(bias, column + outputs, valid, 0.0)
        ups = tl.zeros((ROWS, BLOCK), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        given = tl.load(x + row[:, None] * K + k[None, :], mask=there[:, None], other=0.0)
        at = weight + column[None, :] * K + k[:, None]
        weights = tl.load(at, mask=valid[None, :], other=0.0)
        products = tl.dot(given, weights, products, input_precision="ieee")
        if GATED:
            weights = tl.load(at + outputs * K, mask=valid[None, :], other=0.0)
            ups = tl.dot(given, weights, ups, input_precision="ieee")
    found = _activated((products + biases).to(kind).to(tl.float32), ACTIVATION)
    if GATED:
        found = found.to(kind).to(tl.float32) * (ups + up_biases).to(kind).to(tl.float32)
    place = row[:, None] * outputs + column[None, :]
    whole = there[:, None] & valid[None, :]
    before = _load_or(residual, place, whole, 0.0)
    tl.store(out + place, (found + before).to(kind), mask=whole)


def fused_linear(  # noqa: PLR0913  # what a kernel takes
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    norm: str,
    activation: str,
    gated: bool,
    overlap: bool,
) -> Tensor:
    """activation(norm(x) · weightᵀ + bias) + residual of rows x [B, K], all contiguous: [B, N].

    `norm` is layer, rms or empty; `overlap` needs a GPU of compute capability 9 or later.
    """
    B, K = x.shape
    outputs = len(weight) // (2 if gated else 1)
    out = x.new_empty(B, outputs)
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    depth = K & -K  # its largest power of two
    if B > FEW_ROWS and depth >= MIN_DEPTH:
        if norm:
            given, x = x, torch.empty_like(x)
            wide = triton.next_power_of_2(K)
            _norm_kernel[(B,)](
                given, gain, shift, x, eps, K=K, WIDE=wide, NORM=norm, OVERLAP=overlap, **options
            )
        size = min(TILE_ROWS, max(MIN_DEPTH, triton.next_power_of_2(B)))
        block = 32 if outputs >= 16 * _processors(x.device) else 16
        _tile_kernel[(triton.cdiv(outputs, block), triton.cdiv(B, size))](
            x, weight, bias, residual, out, B, outputs,
            K=K, ROWS=size, BLOCK=block,
            DEPTH=min(depth, 4096 // block, _most_depth(x, size + block * (2 if gated else 1))),
            ACTIVATION=activation, GATED=gated, OVERLAP=overlap,
            num_stages=STAGES, **options,
        )  # fmt: skip
        return out
    block = _outputs_per_program(outputs, K * (2 if gated else 1), x.device)
    _linear_kernel[(triton.cdiv(outputs, block),)](
        x, gain, shift, weight, bias, residual, out, outputs, eps,
        ROWS=B, K=K, WIDE=triton.next_power_of_2(K), BLOCK=block,
        NORM=norm, ACTIVATION=activation, GATED=gated, OVERLAP=overlap,
        **options,
    )  # fmt: skip
    return out


def _outputs_per_program(outputs: int, inputs: int, device: torch.device) -> int:
    """As many rows of the matrix as fit into registers, if that leaves enough programs."""
    block = max(1, MAX_TILE // int(triton.next_power_of_2(inputs)))
    while block > 1 and outputs < MIN_PROGRAMS * _processors(device) * block:
        block //= 2
    return block


def _most_depth(x: Tensor, rows: int) -> int:
    """The largest power of two by which tiles of so many rows fit into a processor's memory."""
    room = SHARED_BYTES
    if x.is_cuda:
        has = torch.cuda.get_device_properties(x.device)
        # what a kernel can ask for; AMD's GPUs have no such field
        room = getattr(has, "shared_memory_per_block_optin", has.shared_memory_per_block) * 9 // 10
    return 1 << (room // (STAGES * rows * x.element_size())).bit_length() - 1


def _processors(device: torch.device) -> int:
    cuda = device.type == "cuda"  # else Triton's interpreter, one program after the other
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1


class FusedStep:
    """A decoding step of a network over the first rows of its cache.

    With `overlap`, a kernel reads its weights while the one before is still running (programmatic
    dependent launch); by default where the GPU can, from compute capability 9 on.
    """

    def __init__(self, network: Network, slots: KVSlots, *, overlap: bool | None = None) -> None:
        self.network = network
        self.slots = slots
        self.overlap = _capability(slots.device) >= (9, 0) if overlap is None else overlap
        c = network.config
        distinct = cast("list[Block]", list(network.trunk.blocks))
        self.blocks = [distinct[i * c.distinct // c.depth] for i in range(c.depth)]
        self.activation = GATES.get(c.activation, c.activation)
        linears = cast("list[nn.Linear]", [one for block in distinct for one in block.linears])
        tiled = all(linear.in_features % MIN_DEPTH == 0 for linear in linears)
        half = network.dtype.itemsize == 2 and _capability(slots.device) >= TENSOR_CORES
        self.most_rows = MANY_ROWS if half and tiled else FEW_ROWS
        row_major(network)

    def __call__(self, tokens: Tensor, positions: Tensor, live: Tensor) -> Tensor:
        """tokens, positions, live [B] → logits [B, V]; rows that are not live store no key."""
        trunk = self.network.trunk
        places = torch.where(live, positions, self.slots.capacity)
        x = trunk.embed(tokens[:, None], positions[:, None], None)[:, 0].contiguous()
        states = [x]
        for layer, block in enumerate(self.blocks):
            if trunk.skips is not None:
                x = trunk.skips(layer, x, states)
            x = self._block(block, layer, x, (states[0], positions, places))
            if trunk.skips is not None:
                states.append(x)
        head = cast(LMHead, self.network.heads["lm"])
        if head.cap or not isinstance(head.project, nn.Identity):
            return self.network.read("lm", trunk.norm(x))
        return self._linear(x, head, trunk.norm)

    def _block(
        self, block: Block, layer: int, x: Tensor, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        embedded, positions, places = inputs
        values = None
        if block.again is not None:
            x, values = block.again(x, embedded)
        qkv = self._linear(x, block.attend.qkv, self._before(block.attend_norm))
        read = self._attend(block.attend, layer, (qkv, values), (positions, places))
        x = self._after(block.attend_norm)(self._linear(read, block.attend.out, residual=x))
        mlp = cast(MLP, block.mlp)
        gated = isinstance(mlp, GatedMLP)
        norm = self._before(block.mlp_norm)
        hidden = self._linear(x, mlp.up, norm, activation=self.activation, gated=gated)
        return cast(Tensor, self._after(block.mlp_norm)(self._linear(hidden, mlp.down, residual=x)))

    def _before(self, norm: nn.Module) -> nn.Module | None:
        """The norm of a branch's input: GPT-2's, not GPT-1's, which follows the residual."""
        return norm if self.network.config.norm == "pre" else None

    def _after(self, norm: nn.Module) -> nn.Module:
        return norm if self.network.config.norm == "post" else nn.Identity()

    def _linear(
        self,
        x: Tensor,
        linear: nn.Module,
        norm: nn.Module | None = None,
        *,
        residual: Tensor | None = None,
        activation: str = "",
        gated: bool = False,
    ) -> Tensor:
        weight, bias = cast(Tensor, linear.weight), cast("Tensor | None", linear.bias)
        gain = shift = None
        name = ""
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            name = self.network.config.norm_kind
            gain = norm.weight
            shift = getattr(norm, "bias", None)
        return fused_linear(
            x, weight, bias, gain, shift, residual,
            eps=self.network.config.eps, norm=name, activation=activation,
            gated=gated, overlap=self.overlap,
        )  # fmt: skip

    def _attend(
        self,
        attend: Attention,
        layer: int,
        new: tuple[Tensor, Tensor | None],
        at: tuple[Tensor, Tensor],
    ) -> Tensor:
        """What each head reads [B, H · E]; the new key and value are stored."""
        c = self.network.config
        qkv, values = new
        few = len(qkv) <= FEW_ROWS
        heads = (c.heads, c.key_heads, c.key_heads)
        q, k, v = qkv.view(len(qkv), -1, 1, attend.size).split(heads, dim=1)
        found = decode_step(
            q, k, v, self.slots.keys[layer], self.slots.values[layer], *at,
            extra=values,
            rotary=cast("Tensor | None", self.network.trunk.rotary),
            norm=c.norm_kind if c.qk_norm else "",
            eps=c.eps,
            block=FEW_ROWS_BLOCK if few else KERNEL_BLOCK,
            warps=FEW_ROWS_WARPS if few else KERNEL_WARPS,
            overlap=self.overlap,
        )  # fmt: skip
        return found.view(len(qkv), -1)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def supports(network: Network) -> bool:
    """Whether the kernels have every layer of this network: as it was built, without adapters."""
    language = dict(network.heads.items()).get("lm")
    return (
        type(language) is LMHead
        and max(network.config.width, network.config.mlp_width) <= MAX_INPUTS
        and network.trunk.is_plain(nn.Linear, (nn.LayerNorm, RMSNorm, nn.Identity))
    )


@torch.inference_mode(mode=False)
@torch.no_grad()
def row_major(network: Network) -> None:
    """Stores linear weights by output, so that a program reads whole rows; GPT-2's files do not."""
    for block in network.trunk.blocks:
        for linear in cast("list[nn.Linear]", cast(Block, block).linears):
            linear.weight.data = linear.weight.data.contiguous()
