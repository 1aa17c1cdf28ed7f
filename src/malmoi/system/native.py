"""Compiled code, built once into a cache that only its owner can write and verified on every load.

A library is stored as `<name>-<sha256 of its bytes>.so`, so that a single rename publishes the file
together with its checksum.
"""

import atexit
import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

from malmoi.system.machine import Machine


def compiled_library(source: str, flags: tuple[str, ...], machine: Machine) -> ctypes.CDLL:
    """Compiles C for this machine, or loads it from the cache.

    Raises `OSError` or `subprocess.SubprocessError` where that fails.
    """
    key = f"{source}{flags}{machine.compiler}{sorted(machine.features)}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return load_library(name, partial(_compile, source, machine.compiler or "c++", flags))


def _compile(source: str, compiler: str, flags: tuple[str, ...], built: Path) -> None:
    """Compiles without linking OpenMP, so that the code uses the library torch has loaded.

    A second OpenMP would keep another thread per core. Apple's compiler has no OpenMP, so there
    the code runs on one core.
    """
    text = built.with_suffix(".c")
    half = built.with_suffix(".o")
    text.write_text(source, "utf-8")
    run = partial(subprocess.run, check=True, capture_output=True, timeout=60)
    common = [compiler, "-x", "c", "-fPIC", "-c", str(text), "-o", str(half)]
    try:
        run([*common, *flags])
    except subprocess.CalledProcessError:
        if "-fopenmp" not in flags:
            raise
        run([*common, *(flag for flag in flags if flag != "-fopenmp")])
    run([compiler, "-shared", str(half), "-o", str(built), "-lm"])


@cache
def native_functions(
    package: str, file: str, names: tuple[tuple[str, int], ...], machine: Machine
) -> tuple[Callable[..., int], ...] | None:
    """Functions of a package's C file by name and number of arguments; None without a compiler.

    Arguments are addresses and 64-bit integers, what they return is one of the latter.
    """
    if machine.compiler is None:
        return None
    source = files(package).joinpath(file).read_text("utf-8")
    native = ("-march=native",) if machine.architecture == "x86_64" else ()
    try:
        library = compiled_library(source, ("-O3", *native), machine)
        found = tuple(library[name] for name, _ in names)
    except (OSError, subprocess.SubprocessError):
        return None
    for function, (_, count) in zip(found, names, strict=True):
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p] * count
    return found


def load_library(name: str, build: Callable[[Path], object]) -> ctypes.CDLL:
    """Loads the library `name` from the cache, or builds it with `build(path)`.

    Exceptions from `build` propagate. If another user could write to the cache, the library is
    built in a private temporary folder instead.
    """
    folder = cache_folder("kernels")
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="malmoi-") as own:  # created with mode 700
            built = Path(own) / f"{name}.so"
            build(built)
            return ctypes.CDLL(str(built))  # the mapping outlives the file
    return ctypes.CDLL(str(_cached(folder, name) or _build(folder, name, build)))


def cache_folder(name: str) -> Path | None:
    """A folder of the user's cache, mode 700; None if another user could change its contents."""
    parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent.resolve() / "malmoi" / name
        for own in (folder.parent, folder):
            own.mkdir(mode=0o700, exist_ok=True)
        if not all(map(_is_private, (folder, *folder.parents))):
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    return folder


def cache_or_temporary(name: str) -> Path:
    """A folder of the cache; of this process, where no cache is this user's alone."""
    return cache_folder(name) or temporary_folder()


@cache
def temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="malmoi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


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
