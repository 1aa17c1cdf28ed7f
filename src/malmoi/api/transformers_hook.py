"""Registers Malmoi's own model type with transformers, when transformers is imported.

Nothing is imported for it: a finder waits for the modules of the Auto classes, and registers ours
after they are loaded. A folder of GPT-2, BERT, LLaMA or another type of transformers needs none of
this.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from malmoi.messages import logger

CONFIGS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"


def register_when_imported() -> None:
    """Registers our classes with the loaded modules now, with the others once they are imported."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name in (CONFIGS, MODELS):
        if name in sys.modules:
            _register(name)


class _AfterImport:
    """Import hook that registers our classes after the modules of the Auto classes are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (CONFIGS, MODELS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_register(module: ModuleType) -> None:
                execute(module)
                _register(name)

            spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


def _register(name: str) -> None:
    """Registers our classes; an error must not break the import of transformers."""
    try:
        from malmoi.api.transformers_config import MalmoiConfig

        loaded = import_module(name)
        if name == CONFIGS:
            loaded.CONFIG_MAPPING.register("malmoi", MalmoiConfig, exist_ok=True)
            return
        from malmoi.api.transformers_models import AUTO_CLASSES

        for auto_name, model in AUTO_CLASSES.items():
            getattr(loaded, auto_name).register(MalmoiConfig, model, exist_ok=True)
    except Exception as error:  # transformers of another version, or a broken torch
        logger.warning(
            "transformers cannot open folders of the model type malmoi here: {error}", error=error
        )
