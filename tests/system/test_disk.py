"""Files are wholly there or not, and folders have one writer."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from malmoi.checkpoint.weights import write_tensors
from malmoi.errors import MalmoiError, UsageError
from malmoi.system.files import (
    LOCK_NAME,
    DiskError,
    atomic_write,
    explain_disk_errors,
    folder_lock,
    output_folder,
    require_free,
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
    for name in (LOCK_NAME, "a"):
        (tmp_path / name).mkdir()
    with (
        pytest.raises(UsageError, match=r"\.lock is a folder where a file should be written"),
        folder_lock(tmp_path),
    ):
        pass
    (tmp_path / LOCK_NAME).rmdir()
    with pytest.raises(UsageError, match=r"a is a folder where a file"):
        write_json(tmp_path / "a", {})


def fill_half(folder: Path) -> None:
    with output_folder(folder) as place:
        write_json(place / "a.json", {})
        raise OSError(errno.ENOSPC, "")


def test_a_new_folder_goes_if_it_cannot_be_filled_and_an_old_one_stays(tmp_path: Path) -> None:
    old, empty, new = (tmp_path / name for name in ("old", "empty", "new"))
    old.mkdir()
    (old / "mine").touch()
    empty.mkdir()
    for folder, left in ((old, ["a.json", "mine"]), (empty, []), (new, None)):
        with pytest.raises(DiskError):
            fill_half(folder)
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else None
        assert names == left


KILLED_WHILE_WRITING = """
import os, pathlib, signal, sys
from malmoi.system import files

os.umask(0o027)
out = pathlib.Path(sys.argv[1])

def write_and_die(beside):
    beside.with_name(".tmpABCDEF").write_bytes(b"half of a library's file")
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "file":
    files.replace_file(out / "model.safetensors", write_and_die)
else:
    with files.output_folder(out) as place:
        files.write_json(place / "a.json", {})
        (place / "inner").mkdir()
        if sys.argv[2] == "moving":
            os.replace(place / "a.json", out / "a.json")
            os.replace(place / "inner", out / "inner")
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["file", "folder", "moving"])
def test_a_killed_writer_leaves_nothing_that_the_next_one_does_not_remove(
    moment: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if moment == "file":
        out.mkdir()
    died = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(out), moment])
    assert died.returncode == -signal.SIGKILL
    assert [path.name for path in out.glob(".*.tmp")] != []
    require_free(out, overwrite=False)  # the same command may simply be repeated
    with output_folder(out) as place:
        write_json(place / "a.json", {"whole": 1})
        (place / "inner").mkdir()
    assert sorted(path.name for path in out.iterdir()) == ["a.json", "inner"]
    with pytest.raises(UsageError, match="already exists"):
        require_free(out, overwrite=False)


def test_a_killed_process_with_the_number_of_this_one_left_nothing_of_ours(tmp_path: Path) -> None:
    """As in containers, whose first process is always the first."""
    with scratch_folder(tmp_path) as ours:
        twin = ours.with_name(ours.name.replace(".scratch-", ".scratch-a", 1))
        twin.mkdir()
        write_json(tmp_path / "a.json", {})
        assert ours.exists()
        assert not twin.exists()


def test_no_file_of_another_machine_that_shares_the_disk_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    theirs = tmp_path / f".scratch-x.00000000-{child.pid}.tmp"
    theirs.mkdir()
    write_json(tmp_path / "a.json", {})
    assert theirs.exists()
    with folder_lock(tmp_path):  # nobody else may write here
        assert not theirs.exists()


def test_files_have_the_mode_of_the_umask_whoever_writes_them(tmp_path: Path) -> None:
    before = os.umask(0o026)
    try:
        write_json(tmp_path / "a.json", {})
        write_tensors(tmp_path / "model.safetensors", {"x": torch.zeros(2)}, {})
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == {"a.json": "0o640", "model.safetensors": "0o640"}


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
