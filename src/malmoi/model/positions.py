"""How a model knows where its tokens are: tables of sines and cosines; a record for each scheme.

Tables are added to embeddings, or rotate queries and keys (Su et al. 2021), with context scaling
rules as text: "llama3:8,1,4,8192". H heads, T tokens, E head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import UsageError, explained, require_known, require_that

# frequencies [E/2], and the factor for cos and sin
ScaledFrequencies = tuple[Tensor, float]


def sinusoid_table(
    positions: int, width: int, *, halves: bool = False, device: torch.device | str = "cpu"
) -> Tensor:
    """Vaswani et al. 2017 §3.5: sin and cos of p / 10000^(2i/D), in turn or in `halves`."""
    even = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] / 10_000 ** (
        even / width
    )
    return torch.stack((angle.sin(), angle.cos()), dim=1 if halves else -1).flatten(1)[:, :width]


class Sinusoid(nn.Module):
    """A table of sinusoids in the place of learned positions."""

    def __init__(self, context: int, width: int, *, halves: bool = False) -> None:
        super().__init__()
        self.register_buffer(
            "table", sinusoid_table(context, width, halves=halves), persistent=False
        )

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, cast(Tensor, self.table))


def linear_scaling(frequency: Tensor, base: float, factor: float) -> ScaledFrequencies:
    """Position interpolation: all positions are compressed equally (Chen et al. 2023 eq. 3)."""
    return frequency / factor, 1.0


def llama3_scaling(
    frequency: Tensor, base: float, factor: float, low: float, high: float, original: float
) -> ScaledFrequencies:
    """LLaMA 3's rule: only low frequencies are scaled.

    Those with fewer than `low` turns in the `original` context are divided by `factor`, those with
    more than `high` are kept, and those between are interpolated (Grattafiori et al. 2024 §3.4.2
    gives the base; the rest is from their code).
    """
    turns = original * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / factor + kept * frequency, 1.0


def yarn_scaling(
    frequency: Tensor,
    base: float,
    factor: float,
    original: float,
    fast: float = 32,
    slow: float = 1,
) -> ScaledFrequencies:
    """YaRN: a ramp over dimensions (Peng et al. 2023 eq. 13), attention scaled by √t (eq. 15)."""
    size = 2 * len(frequency)
    first, last = (
        size * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (fast, slow)
    )
    first = max(math.floor(first), 0)
    last = min(math.ceil(last), size - 1)
    ramp = (torch.arange(len(frequency), device="cpu") - first) / max(last - first, 0.001)
    squeezed = ramp.clamp(0, 1)
    return squeezed * frequency / factor + (1 - squeezed) * frequency, 0.1 * math.log(
        max(factor, 1)
    ) + 1


SCALINGS: dict[str, Callable[..., ScaledFrequencies]] = {
    "linear": linear_scaling,
    "llama3": llama3_scaling,
    "yarn": yarn_scaling,
}


def parse_scaling(text: str) -> tuple[Callable[..., ScaledFrequencies], tuple[float, ...]]:
    """Parses a rule and its numbers: "llama3:8,1,4,8192"."""
    name, _, rest = text.partition(":")
    require_known(name, SCALINGS, "There is no rotary scaling {name!r}.{hint}")
    sentence = "The rotary scaling {text!r} must be a name and numbers, such as 'linear:4'."
    with explained(ValueError, sentence, raises=UsageError, text=text):
        numbers = tuple(float(part) for part in rest.split(","))
    require_that(all(0 < number < math.inf for number in numbers), sentence, text=text)
    return SCALINGS[name], numbers


def rotary_frequencies(config: ModelConfig) -> ScaledFrequencies:
    """The rotation frequency of each pair of dimensions (Su et al. 2021 §3.2.2), scaled."""
    size = config.size_per_head
    plain = config.rotary_base ** (
        -torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    )
    if not config.rotary_scaling:
        return plain, 1.0
    rule, numbers = parse_scaling(config.rotary_scaling)
    try:
        return rule(plain, config.rotary_base, *numbers)
    except TypeError:
        raise UsageError(
            "The rotary scaling {scaling!r} has too many or too few numbers.",
            scaling=config.rotary_scaling,
        ) from None
    except ArithmeticError:  # numbers at the limits of float range
        return plain * math.nan, math.nan


def rotary_table(config: ModelConfig) -> Tensor:
    """cos and sin of position × frequency (Su et al. 2021, eq. 15): [2, context, E/2]."""
    frequency, stretch = rotary_frequencies(config)
    angle = torch.arange(config.context, dtype=torch.float32, device="cpu")[:, None] * frequency
    # in place: for a long context every copy is large
    table = torch.empty(2, *angle.shape, device="cpu")
    torch.cos(angle, out=table[0])
    torch.sin(angle, out=table[1])
    require_that(
        all(bool(x.isfinite()) for x in table.mul_(stretch).aminmax()),
        "Rotary positions with the base {base:g} and {scaling!r} are no finite numbers.",
        base=config.rotary_base,
        scaling=config.rotary_scaling,
    )
    return table


def compiles_for_gpu(x: Tensor) -> bool:
    """Whether this is traced by a compiler that fuses what is between the products."""
    return x.is_cuda and torch.compiler.is_compiling()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates each pair (x_i, x_{i+E/2}): x [B, H, T, E], angles [2, B or 1, 1, T, E/2]."""
    cos, sin = angles.to(x.dtype)
    if compiles_for_gpu(x):  # the same, without branches in its kernel
        both = x.unflatten(-1, (2, -1))
        signed = torch.stack((-sin, sin), dim=-2)
        turned: Tensor = both * cos.unsqueeze(-2) + both.flip(-2) * signed
        return turned.flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# ------------------------------------------------------------------ the schemes


@dataclass(frozen=True)
class PositionScheme:
    """The parts of a model that depend on positions; by default, none does."""

    # positions [B, T] → vectors that are added to those of the tokens
    embedding: Callable[[ModelConfig], nn.Module] | None = None
    attention: Callable[[ModelConfig], nn.Module] | None = None  # instead of the usual one
    rotary: bool = False  # whether queries and keys are rotated


def learned(c: ModelConfig) -> nn.Module:
    """A vector for each position, as BERT and GPT have it."""
    return nn.Embedding(c.context + c.position_offset, c.token_width)


def sinusoidal(c: ModelConfig) -> nn.Module:
    return Sinusoid(c.context, c.token_width, halves=c.positions == "sinusoidal_halves")


def relative(c: ModelConfig) -> nn.Module:
    from malmoi.model.recurrent import RelativeAttention

    return RelativeAttention(c)


POSITIONS = {
    "learned": PositionScheme(learned),
    "sinusoidal": PositionScheme(sinusoidal),
    "sinusoidal_halves": PositionScheme(sinusoidal),
    "rotary": PositionScheme(rotary=True),
    "relative": PositionScheme(attention=relative),
    "none": PositionScheme(),
}
