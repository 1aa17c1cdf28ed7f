"""Verbs of encoders and fine-tuned models: fill, embed, predict."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.cli.inputs import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    TextsArgument,
    lines,
    open_model,
    pairs,
)
from malmoi.cli.show import one_line, print_json
from malmoi.disk import written
from malmoi.errors import UsageError


def add(app: typer.Typer) -> None:
    for verb in (fill, embed, predict):
        app.command()(verb)


def fill(
    model: ModelOption,
    texts: TextsArgument = None,
    top: Annotated[int, typer.Option(help="Candidates for each mask.")] = 5,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Fill in the [MASK] of each text with a BERT: probability, token and the text with it in place.

    Example: malmoi fill --model runs/tiny-bert "나는 오늘 [MASK] 갔다."
    """
    given = lines(texts)
    bert = open_model(model, device, dtype)
    for text in given:
        found = bert.fill(text, top=top)
        masks = found if isinstance(found[0], list) else [found]
        if json:
            print_json({"text": text, "fills": [[vars(one) for one in mask] for mask in masks]})
        else:
            for one in (one for mask in masks for one in mask):
                print(f"{one.probability:.4f}\t{one.token}\t{one_line(one.text)}")


def embed(
    model: ModelOption,
    texts: TextsArgument = None,
    layers: Annotated[str, typer.Option(help="Layers to average: 0 is the embedding, -1 the last; -4,-3,-2,-1")] = "-1",
    pool: Annotated[
        str, typer.Option(help="mean over the tokens, cls (the one that speaks for the text), none")
    ] = "mean",
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts longer than the context.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the vectors to this .npy file instead.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Turn each text into a vector, one a line.

    Example: malmoi embed --model runs/tiny-bert --layers=-4,-3,-2,-1 "a text" "another"
    """
    given, chosen = lines(texts), _layers(layers)
    if out and pool == "none":
        raise UsageError("--out takes one vector a text; --pool none has one a token: use --json.")
    vectors = open_model(model, device, dtype).embed(given, chosen, pool, truncate=truncate)
    if out:
        _save(out, vectors)
        return
    for text, vector in zip(given, vectors, strict=True):
        print_json({"text": text, "vector": vector.tolist()}) if json else print(_numbers(vector))


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--layers takes whole numbers with commas between, such as -2,-1, not {text!r}.") from None


def _save(path: Path, vectors: Any) -> None:
    import numpy as np

    with written(path) as file:
        np.save(file, vectors, allow_pickle=False)


def _numbers(vector: Any) -> str:
    """A vector on a line; the vectors of several tokens on one line each, and a blank line after."""
    if vector.ndim == 2:
        return "\n".join(map(_numbers, vector)) + "\n"
    return " ".join(f"{number:.6g}" for number in vector.tolist())


def predict(
    model: ModelOption,
    texts: TextsArgument = None,
    paired: Annotated[
        bool, typer.Option("--pairs", help="Texts come in twos (question, context…); on standard input a tab between.")
    ] = False,
    choices: Annotated[
        list[str] | None, typer.Option("--choice", help="One of the choices, for a model that chooses; give each.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Say what a fine-tuned model thinks of each text: its label, the spans it marks, its answer, its choice.

    Example: malmoi predict --model runs/sst2 "I love this movie!"
    """
    given: list[Any] = pairs(texts) if paired else lines(texts)
    if choices:
        given = [(*([text] if isinstance(text, str) else text), tuple(choices)) for text in given]
    found = open_model(model, device, dtype).predict(given)
    for text, answer in zip(given, found, strict=True):
        if json:
            key = "spans" if isinstance(answer, list) else "prediction"
            print_json({"text": text, key: list(map(asdict, answer)) if isinstance(answer, list) else asdict(answer)})
        else:
            print(_line(text, answer))


def _line(text: Any, answer: Any) -> str:
    shown = one_line(text) if isinstance(text, str) else "\t".join(one_line(str(part)) for part in text)
    if isinstance(answer, list):
        return f"{' '.join(f'[{one_line(s.text)} {s.label} {s.score:.3f}]' for s in answer) or '-'}\t{shown}"
    if hasattr(answer, "candidates"):
        return f"{one_line(answer.text) or '-'}\t{answer.score:.4f}\t{shown}"
    return f"{answer.label}\t{answer.scores[answer.label]:.4f}\t{shown}"
