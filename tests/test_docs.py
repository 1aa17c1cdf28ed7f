"""The site builds without a warning, fetches nothing, and documents every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import malmoi
from malmoi.cli.app import build_app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pytest.importorskip("mkdocs", reason="what builds the pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_is_documented(site: Path) -> None:
    pages = "".join(page.read_text("utf-8") for page in (site / "api").rglob("*.html"))
    documented = set(re.findall(r'<h2 id="malmoi\.(\w+)"', pages))
    assert documented == set(malmoi.__all__) - {"__version__"}


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        assert fetched == [], page


def test_every_command_has_a_page_of_its_own_help(site: Path) -> None:
    app: Any = get_command(build_app())
    for name in app.commands:
        page = (site / "commands" / name / "index.html").read_text("utf-8")
        assert f"malmoi {name}" in page
    assert "--minutes" in (site / "commands" / "pretrain" / "index.html").read_text("utf-8")
