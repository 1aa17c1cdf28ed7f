"""One table for this machine: the hot paths, ours beside the peers', and the machine's own limits.

    malmoi bench [--quick] [--rows decode predict …] [--without kernel,prefix,cache] [--text FILE]
    [--cpu-time]

Every row measures ours and the peer in this run, in turn, on the same weights and data; a ratio
above 1 means that we are faster. MFU is the share of this machine's measured matmul rate, MBU the
share of its measured memory bandwidth that reading the weights once a step takes. `--without`
switches something off, measures its rows again and compares the results. On a busy machine
`--cpu-time` counts processor time on one thread instead of the clock. The last line is JSON.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from _timing import Clock, Work, benchmark_parser, fewest, processor_time, timed
from malmoi.system.language import language
from malmoi.system.machine import parse_machine, pretend, this_machine
from malmoi.training.device import Execution, flops_per_token

SECONDS = ("s", "ms")  # units in which less is better
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
    if language() == "ko":
        for english, korean in KOREAN.items():
            cell = cell.replace(english, korean)
    return cell


def bandwidth(execution: Execution, size: int, now: Clock = time.perf_counter) -> float:
    """Bytes a second of a copy, read and written."""
    # written once: pages that never were are all the same page of zeros, which a cache holds
    source = torch.ones(size, dtype=torch.uint8, device=execution.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        execution.synchronize()

    execution.synchronize()
    return 2 * size / fewest({"copy": copy}, 4, now)["copy"]


def switches(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Reads "graphs,kernel"."""

    def read(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return read


class CPU:
    """What the rows share: how much to measure, the limits of this machine, a folder."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.quick: bool = given.quick
        self.without: list[str] = given.without
        self.text: str | None = given.text
        self.now = processor_time if given.cpu_time else time.perf_counter
        self.threads = 1 if given.cpu_time else this_machine().cores
        self.folder = folder
        self.execution = Execution(torch.device("cpu"), this_machine().training_dtype("cpu"), False)
        size = 1024 if self.execution.half else 512
        a = torch.randn(size, size).to(self.execution.dtype)
        self.flops = 2 * size**3 / self.best({"product": lambda: a @ a}, 20)["product"]
        self.bandwidth = bandwidth(self.execution, 1 << 28, self.now)

    def machine(self) -> dict[str, Any]:
        found = this_machine()
        return {
            "processor": f"{found.cores} cores, {found.architecture}",
            "threads": torch.get_num_threads(),
            "load": round(os.getloadavg()[0], 1),
            "torch": torch.__version__,
            "GFLOP/s": round(self.flops / 1e9, 1),
            "GB/s": round(self.bandwidth / 1e9, 1),
        }

    def pick(self, quick: Any, full: Any) -> Any:
        return quick if self.quick else full

    def seconds(self, work: Work) -> float:
        return timed(work, self.now)[0]

    def best(self, works: dict[str, Work], rounds: int) -> dict[str, float]:
        return fewest(works, rounds, self.now)


def check_same(what: str, one: object, other: object) -> None:
    if one != other:
        raise SystemExit(f"{what}: the results differ.")


# ------------------------------------------------------------------ start


def start_rows(cpu: CPU) -> Iterator[Row]:
    """Processes that import or print help and exit; then, imported, a model and its first token."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import malmoi
    from decode import peer_of
    from engine import made_up_tokenizer

    processes = {
        "import": ("import malmoi", "import transformers"),
        "--help": ("-m malmoi --help", "-m transformers.cli.transformers --help"),
    }
    for what, codes in processes.items():
        names = dict(zip(("ours", "theirs", "floor"), (*codes, "pass"), strict=True))
        found = cpu.best({k: partial(run_python, v) for k, v in names.items()}, cpu.pick(1, 3))
        floor = f"python alone {found['floor']:.2g} s"
        yield Row(what, "s", found["ours"], "transformers", found["theirs"], floor)
    folder = cpu.folder / "start"
    peer_of("gpt2").save_pretrained(folder)
    made_up_tokenizer().save(folder)
    mapped = partial(load_file, folder / "model.safetensors")

    def load_theirs() -> tuple[Any, Any]:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        return loaded, AutoTokenizer.from_pretrained(folder)

    def write_theirs() -> None:
        model, tokenizer = load_theirs()
        given = tokenizer("ab", return_tensors="pt")
        model.generate(**given, max_new_tokens=1, pad_token_id=0)

    def write_ours() -> None:
        malmoi.load(folder, device="cpu").generate("ab", max_new_tokens=1)

    pairs: dict[str, dict[str, Work]] = {
        "load 124M": {"ours": lambda: malmoi.load(folder, device="cpu"), "theirs": load_theirs},
        "load and first token, 124M": {"ours": write_ours, "theirs": write_theirs},
    }
    for what, works in pairs.items():
        found = cpu.best(works | {"floor": mapped}, cpu.pick(2, 3))
        floor = f"safetensors alone {found['floor']:.2g} s"
        yield Row(what, "s", found["ours"], "transformers", found["theirs"], floor)


def run_python(code: str) -> None:
    words = code.split() if code.startswith("-m") else ["-c", code]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(
        [sys.executable, *words], check=True, capture_output=True, env=environment, timeout=300
    )


# ------------------------------------------------------------------ decoding and reading


SHAPE_NAMES = {"gpt2": "GPT-2 124M", "llama": "SmolLM2-135M"}


def decode_rows(cpu: CPU) -> Iterator[Row]:
    """Greedy, random weights of two shapes, one and eight prompts of 32 tokens."""
    for shape in ("gpt2",) if cpu.quick else SHAPE_NAMES:
        yield from decode_rows_of(cpu, shape)


def decode_rows_of(cpu: CPU, shape: str) -> Iterator[Row]:
    from decode import measure, on_machine, ours, peer_of, theirs
    from malmoi.inference import load
    from malmoi.kernels.int8_row import why_not

    folder = cpu.folder / f"decode-{shape}"
    peer = peer_of(shape)
    peer.save_pretrained(folder)
    decoders = {"malmoi": ours(load(folder, device="cpu")), "transformers": theirs(peer)}
    size = {"malmoi": sum(p.nbytes for p in peer.parameters())}
    if why_not() is None:
        decoders["int8"] = ours(load(folder, device="cpu", dtype="int8"))
        size["int8"] = size["malmoi"] / 4
        if "kernel" in cpu.without:
            decoders["kernel"] = on_machine("no-fused", decoders["int8"])
    if "screen" in cpu.without:
        with pretend(parse_machine("no-bf16")):
            decoders["screen"] = ours(load(folder, device="cpu"))
    off_for = {"screen": "malmoi", "kernel": "int8"}
    for batch in (1, 8):
        found = measure(decoders, batch, cpu.pick(6, 24), cpu.pick(1, 2), cpu.now)
        if not found["identical"]:
            raise SystemExit("Decoding: the tokens differ from those of transformers.")
        for name, label in (("malmoi", "fp32"), ("int8", "int8")):
            if name not in decoders:
                continue
            used = size[name] * found[name] / batch / cpu.bandwidth
            off = {one: found[one] for one in off_for if one in found and off_for[one] == name}
            what = f"decoding {label}, {SHAPE_NAMES[shape]}, {batch} at once"
            peer_rate = found["transformers"]
            yield Row(
                what, "tok/s", found[name], "transformers fp32", peer_rate, f"MBU {used:.0%}", off
            )


def prefix_rows(cpu: CPU) -> Iterator[Row]:
    """Eight requests that begin with the same 256 tokens."""
    import transformers

    from engine import drawn, generated, made_up_tokenizer, served
    from malmoi.inference import load
    from malmoi.inference.engine import Engine

    folder = cpu.folder / "prefix"
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=256, n_layer=4, n_head=4)
    peer = transformers.GPT2LMHeadModel(config).eval()
    peer.save_pretrained(folder)
    made_up_tokenizer().save(folder)
    model = load(folder, device="cpu")
    shared = drawn(1, 256)[0]
    prompts = [(*shared, *end) for end in drawn(8, 8, 1)]
    found: dict[str, Any] = {}

    def ours(name: str, **options: Any) -> Callable[[], None]:
        def work() -> None:
            with Engine(model, slots=8, capacity=512, **options) as engine:
                served(engine, [(*shared, 0)], 1)  # the prompt is known
                began = cpu.now()
                found[name] = served(engine, prompts, 8)
                seconds[name] = cpu.now() - began

        return work

    seconds: dict[str, float] = {}
    works = {"ours": ours("ours")}
    if "prefix" in cpu.without:
        works["prefix"] = ours("prefix", prefix=0)
    for work in works.values():
        work()
    theirs = cpu.best({"theirs": lambda: generated(peer, prompts, 8)}, 2)["theirs"]
    off = {name: 64 / seconds[name] for name in works if name != "ours"}
    if off:
        check_same("prefix", found["ours"], found["prefix"])
    what = "8 requests after one prompt of 256, 4 × 256"
    yield Row(what, "tok/s", 64 / seconds["ours"], "transformers", 64 / theirs, "", off)


