"""Training: recipes, the trainer, and what it saves."""

from malmoi.train.pretrain import pretrain, resolve
from malmoi.train.recipe import Recipe
from malmoi.train.recipes import RECIPES, recipe
from malmoi.train.stop import Stopped

__all__ = ["RECIPES", "Recipe", "Stopped", "pretrain", "recipe", "resolve"]
