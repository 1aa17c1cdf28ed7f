"""Sixty-four streams at once: no error, no growth of memory; and a stop in the middle of it tells
everyone.

    MALMOI_LOAD_ROUNDS=300 pytest -m heavy -s tests/server/test_serve_load.py -k flooding

runs the hard one for a hundred times as many requests and prints what it measured. Requests are
counted, not seconds: a slow machine takes longer and comes to the same verdict.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import monotonic
from typing import Any

import httpx
import pytest

from live_server import gpt_folder

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3600)]  # a busy machine is no hang
STREAMS = 64
ROUNDS = int(os.environ.get("MALMOI_LOAD_ROUNDS", "3"))  # streams of each client, one by one
MAX_GROWTH_MB = 32  # of memory, once the server has seen every kind of request
TEXT = "the state of the union is strong"
START = [
    sys.executable,
    "-c",
    "from malmoi.cli import main; main()",
    "serve",
    "--port",
    "0",
    "--slots",
    "32",
]


@dataclass
class Server:
    url: str
    child: Any
    said: list[str]  # on stderr

    @property
    def memory(self) -> int:
        """MB that the process holds."""
        status = Path(f"/proc/{self.child.pid}/status").read_text("utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024


@dataclass
class Outcome:
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)  # streams that began and did not end


@pytest.fixture(params=["0", "2"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    folder = gpt_folder(tmp_path / "gpt")
    child = subprocess.Popen(
        [*START, "--model", str(folder), "--workers", request.param],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert child.stderr is not None
    try:
        line = next(line for line in child.stderr if "http://" in line)
        said: list[str] = []
        threading.Thread(target=said.extend, args=[child.stderr], daemon=True).start()
        yield Server(re.findall(r"http://[\d.]+:\d+", line)[0], child, said)
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


async def ask(client: httpx.AsyncClient, url: str, seed: int, outcome: Outcome) -> bool:
    """One stream to its end; whether there is a server to ask again."""
    body = {"prompt": "the state of", "max_tokens": 40, "top_k": 50, "seed": seed, "stream": True}
    status, said = 0, []
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            status = answer.status_code
            async for line in answer.aiter_lines():
                said += [line] if line else []
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError) as error:
        if status:
            outcome.broken.append(repr(error))
        else:
            outcome.ends["not taken"] += 1
        return False
    if status == 200 and said[-1:] != ["data: [DONE]"]:
        outcome.broken.append(str(said[-1:]))
    elif status == 200:
        last = json.loads(said[-2][len("data: ") :])
        outcome.ends[last["error"]["code"] if "error" in last else "answered"] += 1
    else:
        outcome.ends[json.loads("".join(said))["error"]["code"]] += 1
    return status == 200


async def load(server: Server, rounds: int, stop: bool = False) -> Outcome:
    """Streams that end after some rounds, or, with `stop`, when the server is stopped in them."""
    outcome = Outcome()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        for i in itertools.count() if stop else range(rounds):
            if not await ask(client, server.url, number + i * STREAMS, outcome):
                return

    async def halt() -> None:
        while outcome.ends["answered"] < rounds * STREAMS:
            await asyncio.sleep(0.01)
        server.child.send_signal(signal.SIGTERM)

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(STREAMS)), *([halt()] if stop else []))
    return outcome


def test_many_streams_for_a_while(server: Server) -> None:
    asyncio.run(load(server, ROUNDS))
    before = server.memory
    outcome = asyncio.run(load(server, 4 * ROUNDS))
    assert outcome.broken == []
    assert outcome.ends == {"answered": 4 * ROUNDS * STREAMS}
    assert server.memory - before < 20
    stats = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:num_requests_running{model_name="gpt"} 0' in stats
    assert not re.search(r'malmoi_requests_total\{.*status="5', stats)


def test_a_stop_under_load_answers_everyone(server: Server) -> None:
    outcome = asyncio.run(load(server, 1, stop=True))
    assert outcome.broken == []
    assert set(outcome.ends) <= {"answered", "stopping", "not taken"}
    assert outcome.ends["answered"] >= STREAMS
    assert server.child.wait() == 143


# ------------------------------------------------------------------ clients that vanish, and one
# that hammers


@dataclass
class Trial:
    """What happened to the well-behaved, and to the server's memory."""

    url: str
    rounds: int  # of every stream
    ends: Counter[str] = field(default_factory=Counter)
    first_token: list[float] = field(default_factory=list)  # seconds
    memory: list[int] = field(default_factory=list)  # MB, after each stream

    @property
    def goes_on(self) -> bool:
        return len(self.memory) < self.rounds * STREAMS