def bert_rows(cpu: CPU) -> Iterator[Row]:
    """One text of 128 tokens through BERT-base."""
    import transformers

    from decode import on_machine
    from malmoi.inference import load
    from malmoi.kernels.int8_row import why_not
    from malmoi.tokenizer import train_tokenizer

    folder = cpu.folder / "bert"
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig()).eval()
    peer.save_pretrained(folder)
    train_tokenizer(["a made-up text"] * 4, kind="wordpiece", vocab=60).save(folder)
    tokens = torch.randint(10, 50, (1, 128))
    exact = load(folder, device="cpu")
    works: dict[str, Work] = {
        "fp32": lambda: exact.network.trunk(tokens),
        "transformers": lambda: peer(tokens),
    }
    if why_not() is None:
        small = load(folder, device="cpu", dtype="int8")
        works["int8"] = lambda: small.network.trunk(tokens)
        if "kernel" in cpu.without:
            works["kernel"] = on_machine("no-fused", works["int8"])
    missing = [name for name in ("onnxruntime", "onnxscript") if find_spec(name) is None]
    if not missing and not cpu.quick:
        works["onnxruntime int8"] = onnx_session(folder, tokens)
    with torch.inference_mode():
        found = {name: 1000 * spent for name, spent in cpu.best(works, cpu.pick(2, 8)).items()}
    weights = sum(p.numel() for p in exact.network.trunk.blocks.parameters())
    used = 2 * weights * 128 / (found["fp32"] / 1000) / cpu.flops
    what = "BERT-base, one text of 128 tokens"
    peer_ms = found["transformers"]
    yield Row(f"{what}, fp32", "ms", found["fp32"], "transformers", peer_ms, f"MFU {used:.0%}")
    if "int8" in found:
        onnx = found.get("onnxruntime int8")
        why = "not with --quick" if cpu.quick else f"{' and '.join(missing)} not installed"
        label = "onnxruntime int8" if onnx else f"onnxruntime int8: {why}"
        off = {name: found[name] for name in ("kernel",) if name in found}
        yield Row(f"{what}, int8", "ms", found["int8"], label, onnx, "", off)


