"""Writes the types of the public functions' keywords from the records that declare the settings.

Run: python tools/keywords.py. A type checker and an editor need a TypedDict that is written out,
which Python cannot derive from a record; so the stubs api/options.pyi and
inference/generation/keywords.pyi are written, and a test fails when they are not the records'.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from malmoi.api.options import EXAMPLES
from malmoi.api.records import RECORDS
from malmoi.inference.generation import keywords
from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig
from malmoi.settings import keywords_doc, settings_of

ROOT = Path(__file__).parents[1] / "src" / "malmoi"
HEAD = "# Written by tools/keywords.py from the records of settings; do not edit.\n"
GENERATION = """
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict
"""
API = """
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from malmoi.adapters.config import AdapterConfig
from malmoi.api.records import Files
from malmoi.api.run_options import Settings
from malmoi.evaluation.task import Task
from malmoi.server.config import LogLevel
from malmoi.text.rows import RowSource
"""
BASES = {
    "FinetuneOptions": "ColumnOptions",
    "EvaluateOptions": "ColumnOptions",
    "DetailedEvaluateOptions": "EvaluateOptions",
    "DistilOptions": "FinetuneOptions",
    "GenerationSettings": "GenerationOptions",
}


def annotations(record: Any) -> dict[str, str]:
    """The type of each field of a record as it is written in the source."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(record)[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign):
                quoted = isinstance(node.annotation, ast.Constant)
                text = node.annotation.value if quoted else ast.unparse(node.annotation)
                found[ast.unparse(node.target)] = text.replace("'", '"')
    for one in fields(record):
        if "setting" not in one.metadata and isinstance(one.default_factory, type):
            found |= annotations(one.default_factory)
    return found


def typed_dict(name: str, records: Any, without: Any = (), example: str = "") -> str:
    """The source of a TypedDict with the settings of records, each with its help."""
    types: dict[str, str] = {}
    for record in records:
        types = annotations(record) | types
    doc = keywords_doc(name, example)
    lines = [
        f"\nclass {name}({BASES.get(name, 'TypedDict')}, total=False):",
        f'    """{doc}"""',
        "",
    ]
    for key, one in settings_of(*records).items():
        if key not in without:
            lines += [f"    {key}: {one.accepts or types[key]}", f'    """{one.help}"""']
    return "\n".join(lines) + "\n"


def generation() -> str:
    records = (GenerationConfig, ConstraintOptions)
    return (
        HEAD
        + GENERATION
        + typed_dict("GenerationOptions", records, {"n"}, keywords.EXAMPLE)
        + typed_dict("GenerationSettings", records, keywords.ALONE)
    )


def api() -> str:
    parts = [HEAD, API]
    for name, records in RECORDS.items():
        base = RECORDS.get(BASES.get(name, ""), ())
        parts.append(typed_dict(name, records, settings_of(*base), EXAMPLES.get(name, "")))
    return "".join(parts)


def stubs() -> Mapping[Path, str]:
    """The files and what they should hold."""
    return {
        ROOT / "inference/generation/keywords.pyi": generation(),
        ROOT / "api/options.pyi": api(),
    }


if __name__ == "__main__":
    for path, source in stubs().items():
        path.write_text(source, "utf-8")
