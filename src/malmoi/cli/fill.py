"""`malmoi fill`: candidates for the masks of a text."""

from typing import Annotated

import typer

from malmoi.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    TextsArgument,
    input_lines,
    open_model,
)
from malmoi.cli.output import one_line, print_json


def fill_command(
    model: ModelOption,
    texts: TextsArgument = None,
    top: Annotated[int, typer.Option(help="Candidates for each mask.")] = 5,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Fill in the [MASK] of each text with a BERT.

    Prints probability, token and the text with it in place.

    Example: malmoi fill --model runs/tiny-bert "나는 오늘 [MASK] 갔다."
    """
    given = input_lines(texts)
    bert = open_model(model, device, dtype)
    for text in given:
        masks = bert.fill_masks(text, top=top)
        if json:
            print_json({"text": text, "fills": [[vars(one) for one in mask] for mask in masks]})
        else:
            for one in (one for mask in masks for one in mask):
                print(f"{one.probability:.4f}\t{one.token}\t{one_line(one.text)}")
