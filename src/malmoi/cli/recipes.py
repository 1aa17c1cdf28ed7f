"""`malmoi recipes`: what can be pre-trained."""

from collections.abc import Iterator
from typing import Any

import typer

from malmoi.cli.options import JsonOption
from malmoi.cli.output import print_json, print_table


def register(app: typer.Typer) -> None:
    app.command("recipes")(recipes_command)


def recipes_command(json: JsonOption = False) -> None:
    """List the pre-training recipes: the papers' models and their fast variants.

    Example: malmoi recipes
    """
    rows = list(_models())
    if json:
        for row in rows:
            print_json(row)
        return
    cells = (
        [f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()] for row in rows
    )
    print_table(tuple(rows[0]), cells)


def _models() -> Iterator[dict[str, Any]]:
    """Every recipe's model, built without memory for its weights."""

    from malmoi.model import Network, count_parameters, without_weights
    from malmoi.training.recipes import RECIPES

    for name, make in RECIPES.items():
        recipe = make()
        config = recipe.model
        encoder = config.pool == "first"
        with without_weights():
            network = Network(
                config, {} if encoder else {"lm": 0}, pooler=encoder and config.pooler == "tanh"
            )
        sizes = {
            field: getattr(config, field)
            for field in ("depth", "width", "heads", "context", "vocab")
        }
        objective = {"objective": recipe.objective}
        yield {
            "recipe": name,
            "parameters": count_parameters(network),
            **sizes,
            **objective,
            "about": recipe.about,
        }
