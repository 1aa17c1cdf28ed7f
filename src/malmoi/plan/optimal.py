"""How many tokens a language model should see for its size: two laws, which disagree."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Optimal:
    """Tokens that the laws give this model, and what the later one would do with the same FLOPs."""

    kaplan: float
    hoffmann: float
    same_parameters: float
    same_tokens: float


def optimal(blocks: int, parameters: int, flops: float) -> Optimal:
    """Kaplan counts the weights without embeddings, Hoffmann all; 6·N·20·N = C gives the size for C FLOPs."""
    size = (flops / (6 * RATIO)) ** 0.5
    return Optimal(kaplan_tokens(blocks), RATIO * parameters, size, RATIO * size)


RATIO = 20  # tokens a parameter: Hoffmann et al. 2022 table 3, as it is usually put


def kaplan_tokens(weights: float) -> float:
    """Kaplan et al. 2020 table 6: N = 1.3e9·C^0.73 and D = 2e10·C^0.27, C in PF-days; here by N. GPT-3 followed it."""
    return 2e10 * (weights / 1.3e9) ** (0.27 / 0.73)
