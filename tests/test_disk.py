"""Files are wholly there or not, and folders have one writer."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from malmoi.disk import alone, full_disk_told, write_json, written
from malmoi.errors import MalmoiError, UsageError


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"글": 1})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, object())
    with pytest.raises(TypeError), written(path) as file:
        file.writelines([b"half", object()])  # type: ignore[list-item]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_has_one_writer_who_clears_up_after_the_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, living = (tmp_path / f".a.{process}.tmp" for process in (child.pid, os.getpid()))
    dead.touch()
    living.touch()
    with alone(tmp_path):
        assert (dead.exists(), living.exists()) == (False, True)
        with pytest.raises(MalmoiError, match="Another process is at work"), alone(tmp_path):
            pass
    with alone(tmp_path), pytest.raises(UsageError, match="is a file"), alone(living):
        pass


def test_a_full_disk_is_a_sentence_and_other_errors_stay() -> None:
    with (
        pytest.raises(MalmoiError, match="The disk is full: a did not fit"),
        full_disk_told("a did not fit"),
    ):
        raise OSError(errno.ENOSPC, "")
    with pytest.raises(FileNotFoundError), full_disk_told("a"):
        raise FileNotFoundError
