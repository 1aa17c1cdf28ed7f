"""Compiled code is loaded only as it was built, out of a folder that only its owner can write."""

import shutil
from pathlib import Path

import pytest
import safetensors._safetensors_rust as compiled

from malmoi.system.native import cache_folder, load_library


class Compiler:
    """Copies a library that is there, and counts how often it was asked."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, path: Path) -> None:
        self.runs += 1
        shutil.copyfile(compiled.__file__, path)


@pytest.fixture
def cache(tmp_path: Path, cache_home: Path) -> Path:
    tmp_path.chmod(0o700)
    return cache_home


def test_a_library_is_built_once_for_its_owner_alone(cache: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        load_library("row", compiler)
    assert compiler.runs == 1
    (built,) = (cache / "malmoi" / "kernels").iterdir()
    assert built.stat().st_mode & 0o077 == 0
    assert built.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("how", ["changed", "cut", "writable", "link"])
def test_a_library_that_is_not_as_it_was_built_is_built_again(cache: Path, how: str) -> None:
    compiler = Compiler()
    load_library("row", compiler)
    (built,) = (cache / "malmoi" / "kernels").iterdir()
    whole = built.read_bytes()
    built.chmod(0o700)
    if how == "link":
        built.rename(cache / "elsewhere")
        built.symlink_to(cache / "elsewhere")
    elif how == "writable":
        built.chmod(0o777)
    else:
        # a new file: the old one is mapped into this process
        built.unlink()
        built.write_bytes(
            whole[:-100] + bytes(100) if how == "changed" else whole[: len(whole) // 2]
        )
    load_library("row", compiler)
    assert compiler.runs == 2
    assert [path.read_bytes() for path in built.parent.iterdir()] == [whole]


def test_a_cache_that_others_can_write_is_not_used(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    compiler = Compiler()
    load_library("row", compiler)
    assert cache_folder("kernels") is None
    assert compiler.runs == 1
    assert not list((cache / "malmoi" / "kernels").iterdir())


def test_a_cache_that_is_a_link_is_not_used(cache: Path, tmp_path: Path) -> None:
    (cache / "malmoi").mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (cache / "malmoi" / "kernels").symlink_to(tmp_path / "theirs")
    load_library("row", Compiler())
    assert not list((tmp_path / "theirs").iterdir())
