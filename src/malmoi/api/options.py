"""The keywords of the public functions, as TypedDicts; options.pyi has their types."""

from malmoi.api.records import SETTINGS
from malmoi.settings import keyword_types

EXAMPLES = {
    "PretrainOptions": '{"minutes": 3, "lr": 1e-3}',
    "FinetuneOptions": '{"text": "review", "epochs": 4}',
    "EvaluateOptions": '{"label": "stars", "limit": 100}',
}
globals().update(
    {name: keyword_types(name, known, EXAMPLES.get(name, "")) for name, known in SETTINGS.items()}
)