def onnx_session(folder: Path, tokens: torch.Tensor) -> Work:
    """Our own export in int8, run by ONNX Runtime with as many threads."""
    import onnxruntime

    import malmoi

    target = folder / "model.onnx"
    malmoi.export(str(folder), target, dtype="int8")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(target), options)
    ones = torch.ones_like(tokens).numpy()
    values = {"input_ids": tokens.numpy(), "attention_mask": ones, "token_type_ids": 0 * ones}
    names = {one.name for one in session.get_inputs()}
    given = {name: value for name, value in values.items() if name in names}
    return lambda: session.run(None, given)


# ------------------------------------------------------------------ training


def train_rows(cpu: CPU) -> Iterator[Row]:
    from malmoi.model import Network, count_parameters
    from malmoi.model.families import gpt2
    from train_cpu import SHAPE, measure, ours, theirs

    size = cpu.pick(4, 8)
    half = this_machine().fast_bf16("cpu")
    precision = "bf16" if half else "fp32"
    ways = {
        "ours": ours(size, cpu.folder / "train", precision, compiled=half and not cpu.quick),
        "theirs": theirs(size, half=False),
    }
    found = measure(ways, size, cpu.pick(2, 4), cpu.pick(1, 3), cpu.now)
    config = gpt2(**SHAPE)
    with torch.device("meta"):
        weights = count_parameters(Network(config, {"lm": 0}))
    used = flops_per_token(config, weights, SHAPE["context"]) * found["ours"] / cpu.flops
    what = f"training a GPT of 4 × 256, {precision}"
    yield Row(what, "tok/s", found["ours"], "transformers fp32", found["theirs"], f"MFU {used:.0%}")


