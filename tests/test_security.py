"""What SECURITY.md promises and no other test shows."""

import hmac
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live

import malmoi
from malmoi.checkpoint import Checkpoint, write
from malmoi.infer import load
from malmoi.model import Network, initialise, preset
from malmoi.serve.settings import ServeConfig
from malmoi.tokenizer import train

ROOT = Path(__file__).parents[1]
SIZES = dict(context=32, width=16, depth=1, heads=2, dropout=0.0, attention_dropout=0.0)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    tokenizer = train(["the law of the people"] * 9, kind="byte-bpe", vocab=270)
    network = initialise(Network(preset("gpt2-small", vocab=tokenizer.vocab_size, **SIZES), {"lm": 0}), 0)
    write(Checkpoint(network, tokenizer), folder)
    return folder


def test_the_key_is_compared_in_constant_time(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def spy(given: bytes, key: bytes) -> bool:
        compared.append(given)
        return hmac.compare_digest(given, key)

    monkeypatch.setattr("malmoi.serve.guard.compare_digest", spy)
    with Live({"gpt": load(gpt, device="cpu")}, api_key="right") as server, httpx.Client(base_url=server.url) as client:
        for key, status in (("wrong", 401), ("right", 200)):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status
    assert compared == [b"Bearer wrong", b"Bearer right"]


def test_the_server_listens_on_loopback_unless_told() -> None:
    assert ServeConfig().host == "127.0.0.1"
    assert ServeConfig().local


def test_no_connection_is_made_for_a_model_on_this_disk(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, lambda self, *address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **options: asked.append(host))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model = malmoi.load(gpt)
    model.generate("the law", max_tokens=2)
    model.score("the people")
    assert asked == []


def test_every_installed_package_is_pinned_by_its_checksum() -> None:
    """torch aside, which comes as another build on every kind of machine."""
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    packages = re.split(r"\n(?=[a-z0-9])", lock[lock.index("\n") + 1 :])
    pins = dict(re.match(r"([a-z0-9.-]+)(?:\[.*?\])?==([^ ]+)", package).groups() for package in packages if "==" in package)  # type: ignore[union-attr]
    assert all("--hash=sha256:" in package for package in packages if "==" in package)
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    wanted = dict(re.findall(r"^([a-z0-9.-]+)(?:\[.*?\])?==([^ \n]+)", constraints, re.MULTILINE))
    left_out = {name for name in wanted if name == "torch" or name.startswith(("nvidia-", "cuda-", "triton"))}
    assert pins == {name: version for name, version in wanted.items() if name not in left_out}


@pytest.mark.parametrize("name", ["requirements.lock", "constraints.txt", "pyproject.toml", "Makefile"])
def test_no_registry_is_named(name: str) -> None:
    assert not re.search(r"https?://|--(extra-)?index-url|find-links", (ROOT / name).read_text("utf-8"))


def test_the_tests_that_security_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text("utf-8"))
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text("utf-8"), f"{file}::{test}"
