"""`malmoi chat`: a conversation with a language model, from arguments or interactive."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from malmoi.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption, open_model
from malmoi.cli.output import print_json
from malmoi.errors import UsageError


def chat_command(
    model: ModelOption,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT…", help="Your messages in order; omit them to type interactively."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per reply.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above 1 is more random.")] = 0.7,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the smallest set of tokens whose probabilities reach p."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed.", show_default="another each time")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Chat with a language model through its own chat template.

    Example: malmoi chat --model SmolLM2-135M-Instruct.gguf --temperature 0 "What is the capital of
    France?"
    """
    options: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    lm = open_model(model, device, dtype)
    messages = [{"role": "system", "content": system}] if system else []
    for said in texts or _typed():
        messages.append({"role": "user", "content": said})
        answer = ""
        for piece in lm.chat_stream(messages, **options):
            piece = piece if answer else piece.lstrip()
            answer += piece
            if not json:
                print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        print_json(messages[-1]) if json else print()


def _typed() -> Iterator[str]:
    """Lines of standard input as they arrive, with a prompt sign on a terminal."""
    if sys.stdin is None:
        raise UsageError("There is no text: write one after the options, or pipe one in.")
    someone = sys.stdin.isatty()
    while True:
        if someone:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
