"""What the benchmarks share: timing in turn, tables, made-up models and text, jobs that resume."""

import argparse
import atexit
import json
import logging
import multiprocessing
import os
import queue
import random
import resource
import shutil
import statistics
import subprocess
import textwrap
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Work = Callable[[], object]
Clock = Callable[[], float]
Result = TypeVar("Result")
Prompts = list[tuple[int, ...]]
SECONDS = ("s", "ms")  # units in which less is better
RECORD = Path(__file__).with_name("recorded.json")  # headline figures by device and row
LEAST_SPREAD = 0.03  # two runs of one commit differ by as much
KOREAN = {  # longer phrases first
    "corpus: read, clean, filter, dedup, decontaminate": "코퍼스: 읽기, 정제, 필터, 중복·오염 제거",
    "near-duplicates, runs of words given": "비슷한 문서 찾기(n-gram은 이미 계산)",
    "predict, a CSV of short texts, BERT of 4 × 256": "예측, 짧은 글의 CSV, BERT 4 × 256",
    "8 requests after one prompt of 256, 4 × 256": "앞 256토큰이 같은 요청 8개, GPT 4 × 256",
    "BERT-base, one text of 128 tokens": "BERT-base, 128토큰 글 하나",
    "load and first token, 124M": "124M 모델 열고 첫 토큰까지",
    "load 124M": "124M 모델 열기",
    "text → token store": "텍스트 → 토큰 저장소",
    "text → ids": "텍스트 → 토큰 번호",
    "fine-tuning a BERT of": "미세 조정, BERT",
    "training a GPT of": "학습, GPT",
    "decoding ": "디코딩 ",
    " at once": "개 동시",
    "server, ": "서버, ",
    " streams": "개 스트림",
    "python alone": "파이썬만",
    "reading alone": "읽기만",
    "safetensors alone": "safetensors만",
    "no new word": "새 단어 없음",
    "first token": "첫 토큰",
    " not installed": " 설치 안 됨",
    "not with --quick": "--quick에서는 생략",
    "no peer measured": "비교 대상 없음",
    "without ": "끄면 ",
    "what": "항목",
    "ours": "말모이",
    "peer": "비교 대상",
    "ratio": "배율",
    "limit": "한계",
}
VOCAB = 50_257  # GPT-2's
WORDS = [
    a + b
    for a in ("ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu")
    for b in ("", "n", "rel", "stam")
]


# ------------------------------------------------------------------ timing


def processor_time() -> float:
    """Seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed(work: Callable[[], Result], now: Clock = time.perf_counter) -> tuple[float, Result]:
    """Seconds of a work, and what it returned."""
    began = now()
    found = work()
    return now() - began, found


PAUSE = 0.05  # threads of the work before may still wait for more, as ONNX Runtime's do


def in_turn(
    works: Mapping[str, "Work | Apart"], rounds: int, now: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each work in each round; in turn, so that other load affects all alike."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            time.sleep(PAUSE)
            apart = isinstance(work, Apart)
            found[name].append(work.seconds(now) if apart else timed(work, now)[0])
    return found


class Apart:
    """A work in a process of its own, so that what Malmoi sets for its process does not help it.

    `make` and what it is given must be picklable, and are imported there.
    """

    def __init__(self, make: Callable[..., Work], *given: object) -> None:
        import torch

        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        given = (there, torch.get_num_threads(), make, given)
        context.Process(target=_work_apart, args=given, daemon=True).start()
        self.pipe.recv()  # it is ready

    def seconds(self, now: Clock) -> float:
        self.pipe.send(now)
        return float(self.pipe.recv())


def _work_apart(pipe: Any, threads: int, make: Callable[..., Work], given: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(threads)
    work = make(*given)
    torch.set_num_threads(threads)
    work()
    pipe.send("ready")
    with suppress(EOFError):  # the benchmark has ended
        while True:
            pipe.send(timed(work, pipe.recv())[0])


def fewest(
    works: Mapping[str, "Work | Apart"], rounds: int, now: Clock = time.perf_counter
) -> dict[str, float]:
    """The fewest seconds of each work."""
    return {name: min(seconds) for name, seconds in in_turn(works, rounds, now).items()}


def bandwidth(execution: Any, size: int, now: Clock = time.perf_counter) -> float:
    """Bytes a second of a copy, read and written."""
    import torch

    # written once: pages that never were are all the same page of zeros, which a cache holds
    source = torch.ones(size, dtype=torch.uint8, device=execution.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        execution.synchronize()

    execution.synchronize()
    return 2 * size / fewest({"copy": copy}, 4, now)["copy"]


# ------------------------------------------------------------------ command lines and tables


def benchmark_parser(about: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark, whose docstring is the help."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def be_quiet() -> None:
    """No warnings and progress bars of the libraries between the rows."""
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def switches(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Reads "graphs,kernel"."""

    def read(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return read


@dataclass
class Row:
    """One line of a table: ours, the peer's, and what limits both."""

    what: str
    unit: str
    ours: float
    peer: str  # the peer's name, or why there is none
    theirs: float | None = None
    bound: str = ""  # MFU, MBU, a floor or a tolerance
    without: dict[str, float] = field(default_factory=dict)  # ours with something switched off
    spread: float = 0.0  # of ours over its rounds: half of the range by the median

    @property
    def ratio(self) -> float | None:
        if self.theirs is None:
            return None
        pair = (self.theirs, self.ours) if self.unit in SECONDS else (self.ours, self.theirs)
        return pair[0] / pair[1]

    def cells(self) -> list[str]:
        theirs = self.peer if self.theirs is None else f"{self.peer} {number(self.theirs)}"
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}×"
        off = [f"without {name}: {number(rate)}" for name, rate in self.without.items()]
        return [
            self.what,
            f"{number(self.ours)} {self.unit}",
            theirs,
            ratio,
            "; ".join(filter(None, [self.bound, *off])),
        ]

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The median, and half of the range as a share of it."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / 2 / median


