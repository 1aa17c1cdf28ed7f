"""The keywords of `generate`, as TypedDicts; keywords.pyi has their types."""

from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig
from malmoi.settings import keyword_types, settings_of

EXAMPLE = '{"max_new_tokens": 20, "temperature": 0.7}'
SETTINGS = settings_of(GenerationConfig, ConstraintOptions)
ALONE = {name: one for name, one in SETTINGS.items() if name != "n"}
globals().update(
    GenerationSettings=keyword_types("GenerationSettings", SETTINGS),
    GenerationOptions=keyword_types("GenerationOptions", ALONE, EXAMPLE),
)
