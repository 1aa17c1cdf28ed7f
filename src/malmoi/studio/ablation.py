"""The view Break it: the answer with and without interventions, and the importance maps.

Also word attributions of a fine-tuned model, and its predictions on its test rows.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from malmoi.errors import explained, require_that
from malmoi.inference import Model
from malmoi.inference.embed import Float32Array
from malmoi.interpret.forward_pass import ForwardResult
from malmoi.interpret.importance import AttributionMethod, Method
from malmoi.interpret.intervention import Intervention, Site, Value
from malmoi.metrics.labels import confusion
from malmoi.server.api.requests import NameField, TextField
from malmoi.studio.attention_view import tab_labelled
from malmoi.studio.endpoint import ShortText, model_view, readable_token
from malmoi.text.rows import BadRow, DataRow, any_rows

MAX_PATCHED_TOKENS = 64
Position = Annotated[int, Field(ge=-100_000, le=100_000)]
Positions = Annotated[tuple[Position, ...], Field(max_length=4096, strict=False)]


Rows = Annotated[list[ShortText], Field(min_length=1, max_length=200)]
Top = Annotated[int, Field(ge=1, le=50)]


class InterventionFields(BaseModel):
    """The fields of an `Intervention`."""

    site: Site
    layer: int | None = None
    head: int | None = None
    positions: Positions | None = None
    value: Value = "zero"
    source: ShortText | None = None
    source_positions: Positions | None = None
    pattern: Annotated[str, Field(max_length=300)] = ""


Changes = Annotated[tuple[InterventionFields, ...], Field(max_length=5000, strict=False)]


@model_view("/ablation")
def ablation_view(
    model: Model, text: ShortText, interventions: Changes = (), top: Top = 5
) -> dict[str, Any]:
    """The model's answers with and without the interventions."""
    before = model.run(text, top=top)
    changes = [Intervention(**one.model_dump()) for one in interventions]
    after = model.run(text, changes, top=top)
    return {
        "tokens": [_readable(model, token) for token in before.tokens],
        "before": _named(model, before),
        "after": _named(model, after),
        # the share of probability that moved to other tokens
        "moved": [_moved(a, b) for a, b in zip(before.logits, after.logits, strict=True)],
    }


def _readable(model: Model, name: str) -> str:
    """A token in readable form, or a label as it is."""
    return name if name in model.labels else readable_token(model.tokenizer, name)


def _named(model: Model, found: ForwardResult) -> list[list[dict[str, Any]]]:
    return [
        [{"text": _readable(model, one.name), "probability": one.probability} for one in some]
        for some in found.guesses
    ]


def _moved(before: Float32Array, after: Float32Array) -> float:
    """The total variation distance of two answers."""
    chances = [np.exp(x - x.max()) for x in (before.astype(np.float64), after.astype(np.float64))]
    first, second = (x / x.sum() for x in chances)
    return float(np.abs(first - second).sum() / 2)


@model_view("/importance")
def importance_view(model: Model, rows: Rows, method: Method = "ablation") -> dict[str, Any]:
    """An `Importance` over rows to predict; a classifier's are text, tab, label."""
    labelled = "classify" in model.network.heads
    given = list(tab_labelled(enumerate(rows, 1))) if labelled else rows
    return model.head_importance(given, method=method).to_dict()


@model_view("/patching")
def patching_view(
    model: Model, source: ShortText, text: ShortText, site: Site = "residual"
) -> dict[str, Any]:
    """A `PatchingMap` with readable tokens, and what each patch recovers.

    That is None if both sentences give the same probability.
    """
    size = max(len(model.tokens(one)) for one in (source, text))
    require_that(
        size <= MAX_PATCHED_TOKENS,
        "The patching map supports at most {most} tokens, not {size}.",
        code="context_length_exceeded",
        most=MAX_PATCHED_TOKENS,
        size=size,
    )
    found = model.patching_map(source, text, site=site)
    same = abs(found.source_logprob - found.logprob) < 1e-6
    return found.to_dict() | {
        "tokens": [_readable(model, token) for token in found.tokens],
        "source_tokens": [_readable(model, token) for token in found.source_tokens],
        "answer": _readable(model, found.answer),
        "recovered": None if same else found.recovered.tolist(),
    }


# ------------------------------------------------------------------ a fine-tuned model

MAX_TESTED_ROWS = 2000
MAX_ROW_CHARACTERS = 600
MAX_LEFT_OUT = 400  # words; each is a pass


@model_view("/attributions")
def attribution_view(
    model: Model,
    text: TextField,
    method: AttributionMethod = "leave-one-out",
    target: NameField | None = None,
) -> dict[str, Any]:
    """An `Attribution`: the contribution of each word to the answer."""
    words = len(text.split())
    require_that(
        method != "leave-one-out" or words <= MAX_LEFT_OUT,
        "Leave-one-out attribution of {words} words takes too long; shorten the text to {most}.",
        code="context_length_exceeded",
        words=words,
        most=MAX_LEFT_OUT,
    )
    found = model.attributions(text, target=target, method=method)
    return found.to_dict() | {"target": _readable(model, found.target)}


@model_view("/tested")
def view_of_tested(model: Model) -> dict[str, Any]:
    """The test predictions that fine-tuning saved; empty if there are none."""
    source = model.checkpoint.source
    file = None if source is None else Path(source) / "predictions.jsonl"
    if file is None or not file.is_file():
        return {"labels": [], "confusion": [], "rows": []}
    with explained(
        (BadRow, KeyError, TypeError, ValueError),
        "{file} was not written by malmoi finetune: {error}.",
        file=file.name,
    ):
        rows = [_tested(row) for row in any_rows(file)]
    right = [row["label"] for row in rows]
    said = [row["prediction"] for row in rows]
    labels = sorted({*right, *said})
    return {
        "labels": labels,
        # a row for each label, a column for each prediction
        "confusion": confusion(right, said, labels).tolist(),
        # the least certain of the right label first
        "rows": sorted(rows, key=lambda row: row["chance"])[:MAX_TESTED_ROWS],
    }


def _tested(row: DataRow) -> dict[str, Any]:
    pair = row.values.get("pair")
    text = f"{row['text']} ‖ {pair}" if pair else str(row["text"])
    return {
        "text": text[:MAX_ROW_CHARACTERS],
        "label": row.text("label"),
        "prediction": row.text("prediction"),
        "chance": float(row["probabilities"][row["label"]]),  # of the right label
    }
