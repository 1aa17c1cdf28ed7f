"""Verbs of language models: generate, score, perplexity."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.cli.inputs import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    TextsArgument,
    open_model,
    pairs,
    whole_texts,
)
from malmoi.cli.show import one_line, print_json
from malmoi.errors import UsageError

if TYPE_CHECKING:
    from malmoi.infer import Model


def add(app: typer.Typer) -> None:
    for verb in (generate, score, perplexity):
        app.command()(verb)


def generate(
    model: ModelOption,
    texts: TextsArgument = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to write.")] = 40,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest token; above 1 is wilder.",
            show_default="1; 0 with --beams or --speculate",
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that together reach p.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repetition less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    n: Annotated[int, typer.Option("--samples", "-n", help="Continuations of each prompt.")] = 1,
    choices: Annotated[
        str | None, typer.Option(help="The text is one of these; spaces count.", metavar="A,B,…")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this as a whole.", metavar="PATTERN")] = None,
    banned: Annotated[list[str] | None, typer.Option(help="Never write this; may be given again.")] = None,
    beams: Annotated[int, typer.Option(help="More than 1: the likeliest text by beam search.")] = 1,
    length_penalty: Annotated[
        float | None, typer.Option(help="Beams are scored by log p / length^penalty.", show_default="1")
    ] = None,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Draft from the text itself: the likeliest text, sooner.")
    ] = False,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Control tokens named in the prompt, <|endoftext|> say, are meant.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Continue prompts with a GPT. One prompt appears as it is written; several are written together.

    Example: malmoi generate --model runs/tiny-gpt --temperature 0.8 "The state of"
    """
    if length_penalty is not None and beams == 1:
        raise UsageError("--length-penalty scores beams: give --beams 2 or more with it.")
    if temperature is None and (beams > 1 or speculate):
        temperature = 0.0
    prompts = whole_texts(texts)
    wishes = _given(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    wishes |= _given(repetition_penalty=repetition_penalty, stop=stop, seed=seed, n=n)
    wishes |= _given(choices=choices and choices.split(","), regex=regex, banned=banned)
    wishes |= _given(
        beams=beams, length_penalty=length_penalty, speculate=speculate, parse_special=parse_special or None
    )
    lm = open_model(model, device, dtype)
    _note_empty(lm, prompts)
    if len(prompts) == 1 and n == 1 and not json:
        _stream(lm, prompts[0], wishes)
    else:
        _write_all(lm, prompts, wishes, json)


def _given(**wishes: Any) -> dict[str, Any]:
    return {name: value for name, value in wishes.items() if value is not None}


def _note_empty(lm: "Model", prompts: list[str]) -> None:
    """Says on stderr what an empty prompt starts from; a model that has no such token refuses it."""
    from malmoi.infer.prompt import start

    if "generate" in lm.abilities and not all(lm.tokenizer.encode(text, specials=False).tokens for text in prompts):
        mark = lm.tokenizer.token(start(lm.tokenizer))
        print(f"note: The prompt is empty: the text starts after {mark}, as a new one.", file=sys.stderr)


def _stream(lm: "Model", prompt: str, wishes: dict[str, Any]) -> None:
    for piece in lm.stream(prompt, **wishes):
        print(piece, end="", flush=True)
    print()


def _write_all(lm: "Model", prompts: list[str], wishes: dict[str, Any], json: bool) -> None:
    texts = lm.generate(prompts, **wishes)
    for i, (prompt, some) in enumerate(zip(prompts, texts, strict=True)):
        for j, text in enumerate([some] if wishes["n"] == 1 else some):
            if json:
                print_json({"prompt": prompt, "text": text})
            else:
                print("---" if i or j else "", text, sep="\n" if i or j else "")


def score(
    model: ModelOption,
    texts: TextsArgument = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """How likely a GPT finds continuations: the first text is the context, each further one a continuation.

    On standard input every line is a context, a tab and a continuation. Prints the log-probability of each.

    Example: malmoi score --model runs/tiny-gpt "The capital of France is" " Paris" " Rome"
    """
    rows = pairs(None) if not texts or texts == ["-"] else [(texts[0], text) for text in texts[1:]]
    if not rows:
        raise UsageError("There is nothing to score: after the context, give at least one continuation.")
    contexts, continuations = (list(column) for column in zip(*rows, strict=True))
    found = open_model(model, device, dtype).score(contexts, continuations)
    for (context, continuation), one in zip(rows, found, strict=True):
        if json:
            print_json({"context": context, "continuation": continuation, **vars(one)})
        else:
            print(f"{one.logprob:.4f}\t{one_line(continuation)}")


def perplexity(
    model: ModelOption,
    texts: TextsArgument = None,
    bits: Annotated[bool, typer.Option("--bits-per-byte", help="Comparable between tokenizers.")] = False,
    stride: Annotated[int | None, typer.Option(help="Tokens the window moves on by; half the context.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """How well a GPT predicts a text of any length: lower is better.

    Example: malmoi perplexity --model runs/tiny-gpt < book.txt
    """
    given = whole_texts(texts)
    lm = open_model(model, device, dtype)
    for text in given:
        value = lm.bits_per_byte(text, stride=stride) if bits else lm.perplexity(text, stride=stride)
        print_json({"bits_per_byte" if bits else "perplexity": value}) if json else print(f"{value:.4f}")
