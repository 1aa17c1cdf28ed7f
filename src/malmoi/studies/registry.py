"""The registry of studies. A new one is a module with a `STUDY`, and a line here."""

from importlib import import_module

from malmoi.errors import UsageError, nearest
from malmoi.studies.grid import Study

STUDIES = (
    *("bert-masking", "bert-objectives", "bert-size", "bert-features"),
    *("gpt1-transfer", "gpt1-zeroshot", "gpt1-ablation"),
    *("gpt2-zeroshot", "in-context", "gpt3-scaling", "gpt3-contamination", "gpt3-sparse"),
    *("bert-vs-gpt", "korean", "compression"),
)
MODULES = {name: name.replace("-", "_") for name in STUDIES}  # study → its module
MODULES["in-context"] = "in_context.study"


def named_study(name: str) -> Study:
    if name not in MODULES:
        raise UsageError(
            "There is no study {name!r}.{hint} `malmoi study` lists them.",
            name=name,
            hint=nearest(name, STUDIES),
        )
    found: Study = import_module(f"malmoi.studies.{MODULES[name]}").STUDY
    return found
