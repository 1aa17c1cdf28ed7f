"""The bounds in pyproject.toml are promises: the oldest and the newest versions they allow pass.

`PYTHON=python3.12 pytest -m heavy tests/test_versions.py` tries another Python.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(7200)]
ROOT = Path(__file__).parents[1]
PYTHON = shutil.which(os.environ.get("PYTHON", sys.executable))
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
TESTS = (
    "tests/cli",
    "tests/test_public.py",
    "tests/system/test_disk.py",
    "tests/system/test_machine.py",
    "tests/system/test_platforms.py",
    "tests/training/test_pace.py",
    "tests/finetuning/test_averaging.py",
    "tests/inference/test_inference_machines.py",
)


def done(command: list[object], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    own = {**os.environ, **variables}
    return subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_the_command_line_and_the_public_names(resolution: str, tmp_path: Path) -> None:
    if shutil.which("uv") is None:
        pytest.skip("uv, which resolves the versions, is not installed")
    compiled = ["uv", "pip", "compile", "--quiet", "--python", PYTHON, "--resolution", resolution]
    project = ["--extra", "serve", ROOT / "pyproject.toml", "--output-file", "versions.txt"]
    if done([*compiled, *project], tmp_path).returncode:
        pytest.skip("there is no package index to ask")
    assert done([PYTHON, "-m", "venv", ".venv"], tmp_path).returncode == 0
    installed = done([ROOT / "tools/install", "--requirement", "versions.txt", *TOOLS], tmp_path)
    assert installed.returncode == 0, installed.stderr
    # an old library may warn of a new one that it uses
    quiet = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
    tests = [tmp_path / ".venv/bin/python", "-m", "pytest", *quiet, *TESTS]
    passed = done(tests, ROOT, PYTHONPATH=str(ROOT / "src"))
    assert passed.returncode == 0, passed.stdout
