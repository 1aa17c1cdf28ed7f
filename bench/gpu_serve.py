"""The engine and the server on a GPU under 64 and 256 streams, beside transformers.

    PYTHONPATH=src python bench/gpu_serve.py --out OUT [--no-peers] [--limit tiny]

A random GPT-2 of 124M in bf16, the same weights for all; prompts of 16 to 128 tokens, 96 new tokens
each, greedy. Ours is a closed loop: each stream asks again as soon as it is answered, three times
after a warm-up. transformers gets all prompts at once: `generate_batch` (continuous batching) and
`generate` (batches of as many as there are streams, padded on the left); the second run counts.
First tokens are timed from the request. The server is a process of its own, its clients are in this
one; without fastapi and uvicorn it is left out. `--limit tiny` runs a tiny GPT-2 on a CPU.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from engine import made_up_tokenizer
from malmoi.inference import Model, load
from malmoi.inference.engine import Engine, GenerationJob
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.stream import TextChunk

NEW_TOKENS = 96
ROUNDS = 3
PATIENCE_SECONDS = 90
Prompts = list[tuple[int, ...]]


@dataclass
class Load:
    """What was generated, and how soon each request had its first token."""

    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def row(self, way: str, streams: int) -> dict[str, Any]:
        ordered = sorted(self.first)

        def share(part: float) -> float | None:
            return 1000 * ordered[int(part * (len(ordered) - 1))] if ordered else None

        return {
            "way": way,
            "streams": streams,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "first_token_ms_p50": share(0.5),
            "first_token_ms_p95": share(0.95),
            "errors": len(self.errors),
            "first_error": self.errors[0][:200] if self.errors else None,
        }


def draw_prompts(count: int, vocab: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(16, 129, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, vocab, (n,), generator=generator).tolist()) for n in lengths]


# ------------------------------------------------------------------ ours


def engine_load(engine: Engine, prompts: Prompts, streams: int, tokens: int) -> Load:
    """Each stream submits its next prompt when its last one is answered."""
    found = Load()
    config = GenerationConfig(tokens, Sampling(temperature=0))
    left = [prompts[i::streams] for i in range(streams)]
    done = threading.Semaphore(0)

    def ask(stream: int) -> None:
        if not left[stream]:
            done.release()
            return
        asked = time.perf_counter()
        heard = False

        def hear(chunk: TextChunk) -> None:
            nonlocal heard
            if chunk.tokens and not heard:
                found.first.append(time.perf_counter() - asked)
                heard = True
            found.tokens += len(chunk.tokens)
            if chunk.finish is not None:
                if chunk.finish == "error":
                    found.errors.append("the request failed")
                ask(stream)

        engine.submit(GenerationJob(left[stream].pop(), config), hear)

    start = time.perf_counter()
    for stream in range(streams):
        ask(stream)
    for _ in range(streams):
        done.acquire()
    found.seconds = time.perf_counter() - start
    return found


async def ask_server(port: int, body: bytes, found: Load) -> None:
    """One request over a connection of its own; counts an event for each piece of text."""
    asked = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + kind).encode() + body)
    status = await reader.readline()
    heard = False
    tokens = 0
    async for line in reader:
        if not heard and line.startswith(b"data: {") and b'"choices":[{' in line:
            found.first.append(time.perf_counter() - asked)
            heard = True
        if b'"completion_tokens"' in line:
            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    writer.close()
    found.tokens += tokens
    if not tokens:
        found.errors.append(status.decode().strip())


async def server_load(port: int, prompts: Prompts, streams: int, tokens: int) -> Load:
    found = Load()
    fixed = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [
        json.dumps({"prompt": one, **fixed, "stream_options": {"include_usage": True}}).encode()
        for one in prompts
    ]

    async def stream(number: int) -> None:
        for body in bodies[number::streams]:
            await ask_server(port, body, found)

    start = time.perf_counter()
    await asyncio.gather(*(stream(number) for number in range(streams)))
    found.seconds = time.perf_counter() - start
    return found


@contextmanager
def server(folder: Path, slots: int) -> Iterator[int]:
    """Our server in a process of its own; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    command = [sys.executable, __file__, "--serve", str(folder), "--port", str(port)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*command, "--slots", str(slots)], stdout=said, stderr=said)
        try:
            end = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < end and process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            if process.poll() is not None:
                said.seek(0)
                raise RuntimeError(said.read()[-500:].decode("utf-8", "replace"))
            yield port
        finally:
            process.kill()
            process.wait()


def run_server(folder: Path, port: int, slots: int) -> None:
    from malmoi.server.config import ServeConfig
    from malmoi.server.serve import serve_models

    cuda = torch.cuda.is_available()
    settings = ServeConfig(port=port, slots=slots, queue=1024)
    serve_models([folder], settings, dtype="bf16" if cuda else None)


# ------------------------------------------------------------------ transformers


