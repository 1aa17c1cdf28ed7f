"""Verbs of tokenizers: train, show."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from malmoi.cli.app import add_group
from malmoi.cli.options import JsonOption, whole_texts
from malmoi.cli.output import print_json, print_table


def register(app: typer.Typer) -> None:
    add_group(
        app,
        "tokenizer",
        "Train a tokenizer, or see how one cuts a text.",
        train_command,
        show_command,
    )


def train_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Files, folders, globs, or builtin:sotu.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.", metavar="DIR")],
    kind: Annotated[
        str, typer.Option(help="wordpiece (BERT), bpe (GPT-1), byte-bpe (GPT-2) or char.")
    ] = "wordpiece",
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = 30_000,
    lowercase: Annotated[
        bool | None, typer.Option(help="Lowercase the text first; default: as the family does.")
    ] = None,
    min_frequency: Annotated[
        int, typer.Option(help="Merge only pairs that occur at least this often.")
    ] = 2,
    json: JsonOption = False,
) -> None:
    """Learn a tokenizer from text and write it as a Hugging Face folder.

    Example: malmoi tokenizer train books/*.txt --kind byte-bpe --vocab 16000 --out tokenizers/mine
    """
    from malmoi.text.documents import read_documents
    from malmoi.tokenizer import train_tokenizer

    reader = read_documents(sources)
    texts = (document.text for document in reader)
    tokenizer = train_tokenizer(
        texts, kind=kind, vocab=vocab, lowercase=lowercase, min_frequency=min_frequency
    )
    for sentence in reader.describe():
        print(sentence, file=sys.stderr)
    tokenizer.save(out)
    result = {"folder": str(out), "kind": kind, "vocab": tokenizer.vocab_size}
    print_json(result) if json else print(f"{out}: {kind}, {tokenizer.vocab_size:,} tokens")


def show_command(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="A text; omit it, or pass -, to read stdin."),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(help="Tokenizer folder or file; default: the current folder.", metavar="DIR"),
    ] = ".",
    parse_special: Annotated[
        bool,
        typer.Option(
            "--parse-special", help="Control tokens named in the text, [MASK] say, are meant."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show how a text is cut: every token, its id, and the characters it stands for.

    Example: malmoi tokenizer show --tokenizer runs/tiny-bert "말모이는 사전이다."
    """
    from malmoi.tokenizer import Tokenizer

    cutter = Tokenizer.load(tokenizer)
    for text in whole_texts(texts):
        encoding = cutter.encode(text, parse_special=parse_special)
        tokens = [cutter.token(token) for token in encoding.tokens]
        if json:
            print_json(
                {
                    "text": text,
                    "tokens": tokens,
                    "ids": encoding.tokens,
                    "offsets": encoding.offsets,
                }
            )
            continue
        rows = zip(tokens, encoding.tokens, encoding.offsets, strict=True)
        cells = (
            (token, number, f"{start}-{end}", text[start:end])
            for token, number, (start, end) in rows
        )
        print_table(("token", "id", "characters", "text"), cells)
