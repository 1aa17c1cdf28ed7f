"""The view Break it: the answer with and without interventions, and the importance maps.

Also word attributions of a fine-tuned model, and its predictions on its test rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from malmoi.errors import UsageError, explained
from malmoi.inference import Model
from malmoi.inference.embed import Float32Array
from malmoi.interpret.forward_pass import ForwardResult
from malmoi.interpret.importance import AttributionMethod, Row
from malmoi.interpret.intervention import Intervention, Site, Value
from malmoi.metrics.labels import confusion
from malmoi.server.api.requests import ApiRequest, NameField
from malmoi.studio.endpoint import TextRequest, model_view, readable_token
from malmoi.studio.probing import tab_labelled
from malmoi.text.rows import BadRow, DataRow, any_rows

MAX_PATCHED_TOKENS = 64
ShortText = Annotated[str, Field(max_length=2000)]
Position = Annotated[int, Field(ge=-100_000, le=100_000)]
Positions = Annotated[tuple[Position, ...], Field(max_length=4096, strict=False)]


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


class AblationRequest(ApiRequest):
    """A text and the interventions on the model."""

    text: ShortText
    interventions: list[InterventionFields] = Field(default_factory=list, max_length=5000)
    top: int = Field(5, ge=1, le=50)


class ImportanceRequest(ApiRequest):
    """Rows to predict with each part switched off; a classifier's are text, tab, label."""

    rows: Annotated[list[ShortText], Field(min_length=1, max_length=200)]
    method: Literal["ablation", "gradient"] = "ablation"


class PatchingRequest(ApiRequest):
    """Two sentences of the same length."""

    source: ShortText
    text: ShortText
    site: Site = "residual"


@model_view("/ablation")
def ablation_view(model: Model, body: AblationRequest) -> dict[str, Any]:
    """The model's answers with and without the interventions."""
    interventions = [Intervention(**one.model_dump()) for one in body.interventions]
    before = model.run(body.text, top=body.top)
    after = model.run(body.text, interventions, top=body.top)
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
def importance_view(model: Model, body: ImportanceRequest) -> dict[str, Any]:
    """An `Importance`."""
    return model.head_importance(_rows(body.rows, model), method=body.method).to_dict()


def _rows(lines: Sequence[str], model: Model) -> list[Row]:
    if "classify" not in model.network.heads:
        return list(lines)
    return list(tab_labelled(enumerate(lines, 1)))


@model_view("/patching")
def patching_view(model: Model, body: PatchingRequest) -> dict[str, Any]:
    """A `PatchingMap` with readable tokens, and what each patch recovers.

    That is None if both sentences give the same probability.
    """
    size = max(len(model.tokens(text)) for text in (body.source, body.text))
    if size > MAX_PATCHED_TOKENS:
        raise UsageError(
            "The patching map supports at most {most} tokens, not {size}.",
            code="context_length_exceeded",
            most=MAX_PATCHED_TOKENS,
            size=size,
        )
    found = model.patching_map(body.source, body.text, site=body.site)
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


class AttributionRequest(TextRequest):
    """A text whose words are coloured."""

    method: AttributionMethod = "leave-one-out"
    target: NameField | None = None  # none: the predicted label


@model_view("/attributions")
def attribution_view(model: Model, body: AttributionRequest) -> dict[str, Any]:
    """An `Attribution`: the contribution of each word to the answer."""
    words = len(body.text.split())
    if body.method == "leave-one-out" and words > MAX_LEFT_OUT:
        raise UsageError(
            "Leave-one-out attribution of {words} words takes too long; shorten the text "
            "to {most}.",
            code="context_length_exceeded",
            words=words,
            most=MAX_LEFT_OUT,
        )
    found = model.attributions(body.text, target=body.target, method=body.method)
    return found.to_dict() | {"target": _readable(model, found.target)}


@model_view("/tested")
def view_of_tested(model: Model, body: ApiRequest) -> dict[str, Any]:
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