def finetune_rows(cpu: CPU) -> Iterator[Row]:
    if find_spec("accelerate") is None:
        print("fine-tuning: transformers' Trainer needs accelerate, which is not installed")
        return
    import finetune

    rows = finetune.made_up(cpu.pick(160, 800))
    folder = cpu.folder / "finetune"
    finetune.model(folder, "cpu", rows)
    seconds = {}
    for name, way in (("ours", finetune.ours), ("theirs", finetune.theirs)):
        way(folder, rows[:64], "cpu", cpu.folder / f"{name}-warm")
        seconds[name] = way(folder, rows, "cpu", cpu.folder / name)
    rates = {name: len(rows) / spent for name, spent in seconds.items()}
    what = "fine-tuning a BERT of 4 × 256, batch 32"
    yield Row(what, "examples/s", rates["ours"], "transformers' Trainer", rates["theirs"])


def predict_rows(cpu: CPU) -> Iterator[Row]:
    import predict

    folder = cpu.folder / "predict"
    data = cpu.folder / "rows.csv"
    count = cpu.pick(300, 2000)
    predict.write_model(folder, predict.write_rows(data, count))
    ready = {"ours": predict.ours(folder), "theirs": predict.pipeline(folder)}
    outs = {name: cpu.folder / f"{name}.csv" for name in ready}
    works = {name: lambda name=name: ready[name](data, outs[name]) for name in ready}
    seconds = cpu.best(works, 2)
    check_same("predict", *(predict.labels_of(out) for out in outs.values()))
    rates = {name: count / spent for name, spent in seconds.items()}
    what = "predict, a CSV of short texts, BERT of 4 × 256"
    yield Row(what, "rows/s", rates["ours"], "transformers' pipeline", rates["theirs"])


# ------------------------------------------------------------------ text


def source_text(cpu: CPU) -> str:
    return cpu.text or "builtin:sotu"


def text_rows(cpu: CPU) -> Iterator[Row]:
    """Text to ids and to a token store, with a vocabulary of 8,000 learnt from it."""
    from encode import peers, prepare
    from malmoi.text.documents import read_documents
    from malmoi.tokenizer import train_tokenizer
    from malmoi.training.data.cached_encoder import CachedTexts, make_encoder
    from malmoi.training.data.encode import build_stores

    source = source_text(cpu)
    path, size = prepare(source, cpu.pick(2, 8), cpu.folder)
    lines = path.read_text("utf-8").splitlines()
    tokenizer = train_tokenizer(list(islice(lines, 2000)), kind="byte-bpe", vocab=8000)
    fast = peers(path, tokenizer, cpu.folder)
    stores = cpu.folder / "stores"
    reader = read_documents(path, documents="line")
    ours = size / cpu.seconds(lambda: build_stores(reader, tokenizer, stores))
    theirs = {name: size / spent for name, spent in cpu.best(fast, 1).items()}
    ids = "tokenizers.encode_batch"
    mapped = theirs.get("datasets.map")
    label = "datasets.map" if mapped else "datasets not installed"
    known = make_encoder(tokenizer)
    works: dict[str, Work] = {
        "ours": lambda: make_encoder(tokenizer).encode(lines),
        "known": lambda: known.encode(lines),
    }
    known.encode(lines)
    if "cache" in cpu.without:
        works["cache"] = lambda: CachedTexts(tokenizer).encode(lines)
        pairs = [
            coder.encode(lines[:500]) for coder in (make_encoder(tokenizer), CachedTexts(tokenizer))
        ]
        check_same("cache", *([part.tolist() for part in pair] for pair in pairs))
    found = {name: size / spent for name, spent in cpu.best(works, 1).items()}
    off = {name: rate for name, rate in found.items() if name == "cache"}
    floor = f"no new word {number(found['known'])} MB/s"
    yield Row("text → token store", "MB/s", ours, label, mapped, floor)
    yield Row("text → ids", "MB/s", found["ours"], ids, theirs[ids], floor, off)


