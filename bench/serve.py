"""Concurrent streams on loopback: `malmoi serve` beside `transformers serve` on the same random
GPT-2, in one run.

    malmoi bench serve [--seconds N] [--streams 64] [--tokens 64] [--peers plain batching] [--json]

Each stream asks again as soon as it is answered. Tokens are those that the servers say they wrote;
an error is an answer that is not a stream with an end. Memory is the server's own, from a quarter
of the time on to the end. A ratio above 1 means that we are faster. The peers: "plain" (its
default) and "batching" (--continuous-batching).
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import transformers

from _timing import benchmark_parser
from malmoi.tokenizer import train_tokenizer

WORDS = (
    "the",
    "state",
    "of",
    "union",
    "is",
    "strong",
    "people",
    "are",
    "free",
    "we",
    "work",
    "for",
    "peace",
    "law",
)
LONGEST = 300  # seconds that an answer may take
PATIENCE = 90  # seconds for a server to start


@dataclass
class Tally:
    """What the clients saw."""

    tokens: int = 0
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first text of each answer
    memory: list[int] = field(default_factory=list)  # MB of the server, now and then


def make_folder(folder: Path) -> Path:
    """A random GPT-2 of 5M weights, and a vocabulary learnt from a few made-up sentences."""
    rng = random.Random(0)
    tokenizer = train_tokenizer(
        [" ".join(rng.choices(WORDS, k=12)) for _ in range(200)], kind="byte-bpe", vocab=400
    )
    sizes = dict(vocab_size=tokenizer.vocab_size, n_positions=256, n_embd=256, n_layer=6, n_head=4)
    transformers.set_seed(0)
    end = tokenizer.specials.eos
    config = transformers.GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


# ------------------------------------------------------------------ servers


@contextmanager
def served(command: list[str], port: int) -> Iterator[int]:
    """A server in a process of its own, ready to be asked; gives its process's number."""
    # not a pipe, which would stop a talkative server once it is full
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=said, stderr=said
        )
        try:
            wait_for(child, port, said)
            yield child.pid
        finally:
            child.terminate()
            child.wait()


def wait_for(child: subprocess.Popen[bytes], port: int, said: IO[str]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if child.poll() is not None:
            said.seek(0)
            raise SystemExit(f"The server ended before it began: {said.read()[-500:]}")
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"The server did not answer within {PATIENCE} seconds.")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def command_of(name: str, folder: Path, port: int, streams: int) -> list[str]:
    here = Path(sys.executable).parent
    if name == "malmoi":
        return [
            str(here / "malmoi"),
            "serve",
            "-m",
            str(folder),
            "--port",
            str(port),
            "--slots",
            str(streams),
        ]
    more = ["--continuous-batching"] if name == "batching" else []
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(here / "transformers"), "serve", str(folder), "--device", "cpu", *listen, *more]


# ------------------------------------------------------------------ clients, lean: they share the
# processor


async def ask(port: int, body: dict[str, Any], tally: Tally) -> None:
    """One request over a connection of its own; reads the stream to its end."""
    start, data = time.perf_counter(), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: "
        "application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    ended, heard, status = False, False, await reader.readline()
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        if not heard and b'"text":""' not in line:
            tally.first.append(time.perf_counter() - start)
            heard = True
        if b'"completion_tokens"' in line:
            tally.tokens += json.loads(line[6:])["usage"]["completion_tokens"]
        ended = ended or b'"finish_reason":"length"' in line or b'"finish_reason":"stop"' in line
    writer.close()
    tally.answers += 1
    if b" 200 " not in status or not ended:
        tally.errors.append(status.decode().strip())


async def stream(port: int, model: str, seed: int, tokens: int, end: float, tally: Tally) -> None:
    """Asks again and again until it is time."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        prompt = " ".join(rng.choices(WORDS, k=10))
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
        }
        try:
            async with asyncio.timeout(LONGEST):
                await ask(port, body | {"stream_options": {"include_usage": True}}, tally)
        except (OSError, TimeoutError) as error:
            tally.errors.append(repr(error))


async def watch(pid: int, end: float, tally: Tally) -> None:
    while time.monotonic() < end:
        tally.memory.append(memory(pid))
        await asyncio.sleep(0.5)


def memory(pid: int) -> int:
    """MB that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        // 1024
    )


async def load(pid: int, port: int, model: str, chosen: argparse.Namespace) -> tuple[Tally, float]:
    warm, tally = Tally(), Tally()
    await asyncio.gather(
        *(stream(port, model, i, 4, time.monotonic() + 0.5, warm) for i in range(4))
    )
    start = time.monotonic()
    end = start + chosen.seconds
    streams = (stream(port, model, i, chosen.tokens, end, tally) for i in range(chosen.streams))
    await asyncio.gather(watch(pid, end, tally), *streams)
    return tally, time.monotonic() - start


# ------------------------------------------------------------------ the comparison


def measure(name: str, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    with served(command_of(name, folder, port, chosen.streams), port) as pid:
        model = folder.name if name == "malmoi" else str(folder)
        tally, seconds = asyncio.run(load(pid, port, model, chosen))
    held = tally.memory[len(tally.memory) // 4 :]
    first = sorted(tally.first)
    return {
        "server": name if name == "malmoi" else f"transformers serve, {name}",
        "tokens_per_second": tally.tokens / seconds,
        "answers": tally.answers,
        "errors": len(tally.errors),
        "first_errors": tally.errors[:3],
        "median_first_token_s": first[len(first) // 2] if first else None,
        "p95_first_token_s": first[int(len(first) * 0.95)] if first else None,
        "memory_mb": held[-1] if held else None,
        "memory_growth_mb": held[-1] - held[0] if held else None,
    }


def describe(row: dict[str, Any]) -> str:
    known = {"server", "tokens_per_second", "ratio"}
    ratio = f", ours {row['ratio']:.2f}×" if "ratio" in row else ""
    lines = [f"{row['server']}: {row['tokens_per_second']:,.0f} tokens/s{ratio}"]
    rest = {
        name: value for name, value in row.items() if name not in known and value not in ([], None)
    }
    parts = (
        f"{name.replace('_', ' ')} {round(value, 3) if isinstance(value, float) else value}"
        for name, value in rest.items()
    )
    return "\n".join([*lines, "    " + ", ".join(parts)])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="the most that an answer has")
    parser.add_argument("--peers", nargs="*", default=["plain"], choices=["plain", "batching"])
    parser.add_argument("--json", action="store_true", help="print one JSON object a server")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(Path(place) / "small-gpt")
        ours = measure("malmoi", folder, chosen)
        for name in ["malmoi", *chosen.peers]:
            row = ours if name == "malmoi" else measure(name, folder, chosen)
            if row is not ours and row["tokens_per_second"]:
                row["ratio"] = ours["tokens_per_second"] / row["tokens_per_second"]
            print(json.dumps(row) if chosen.json else describe(row), flush=True)


if __name__ == "__main__":
    main()
