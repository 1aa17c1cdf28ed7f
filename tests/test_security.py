"""What SECURITY.md promises and no other test shows."""

import hmac
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

import malmoi
from conftest import environment
from live_server import Live
from malmoi.inference import load
from malmoi.server.config import ServeConfig
from tiny_models import tiny_gpt

ROOT = Path(__file__).parents[1]
SIZES = dict(context=32, width=16, depth=1, heads=2, dropout=0.0, attention_dropout=0.0)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    return tiny_gpt(folder, ["the law of the people"] * 9, 270, **SIZES)


def test_the_key_is_compared_in_constant_time(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def spy(given: bytes, key: bytes) -> bool:
        compared.append(given)
        return hmac.compare_digest(given, key)

    monkeypatch.setattr("malmoi.server.middleware.compare_digest", spy)
    with (
        Live({"gpt": load(gpt, device="cpu")}, api_key="right") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for key, status in (("wrong", 401), ("right", 200)):
            assert (
                client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
                == status
            )
    assert compared == [b"Bearer wrong", b"Bearer right"]


def test_the_server_listens_on_loopback_by_default() -> None:
    assert ServeConfig().host == "127.0.0.1"
    assert ServeConfig().local


def test_without_a_key_only_this_machine_is_answered(gpt: Path) -> None:
    with (
        Live({"gpt": load(gpt, device="cpu")}) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"Host": "page.example"}).status_code == 403


def test_no_connection_is_made_for_a_model_on_this_disk(
    gpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, lambda self, *address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **options: asked.append(host))
    with environment(HF_HUB_OFFLINE=None):
        model = malmoi.load(gpt)
    model.generate("the law", max_new_tokens=2)
    model.score("the people", " of law")
    assert asked == []


def pins(name: str) -> dict[str, str]:
    """Each package of a list, and what the list says of it: version, marker, checksums."""
    packages = re.split(r"\n(?=[a-z0-9])", (ROOT / name).read_text("utf-8"))[1:]  # after the remark
    return {package.partition("==")[0]: package.partition("==")[2] for package in packages}


def test_every_package_is_pinned_and_installed_by_its_checksum() -> None:
    """torch aside, and the CUDA libraries it may bring: it is another build on every kind of
    machine.
    """
    core, dev = pins("requirements.lock"), pins("requirements-dev.lock")
    locked = core | dev
    # what the demo needs on some systems only, the tests may need on all
    assert all(" ; " in core[name].partition("\n")[0] for name in core.keys() & dev.keys())
    assert [name for name, rest in locked.items() if "--hash=sha256:" not in rest] == []
    assert [name for name in locked if re.match("torch$|triton$|nvidia-|cuda-", name)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert names(project["dependencies"]) | names(extras["serve"]) <= core.keys() | {"torch"}
    assert names(extras["dev"]) <= locked.keys() | {"malmoi"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^BY_HASH := .* --no-deps .*--require-hashes", makefile, re.MULTILINE)
    assert re.search(r"^TORCH := torch==[\d.]+$", makefile, re.MULTILINE)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", line)[0].replace("_", "-") for line in requirements}


@pytest.mark.parametrize(
    "name", ["requirements.lock", "requirements-dev.lock", "pyproject.toml", "Makefile"]
)
def test_no_registry_is_named(name: str) -> None:
    assert not re.search(
        r"https?://|--(extra-)?index-url|find-links", (ROOT / name).read_text("utf-8")
    )


def test_the_tests_that_security_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text("utf-8"))
    assert named
    for file, test in named:
        found = next((ROOT / "tests").rglob(file))
        assert f"def {test}(" in found.read_text("utf-8"), f"{file}::{test}"
