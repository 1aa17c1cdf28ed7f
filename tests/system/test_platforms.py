"""Windows and macOS as far as Linux can show: what only Linux has is missing, and the main paths
run.
"""

import ast
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import malmoi
from malmoi.corpus.steps import Execution
from malmoi.errors import MalmoiError
from malmoi.system import confined_worker, files, machine
from malmoi.system.files import LOCK_NAME, folder_lock, write_json

LACKING = {"fcntl", "resource", "pwd", "grp", "termios", "select"}  # modules that Windows has not
WITHOUT_RESOURCE = """
import runpy, sys
sys.modules["resource"] = None
sys.argv = [{worker!r}, "1000000000", "60"]
runpy.run_path({worker!r}, run_name="__main__")
"""
HOLD = """
import sys; from pathlib import Path; from malmoi.system.files import folder_lock
with folder_lock(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True); sys.stdin.read()
"""


def test_all_of_malmoi_imports_without_what_windows_lacks() -> None:
    """What a function imports, it may import on Linux alone."""
    sources = list(Path(malmoi.__file__).parent.rglob("*.py"))
    assert len(sources) > 300
    for source in sources:
        for node in ast.parse(source.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                assert node.module not in LACKING, source
            elif isinstance(node, ast.Import):
                assert not LACKING.intersection(alias.name for alias in node.names), source


def test_a_template_is_rendered_where_memory_cannot_be_bounded() -> None:
    pytest.importorskip("jinja2", reason="templates need jinja2")
    question = {"do": "render", "template": "{{ x }}!", "values": {"x": "글"}, "limit": 9}
    script = WITHOUT_RESOURCE.format(worker=confined_worker.__file__)
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(question), capture_output=True, text=True
    )
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert (ready["found"], answer["found"]) == ("ready", "글!")


def test_windows_has_no_kernels_and_flushes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.sys, "platform", "win32")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sysconf")
    described = machine.detect.__wrapped__()
    assert described.compiler is None
    assert described.memory > 0
    assert described.cores > 0
    (tmp_path / "a").write_text("a")
    for path in (tmp_path, tmp_path / "a"):
        files.flush_to_disk(path)


def test_workers_are_spawned_where_there_is_no_forkserver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    jobs = [(write_json, (tmp_path / f"{i}.json", i)) for i in range(4)]
    with Execution(2).pool() as pool:
        pool.run(jobs, "write", 4)
    assert [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("first", ["whole", "shared"])
@pytest.mark.parametrize("second", ["whole", "shared"])
def test_processes_share_a_folder_only_if_both_said_so(
    tmp_path: Path, first: str, second: str
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), first]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        if first == second == "shared":
            with folder_lock(tmp_path, shared=True):
                pass
        else:
            with (
                pytest.raises(MalmoiError, match="Another process is using"),
                folder_lock(tmp_path, shared=second == "shared"),
            ):
                pass
        child.communicate("")
    with folder_lock(tmp_path):  # nobody is left
        assert all(path.name.endswith(LOCK_NAME) for path in tmp_path.iterdir())
