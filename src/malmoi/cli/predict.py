"""`malmoi predict`: what a fine-tuned model says of texts."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from malmoi.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    TextsArgument,
    input_lines,
    input_pairs,
    open_model,
)
from malmoi.cli.output import one_line, print_json


def predict_command(
    model: ModelOption,
    texts: TextsArgument = None,
    paired: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Read texts in pairs (question, context…); tab-separated on standard input.",
        ),
    ] = False,
    choices: Annotated[
        list[str] | None,
        typer.Option("--choice", help="A choice, for a multiple-choice model; repeatable."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Predict labels, spans or answers with a fine-tuned model.

    Example: malmoi predict --model runs/sst2 "I love this movie!"
    """
    given: list[Any] = input_pairs(texts) if paired else input_lines(texts)
    if choices:
        given = [(*([text] if isinstance(text, str) else text), tuple(choices)) for text in given]
    found = open_model(model, device, dtype).predict(given)
    for text, answer in zip(given, found, strict=True):
        if json:
            key = "spans" if isinstance(answer, list) else "prediction"
            print_json(
                {
                    "text": text,
                    key: list(map(asdict, answer)) if isinstance(answer, list) else asdict(answer),
                }
            )
        else:
            print(_line(text, answer))


def _line(text: Any, answer: Any) -> str:
    shown = (
        one_line(text) if isinstance(text, str) else "\t".join(one_line(str(part)) for part in text)
    )
    if isinstance(answer, list):
        return f"{' '.join(f'[{one_line(s.text)} {s.label} {s.score:.3f}]' for s in answer) or '-'}\t{shown}"  # noqa: E501
    if hasattr(answer, "candidates"):
        return f"{one_line(answer.text) or '-'}\t{answer.score:.4f}\t{shown}"
    labels = answer.labels if hasattr(answer, "labels") else (answer.label,)
    scores = ", ".join(f"{answer.scores[label]:.4f}" for label in labels)
    return f"{', '.join(labels) or '-'}\t{scores or '-'}\t{shown}"
