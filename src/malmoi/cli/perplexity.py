"""`malmoi perplexity`: how well a language model predicts a text."""

from typing import Annotated

import typer

from malmoi.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    TextsArgument,
    open_model,
    whole_texts,
)
from malmoi.cli.output import print_json


def perplexity_command(
    model: ModelOption,
    texts: TextsArgument = None,
    bits: Annotated[
        bool, typer.Option("--bits-per-byte", help="Comparable between tokenizers.")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(help="Stride of the sliding window.", show_default="half the context"),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            help="Tokens of earlier segments that a Transformer-XL attends to; 0: none.",
            show_default="as in training",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Perplexity of a text of any length under a GPT: lower is better.

    Example: malmoi perplexity --model runs/tiny-gpt < book.txt
    """
    given = whole_texts(texts)
    lm = open_model(model, device, dtype)
    for text in given:
        measure = lm.bits_per_byte if bits else lm.perplexity
        value = measure(text, stride=stride, memory=memory)
        print_json({"bits_per_byte" if bits else "perplexity": value}) if json else print(
            f"{value:.4f}"
        )
