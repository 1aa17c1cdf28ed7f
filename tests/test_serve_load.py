"""Sixty-four streams at once: no error, no growth of memory; and a stop in the middle of it tells everyone."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from live_server import gpt_folder

pytestmark = pytest.mark.heavy
STREAMS = 64
START = [sys.executable, "-c", "from malmoi.cli import main; main()", "serve", "--port", "0", "--slots", "32"]


@dataclass
class Server:
    url: str
    child: Any

    @property
    def memory(self) -> int:
        """MB that the process holds."""
        status = Path(f"/proc/{self.child.pid}/status").read_text("utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024


@dataclass
class Outcome:
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)  # streams that began and did not end


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = gpt_folder(tmp_path / "gpt")
    child = subprocess.Popen([*START, "--model", str(folder)], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert child.stderr is not None
    try:
        line = next(line for line in child.stderr if "http://" in line)
        yield Server(re.findall(r"http://[\d.]+:\d+", line)[0], child)
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


async def load(server: Server, seconds: float, stop: bool = False) -> Outcome:
    outcome, end = Outcome(), monotonic() + seconds

    async def one(client: httpx.AsyncClient, number: int) -> None:
        seed = number
        while monotonic() < end + (30 if stop else 0):
            seed += STREAMS
            if not await ask(client, server.url, seed, outcome):
                return

    async def halt() -> None:
        await asyncio.sleep(seconds)
        server.child.send_signal(signal.SIGTERM)

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(STREAMS)), *([halt()] if stop else []))
    return outcome


def test_many_streams_for_a_while(server: Server) -> None:
    asyncio.run(load(server, 5))
    before = server.memory
    outcome = asyncio.run(load(server, 25))
    assert outcome.broken == []
    assert set(outcome.ends) == {"answered"}
    assert outcome.ends["answered"] > STREAMS
    assert server.memory - before < 20
    stats = httpx.get(f"{server.url}/metrics").text
    assert 'malmoi_running{model="gpt"} 0' in stats
    assert 'malmoi_failed_total{model="gpt"} 0' in stats


def test_a_stop_in_the_middle_tells_everyone(server: Server) -> None:
    outcome = asyncio.run(load(server, 3, stop=True))
    assert outcome.broken == []
    assert set(outcome.ends) <= {"answered", "stopping", "not taken"}
    assert outcome.ends["answered"] >= STREAMS
    assert server.child.wait(30) == 143
