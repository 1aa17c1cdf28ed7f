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
from typing import TYPE_CHECKING

from malmoi.api.transformers_hook import register_when_imported
from malmoi.system.lazy import lazy_names
from malmoi.system.threads import sleep_soon

__version__ = "0.2.0"
__all__ = [
    "Answer", "EvaluateOptions", "FinetuneOptions", "GenerationConfig", "GenerationOptions",
    "Intervention", "MalmoiError", "Model", "ModelConfig", "MultiLabelPrediction", "Prediction",
    "PretrainOptions", "Progress", "Recipe", "Reply", "Span", "Task", "Tokenizer", "UsageError",
    "__version__", "build_corpus", "chat", "compress", "custom_task", "embed", "evaluate", "export",
    "fill", "finetune", "generate", "load", "plan", "predict", "pretrain", "probe", "recipes",
    "register_metric", "register_objective", "register_pattern", "register_schedule",
    "register_task", "score", "serve", "stream", "study", "tasks", "trace", "train_tokenizer",
]  # fmt: skip

if TYPE_CHECKING:  # a type checker would accept any name because of `__getattr__`
    # isort: off
    from malmoi.api.models import chat, embed, fill, generate, predict, probe, score, stream, trace
    from malmoi.api.options import EvaluateOptions, FinetuneOptions, PretrainOptions
    from malmoi.api.plugins import register_metric, register_objective, register_pattern
    from malmoi.api.plugins import register_schedule, register_task
    from malmoi.api.runs import evaluate, finetune, pretrain, study
    from malmoi.api.tools import build_corpus, compress, export, plan, recipes, serve, tasks
    from malmoi.api.tools import train_tokenizer
    from malmoi.config import ModelConfig
    from malmoi.errors import MalmoiError, UsageError
    from malmoi.evaluation.kinds import custom_task
    from malmoi.evaluation.task import Task
    from malmoi.inference import Answer, MultiLabelPrediction, Prediction, Reply, Span
    from malmoi.inference.generation.keywords import GenerationOptions
    from malmoi.inference.generation.options import GenerationConfig
    from malmoi.inference.model import Model, load
    from malmoi.interpret.intervention import Intervention
    from malmoi.system.progress import Progress
    from malmoi.tokenizer.core import Tokenizer
    from malmoi.training.recipe import Recipe
    # isort: on
else:
    _find = lazy_names(
        __name__,
        **{
            "api.models": "chat embed fill generate predict probe score stream trace",
            "api.options": "EvaluateOptions FinetuneOptions PretrainOptions",
            "api.plugins": "register_metric register_objective register_pattern register_schedule "
            "register_task",
            "api.runs": "evaluate finetune pretrain study",
            "api.tools": "build_corpus compress export plan recipes serve tasks train_tokenizer",
            "config": "ModelConfig",
            "errors": "MalmoiError UsageError",
            "evaluation.kinds": "custom_task",
            "evaluation.task": "Task",
            "inference": "Answer MultiLabelPrediction Prediction Reply Span",
            "inference.generation.keywords": "GenerationOptions",
            "inference.generation.options": "GenerationConfig",
            "inference.model": "Model load",
            "interpret.intervention": "Intervention",
            "system.progress": "Progress",
            "tokenizer.core": "Tokenizer",
            "training.recipe": "Recipe",
        },
    )

    def __getattr__(name: str) -> object:
        sleep_soon()
        return _find(name)


logging.getLogger("malmoi").addHandler(logging.NullHandler())  # silent by default

register_when_imported()


def __dir__() -> list[str]:
    return sorted(__all__)
