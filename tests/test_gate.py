"""The gate's own check, and that scripts outside the package import what is there."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = "[tool.malmoi]\nceiling = 9\ncomplex = 0\n"
FINE = {"__init__.py": "", "model/__init__.py": "", "model/a.py": "import malmoi.model.b\n"}
WRONG = {
    "a circle": ({"model/b.py": "from malmoi.model import a\n"}, "malmoi.model.a, malmoi.model.b"),
    "too complex": (
        {"model/b.py": f"def f(a):\n    return {'a and ' * 10}a\n"},
        "malmoi.model.b.f 11",
    ),
    "too long": ({"model/b.py": "x = 1\n" * 9}, "more than its ceiling of 9"),
}


def check(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (root / "pyproject.toml").write_text(PROJECT)
    for name, text in files.items():
        path = root / "src/malmoi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(ROOT / "tools/count.py"), str(root), "--check"]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    inner = {"model/b.py": "def f():\n    from malmoi.model import a\n"}
    assert check(tmp_path, FINE | inner).returncode == 0


@pytest.mark.parametrize("what", WRONG)
def test_every_violation_is_named(what: str, tmp_path: Path) -> None:
    files, said = WRONG[what]
    done = check(tmp_path, FINE | files)
    assert done.returncode == 1
    assert said in done.stderr


SCRIPTS = sorted(path for folder in ("bench", "tools") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_of_ours_is_there(path: Path) -> None:
    """Type checking leaves these files out, and most of their imports are inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "malmoi":
            module = import_module(str(node.module))
            missing = [one.name for one in node.names if not hasattr(module, one.name)]
            assert not missing, f"{node.module} has no {', '.join(missing)}"
