"""Writes the keywords of the public functions from the records that declare the settings.

Run: python tools/keywords.py [--check]. A type checker and an editor read the keywords of a
function from a TypedDict, which Python cannot derive from a record; so they are written to files,
and a test fails when they are not those of the records.
"""

import ast
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from malmoi.settings import settings_of

ROOT = Path(__file__).parents[1] / "src" / "malmoi"
HEAD = '"""{about} Written by tools/keywords.py; do not edit."""\n\n'


def annotations(record: Any) -> dict[str, str]:
    """The type of each field of a record as it is written in the source."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(record)):
        if base is not object:
            body = ast.parse(inspect.getsource(base)).body[0]
            assert isinstance(body, ast.ClassDef)
            for node in body.body:
                if isinstance(node, ast.AnnAssign):
                    found[ast.unparse(node.target)] = ast.unparse(node.annotation)
    for one in fields(record):
        if "setting" not in one.metadata and isinstance(one.default_factory, type):
            found |= annotations(one.default_factory)
    return found


def typed_dict(name: str, base: str, about: str, *records: Any, without: Any = ()) -> str:
    """The source of a TypedDict with the settings of records."""
    types: dict[str, str] = {}
    for record in records:
        types = annotations(record) | types
    lines = [f"class {name}({base}, total=False):", f'    """{about}"""', ""]
    for key, one in settings_of(*records).items():
        if key not in without:
            kind = (one.accepts or types[key]).replace("'", '"')
            lines.append(f"    {key}: {kind}")
    return "\n\n" + "\n".join(lines) + "\n"


def example(about: str, name: str, options: str) -> str:
    return f"{about}\n\n    Examples:\n        >>> options: malmoi.{name} = {options}\n    "


def generation_keywords() -> str:
    from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig

    records = (GenerationConfig, ConstraintOptions)
    others = [name for name in settings_of(*records) if name != "n"]
    about = example(
        "Options that control how text is generated.",
        "GenerationOptions",
        '{"max_new_tokens": 20, "temperature": 0.7}',
    )
    more = "`GenerationOptions` and the number of continuations."
    return (
        HEAD.format(about="The keywords of `generate`.")
        + "from collections.abc import Callable, Iterable, Mapping, Sequence\n"
        + "from typing import Any, Literal, TypedDict\n"
        + typed_dict("GenerationOptions", "TypedDict", about, *records, without={"n"})
        + typed_dict("GenerationSettings", "GenerationOptions", more, *records, without=others)
    )


API_IMPORTS = """\
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from malmoi.adapters.config import AdapterConfig
from malmoi.api.records import Files, Settings
from malmoi.server.config import LogLevel

if TYPE_CHECKING:
    from malmoi.evaluation.task import Task
    from malmoi.text.rows import RowSource
"""
BASES = {
    "FinetuneOptions": "ColumnOptions",
    "EvaluateOptions": "ColumnOptions",
    "DetailedEvaluateOptions": "EvaluateOptions",
    "DistilOptions": "FinetuneOptions",
}
EXAMPLES = {
    "PretrainOptions": '{"minutes": 3, "lr": 1e-3}',
    "FinetuneOptions": '{"text": "review", "epochs": 4}',
    "EvaluateOptions": '{"label": "stars", "limit": 100}',
}


def api_options() -> str:
    from malmoi.api.records import RECORDS

    parts = [HEAD.format(about="The keywords of the public functions."), API_IMPORTS]
    for name, records in RECORDS.items():
        words = re.sub("([A-Z])", r" \1", name.removesuffix("Options")).lower().split()
        about = (
            f"The options of `{words[-1]}`."
            if name != "ColumnOptions"
            else "The columns of a table."
        )
        if name in EXAMPLES:
            about = example(about, name, EXAMPLES[name])
        base = BASES.get(name, "TypedDict")
        inherited = settings_of(*RECORDS[base]) if base in RECORDS else ()
        parts.append(typed_dict(name, base, about, *records, without=inherited))
    return "".join(parts)


FILES = {"inference/generation/keywords.py": generation_keywords, "api/options.py": api_options}


def main() -> int:
    """Writes the files, or with --check compares them; 1 if one differs."""
    stale = []
    for path, source in FILES.items():
        file = ROOT / path
        if not file.exists() or file.read_text("utf-8") != source():
            stale.append(path)
            if "--check" not in sys.argv:
                file.write_text(source(), "utf-8")
    if stale and "--check" in sys.argv:
        print(f"Not the records' settings, run python tools/keywords.py: {', '.join(stale)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
