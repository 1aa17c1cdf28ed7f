"""A fine-tuned model: word attributions, and its predictions on its test rows."""

from pathlib import Path

from pydantic import BaseModel

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference import Model
from malmoi.interpret.importance import AttributionMethod, Piece
from malmoi.messages import msg
from malmoi.metrics.labels import confusion
from malmoi.server.api.requests import ApiRequest, NameField, TextField
from malmoi.studio.endpoint import model_view
from malmoi.studio.tokens import readable_token
from malmoi.text.rows import BadRow, DataRow, any_rows

MAX_TESTED_ROWS = 2000
MAX_ROW_CHARACTERS = 600
MAX_LEFT_OUT = 400  # words; each is a pass


class AttributionRequest(ApiRequest):
    """A text whose words are coloured."""

    text: TextField
    method: AttributionMethod = "leave-one-out"
    target: NameField | None = None  # none: the predicted label


class TestedRequest(ApiRequest):
    """The test rows of a fine-tuned model."""


class AttributionView(BaseModel):
    target: str
    probability: float
    pieces: tuple[Piece, ...]


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
def attribution_view(model: Model, body: AttributionRequest) -> AttributionView:
    """Attributions: the contribution of each word to the answer."""
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
    target = found.target
    return AttributionView(
        target=target if target in model.labels else readable_token(model.tokenizer, target),
        probability=found.probability,
        pieces=found.pieces,
    )


@model_view("/tested")
def view_of_tested(model: Model, body: TestedRequest) -> TestedView:
    """The test predictions that fine-tuning saved; empty if there are none."""
    source = model.checkpoint.source
    file = None if source is None else Path(source) / "predictions.jsonl"
    if file is None or not file.is_file():
        return TestedView(labels=[], confusion=[], rows=[])
    try:
        rows = [_tested(row) for row in any_rows(file)]
    except (BadRow, KeyError, TypeError, ValueError) as error:
        raise MalmoiError(
            "{file} was not written by malmoi finetune: {error}.", file=file.name, error=error
        ) from None
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
