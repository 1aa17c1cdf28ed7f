"""Concurrent streams: `malmoi serve` and the engine beside transformers, on the same random GPT-2.

    malmoi bench serve [--streams 64] [--seconds 20] [--tokens 64] [--peers plain batching]
    malmoi bench serve --gpu [--streams 64 256] [--tokens 96]

Each stream asks again as soon as it is answered. Tokens are those that the servers say they wrote;
an error is an answer that is not a stream with an end. Clients are several processes where there
are cores for them. Memory is that of the server's first process, from a quarter of the time on to
the end. The peers: `transformers serve` as it is ("plain") and with
--continuous-batching ("batching"). On a processor the model has 5M weights. With `--gpu` it is
GPT-2 of 124M in bf16, all prompts are 16 to 128 tokens and answers greedy, the engine is measured
without HTTP too (with answers that end together, and out of step as clients' do), and the peer is
`generate_batch`, which gets all prompts at once.
"""

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import torch
import transformers

from _shared import VOCAB, Prompts, be_quiet, benchmark_parser, made_up_tokenizer
from malmoi.tokenizer import train_tokenizer

WORDS = re.findall(r"\w+", "the state of union is strong people are free we work for peace law")
LONGEST = 300  # seconds that an answer may take
PATIENCE = 90  # seconds for a server to start


@dataclass(frozen=True)
class Load:
    """How many streams ask, for how long, and for how many new tokens each time."""

    streams: int = 64
    seconds: float = 20.0
    tokens: int = 64
    as_engine: bool = False  # prompts and settings over HTTP as without it
    workers: int | None = None  # processes for HTTP; None: the server's choice