def corpus_rows(cpu: CPU) -> Iterator[Row]:
    """The whole chain, then near-duplicates alone, given each text's runs of words."""
    import corpus
    from encode import prepare
    from malmoi.text.documents import read_documents

    source = source_text(cpu)
    place = cpu.folder / "raw"
    place.mkdir()
    path, size = prepare(source, cpu.pick(2, 24), place)
    texts = [document.text for document in read_documents(path, documents="line")]
    held_out = place / "test.txt"
    held_out.write_text("\n".join(texts[:20]), "utf-8")
    options = dict(decontaminate=[str(held_out)], workers=cpu.threads, documents="line")
    # in a process of its own: workers that it starts would import all that this one has
    chain = f"""if True:
        import malmoi, tempfile
        with tempfile.TemporaryDirectory() as out:
            malmoi.build_corpus([{str(path)!r}], out + "/corpus", **{options!r})
    """
    reading = cpu.seconds(lambda: sum(1 for _ in read_documents(path, documents="line")))
    floor = f"reading alone {number(size / reading)} MB/s"
    label = "no peer measured" if find_spec("datatrove") else "datatrove not installed"
    what = "corpus: read, clean, filter, dedup, decontaminate"
    yield Row(what, "MB/s", size / cpu.seconds(lambda: run_python(chain)), label, None, floor)
    ours = corpus.our_shingles(texts)
    rate = size / cpu.seconds(lambda: corpus.our_duplicates(ours))
    theirs = None
    label = "rensa not installed"
    if find_spec("rensa") is not None:
        runs = corpus.python_shingles(texts)
        theirs = size / cpu.seconds(lambda: corpus.rensa(runs))
        label = "rensa"
    yield Row("near-duplicates, runs of words given", "MB/s", rate, label, theirs)


# ------------------------------------------------------------------ server


def serve_rows(cpu: CPU) -> Iterator[Row]:
    """Streams over HTTP from a GPT-2 of 5M."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        print(f"serve: {' and '.join(missing)} not installed")
        return
    import serve

    folder = serve.make_folder(cpu.folder / "small-gpt")
    given = argparse.Namespace(seconds=cpu.pick(4, 10), streams=cpu.pick(16, 64), tokens=32)
    found = [serve.measure(name, folder, given) for name in ("malmoi", "plain")]
    rates = [one["tokens_per_second"] for one in found]
    first = found[0]["p95_first_token_s"]
    what = f"server, {given.streams} streams, GPT-2 of 5M"
    bound = f"first token p95 {first:.2f} s" if first else ""
    yield Row(what, "tok/s", rates[0], "transformers serve", rates[1] or None, bound)


ROWS: dict[str, Callable[[CPU], Iterator[Row]]] = {
    "start": start_rows,
    "train": train_rows,
    "decode": decode_rows,
    "prefix": prefix_rows,
    "bert": bert_rows,
    "predict": predict_rows,
    "finetune": finetune_rows,
    "text": text_rows,
    "corpus": corpus_rows,
    "serve": serve_rows,
}
SWITCHES = ("kernel", "prefix", "cache", "screen", "graphs")
CLOCK_ONLY = ("finetune", "serve")  # rows whose processes take the time themselves


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="about two minutes on two cores")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--without", type=switches(SWITCHES), default=[], help=str(SWITCHES))
    parser.add_argument("--text", help="a text to encode and clean [builtin:sotu]")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, one thread")
    given = parser.parse_args()
    if given.cpu_time:
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        given.rows = [name for name in given.rows if name not in CLOCK_ONLY]
    if "graphs" in given.without:
        print("graphs: only a GPU records them, there is nothing to switch off here")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        cpu = CPU(given, Path(folder))
        for name in given.rows:
            began = time.perf_counter()
            rows += ROWS[name](cpu)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        print_table(cpu.machine(), rows)


if __name__ == "__main__":
    main()
