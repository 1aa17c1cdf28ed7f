"""Malmoi: build BERT and GPT from your own text.

>>> import malmoi
>>> lm = malmoi.load("runs/tiny-gpt")
>>> lm.generate("The state of", max_new_tokens=40)

Names are imported when they are first used: `import malmoi` needs neither torch nor a second.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

PUBLIC = {
    "load": "malmoi.inference.model",
    "pretrain": "malmoi.training.pretrain",
    "finetune": "malmoi.finetuning.finetune",
    "evaluate": "malmoi.evaluation.evaluate",
    "custom_task": "malmoi.evaluation.tasks.custom",
    "Task": "malmoi.evaluation.tasks.base",
    "Recipe": "malmoi.training.recipe",
    "GenerationConfig": "malmoi.inference.generation.config",
    "Model": "malmoi.inference.model",
    "Tokenizer": "malmoi.tokenizer.core",
    "ModelConfig": "malmoi.config",
    "MalmoiError": "malmoi.errors",
    "UsageError": "malmoi.errors",
}
__all__ = ["__version__", *PUBLIC]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from malmoi.config import ModelConfig as ModelConfig
    from malmoi.errors import MalmoiError as MalmoiError
    from malmoi.errors import UsageError as UsageError
    from malmoi.evaluation.evaluate import evaluate as evaluate
    from malmoi.evaluation.tasks.base import Task as Task
    from malmoi.evaluation.tasks.custom import custom_task as custom_task
    from malmoi.finetuning.finetune import finetune as finetune
    from malmoi.inference import Model as Model
    from malmoi.inference import load as load
    from malmoi.inference.generation.config import GenerationConfig as GenerationConfig
    from malmoi.tokenizer import Tokenizer as Tokenizer
    from malmoi.training.pretrain import pretrain as pretrain
    from malmoi.training.recipe import Recipe as Recipe


logging.getLogger("malmoi").addHandler(logging.NullHandler())  # silent unless asked


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'malmoi' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
