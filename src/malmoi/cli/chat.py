"""`malmoi chat`: a conversation with a language model, from arguments or interactive."""

import sys
from collections.abc import Iterator
from typing import Any

from malmoi.cli import shared as cli
from malmoi.errors import require_that
from malmoi.inference.generation.options import GenerationConfig


def chat_command(
    model: cli.Model,
    texts: list[str] | None = cli.argument(
        None, "Your messages in order; omit them to type interactively.", metavar="TEXT…"
    ),
    system: str | None = cli.option(None, "System prompt."),
    options: dict[str, Any] = cli.options_of(
        GenerationConfig,
        names="max_new_tokens temperature top_p seed",
        max_new_tokens=256,
        temperature=0.7,
    ),
    device: cli.Device = None,
    dtype: cli.Dtype = None,
    json: cli.Json = False,
) -> None:
    """Chat with a language model through its own chat template.

    Example: malmoi chat --model SmolLM2-135M-Instruct.gguf --temperature 0 "What is the capital of
    France?"
    """
    lm = cli.open_model(model, device, dtype)
    messages = [{"role": "system", "content": system}] if system else []
    for message in texts or _typed():
        messages.append({"role": "user", "content": message})
        answer = ""
        for piece in lm.chat_stream(messages, **options):
            piece = piece if answer else piece.lstrip()
            answer += piece
            if not json:
                print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        cli.print_json(messages[-1]) if json else print()


def _typed() -> Iterator[str]:
    """Lines of standard input as they arrive, with a prompt sign on a terminal."""
    require_that(
        sys.stdin is not None, "There is no text: write one after the options, or pipe one in."
    )
    someone = sys.stdin.isatty()
    while True:
        if someone:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