async def stream_often(
    trial: Trial, client: httpx.AsyncClient, number: int, server: Server
) -> None:
    """Streams one after another; of every ten, one is left after a few events."""
    rng = Random(number)
    for _ in range(trial.rounds):
        seed, leaves = rng.randrange(2**31), rng.randrange(10) == 0
        body = {"prompt": TEXT, "max_tokens": 40, "top_k": 50, "seed": seed, "stream": True}
        began, said = monotonic(), []
        try:
            async with client.stream("POST", f"{trial.url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line and not said:
                        trial.first_token.append(monotonic() - began)
                    said += [line] if line else []
                    if leaves and len(said) > seed % 8:
                        break
        except httpx.TransportError as error:
            trial.ends[f"{error!r} after {monotonic() - began:.1f} s and {len(said)} lines"] += 1
            continue
        finally:
            trial.memory.append(server.memory)
        ended = (
            said[-1:] == ["data: [DONE]"] and "error" not in said[-2] and answer.status_code == 200
        )
        trial.ends["left" if leaves else "answered" if ended else str(said[-2:])] += 1


LONG: list[tuple[str, dict[str, Any], set[int]]] = [
    ("/v1/classify", {"text": [TEXT] * 256, "labels": ["yes", "no", "union", "state"]}, {200}),
    ("/v1/completions", {"prompt": TEXT, "n": 32, "max_tokens": 80}, {200}),
    ("/v1/embeddings", {"input": [f"{TEXT} {TEXT}"] * 256}, {200}),
    ("/v1/classify", {"text": [TEXT] * 256, "labels": [f"label {i}" for i in range(64)]}, {400}),
    ("/studio/lens", {"text": f"{TEXT} " * 8}, {200}),
]


async def hammer(trial: Trial, client: httpx.AsyncClient) -> None:
    """The longest requests that there are, without a pause; a third of them are given up."""
    rng = Random(0)
    while trial.goes_on:
        path, body, expected = rng.choice(LONG)
        patience = 0.3 if rng.randrange(3) == 0 else 300
        try:
            answer = await client.post(f"{trial.url}{path}", json=body, timeout=patience)
            trial.ends[
                "hammered" if answer.status_code in expected else f"{path}: {answer.text}"
            ] += 1
        except httpx.ReadTimeout:
            trial.ends["hammered and left" if patience < 1 else f"{path}: no answer"] += 1


async def try_it(server: Server, rounds: int) -> Trial:
    trial = Trial(server.url, rounds)
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        streams = (stream_often(trial, client, i, server) for i in range(STREAMS))
        await asyncio.gather(*streams, hammer(trial, client))
    return trial


def test_disconnecting_and_flooding_clients_do_not_affect_others(server: Server) -> None:
    trial = asyncio.run(try_it(server, ROUNDS))
    quarter = max(1, len(trial.memory) // 4)
    warm, end = median(trial.memory[quarter : 2 * quarter]), median(trial.memory[-quarter:])
    p50, p95 = (quantiles(trial.first_token, n=20)[i] for i in (9, 18))
    print(
        f"\n{ROUNDS} rounds, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}: "
        f"{dict(trial.ends)}"
    )
    print(f"first token: p50 {p50:.2f} s, p95 {p95:.2f} s, worst {max(trial.first_token):.2f} s")
    print(f"memory: {warm:g} MB in the second quarter, {end:g} MB in the last")
    assert server.child.poll() is None, server.said
    assert set(trial.ends) <= {"answered", "left", "hammered", "hammered and left"}
    assert trial.ends["answered"] + trial.ends["left"] == ROUNDS * STREAMS
    assert trial.ends["left"]
    assert trial.ends["hammered"] + trial.ends["hammered and left"]
    assert end - warm < MAX_GROWTH_MB
    asyncio.run(_idle(server))


async def _idle(server: Server) -> None:
    """Nothing is left of those who went: no slot is taken, and nothing failed on the way."""
    async with asyncio.timeout(60):
        while 'vllm:num_requests_running{model_name="gpt"} 0' not in (
            stats := httpx.get(f"{server.url}/metrics").text
        ):
            await asyncio.sleep(0.1)
    assert not re.search(r'malmoi_requests_total\{.*status="5', stats)
