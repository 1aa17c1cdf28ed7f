"""Processes for HTTP beside the one with the models: the same answers, errors and ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import Live, gpt_folder, wait_until
from malmoi.inference import load

PROMPT = "the state of"
PATIENCE = 120  # seconds, on a busy machine
get, post = (partial(one, timeout=PATIENCE) for one in (httpx.get, httpx.post))
START = [sys.executable, "-c", "from malmoi.cli import main; main()", "serve", "--port", "0"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers share a socket")


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Its address, its process, and what it says on stderr."""
    command = [*START, "--model", str(folder), "--workers", "2", "--access-log", *options]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        line = next(line for line in child.stderr if "http://" in line)
        said: list[str] = []
        reading = threading.Thread(target=said.extend, args=[child.stderr], daemon=True)
        reading.start()
        yield re.findall(r"http://[\d.]+:\d+", line)[0], child, said
    finally:
        child.kill()
        child.wait()
        reading.join(PATIENCE)  # the workers have ended too: nobody holds the pipe
        child.stderr.close()


def workers_of(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True)
    return [int(number) for number in listed.stdout.split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_folder(tmp_path_factory.mktemp("workers") / "gpt")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, Any, list[str]]]:
    with served(folder, "--slots", "4", "--max-tokens", "80") as one:
        yield one


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "seed": 1, "n": 2}),
    (
        "/v1/completions",
        {"prompt": [PROMPT, "yes"], "max_tokens": 5, "logprobs": 2, "echo": True, "seed": 1},
    ),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "seed": 1, "stream": True}),
    (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "stream": True, "stop": ["e", "t"]},
    ),
    ("/v1/completions", {"prompt": PROMPT, "guided_choice": ["yes", "no"], "temperature": 0}),
    ("/v1/completions", {"prompt": PROMPT, "min_tokens": 3, "stream": True, "temperature": 0}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "yes?"}],
            "temperature": 0,
            "max_tokens": 6,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/embeddings", {"input": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 81}),
    ("/v1/completions", {"prompt": "the " * 200}),
    ("/v1/completions", {"prompt": PROMPT, "model": "nosuch"}),
    ("/v1/completions", {"prompt": PROMPT, "temprature": 1}),
    ("/v1/fill", {"text": PROMPT}),
    ("/nosuch", {}),
]


def told(answer: httpx.Response) -> tuple[int, str]:
    """What does not differ from one answer to the next."""
    ids = re.sub(r'"(id|item_id|created|created_at)": ?("[^"]*"|\d+)', "", answer.text)
    return answer.status_code, ids


def test_workers_answer_as_one_process_does(
    server: tuple[str, Any, list[str]], folder: Path
) -> None:
    models = {"gpt": load(folder, device="cpu")}
    with Live(models, slots=4, max_tokens=80) as alone:
        for path, body in BODIES:
            with httpx.Client(timeout=PATIENCE) as client:
                one, other = (client.post(url + path, json=body) for url in (alone.url, server[0]))
            assert joined(told(other)) == joined(told(one)), (path, body)
        for path in ("/v1/models/gpt", "/openapi.json", "/docs", "/"):
            one, other = (get(url + path) for url in (alone.url, server[0]))
            text = other.text.replace(server[0], alone.url)
            created = r'"created":\d+'
            assert re.sub(created, "", text) == re.sub(created, "", one.text)
            assert other.headers["content-type"] == one.headers["content-type"]


def joined(told: tuple[int, str]) -> tuple[int, str]:
    """A stream's texts as one, since tokens may arrive one by one or together."""
    status, text = told
    if not text.startswith("data: "):
        return told
    texts = re.findall(r'"(?:text|content)":"((?:[^"\\]|\\.)*)"', text)
    ends = re.findall(r'"(finish_reason|usage)":("\w+"|\{[^}]*\})', text)
    return status, json.dumps(["".join(texts), ends])


def test_metrics_and_log_count_what_all_workers_did(server: tuple[str, Any, list[str]]) -> None:
    url, _, said = server

    def value(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", get(f"{url}/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    names = (
        'malmoi_requests_total{path="/v1/completions",status="200"}',
        'vllm:time_to_first_token_seconds_count{model_name="gpt"}',
        'vllm:request_success_total{model_name="gpt",finished_reason="length"}',
        'malmoi_requests_total{path="/v1/embeddings",status="200"}',
    )
    before = [value(name) for name in names]
    lines = sum("POST /v1/completions 200" in line for line in said)
    for _ in range(8):  # each over a connection of its own
        body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
        assert post(f"{url}/v1/completions", json=body).status_code == 200
        assert post(f"{url}/v1/embeddings", json={"input": "yes"}).status_code == 200
    assert wait_until(
        lambda: [value(n) - b for n, b in zip(names, before, strict=True)] == [8] * 4, PATIENCE
    )
    assert sum("POST /v1/completions 200" in line for line in said) == lines + 8


def streaming(url: str, **more: Any) -> tuple[httpx.Client, Any]:
    client = httpx.Client(base_url=url, timeout=PATIENCE)
    body = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "stream": True, **more}
    return client, client.stream("POST", "/v1/completions", json=body)


def test_a_full_queue_is_429_and_a_client_that_leaves_frees_its_place(folder: Path) -> None:
    with served(folder, "--slots", "1", "--queue", "1") as (url, _, _):
        body = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "n": 3, "stream": True}
        refused = post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 400  # three are above the limit of one
        client = httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_connections=None))
        statuses = set()
        with client:
            threads = [
                threading.Thread(
                    target=lambda: statuses.add(
                        client.post(f"{url}/v1/completions", json=body | {"n": 1}).status_code
                    )
                )
                for _ in range(12)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert statuses == {200, 429}
        for _ in range(3):
            one, stream = streaming(url)
            with one, stream as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        metric = r'vllm:num_requests_running\{model_name="gpt"\} 0'
        assert wait_until(lambda: re.search(metric, get(f"{url}/metrics").text), PATIENCE)


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_nothing_stays_when_a_process_is_killed(folder: Path, victim: str) -> None:
    with served(folder, "--slots", "2") as (url, child, said):
        assert get(f"{url}/health").status_code == 200
        workers = workers_of(child.pid)
        assert len(workers) == 2
        os.kill(child.pid if victim == "server" else workers[0], signal.SIGKILL)
        assert child.wait(PATIENCE) == (-signal.SIGKILL if victim == "server" else 1)
        assert wait_until(lambda: not any(map(alive, workers)), PATIENCE)
        with pytest.raises(httpx.ConnectError):
            get(f"{url}/health")
    assert victim == "server" or any("A process for HTTP ended with code -9" in x for x in said)
    assert "Traceback" not in "".join(said)


def test_a_stream_whose_server_dies_ends_with_an_error(folder: Path) -> None:
    with served(folder, "--slots", "2") as (url, child, _):
        one, stream = streaming(url)
        with one, stream as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(child.pid, signal.SIGSTOP)  # so that it generates no more
            os.kill(child.pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        if '"finish_reason":"length"' not in "".join(rest):
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2][6:])["error"]["code"] == "stopping"


def test_a_signal_drains_the_workers(folder: Path) -> None:
    with served(folder, "--slots", "2") as (url, child, _):
        one, stream = streaming(url)
        with one, stream as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert child.wait(PATIENCE) == 143
