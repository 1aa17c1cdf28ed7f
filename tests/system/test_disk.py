"""Files are wholly there or not, and folders have one writer."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from malmoi.errors import MalmoiError, UsageError
from malmoi.system.files import (
    LOCK_NAME,
    DiskError,
    atomic_write,
    explain_disk_errors,
    folder_lock,
    output_folder,
    scratch_folder,
    write_json,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"글": 1})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, object())
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half", object()])  # type: ignore[list-item]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_has_one_writer_who_removes_leftovers(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, living = (tmp_path / f".a.{process}.tmp" for process in (child.pid, os.getpid()))
    dead.touch()
    living.touch()
    with folder_lock(tmp_path):
        assert (dead.exists(), living.exists()) == (False, True)
        with pytest.raises(MalmoiError, match="Another process is using"), folder_lock(tmp_path):
            pass
    with folder_lock(tmp_path), pytest.raises(UsageError, match="is a file"), folder_lock(living):
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, ""), "The disk is full: a could not be written"),
        (OSError(errno.EDQUOT, ""), "quota is used up: a could"),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "The disk is full: a could",
        ),
        (OSError("4640 requested and 360 written"), "The disk is full: a could"),
        (OSError(errno.EIO, ""), "I/O error: a could not be read or written"),
    ],
)
def test_disk_errors_are_one_sentence(error: Exception, said: str) -> None:
    with pytest.raises(DiskError, match=said), explain_disk_errors("a"):
        raise error


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(FileNotFoundError), explain_disk_errors("a"):
        raise FileNotFoundError
    with pytest.raises(MalmoiError, match=r"^4 requested and 3 written$"), explain_disk_errors("a"):
        raise MalmoiError("4 requested and 3 written")


def test_a_folder_where_a_file_belongs_is_a_sentence(tmp_path: Path) -> None:
    for name in (LOCK_NAME, f".a.{os.getpid()}.tmp"):
        (tmp_path / name).mkdir()
    with (
        pytest.raises(UsageError, match=r"\.lock is a folder where a file should be written"),
        folder_lock(tmp_path),
    ):
        pass
    (tmp_path / LOCK_NAME).rmdir()
    with pytest.raises(UsageError, match=r"\.tmp is a folder"):
        write_json(tmp_path / "a", {})
    with folder_lock(tmp_path):
        assert (tmp_path / f".a.{os.getpid()}.tmp").is_dir()


def fill_half(folder: Path) -> None:
    with output_folder(folder):
        write_json(folder / "a.json", {})
        raise OSError(errno.ENOSPC, "")


def test_a_new_folder_goes_if_it_cannot_be_filled_and_an_old_one_stays(tmp_path: Path) -> None:
    for folder, stays in ((tmp_path / "new", False), (tmp_path, True)):
        with pytest.raises(DiskError):
            fill_half(folder)
        assert (folder / "a.json").exists() == stays


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    (tmp_path / f".tokenizer.json.{child.pid}.tmp").touch()
    (tmp_path / f".scratch-x.{child.pid}.tmp").mkdir()
    theirs = [tmp_path / ".x.tmp", tmp_path / f".x.{child.pid}.tmp"]
    for folder in theirs:
        folder.mkdir()
    with output_folder(tmp_path), scratch_folder(tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(theirs)
