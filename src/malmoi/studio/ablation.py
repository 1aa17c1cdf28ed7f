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
from malmoi.messages import msg
from malmoi.metrics.labels import confusion
from malmoi.server.api.requests import ApiRequest, NameField
from malmoi.studio.endpoint import TextRequest, TokenChance, model_view, readable_token
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

    def intervention(self) -> Intervention:
        return Intervention(**self.model_dump())


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


class AblationView(BaseModel):
    tokens: list[str]
    positions: list[int]  # where the model answers; none for a classifier
    before: list[list[TokenChance]]  # one list for each answer
    after: list[list[TokenChance]]
    moved: list[float]  # the share of probability that moved to other tokens


@model_view("/ablation")
def ablation_view(model: Model, body: AblationRequest) -> AblationView:
    """The model's answer with and without the interventions."""
    interventions = [one.intervention() for one in body.interventions]
    before = model.run(body.text, top=body.top)
    after = model.run(body.text, interventions, top=body.top)
    return AblationView(
        tokens=[readable_token(model.tokenizer, token) for token in before.tokens],
        positions=list(before.positions),
        before=_named(model, before),
        after=_named(model, after),
        moved=[_moved(a, b) for a, b in zip(before.logits, after.logits, strict=True)],
    )


def _named(model: Model, found: ForwardResult) -> list[list[TokenChance]]:
    labels = set(model.labels)

    def name(one: str) -> str:
        return one if one in labels else readable_token(model.tokenizer, one)

    return [
        [TokenChance(text=name(one.name), probability=one.probability) for one in some]
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
        sentence = msg(
            "The patching map supports at most {most} tokens, not {size}.",
            most=MAX_PATCHED_TOKENS,
            size=size,
        )
        raise UsageError(sentence, code="context_length_exceeded")
    found = model.patching_map(body.source, body.text, site=body.site)
    same = abs(found.source_logprob - found.logprob) < 1e-6
    return found.to_dict() | {
        "tokens": [readable_token(model.tokenizer, token) for token in found.tokens],
        "source_tokens": [readable_token(model.tokenizer, token) for token in found.source_tokens],
        "answer": readable_token(model.tokenizer, found.answer),
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


class TestedRow(BaseModel):
    text: str
    label: str
    prediction: str
    chance: float  # of the right label


class TestedView(BaseModel):
    labels: list[str]
    confusion: list[list[int]]  # a row for each label, a column for each prediction
    rows: list[TestedRow]  # the least certain of the right label first


@model_view("/attributions")
def attribution_view(model: Model, body: AttributionRequest) -> dict[str, Any]:
    """An `Attribution`: the contribution of each word to the answer."""
    words = len(body.text.split())
    if body.method == "leave-one-out" and words > MAX_LEFT_OUT:
        sentence = msg(
            "Leave-one-out attribution of {words} words takes too long; shorten the text "
            "to {most}.",
            words=words,
            most=MAX_LEFT_OUT,
        )
        raise UsageError(sentence, code="context_length_exceeded")
    found = model.attributions(body.text, target=body.target, method=body.method)
    label = found.target in model.labels
    target = found.target if label else readable_token(model.tokenizer, found.target)
    return found.to_dict() | {"target": target}


@model_view("/tested")
def view_of_tested(model: Model, body: ApiRequest) -> TestedView:
    """The test predictions that fine-tuning saved; empty if there are none."""
    source = model.checkpoint.source
    file = None if source is None else Path(source) / "predictions.jsonl"
    if file is None or not file.is_file():
        return TestedView(labels=[], confusion=[], rows=[])
    with explained(
        (BadRow, KeyError, TypeError, ValueError),
        "{file} was not written by malmoi finetune: {error}.",
        file=file.name,
    ):
        rows = [_tested(row) for row in any_rows(file)]
    labels = sorted({row.label for row in rows} | {row.prediction for row in rows})
    matrix = confusion([row.label for row in rows], [row.prediction for row in rows], labels)
    worst = sorted(rows, key=lambda row: row.chance)[:MAX_TESTED_ROWS]
    return TestedView(labels=labels, confusion=matrix.tolist(), rows=worst)


def _tested(row: DataRow) -> TestedRow:
    pair = row.values.get("pair")
    text = f"{row['text']} ‖ {pair}" if pair else str(row["text"])
    return TestedRow(
        text=text[:MAX_ROW_CHARACTERS],
        label=row["label"],
        prediction=row["prediction"],
        chance=float(row["probabilities"][row["label"]]),
    )
