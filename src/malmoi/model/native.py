"""Compiled code, built once into a cache that only its owner can write and verified on every load.

A library is stored as `<name>-<sha256 of its bytes>.so`, so that a single rename publishes the file
together with its checksum.
"""

import ctypes
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path


def load_library(name: str, build: Callable[[Path], object]) -> ctypes.CDLL:
    """Loads the library `name` from the cache, or builds it with `build(path)`.

    Exceptions from `build` propagate. If another user could write to the cache, the library is
    built in a private temporary folder instead.
    """
    folder = cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="malmoi-") as own:  # created with mode 700
            built = Path(own) / f"{name}.so"
            build(built)
            return ctypes.CDLL(str(built))  # the mapping outlives the file
    return ctypes.CDLL(str(_cached(folder, name) or _build(folder, name, build)))


def cache_folder() -> Path | None:
    """The cache folder, mode 700; None if another user could change its contents."""
    parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent.resolve() / "malmoi" / "kernels"
        for own in (folder.parent, folder):
            own.mkdir(mode=0o700, exist_ok=True)
        if not all(map(_is_private, (folder, *folder.parents))):
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    return folder


def _is_private(folder: Path) -> bool:
    """Whether the folder is no symlink and only this user and root can replace files in it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        return False
    if found.st_mode & stat.S_ISVTX:  # sticky, as /tmp: others may add files but not replace ours
        return True
    strangers = stat.S_IWOTH | (0 if found.st_gid in (os.getegid(), 0) else stat.S_IWGRP)
    return not found.st_mode & strangers


def _cached(folder: Path, name: str) -> Path | None:
    """A cached library whose checksum still matches; a file that has changed is deleted."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        found = path.lstat()
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if ours and not found.st_mode & 0o022 and path.stem == f"{name}-{_checksum(path)}":
            return path
        path.unlink(missing_ok=True)
    return None


def _build(folder: Path, name: str, build: Callable[[Path], object]) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / f"{name}.so"
        build(built)
        built.chmod(0o500)
        return built.replace(folder / f"{name}-{_checksum(built)}.so")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
