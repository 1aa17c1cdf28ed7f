"""The verb `chat`: talk with a language model, one message or many."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from malmoi.cli.inputs import DeviceOption, DtypeOption, JsonOption, ModelOption, open_model
from malmoi.cli.show import print_json
from malmoi.errors import UsageError


def add(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    model: ModelOption,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT…", help="What you say, in turn; none reads lines as you type.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Who the model is to be, said before all else.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token; above 1 is wilder.")] = 0.7,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that together reach p.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Talk with a language model by its own chat template; it remembers what was said before.

    Example: malmoi chat --model SmolLM2-135M-Instruct.gguf --temperature 0 "What is the capital of France?"
    """
    wishes: dict[str, Any] = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    lm = open_model(model, device, dtype)
    messages = [{"role": "system", "content": system}] if system else []
    for said in texts or _typed():
        messages.append({"role": "user", "content": said})
        answer = ""
        for piece in lm.chat_stream(messages, **wishes):
            answer += piece
            if not json:
                print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        print_json(messages[-1]) if json else print()


def _typed() -> Iterator[str]:
    """Lines as they come, with a sign to type after where someone sits there."""
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
