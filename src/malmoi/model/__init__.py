"""One Transformer for four papers: patterns → attention → transformer → heads → families."""

from malmoi.model.attention import Bounds, KVCache, Looker
from malmoi.model.families import PRESETS, preset
from malmoi.model.features import FeatureConfig
from malmoi.model.heads import Network, initialise, parameters
from malmoi.model.patterns import PATTERNS, Layout, parse
from malmoi.model.transformer import Trail, Transformer
from malmoi.model.undrawn import without_weights

__all__ = [
    "PATTERNS",
    "PRESETS",
    "Bounds",
    "FeatureConfig",
    "KVCache",
    "Layout",
    "Looker",
    "Network",
    "Trail",
    "Transformer",
    "initialise",
    "parameters",
    "parse",
    "preset",
    "without_weights",
]
