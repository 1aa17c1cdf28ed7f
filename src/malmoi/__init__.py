"""Malmoi: build BERT and GPT from your own text.

>>> import malmoi
>>> lm = malmoi.load("runs/tiny-gpt")
>>> lm.generate("The state of", max_new_tokens=40)

Names are imported when they are first used: `import malmoi` needs neither torch nor a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

PUBLIC = {
    "load": "malmoi.infer",
    "pretrain": "malmoi.train",
    "finetune": "malmoi.tune",
    "evaluate": "malmoi.tune",
    "Model": "malmoi.infer",
    "Tokenizer": "malmoi.tokenizer",
    "ModelConfig": "malmoi.config",
    "MalmoiError": "malmoi.errors",
    "UsageError": "malmoi.errors",
}
__all__ = ["__version__", *PUBLIC]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from malmoi.config import ModelConfig as ModelConfig
    from malmoi.errors import MalmoiError as MalmoiError
    from malmoi.errors import UsageError as UsageError
    from malmoi.infer import Model as Model
    from malmoi.infer import load as load
    from malmoi.tokenizer import Tokenizer as Tokenizer
    from malmoi.train import pretrain as pretrain
    from malmoi.tune import evaluate as evaluate
    from malmoi.tune import finetune as finetune


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'malmoi' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