def slower_than_recorded(
    machine: dict[str, Any], rows: Sequence[Row], path: Path = RECORD
) -> list[str]:
    """What is slower than the same row of this device by more than both spreads allow."""
    kept = _record(path).get(machine["device"], {})
    found = []
    for row in rows:
        if (before := kept.get(row.what)) is None:
            continue
        ratio = row.ours / before["ours"]
        ratio = 1 / ratio if row.unit in SECONDS else ratio
        if ratio < 1 - max(LEAST_SPREAD, before["spread"] + row.spread):
            found.append(
                f"slower than recorded: {row.what}: {number(row.ours)} {row.unit}, "
                f"{number(before['ours'])} ± {before['spread']:.0%} at {before['commit']} "
                f"({before['date']})"
            )
    return found


def record_rows(machine: dict[str, Any], rows: Sequence[Row], path: Path = RECORD) -> None:
    """Keeps these rows with their commit, in place of those before."""
    git = [shutil.which("git") or "true", "rev-parse", "--short", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True, check=False, cwd=path.parent)
    commit = said.stdout.strip() or "no commit"
    today = {"commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    record = _record(path)
    kept = record.setdefault(machine["device"], {})
    for row in rows:
        kept[row.what] = {
            "ours": round(row.ours, 4), "unit": row.unit, "spread": round(row.spread, 3), **today
        }  # fmt: skip
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def print_table(machine: dict[str, Any], rows: list[Row]) -> None:
    """The machine, the table and, last, both as one JSON line.

    Where the terminal is too narrow for the table, each row takes two lines.
    """
    head = ["what", "ours", "peer", "ratio", "limit"]
    lines = [[localised(cell) for cell in line] for line in (head, *(row.cells() for row in rows))]
    print(textwrap.fill(" · ".join(f"{name} {value}" for name, value in machine.items()), 80))
    widths = [max(cells_of(line[i]) for line in lines) for i in range(len(head))]
    narrow = sum(widths) + 2 * len(head) > shutil.get_terminal_size().columns
    for what, *cells in lines:
        columns = zip(cells, widths[1:], strict=True)
        shown = "  ".join(map(padded, *zip(*columns, strict=True))).rstrip()
        print(f"{what}\n  {shown}" if narrow else f"{padded(what, widths[0])}  {shown}")
    print(json.dumps({"machine": machine, "rows": [row.facts() for row in rows]}))


def cells_of(text: str) -> int:
    """The columns that a text takes on a terminal, where a Korean letter takes two."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def padded(text: str, size: int) -> str:
    return text + " " * (size - cells_of(text))


def localised(cell: str) -> str:
    """A cell in the user's language."""
    from malmoi.messages import language

    if language() == "ko":
        for english, korean in KOREAN.items():
            cell = cell.replace(english, korean)
    return cell


# ------------------------------------------------------------------ made-up models and text


def made_up_tokenizer() -> Any:
    """A byte-level vocabulary of GPT-2's size, so that text comes out at GPT-2's cost: pairs and
    triples of bytes.
    """
    from tokenizers import Tokenizer as Rust, decoders, models, pre_tokenizers

    from malmoi.tokenizer import Tokenizer
    from malmoi.tokenizer.pipeline import byte_alphabet

    letters = list(byte_alphabet())
    words = [a + b for a in letters for b in letters[:190]]
    vocab = {
        token: i for i, token in enumerate([*letters, *words, *(w + "a" for w in words)][:VOCAB])
    }
    rust = Rust(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer, rust.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return Tokenizer(rust)


def drawn(count: int, length: int, seed: int = 0) -> Prompts:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(row) for row in torch.randint(0, VOCAB, (count, length), generator=generator).tolist()
    ]


def served(engine: Any, prompts: Prompts, count: int) -> list[list[int]]:
    """All prompts through the engine at once, text and all."""
    from malmoi.inference.engine import GenerationJob
    from malmoi.inference.generation.options import GenerationConfig, Sampling

    wish = GenerationConfig(count, Sampling(temperature=0))
    tickets = [engine.submit(GenerationJob(prompt, wish)) for prompt in prompts]
    return [list(ticket.result().tokens) for ticket in tickets]


def generated(peer: Any, prompts: Prompts, count: int, **more: Any) -> Any:
    """New tokens of transformers' greedy `generate`."""
    import torch

    ids = torch.tensor(prompts, device=peer.device)
    fixed = {
        "do_sample": False,
        "max_new_tokens": count,
        "min_new_tokens": count,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        whole = peer.generate(ids, attention_mask=mask, eos_token_id=None, **fixed, **more)
    return whole[:, ids.size(1) :].tolist()


def made_up_texts(count: int) -> list[str]:
    """Texts of 3 to 50 words, most of them short."""
    chance = random.Random(0)
    return [
        " ".join(chance.choices(WORDS, k=min(50, 3 + int(chance.expovariate(1 / 8)))))
        for _ in range(count)
    ]


def save_bert(folder: Path, texts: Sequence[str], kind: str, **more: Any) -> None:
    """A BERT of 4 × 256 with random weights and a vocabulary of the texts, which both open."""
    import torch
    import transformers

    from malmoi.tokenizer import train_tokenizer

    sizes = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, intermediate_size=1024, **more)
    getattr(transformers, kind)(config).save_pretrained(folder)
    train_tokenizer(list(texts[:2000]), kind="wordpiece", vocab=400).save(folder)


# ------------------------------------------------------------------ jobs in processes of their own


def run_jobs(
    work: Callable[[Any], dict[str, Any]],
    jobs: Mapping[str, Any],
    out: Path,
    *,
    lanes: Sequence[set[int] | None],
    fresh: bool = False,
    limit: float | None = None,
) -> dict[str, dict[str, Any]]:
    """The rows of all jobs by name: a lane is a process, pinned to its cores where it has some.

    A row that OUT has is not run again; a failure is a row with its error, and is. `fresh` gives
    each job a new process, which ends after `limit` seconds.
    """
    from malmoi.system.files import write_text

    out.mkdir(parents=True, exist_ok=True)
    paths = {name: out / f"{name.replace(' ', '-')}.json" for name in jobs}
    rows = {n: json.loads(p.read_text("utf-8")) for n, p in paths.items() if p.is_file()}
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in jobs:
        if name not in rows:
            waiting.put(name)

    def lane(cores: set[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        pool = context.Pool(1, _begin_lane, (cores,))
        while not waiting.empty():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            row = _attempt(pool, work, jobs[name], limit)
            if "error" not in row:
                write_text(paths[name], json.dumps(row, ensure_ascii=False))  # whole or not at all
            rows[name] = row
            print(json.dumps({"job": name, **row}, ensure_ascii=False), flush=True)
            if fresh:
                pool.terminate()
                pool = context.Pool(1, _begin_lane, (cores,))
        pool.terminate()

    threads = [threading.Thread(target=lane, args=(cores,)) for cores in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: rows[name] for name in jobs}


def _begin_lane(cores: set[int] | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if cores:
        os.sched_setaffinity(0, cores)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _end_with_parent() -> None:
    """Ends this lane with the process that began it: it would train on in a folder of the next."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(pool: Any, work: Any, job: Any, limit: float | None) -> dict[str, Any]:
    try:
        row: dict[str, Any] = pool.apply_async(work, (job,)).get(limit)
    except multiprocessing.TimeoutError:
        return {"error": f"more than {limit:.0f} s"}
    except Exception as error:  # the others' results must not be lost
        return {"error": f"{type(error).__name__}: {error}"}
    return row


def core_groups(text: str, each: int) -> list[set[int] | None]:
    """'4-15' or '0,1' as groups of `each` cores; empty: the cores this process may use."""
    if text:
        ends = [part.split("-") for part in text.split(",")]
        cores = [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]
    else:
        cores = sorted(os.sched_getaffinity(0))
    groups = [set(cores[i : i + each]) for i in range(0, len(cores) - each + 1, each)]
    if not groups:
        raise SystemExit(f"--cores {text} are fewer than {each}.")
    return [*groups]


def start_mps(out: Path) -> None:
    """NVIDIA's multi-process service: without it, processes take turns on the card."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("There is no nvidia-cuda-mps-control here: processes take turns.", flush=True)
        return
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        os.environ[name] = str(out.resolve() / "mps")
    Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).mkdir(parents=True, exist_ok=True)
    subprocess.run([control, "-d"], check=True, timeout=30)
    atexit.register(subprocess.run, [control], input=b"quit\n", timeout=30, check=False)
