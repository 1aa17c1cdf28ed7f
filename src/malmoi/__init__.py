"""Malmoi: build BERT and GPT from your own text.

>>> import malmoi
>>> lm = malmoi.load("runs/tiny-gpt")
>>> lm.generate("The state of", max_new_tokens=40)
'...'

Names are imported when they are first used: `import malmoi` needs neither torch nor a second.
Status goes to `logging.getLogger("malmoi")`; what takes a while accepts `progress=`, a function of
one `Progress`.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from malmoi.api.transformers_hook import register_when_imported
from malmoi.system.threads import sleep_soon

__version__ = "0.2.0"

if TYPE_CHECKING:  # the same names, for editors and type checkers; one statement a module
    # isort: off
    from malmoi.api.models import (
        chat as chat,
        embed as embed,
        fill as fill,
        generate as generate,
        predict as predict,
        probe as probe,
        score as score,
        stream as stream,
        trace as trace,
    )
    from malmoi.api.options import (
        EvaluateOptions as EvaluateOptions,
        FinetuneOptions as FinetuneOptions,
        PretrainOptions as PretrainOptions,
    )
    from malmoi.api.plugins import (
        register_metric as register_metric,
        register_objective as register_objective,
        register_pattern as register_pattern,
        register_schedule as register_schedule,
        register_task as register_task,
    )
    from malmoi.api.runs import (
        evaluate as evaluate,
        finetune as finetune,
        pretrain as pretrain,
        study as study,
    )
    from malmoi.api.tools import (
        build_corpus as build_corpus,
        compress as compress,
        export as export,
        plan as plan,
        recipes as recipes,
        serve as serve,
        tasks as tasks,
        train_tokenizer as train_tokenizer,
    )
    from malmoi.config import ModelConfig as ModelConfig
    from malmoi.errors import MalmoiError as MalmoiError, UsageError as UsageError
    from malmoi.evaluation.kinds import custom_task as custom_task
    from malmoi.evaluation.task import Task as Task
    from malmoi.inference import (
        Answer as Answer,
        MultiLabelPrediction as MultiLabelPrediction,
        Prediction as Prediction,
        Reply as Reply,
        Span as Span,
    )
    from malmoi.inference.generation.keywords import GenerationOptions as GenerationOptions
    from malmoi.inference.generation.options import GenerationConfig as GenerationConfig
    from malmoi.inference.model import Model as Model, load as load
    from malmoi.interpret.intervention import Intervention as Intervention
    from malmoi.system.progress import Progress as Progress
    from malmoi.tokenizer.core import Tokenizer as Tokenizer
    from malmoi.training.recipe import Recipe as Recipe
    # isort: on

HOMES = {
    "api.models": (
        "generate",
        "stream",
        "chat",
        "score",
        "fill",
        "embed",
        "predict",
        "probe",
        "trace",
    ),
    "api.runs": ("pretrain", "finetune", "evaluate", "study"),
    "api.tools": (
        "compress",
        "export",
        "plan",
        "build_corpus",
        "train_tokenizer",
        "serve",
        "recipes",
        "tasks",
    ),
    "api.plugins": (
        "register_metric",
        "register_objective",
        "register_pattern",
        "register_schedule",
        "register_task",
    ),
    "api.options": ("PretrainOptions", "FinetuneOptions", "EvaluateOptions"),
    "inference.model": ("load", "Model"),
    "inference": ("Prediction", "MultiLabelPrediction", "Answer", "Span", "Reply"),
    "inference.generation.options": ("GenerationConfig",),
    "inference.generation.keywords": ("GenerationOptions",),
    "interpret.intervention": ("Intervention",),
    "evaluation.kinds": ("custom_task",),
    "evaluation.task": ("Task",),
    "training.recipe": ("Recipe",),
    "tokenizer.core": ("Tokenizer",),
    "config": ("ModelConfig",),
    "system.progress": ("Progress",),
    "errors": ("MalmoiError", "UsageError"),
}
PUBLIC = {name: f"malmoi.{home}" for home, names in HOMES.items() for name in names}
__all__ = ["__version__", *PUBLIC]

logging.getLogger("malmoi").addHandler(logging.NullHandler())  # silent by default

register_when_imported()


if not TYPE_CHECKING:  # a type checker would accept any name because of it

    def __getattr__(name: str) -> object:
        if name not in PUBLIC:
            raise AttributeError(f"module 'malmoi' has no attribute {name!r}")
        sleep_soon()
        value = globals()[name] = getattr(import_module(PUBLIC[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