def continuous_load(peer: transformers.PreTrainedModel, prompts: Prompts, tokens: int) -> Load:
    found = Load()
    config = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    start = time.perf_counter()
    outputs = peer.generate_batch(
        inputs=[list(prompt) for prompt in prompts],
        generation_config=config,
        progress_bar=False,
        persistent_manager=True,
        record_timestamps=True,
    )
    found.seconds = time.perf_counter() - start
    for output in outputs.values():
        found.tokens += len(output.generated_tokens)
        if output.error:
            found.errors.append(output.error)
        elif output.timestamps:
            found.first.append(output.timestamps[0] - output.created_time)
    return found


@torch.inference_mode()
def generate_load(
    peer: transformers.PreTrainedModel, prompts: Prompts, streams: int, tokens: int
) -> Load:
    found = Load()
    start = time.perf_counter()
    for first in range(0, len(prompts), streams):
        some = prompts[first : first + streams]
        longest = max(map(len, some))
        ids = torch.zeros(len(some), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, keep, prompt in zip(ids, mask, some, strict=True):
            row[longest - len(prompt) :] = torch.tensor(prompt)
            keep[longest - len(prompt) :] = 1
        written = peer.generate(
            ids.to(peer.device),
            attention_mask=mask.to(peer.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.tokens += len(some) * (written.size(1) - longest)
    if peer.device.type == "cuda":
        torch.cuda.synchronize()
    found.seconds = time.perf_counter() - start
    return found


# ------------------------------------------------------------------ the comparison


def attempt(way: str, streams: int, work: Callable[[], Load]) -> dict[str, Any]:
    """A row; one that says why where this machine cannot run it."""
    try:
        row = work().row(way, streams)
    except Exception as error:
        row = Load(errors=[f"{type(error).__name__}: {error}"]).row(way, streams)
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    streams: tuple[int, ...] = (64, 256)
    rounds: int = ROUNDS
    tokens: int = NEW_TOKENS
    peers: bool = True


def measure(
    ours: Model, peer: transformers.PreTrainedModel, folder: Path, size: Size, streams: int
) -> list[dict[str, Any]]:
    """Every way under this many streams, each warmed up with as many other prompts."""
    count = streams * size.rounds
    warm, prompts = (draw_prompts(count, ours.config.vocab, streams + i) for i in range(2))

    def engine() -> Load:
        with Engine(ours, slots=streams, queue=1024) as one:
            engine_load(one, warm, streams, size.tokens)
            return engine_load(one, prompts, streams, size.tokens)

    def over_http() -> Load:
        with server(folder, streams) as port:
            asyncio.run(server_load(port, warm, streams, size.tokens))
            return asyncio.run(server_load(port, prompts, streams, size.tokens))

    def continuous() -> Load:
        # the cached manager was sized for the streams before
        getattr(peer, "destroy_cached_continuous_batching_manager", lambda: None)()
        continuous_load(peer, warm, size.tokens)
        return continuous_load(peer, prompts, size.tokens)

    def static() -> Load:
        generate_load(peer, warm, streams, size.tokens)
        return generate_load(peer, prompts, streams, size.tokens)

    ways = {"malmoi engine": engine, "malmoi server": over_http}
    if not all(find_spec(name) for name in ("fastapi", "uvicorn")):
        print("fastapi or uvicorn is not installed: no server.", file=sys.stderr)
        del ways["malmoi server"]
    if size.peers:
        ways |= {"transformers generate_batch": continuous, "transformers generate": static}
    rows = [attempt(way, streams, work) for way, work in ways.items()]
    rate = rows[0]["tokens_per_second"]
    return [
        row | {"share_of_engine": row["tokens_per_second"] / rate if rate else None} for row in rows
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["way                           streams  tokens/s  of engine  first token p50 / p95 ms"]
    for row in rows:
        first = [row[f"first_token_ms_{part}"] for part in ("p50", "p95")]
        times = " / ".join("-" if one is None else f"{one:,.0f}" for one in first)
        share = row.get("share_of_engine")
        error = f"  {row['errors']} errors: {row['first_error']}" if row["errors"] else ""
        lines.append(
            f"{row['way']:<30}{row['streams']:>7}{row['tokens_per_second']:>10,.0f}"
            f"{'-' if share is None else f'{share:.0%}':>11}  {times}{error}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_serve"))
    parser.add_argument("--data", type=Path, help="not used: everything is drawn")
    parser.add_argument("--limit", choices=["tiny"])
    parser.add_argument("--no-peers", action="store_true", help="malmoi's rows alone")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is not None:
        run_server(chosen.serve, chosen.port, chosen.slots)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2} if chosen.limit else {}
    size = Size((4, 8), 2, 8) if chosen.limit else Size()
    size = replace(size, peers=not chosen.no_peers)
    torch.manual_seed(0)
    start = time.perf_counter()
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "gpt2-124m"
        peer.save_pretrained(folder)
        made_up_tokenizer().save(folder)
        ours = load(folder, device=device, dtype=dtype)
        peer = peer.to(device=device, dtype=dtype)
        rows = [row for n in size.streams for row in measure(ours, peer, folder, size, n)]
    seconds = time.perf_counter() - start
    about = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    report = {**about, "seconds": seconds, "rows": rows}
    (chosen.out / "gpu_serve.json").write_text(json.dumps(report, indent=1), "utf-8")
    print(f"{about['device']}, {seconds:.0f} s\n{table(rows)}")


if __name__ == "__main__":
    main()
