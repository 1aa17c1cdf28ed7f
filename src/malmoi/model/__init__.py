"""One Transformer for every family: patterns → attention → transformer → heads → families."""

from typing import TYPE_CHECKING

from malmoi.system.lazy import lazy_names

if TYPE_CHECKING:
    from malmoi.model.attention_mask import Bounds
    from malmoi.model.families import preset
    from malmoi.model.kv_cache import FusedDecodeCache, KVCache
    from malmoi.model.network import Network, count_parameters, initialise
    from malmoi.model.patterns import PATTERNS, Layout, parse_pattern
    from malmoi.model.transformer import Activations
    from malmoi.model.trunks import FeatureConfig
else:
    __getattr__ = lazy_names(
        __name__,
        attention_mask="Bounds",
        families="preset",
        kv_cache="FusedDecodeCache KVCache",
        network="Network count_parameters initialise",
        patterns="PATTERNS Layout parse_pattern",
        transformer="Activations",
        trunks="FeatureConfig",
    )

__all__ = [
    "PATTERNS", "Activations", "Bounds", "FeatureConfig", "FusedDecodeCache", "KVCache", "Layout",
    "Network", "count_parameters", "initialise", "parse_pattern", "preset",
]  # fmt: skip