@dataclass
class Tally:
    """What the clients saw."""

    tokens: int = 0
    answers: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first text of each answer
    memory: list[int] = field(default_factory=list)  # MB of the server, now and then

    def add(self, other: "Tally") -> None:
        """What another process of clients saw at the same time."""
        self.tokens += other.tokens
        self.answers += other.answers
        self.seconds = max(self.seconds, other.seconds)
        for name in ("errors", "first", "memory"):
            getattr(self, name).extend(getattr(other, name))

    def row(self, way: str, streams: int) -> dict[str, Any]:
        ordered = sorted(self.first)
        held = self.memory[len(self.memory) // 4 :]

        def share(part: float) -> float | None:
            return 1000 * ordered[int(part * (len(ordered) - 1))] if ordered else None

        return {
            "way": way,
            "streams": streams,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "first_token_ms_p50": share(0.5),
            "first_token_ms_p95": share(0.95),
            "answers": self.answers,
            "errors": len(self.errors),
            "first_error": self.errors[0][:200] if self.errors else None,
            "memory_mb": held[-1] if held else None,
            "memory_growth_mb": held[-1] - held[0] if held else None,
        }


def small_model(folder: Path) -> Path:
    """A random GPT-2 of 5M weights, and a vocabulary learnt from a few made-up sentences."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=12)) for _ in range(200)]
    tokenizer = train_tokenizer(texts, kind="byte-bpe", vocab=400)
    sizes = dict(vocab_size=tokenizer.vocab_size, n_positions=256, n_embd=256, n_layer=6, n_head=4)
    transformers.set_seed(0)
    end = tokenizer.specials.eos
    config = transformers.GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def draw_prompts(count: int, seed: int) -> Prompts:
    """Prompts of 16 to 128 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(16, 129, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


# ------------------------------------------------------------------ over HTTP


@contextmanager
def started(command: list[str], port: int) -> Iterator[int]:
    """A server in a process of its own, ready to be asked; gives its process's number."""
    # not a pipe, which would stop a talkative server once it is full
    with tempfile.TemporaryFile("w+") as said:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        child = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
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


def command_of(name: str, folder: Path, port: int, load: Load) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "malmoi":
        slots = ["--slots", str(load.streams), "--queue", "1024"]
        slots += [] if load.workers is None else ["--workers", str(load.workers)]
        if torch.cuda.is_available():
            slots += ["--dtype", "bf16"]
        return [sys.executable, "-m", "malmoi", "serve", "-m", str(folder), *listen, *slots]
    here = Path(sys.executable).parent
    more = ["--continuous-batching"] if name == "batching" else []
    return [str(here / "transformers"), "serve", str(folder), "--device", "cpu", *listen, *more]


async def ask(port: int, body: dict[str, Any], tally: Tally) -> None:
    """One request over a connection of its own, read to its end; lean: it shares the processor."""
    start, data = time.perf_counter(), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write((head + kind).encode() + data)
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


async def stream(port: int, model: str, seed: int, load: Load, end: float, tally: Tally) -> None:
    """Asks again and again until it is time."""
    chance = random.Random(seed)
    fixed = {"model": model, "max_tokens": load.tokens, "stream": True, "seed": seed}
    fixed |= {"temperature": 1.0, "stream_options": {"include_usage": True}}
    drawn = draw_prompts(64, seed) if load.as_engine else ()
    if load.as_engine:
        fixed |= {"temperature": 0, "ignore_eos": True}
    while time.monotonic() < end:
        words = " ".join(chance.choices(WORDS, k=10))
        body = fixed | {"prompt": chance.choice(drawn) if drawn else words}
        try:
            async with asyncio.timeout(LONGEST):
                await ask(port, body, tally)
        except (OSError, TimeoutError) as error:
            tally.errors.append(repr(error))


async def watch(pid: int, end: float, tally: Tally) -> None:
    """MB that the server holds, every half second."""
    while pid and time.monotonic() < end:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
        held = next(line for line in lines if line.startswith("VmRSS"))
        tally.memory.append(int(held.split()[1]) // 1024)
        await asyncio.sleep(0.5)


async def all_streams(pid: int, port: int, model: str, load: Load, numbers: range) -> Tally:
    tally = Tally()
    start = time.monotonic()
    end = start + load.seconds
    streams = (stream(port, model, i, load, end, tally) for i in numbers)
    await asyncio.gather(watch(pid, end, tally), *streams)
    tally.seconds = time.monotonic() - start
    return tally


def clients(begin: float, pid: int, port: int, model: str, load: Load, numbers: range) -> Tally:
    """Some of the streams, in a process of their own, from a moment on that all processes share."""
    time.sleep(max(0.0, begin - time.monotonic()))
    return asyncio.run(all_streams(pid, port, model, load, numbers))


def ask_together(pid: int, port: int, model: str, load: Load) -> Tally:
    """All streams, by as many processes as there are cores for."""
    asyncio.run(all_streams(0, port, model, replace(load, seconds=0.5, tokens=4), range(4)))
    count = max(1, min(4, (os.cpu_count() or 1) // 4))
    tally = Tally()
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for one in [pool.submit(time.sleep, 0.5) for _ in range(count)]:
            one.result()  # the processes have started
        begin = time.monotonic() + 0.5
        shares = [range(i, load.streams, count) for i in range(count)]
        watched = [pid, *[0] * (count - 1)]
        parts = [
            pool.submit(clients, begin, pid, port, model, load, share)
            for pid, share in zip(watched, shares, strict=True)
        ]
        for part in parts:
            tally.add(part.result())
    return tally


def over_http(name: str, folder: Path, load: Load) -> dict[str, Any]:
    """The row of a server: "malmoi", or transformers' "plain" or "batching"."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    with started(command_of(name, folder, port, load), port) as pid:
        model = folder.name if name == "malmoi" else str(folder)
        tally = ask_together(pid, port, model, load)
    way = "malmoi server" if name == "malmoi" else f"transformers serve, {name}"
    return tally.row(way, load.streams)


# ------------------------------------------------------------------ without HTTP


def through_engine(model: Any, load: Load) -> dict[str, Any]:
    """Each stream submits its next prompt when its last one is answered; warmed up."""
    from malmoi.inference.engine import Engine

    with Engine(model, slots=load.streams, queue=1024) as engine:
        closed_loop(engine, Load(load.streams, 0.5, load.tokens), 1)
        row = closed_loop(engine, load, 2).row("malmoi engine", load.streams)
        apart = closed_loop(engine, load, 3, in_step=False)
        return row | {"out_of_step_tokens_per_second": apart.tokens / apart.seconds}


def closed_loop(engine: Any, load: Load, seed: int, *, in_step: bool = True) -> Tally:
    """`in_step`: answers begin and end together; else the first ones differ in length."""
    from malmoi.inference.engine import GenerationJob
    from malmoi.inference.generation.options import GenerationConfig, Sampling

    tally = Tally()
    config = GenerationConfig(load.tokens, Sampling(temperature=0))
    chance = random.Random(seed)
    prompts = draw_prompts(4096, seed)
    finished = threading.Semaphore(0)
    start = time.perf_counter()

    def submit(number: int) -> None:
        if time.perf_counter() - start > load.seconds:
            finished.release()
            return
        asked = time.perf_counter()
        heard = False

        def hear(chunk: Any) -> None:
            nonlocal heard
            if chunk.tokens and not heard:
                tally.first.append(time.perf_counter() - asked)
                heard = True
            tally.tokens += len(chunk.tokens)
            if chunk.finish is not None:
                tally.answers += 1
                if chunk.finish == "error":
                    tally.errors.append("the request failed")
                submit(number + load.streams)

        shorter = not in_step and number < load.streams
        settings = (
            replace(config, max_new_tokens=chance.randint(1, load.tokens)) if shorter else config
        )
        engine.submit(GenerationJob(prompts[number % len(prompts)], settings), hear)

    for number in range(load.streams):
        submit(number)
    for _ in range(load.streams):
        finished.acquire()
    tally.seconds = time.perf_counter() - start
    return tally


def through_transformers(peer: Any, load: Load) -> dict[str, Any]:
    """`generate_batch` of three prompts a stream; the second run counts."""
    # the cached manager was sized for the streams before
    getattr(peer, "destroy_cached_continuous_batching_manager", lambda: None)()
    config = transformers.GenerationConfig(
        max_new_tokens=load.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    for seed in (1, 2):
        tally = Tally()
        start = time.perf_counter()
        try:
            outputs = peer.generate_batch(
                inputs=[list(prompt) for prompt in draw_prompts(3 * load.streams, seed)],
                generation_config=config,
                progress_bar=False,
                persistent_manager=True,
                record_timestamps=True,
            )
        except Exception as error:  # what this machine cannot run is a row that says so
            tally.errors.append(f"{type(error).__name__}: {error}")
            break
        tally.seconds = time.perf_counter() - start
        for output in outputs.values():
            tally.answers += 1
            tally.tokens += len(output.generated_tokens)
            if output.error:
                tally.errors.append(output.error)
            elif output.timestamps:
                tally.first.append(output.timestamps[0] - output.created_time)
    return tally.row("transformers generate_batch", load.streams)


# ------------------------------------------------------------------ the comparison


def gpu_ways(
    folder: Path, loads: list[Load], workers: list[int | None], *, tiny: bool, peers: bool
) -> Iterator[dict[str, Any]]:
    from malmoi.inference import load as load_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_embd=64, n_head=2) if tiny else {}
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    peer.save_pretrained(folder)
    made_up_tokenizer().save(folder)
    ours = load_model(folder, device=device, dtype=dtype)
    peer = peer.to(device=device, dtype=dtype)
    for load in loads:
        engine = through_engine(ours, load)
        yield engine
        for count in workers:
            served = over_http("malmoi", folder, replace(load, workers=count))
            rate = served["tokens_per_second"]
            served |= {"workers": count, "of_engine": rate / engine["tokens_per_second"]}
            yield served | {"of_out_of_step": rate / engine["out_of_step_tokens_per_second"]}
        if peers:
            yield through_transformers(peer, load)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="the most that an answer has")
    parser.add_argument("--peers", nargs="*", default=["plain"], choices=["plain", "batching"])
    parser.add_argument("--workers", type=int, nargs="+", default=[None], help="malmoi's, for HTTP")
    parser.add_argument("--gpu", action="store_true", help="GPT-2 of 124M, and the engine alone")
    parser.add_argument("--limit", choices=("tiny",), help="a dry run of --gpu on a CPU")
    given = parser.parse_args()
    be_quiet()
    loads = [Load(one, given.seconds, given.tokens, given.gpu) for one in given.streams]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "gpt"
        if given.gpu:
            settings = {"tiny": bool(given.limit), "peers": bool(given.peers)}
            rows = gpu_ways(folder, loads, given.workers, **settings)
        else:
            small_model(folder)
            loads = [replace(load, workers=one) for load in loads for one in given.workers]
            ways = ["malmoi", *given.peers]
            rows = (over_http(way, folder, load) for load in loads for way in ways)
        for row in rows:
            print(json.dumps({name: value for name, value in row.items() if value is not None}))


if __name__ == "__main__":
    main()
