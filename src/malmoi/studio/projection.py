"""Texts as points on a plane: the first two principal components of their vectors. N texts."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from malmoi.inference import Model
from malmoi.studio.endpoint import Layer, ShortText, model_view

VectorArray = np.ndarray[Any, np.dtype[np.float64]]
Texts = Annotated[list[ShortText], Field(min_length=2, max_length=200)]
NEAREST_TEXTS = 5


@model_view("/embeddings")
def project_texts(
    model: Model, texts: Texts, layer: Layer = -1, pool: Literal["mean", "cls"] = "mean"
) -> dict[str, Any]:
    """Texts as points on a plane; neighbours are computed in the full space."""
    found = model.embed(texts, (layer,), pool, truncate=True)
    vectors = np.asarray(found, np.float64)
    plane, explained = principal(vectors)
    cosines = _cosines(vectors)
    return {
        "points": plane.tolist(),
        "explained": explained.tolist(),  # share of the variance of each direction
        "neighbours": [_nearest(i, row) for i, row in enumerate(cosines)],  # of each text
        # mean over pairs of texts: near 1 where all vectors point one way
        "cosine": float(cosines[~np.eye(len(texts), dtype=bool)].mean()),
    }


def principal(vectors: VectorArray) -> tuple[VectorArray, VectorArray]:
    """The first two principal components [N, 2] and their shares of variance, with fixed signs."""
    u, s, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    scores = np.pad(u * s, ((0, 0), (0, max(0, 2 - len(s)))))[:, :2]
    signs = np.sign(scores[np.abs(scores).argmax(0), (0, 1)])
    total = float((s**2).sum()) or 1.0
    shares = np.pad(s**2 / total, (0, max(0, 2 - len(s))))[:2]
    return scores * np.where(signs == 0, 1, signs), shares


def _cosines(vectors: VectorArray) -> VectorArray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms == 0, 1, norms)
    found: VectorArray = unit @ unit.T
    return found


def _nearest(i: int, cosines: VectorArray) -> list[dict[str, float]]:
    """The nearest of the other texts, by their cosines with text i."""
    order = [int(j) for j in np.argsort(-cosines, kind="stable") if j != i]
    return [{"index": j, "cosine": float(cosines[j])} for j in order[:NEAREST_TEXTS]]
