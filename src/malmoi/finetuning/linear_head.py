"""A linear head that is solved for, not trained: ridge regression of every kind of label.

n rows, D width of a text's vector, N labels, F folds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.evaluation.features import TrainingItem
from malmoi.inference.predict import pool_texts
from malmoi.inference.predictors import LABEL_SET, NUMBER, ONE_LABEL, TaskHead
from malmoi.interpret.probe import fit_linear
from malmoi.model import Network
from malmoi.model.heads import LinearHead

Loss = Callable[[Tensor, Tensor], Tensor]  # of scores [n, N] and labels
LOSSES: Mapping[TaskHead, Loss] = {
    ONE_LABEL: F.cross_entropy,
    LABEL_SET: F.binary_cross_entropy_with_logits,
    NUMBER: lambda scores, labels: F.mse_loss(scores[:, 0], labels),
}
RIDGES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # × |W|² beside the mean loss, on vectors of mean length 1
FOLDS = 3
MAX_COMPARED_ROWS = 1000  # more change no choice
TINY = 1e-12


def item_vectors(network: Network, items: Sequence[TrainingItem]) -> Tensor:
    """A pooled vector per item [n, D]: the sum of its rows, as a pair in both orders is read."""
    vectors = pool_texts(network, [row for item in items for row in item.rows]).float().cpu()
    return vectors.view(len(items), -1, vectors.size(-1)).sum(1)


def fit_head(
    network: Network, x: Tensor, y: Tensor, loss: Loss = F.cross_entropy, ridge: float | None = None
) -> None:
    """Sets the classify head to the one with the least loss; cross-validation chooses the ridge.

    Vectors are scaled by their mean length, so that the penalty does not depend on the encoder's
    scale; to choose it they are centred too, since some encoders have one large vector in all.
    """
    head = cast(LinearHead, network.heads["classify"]).linear
    classes = head.out_features
    middle = x.mean(0) * (ridge is None)
    x = x - middle
    scale = 1 / x.norm(dim=1).mean().clamp(min=TINY)
    x = x * scale
    if ridge is None:
        some, known = x[:MAX_COMPARED_ROWS], y[:MAX_COMPARED_ROWS]
        held = torch.arange(len(some)) % FOLDS == torch.arange(FOLDS)[:, None]
        scores = {r: held_out_scores(some, known, held, classes, r, loss) for r in RIDGES}
        ridge = min(RIDGES, key=lambda r: float(loss(scores[r], known)))
    weight, bias = fit_linear(x, y, classes, ridge, loss)
    with torch.no_grad():
        head.weight.copy_(weight.T * scale)
        if head.bias is not None:
            head.bias.copy_(bias - middle @ weight * scale)


def held_out_scores(
    x: Tensor, y: Tensor, held: Tensor, classes: int, ridge: float, loss: Loss = F.cross_entropy
) -> Tensor:
    """Scores of every row [n, N] by the fit without its fold; `held` [F, n] are the folds' rows."""
    scores = torch.zeros(len(x), classes, dtype=x.dtype)
    for fold in held:
        if not fold.all():
            weight, bias = fit_linear(x[~fold], y[~fold], classes, ridge, loss)
            scores[fold] = x[fold] @ weight + bias
    return scores
