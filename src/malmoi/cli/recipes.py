"""`malmoi recipes` and `malmoi tasks`: what can be trained, and for what."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from malmoi.cli import shared as cli
from malmoi.config import ModelConfig
from malmoi.messages import msg, translate
from malmoi.settings import Config, settings_of
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import RECIPES, SIZED, named_recipe

# what `pretrain gpt|bert|both` chooses for its text, its minutes and its machine
FITTED = (
    *("model.vocab", "model.context", "model.width", "model.depth", "model.heads"),
    *("model.dropout", "tokenizer.vocab", "data.valid"),
    *("data.fraction", "data.masked_length", "data.packed", "train.minutes", "train.batch"),
    *("train.muon_decay", "train.max_epochs", "train.valid_every", "train.own_teacher"),
)
FITTED_BERT = ("objective", "data.mask_rate", "model.generator_depth", "train.ema")


def recipes_command(
    name: str | None = cli.argument(
        None,
        "Show the settings of this recipe.",
        metavar="[NAME]",
        autocompletion=cli.complete_recipes,
    ),
    json: cli.Json = False,
) -> None:
    """List the recipes, or the settings of one.

    Recipes that end in -fast deviate from their paper; each lists its changes.

    Example: malmoi recipes bert-tiny
    """
    if name is not None:
        recipe = named_recipe(name)
        cli.print_json(recipe.to_dict()) if json else _show(recipe)
    else:
        facts = ({"recipe": key, **_facts(make())} for key, make in RECIPES.items())
        order = [*SIZED, *(key for key in RECIPES if key not in SIZED)]
        rows = (
            row
            for _, names in groupby(order, key=_family)
            for row in ((), *(_row(key, RECIPES[key]()) for key in names))
        )
        cli.print_rows(json, facts, ("recipe", "size", "layers", "context", "learns"), rows)


def _family(name: str) -> str:
    return "auto" if name in SIZED else name.split("-")[0] + "-fast" * name.endswith("-fast")


def _row(name: str, recipe: Recipe) -> tuple[str, ...]:
    c = recipe.model
    if _family(name) == "auto":
        return (
            *(name, "auto", "auto", "auto"),
            translate(msg("{objective}, fitted to your text", objective=recipe.objective)),
        )
    from malmoi.report.chart import short_number

    size = short_number(approximate_parameters(with_vocab(recipe)), 3)
    return name, size, f"{c.depth} × {c.width}", f"{c.context:,}", _about(recipe)


def _about(recipe: Recipe) -> str:
    """A recipe in a few words: its objective and its paper."""
    if recipe.name.endswith("-fast"):
        return translate(msg("{objective}, changed for speed", objective=recipe.objective))
    paper = re.search(r"\(([A-Z][\w ]+? et al\. \d{4})", recipe.about)
    return f"{recipe.objective}, {paper[1] if paper else translate(recipe.about).split(';')[0]}"


def with_vocab(recipe: Recipe) -> ModelConfig:
    """The model config with the vocabulary size of its tokenizer."""
    return replace(recipe.model, vocab=recipe.tokenizer.vocab or recipe.model.vocab)


def approximate_parameters(c: ModelConfig) -> float:
    """Parameter count to within about 1%, without torch: blocks, embeddings, positions."""
    embedding = c.vocab * c.token_width * (1 if c.tied else 2)
    positions = c.token_width * c.context * (c.positions == "learned")
    pooler = c.width**2 * (c.pooler == "tanh")
    # an encoder's blocks, and the attention to it in every block of the decoder
    encoder = c.encoder_depth * c.block_weights + 4 * c.width**2 * c.depth * (c.encoder_depth > 0)
    # between an embedding and blocks of another width; an LSTM's states are projected back
    bridge = c.token_width * c.width * (1 + c.recurrent) * (c.token_width != c.width)
    return c.distinct * c.block_weights + encoder + embedding + bridge + positions + pooler


def _facts(recipe: Recipe) -> dict[str, Any]:
    from malmoi.training.budget import exact_parameters

    c = with_vocab(recipe)
    sizes = {name: getattr(c, name) for name in ("depth", "width", "heads", "context", "vocab")}
    about = {"objective": recipe.objective, "about": recipe.about}
    return {"parameters": exact_parameters(c), **sizes, **about}


# ------------------------------------------------------------------ one recipe


def _show(recipe: Recipe) -> None:
    """Prints every setting by its --set name, with its meaning."""
    print(f"{recipe.name}: {translate(recipe.about).replace(chr(10), ' ')}\n")
    fitted = (FITTED + FITTED_BERT * (recipe.name == "bert")) * (recipe.name in SIZED)
    cli.print_table(
        ("--set", "value", "meaning"),
        (
            (name, "auto" if name in fitted else f"{value}", comment)
            for name, value, comment in _settings(recipe)
        ),
    )


def _settings(record: Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    known = settings_of(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Config):
            yield from _settings(value, f"{prefix}{field.name}.")
        elif prefix or field.name == "objective":
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            yield f"{prefix}{field.name}", shown, translate(known[field.name].help)


# ------------------------------------------------------------------ tasks


def tasks_command(
    name: str | None = cli.argument(
        None, "Show this task alone.", metavar="[NAME]", autocompletion=cli.complete_tasks
    ),
    json: cli.Json = False,
) -> None:
    """List the tasks, their kinds and the files they read.

    The kinds are for your own columns: malmoi finetune classification rows.csv --label stars

    Example: malmoi tasks sst2
    """
    from malmoi.evaluation.tasks import KIND_METRICS, TASKS, metric_names, named_task

    shown = list(TASKS.values()) if name is None else [named_task(name)]
    facts = [
        {
            "task": one.name,
            "kind": one.kind,
            "metrics": ", ".join(metric_names(one)),
            "about": one.about if json else translate(one.about),
            "files": " ".join(one.files),
        }
        for one in shown
    ]
    if name is not None:
        cells = [(translate(key), value) for key, value in facts[0].items()]
        cli.print_rows(json, facts, ("task", shown[0].name), cells[1:])
        return
    rows = (
        row
        for kind in KIND_METRICS
        for row in ((), *((t.name, kind, translate(t.about)) for t in shown if t.kind == kind))
    )
    cli.print_rows(json, facts, ("task", "kind", "question"), rows)
    if not json:
        print()
        metrics = [(kind, ", ".join(names)) for kind, names in KIND_METRICS.items()]
        cli.print_table(("kind", "metrics"), metrics)
