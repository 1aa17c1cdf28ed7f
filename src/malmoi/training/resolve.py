"""A recipe by name or file, with the user's overrides."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.model import PATTERNS
from malmoi.training.recipe import BUDGETS, OBJECTIVE_SAMPLES, Recipe, read_recipe
from malmoi.training.recipes import RECIPES, SIZED, named_recipe
from malmoi.training.schedule import SCHEDULES


def resolve_recipe(recipe: str | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe by name or file with overrides; a new budget replaces the recipe's own."""
    chosen = _find(recipe) if isinstance(recipe, str) else recipe
    paths = settings_by_path(chosen, overrides)
    sized = isinstance(recipe, str) and recipe in SIZED
    if sized and "model.heads" in paths:
        paths = {"model.head_width": 64, **paths}  # until the width is chosen, by the heads
    if "train.batch" in paths:
        paths = {"train.fit_batch": False, **paths}
    if names_budget(paths):
        unset: dict[str, Any] = dict.fromkeys(BUDGETS, 0)
        chosen = replace(chosen, train=replace(chosen.train, **unset))
    chosen = chosen.override(paths)
    # the row that data.masked_length divides is still to be chosen
    (chosen.override({"data.masked_length": 0}) if sized else chosen).check()
    return replace(chosen, plugins=_plugins(chosen))


def _find(name: str) -> Recipe:
    """A recipe by its name, or from a recipe.json or a run's folder."""
    path = Path(name) if name.endswith(".json") else Path(name) / "recipe.json"
    if name in RECIPES or (not path.is_file() and not name.endswith(".json")):
        # the paper's batch assumes its hardware; with a memory the number of rows is constant
        named = named_recipe(name)
        return named.override({"train.fit_batch": not named.model.memory})
    if not path.is_file():
        raise UsageError("There is no recipe file {path}.", path=path)
    return read_recipe(path)


def settings_by_path(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides by path; a new tokenizer gets the model's vocabulary size."""
    paths = {_path(recipe, name): value for name, value in overrides.items() if value is not None}
    if "model.vocab" in paths:
        paths.setdefault("tokenizer.vocab", paths["model.vocab"])
    return paths


def _path(recipe: Recipe, name: str) -> str:
    if "." in name:
        return name
    parts = {
        part: getattr(recipe, part).to_dict() for part in ("train", "data", "tokenizer", "model")
    }
    for part, fields in parts.items():
        if name in fields:
            return f"{part}.{name}"
    if name in recipe.to_dict():
        return name
    raise UsageError(
        "The recipe has no setting {name!r}.{hint}",
        name=name,
        hint=nearest(name, {f for p in parts.values() for f in p}),
    )


def names_budget(overrides: Mapping[str, Any]) -> bool:
    """Whether the user set a budget, as opposed to the recipe."""
    given = {name.removeprefix("train.") for name, value in overrides.items() if value is not None}
    return not given.isdisjoint(BUDGETS)


def _plugins(recipe: Recipe) -> tuple[str, ...]:
    """The plugins that registered names used by the recipe."""
    patterns = set(re.findall(r"[A-Za-z_]\w*", " ".join(recipe.model.attention)))
    found = [OBJECTIVE_SAMPLES.origins.get(recipe.objective)]
    found += [SCHEDULES.origins.get(recipe.train.schedule)]
    found += [PATTERNS.origins.get(name) for name in sorted(patterns)]
    return tuple(dict.fromkeys(name for name in found if name is not None))
