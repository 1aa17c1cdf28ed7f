"""What nobody waits for stops; requests take turns at a model; nobody asks for more than their
share.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from live_server import Live, bert_with, gpt_folder, wait_until
from malmoi.inference import Model, load
from malmoi.inference.engine import Engine
from malmoi.server.config import ServeConfig
from malmoi.server.executor import ModelExecutor, checkpoint
from malmoi.tokenizer import train_tokenizer

torch.set_num_threads(1)
TEXT = "the state of the union is strong"
ROWS = "\n".join(json.dumps({"text": f"row {i}", "label": "ab"[i % 2]}) for i in range(6))
LABELS = ["yes", "no", "perhaps", "never"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_folder(tmp_path_factory.mktemp("turns") / "gpt")


class Held:
    """Counts the layers that requests compute, by thread; the first of them waits until it is
    let go.
    """

    def __init__(self, model: Model) -> None:
        self.threads: list[str] = []
        self.reached, self.go = threading.Event(), threading.Event()
        for block in model.network.trunk.blocks:
            block.register_forward_pre_hook(self._see)

    def _see(self, *_: Any) -> None:
        name = threading.current_thread().name
        if name == "malmoi-engine":
            return
        self.threads.append(name)
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(60)


class Serving:
    """A server of one model whose first request stops in its first layer."""

    def __init__(self, live: Live, held: Held) -> None:
        self.live, self.held = live, held
        self.desk: ModelExecutor = live.app.state.work["gpt"]

    @property
    def inside(self) -> int:
        return int(self.live.app.state.work["gpt"].pending)

    def ask(self, path: str, body: dict[str, Any], **headers: str) -> socket.socket:
        """Sends a request and does not wait for its answer."""
        sent = json.dumps(body).encode()
        head = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Content-Length": str(len(sent)),
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        one = socket.create_connection(self.live.socket.getsockname())
        one.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + sent)
        return one

    def ends(self) -> bool:
        return wait_until(lambda: self.desk.running is None and not self.desk.begun)


@pytest.fixture
def serving(folder: Path) -> Iterator[Serving]:
    model = load(folder, device="cpu")
    held = Held(model)
    with Live({"gpt": model}, slots=2, max_read_tokens=2000, time_slice=0) as live:
        yield Serving(live, held)
        held.go.set()


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/studio/lens", {"text": TEXT}),
    ("/studio/attention", {"text": TEXT}),
    ("/studio/embeddings", {"texts": [TEXT, "a small model"]}),
    ("/studio/beside", {"text": TEXT, "place": 2, "gpt": "gpt"}),
    ("/studio/shots", {"task": "own", "lines": ROWS, "shots": 2}),
    ("/v1/classify", {"text": [TEXT, "no"], "labels": LABELS}),
    ("/v1/score", {"context": TEXT, "continuations": [" a", " b"]}),
    ("/v1/embeddings", {"input": [TEXT, "a"]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_cancelled_work_is_not_computed(serving: Serving, path: str, body: dict[str, Any]) -> None:
    """One is in its first layer and four wait when their clients go: that layer was the last."""
    first = serving.ask(path, body)
    assert serving.held.reached.wait(30)
    others = [serving.ask(path, body) for _ in range(4)]
    assert wait_until(lambda: serving.inside == 5)
    for one in (first, *others):
        one.close()
    # those that waited are dropped before anything is computed
    assert wait_until(lambda: serving.inside == 0)
    assert serving.desk.waiting == {}
    serving.held.go.set()
    assert serving.ends()
    assert len(serving.held.threads) == 1


def test_timed_out_work_stops(folder: Path) -> None:
    model = load(folder, device="cpu")
    held = Held(model)
    with Live({"gpt": model}, slots=2, timeout=0.2) as live:
        answer = httpx.post(f"{live.url}/studio/lens", json={"text": TEXT}, timeout=60)
        held.go.set()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert wait_until(lambda: not live.app.state.work["gpt"].begun)
    assert len(held.threads) == 1


def test_an_immediate_stop_answers_paused_work(serving: Serving) -> None:
    with ThreadPoolExecutor(2) as pool:
        ask = lambda: httpx.post(f"{serving.live.url}/studio/lens", json={"text": TEXT}, timeout=60)  # noqa: E731
        asked = [pool.submit(ask) for _ in range(2)]
        assert serving.held.reached.wait(30)
        assert wait_until(lambda: serving.inside == 2)
        serving.live.server.stop(now=True)
        assert [one.result().json()["error"]["code"] for one in asked] == ["stopping", "stopping"]
        serving.held.go.set()
    assert serving.ends()


# ------------------------------------------------------------------ turns


def test_a_short_request_does_not_wait_for_a_long_one(serving: Serving) -> None:
    url = serving.live.url
    with ThreadPoolExecutor(2) as pool:
        body = {"text": [TEXT] * 4, "labels": LABELS}
        long = pool.submit(httpx.post, f"{url}/v1/classify", json=body, timeout=60)
        assert serving.held.reached.wait(30)
        short = pool.submit(httpx.post, f"{url}/studio/lens", json={"text": TEXT}, timeout=60)
        assert wait_until(lambda: serving.inside == 2)
        serving.held.go.set()
        assert short.result().status_code == long.result().status_code == 200
    layers = serving.held.threads
    mine = [at for at, name in enumerate(layers) if name != layers[0]]
    assert len(mine) == 3
    assert mine[-1] < 10 < len(layers)  # in turn with the long one, which ends long after it


def test_answers_do_not_depend_on_other_requests(serving: Serving) -> None:
    serving.held.go.set()
    texts = [TEXT[: 6 + 2 * i] for i in range(10)]

    def ask(text: str) -> Any:
        body = {"text": text, "labels": LABELS}
        return httpx.post(f"{serving.live.url}/v1/classify", json=body, timeout=60).json()["data"][
            0
        ]["scores"]

    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(ask, texts))
    model = serving.live.registry.get("gpt").model
    assert found == [pytest.approx(model.classify(text, LABELS).scores, abs=1e-4) for text in texts]


def test_clients_take_turns_then_their_requests_do() -> None:
    turns: list[str] = []
    go = threading.Event()

    def task(name: str) -> str:
        assert go.wait(60)
        for _ in range(3):
            turns.append(name)
            checkpoint()
        return name

    async def all_of_them() -> list[str]:
        desk = ModelExecutor("test", nn.ModuleList(), ServeConfig(time_slice=0))
        asked = [
            asyncio.ensure_future(desk.run(name[0], lambda name=name: task(name))) for name in order
        ]  # type: ignore[misc]
        await asyncio.sleep(0)  # all have arrived before the first continues
        go.set()
        return await asyncio.gather(*asked)

    order = ["a1", "a2", "a3", "b1"]
    assert asyncio.run(all_of_them()) == order
    assert [name[0] for name in turns[1:7]] == ["a", "b"] * 3  # after a1, which came first
    assert [name for name in turns if name != "b1"][:4] == ["a1", "a2", "a3", "a1"]


def test_generation_continues_while_others_are_read(serving: Serving) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"text": [TEXT] * 4, "labels": LABELS}
        long = pool.submit(httpx.post, f"{serving.live.url}/v1/classify", json=body, timeout=60)
        assert serving.held.reached.wait(30)
        asked = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}
        written = httpx.post(f"{serving.live.url}/v1/completions", json=asked, timeout=60)
        assert written.status_code == 200
        assert not long.done()
        serving.held.go.set()
        assert long.result().status_code == 200


def test_slots_are_shared_between_clients_and_their_requests(folder: Path) -> None:
    """A client with six jobs of one request and one of another; a second client with one job."""
    first: dict[str, int] = {}
    with Engine(load(folder, device="cpu"), slots=2) as engine:

        def submit(name: str, *owner: str) -> Any:
            hear = lambda piece: first.setdefault(name, len(first))  # noqa: E731
            return engine.submit(engine.job(TEXT, max_new_tokens=3), hear, owner=owner)

        with engine.changed:  # the engine begins when all have come
            for i in range(6):
                submit(f"a{i}", "a", "one")
            submit("a6", "a", "two")
            submit("b", "b", "one")
        assert wait_until(lambda: engine.stats().finished == 8)
    order = sorted(first, key=first.__getitem__)
    assert set(order[:2]) == {"a0", "b"}
    assert set(order[2:4]) == {"a1", "a6"}


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/classify", {"text": [TEXT] * 20, "labels": LABELS}),
        ("/v1/embeddings", {"input": [f"{TEXT} {TEXT}"] * 200}),
        ("/v1/score", {"context": f"{TEXT} {TEXT}", "continuations": [" a"] * 200}),
    ],
)
def test_one_request_reads_no_more_than_the_limit(
    serving: Serving, path: str, body: dict[str, Any]
) -> None:
    serving.held.go.set()
    answer = httpx.post(f"{serving.live.url}{path}", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "too_many_tokens")
    assert "limit of 2,000 per request" in error["message"]
    assert serving.held.threads == []


def test_a_bert_reads_a_text_with_the_words_of_every_label() -> None:
    pieces = train_tokenizer([TEXT] * 4, kind="wordpiece", vocab=120)
    model = bert_with(pieces, mlm=0)
    with Live({"bert": model}, max_read_tokens=100) as live:
        body = {"text": TEXT, "labels": ["union " * 12, "strong " * 12]}
        answer = httpx.post(f"{live.url}/v1/classify", json=body, timeout=60)
        assert "× 2 passes" in answer.json()["error"]["message"]
        fewer = httpx.post(
            f"{live.url}/v1/classify",
            json={"text": TEXT, "labels": ["union", "strong"]},
            timeout=60,
        )
        assert fewer.status_code == 200
