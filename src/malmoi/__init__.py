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

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from malmoi.api.models import chat as chat
    from malmoi.api.models import embed as embed
    from malmoi.api.models import fill as fill
    from malmoi.api.models import generate as generate
    from malmoi.api.models import predict as predict
    from malmoi.api.models import probe as probe
    from malmoi.api.models import score as score
    from malmoi.api.models import stream as stream
    from malmoi.api.models import trace as trace
    from malmoi.api.options import EvaluateOptions as EvaluateOptions
    from malmoi.api.options import FinetuneOptions as FinetuneOptions
    from malmoi.api.options import PretrainOptions as PretrainOptions
    from malmoi.api.plugins import register_metric as register_metric
    from malmoi.api.plugins import register_objective as register_objective
    from malmoi.api.plugins import register_pattern as register_pattern
    from malmoi.api.plugins import register_schedule as register_schedule
    from malmoi.api.plugins import register_task as register_task
    from malmoi.api.runs import evaluate as evaluate
    from malmoi.api.runs import finetune as finetune
    from malmoi.api.runs import pretrain as pretrain
    from malmoi.api.runs import study as study
    from malmoi.api.tools import build_corpus as build_corpus
    from malmoi.api.tools import compress as compress
    from malmoi.api.tools import export as export
    from malmoi.api.tools import plan as plan
    from malmoi.api.tools import recipes as recipes
    from malmoi.api.tools import serve as serve
    from malmoi.api.tools import tasks as tasks
    from malmoi.api.tools import train_tokenizer as train_tokenizer
    from malmoi.config import ModelConfig as ModelConfig
    from malmoi.errors import MalmoiError as MalmoiError
    from malmoi.errors import UsageError as UsageError
    from malmoi.evaluation.kinds import custom_task as custom_task
    from malmoi.evaluation.task import Task as Task
    from malmoi.inference import Answer as Answer
    from malmoi.inference import MultiLabelPrediction as MultiLabelPrediction
    from malmoi.inference import Prediction as Prediction
    from malmoi.inference import Reply as Reply
    from malmoi.inference import Span as Span
    from malmoi.inference.generation.keywords import GenerationOptions as GenerationOptions
    from malmoi.inference.generation.options import GenerationConfig as GenerationConfig
    from malmoi.inference.model import Model as Model
    from malmoi.inference.model import load as load
    from malmoi.interpret.intervention import Intervention as Intervention
    from malmoi.system.progress import Progress as Progress
    from malmoi.tokenizer.core import Tokenizer as Tokenizer
    from malmoi.training.recipe import Recipe as Recipe

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
