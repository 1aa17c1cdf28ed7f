"""One table for a GPU: training, decoding and serving beside transformers, and the card's limits.

    malmoi bench --gpu [--out DIR] [--seconds 900]
        [--rows decode xl-decode streams streams-256 bert gpt2 medium xl]
        [--without graphs,kernel,prefix] [--alone] [--record] [--limit tiny]

GPT-2 124M at 1,024 tokens without dropout, 355M and 1.5B, BERT-base at 128 and 512 (real tokens of
packed text), greedy decoding of one and 64 requests, and of one by 1.5B, 64 and 256 streams
through the engine and the server. A training row is the trainer's
own run; its bare step, the same passes again and again, is beside it. transformers is compiled, in
bf16 with a fused AdamW, on full rows. Text and weights are made up. What does not fit into the
seconds is not measured. `--alone` leaves the peers out. `--limit tiny` is a dry run on a CPU.
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import serve
from _shared import (
    Row,
    bandwidth,
    be_quiet,
    benchmark_parser,
    drawn,
    generated,
    made_up_tokenizer,
    middle,
    print_table,
    record_rows,
    served,
    slower_than_recorded,
    switches,
)
from malmoi.inference import Model, load
from malmoi.inference.engine import Engine
from malmoi.model import count_parameters
from malmoi.system.machine import pretend, this_machine
from malmoi.tokenizer import train_tokenizer
from malmoi.training.device import Execution, flops_per_token, matmul_rate
from malmoi.training.parallel import ProcessGroup
from malmoi.training.prepare import RunSources, prepare_run
from malmoi.training.recipes import named_recipe, resolve_recipe
from malmoi.training.trainer import Trainer

SWITCHES = ("graphs", "kernel", "prefix")
GPT2_BATCH = {"train.batch": 128, "train.micro": 64}
STILL = {"model.dropout": 0.0, "model.attention_dropout": 0.0}
ROUNDS = 3  # of streams: their middle counts, and half of their range is the spread
TINY = {"model.width": 32, "model.depth": 1, "model.heads": 2}
WORDS = [
    a + b + c for a in "bdfgklmnprst" for b in ("a", "en", "il", "or", "u") for c in ("", "sa")
]


class Table:
    """What all rows share: the device, its limits, the made-up text and the clock."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.tiny = bool(given.limit)
        self.folder = folder
        self.without: list[str] = given.without
        self.alone: bool = given.alone
        self.device = torch.device("cpu" if self.tiny else "cuda")
        dtype = torch.float32 if self.tiny else torch.bfloat16
        self.execution = Execution(self.device, dtype, compiled=not self.tiny)
        self.flops = matmul_rate(self.execution, 256 if self.tiny else 8192, 1)
        self.bandwidth = bandwidth(self.execution, 1 << (24 if self.tiny else 32))
        # compiling peers takes longest, so that they come when all of ours are measured
        self.peers: list[tuple[Row, Callable[[], float]]] = []
        self.text = folder / "text.txt"
        self.text.write_text("\n\n".join(documents(100 if self.tiny else 4000)), "utf-8")

    def machine(self) -> dict[str, Any]:
        name = "dry run" if self.tiny else torch.cuda.get_device_name()
        return {
            "device": name,
            "torch": torch.__version__,
            "TFLOP/s": round(self.flops / 1e12, 3),
            "GB/s": round(self.bandwidth / 1e9, 1),
        }

    def later(self, row: Row, peer: Callable[[], float]) -> None:
        if not self.alone:
            self.peers.append((row, peer))

    def peer_rate(self, work: Callable[[int], int], rounds: int) -> float | None:
        """The same of a peer, warmed up."""
        if self.alone:
            return None
        self.rate(work, 1)
        return self.rate(work, rounds)

    def free_memory(self) -> None:
        """Lets the next trainer see what the last one took."""
        gc.collect()
        self.execution.free_cache()

    def rates(self, work: Callable[[int], int], rounds: int) -> list[float]:
        """Tokens a second of each round of `work(i)`, which returns its tokens."""
        found = []
        for i in range(rounds):
            self.execution.synchronize()
            began = time.perf_counter()
            tokens = work(i)
            self.execution.synchronize()
            found.append(tokens / (time.perf_counter() - began))
        return found

    def rate(self, work: Callable[[int], int], rounds: int) -> float:
        return middle(self.rates(work, rounds))[0]


def documents(count: int) -> Iterator[str]:
    """Documents of 10 to 40 sentences of 4 to 40 words."""
    chance = random.Random(0)
    for _ in range(count):
        lengths = [chance.randint(4, 40) for _ in range(chance.randint(10, 40))]
        yield " ".join(" ".join(chance.choices(WORDS, k=n)).capitalize() + "." for n in lengths)


def padded_tokenizer(kind: Any, vocab: int, text: Path, folder: Path) -> Path:
    """A small vocabulary with unused tokens up to the size that the model's head has."""
    train_tokenizer([text.read_text("utf-8")[:100_000]], kind=kind, vocab=400).save(folder)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text("utf-8"))
    taken = {*whole["model"]["vocab"].values(), *(one["id"] for one in whole["added_tokens"])}
    free = (i for i in range(vocab) if i not in taken)
    whole["model"]["vocab"] |= {f"unused{i}": i for i in free}
    path.write_text(json.dumps(whole), "utf-8")
    return folder


# ------------------------------------------------------------------ training


def train(table: Table, name: str, length: int, changes: dict[str, Any]) -> Row:
    """Tokens a second of the trainer's run and, as its bound, of its step alone."""
    kind = "wordpiece" if name.startswith("bert") else "byte-bpe"
    vocab = 500 if table.tiny else named_recipe(name).model.vocab
    tokenizer = padded_tokenizer(kind, vocab, table.text, table.folder / f"vocab-{name}")
    steps = 4 if table.tiny else 24
    fixed = {"train.steps": steps, "train.log_every": 2, "train.warmup_steps": 2}
    fixed |= {"train.valid_every": 1000, "train.compile": not table.tiny}
    recipe = resolve_recipe(name, fixed | changes | (TINY if table.tiny else {}))
    table.free_memory()
    group = ProcessGroup(device=table.device)
    out = table.folder / f"{name}-{length}"
    began = time.perf_counter()
    run = prepare_run(recipe, RunSources((str(table.text),), tokenizer), out, group)
    trainer = Trainer(run)
    trainer.restore()  # as a run begins: from here on steps of one shape are CUDA graphs
    size, micro = trainer.config.batch, trainer.micro
    passes = [trainer.feeds[0]._step(i * size, size, micro, table.device) for i in range(2)]

    def step(i: int) -> int:
        trainer.step([micro.tensors for micro in passes[i % 2]])
        return sum(micro.tokens for micro in passes[i % 2])

    step(0)
    table.execution.synchronize()
    first = time.perf_counter() - began
    table.rate(step, 1 if table.tiny else 4)
    bare = table.rate(step, 2 if table.tiny else 12)
    trainer.fit()
    lines = (out / "metrics.jsonl").read_text("utf-8").splitlines()
    speeds = [row["tokens_per_second"] for row in map(json.loads, lines) if "lr" in row]
    ours, spread = middle(speeds[len(speeds) // 3 :])
    weights = count_parameters(trainer.network)
    used = flops_per_token(trainer.network.config, weights, length) * ours / table.flops
    bound = f"MFU {used:.0%}; step alone {bare:,.0f}; first step after {first:.0f} s"
    what = f"{name}, {length} tokens, training"
    return Row(what, "tok/s", ours, "not measured", bound=bound, spread=spread)


def gpt2_row(table: Table) -> Row:
    length = 64 if table.tiny else 1024
    size = {"train.batch": 4, "model.context": length}
    row = train(table, "gpt2-small", length, STILL | (size if table.tiny else GPT2_BATCH))
    still: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    small: Any = (
        dict(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=500) if table.tiny else {}
    )
    config = transformers.GPT2Config(**small, **still, bos_token_id=None, eos_token_id=None)
    table.later(row, lambda: peer_training(table, transformers.GPT2LMHeadModel(config), length))
    return row


def large_row(table: Table, name: str, micro: int) -> Row:
    """A larger GPT-2 without dropout, two passes a step."""
    if table.tiny:
        return train(table, name, 64, STILL | {"train.batch": 4, "model.context": 64})
    return train(table, name, 1024, STILL | {"train.batch": 2 * micro, "train.micro": micro})


def bert_row(table: Table, length: int) -> Row:
    # 131,072 tokens a step at either length
    batch = 8 if table.tiny else 131_072 // length
    phases = {"data.lengths": (length,), "data.shares": (1.0,), "train.batch": batch}
    row = train(table, "bert-base", length, phases)
    small: Any = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=500)
    config = transformers.BertConfig(**(small if table.tiny else {}))
    table.later(row, lambda: peer_training(table, transformers.BertForMaskedLM(config), length))
    return row


def peer_training(table: Table, network: Any, length: int) -> float:
    """Four passes a step on full rows of random tokens, every one of them a label."""
    network.to(table.device).train()
    call = network if table.tiny else torch.compile(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=not table.tiny)
    rows = 2 if table.tiny else 32_768 // length
    tokens = torch.randint(0, network.config.vocab_size, (rows, length), device=table.device)

    def step(_: int) -> int:
        for _ in range(4):
            half = nullcontext() if table.tiny else torch.autocast("cuda", torch.bfloat16)
            with half:
                loss = call(tokens, labels=tokens).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 4 * tokens.numel()

    table.rate(step, 2)
    return table.rate(step, 2 if table.tiny else 8)


# ------------------------------------------------------------------ decoding


def open_both(
    table: Table, name: str = "gpt", shape: dict[str, Any] | None = None
) -> tuple[Model, transformers.PreTrainedModel]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(n_embd=32, n_layer=1, n_head=2) if table.tiny else shape or {}
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    folder = table.folder / name
    peer.save_pretrained(folder)
    made_up_tokenizer().save(folder)
    ours = load(folder, device=table.device, dtype=table.execution.dtype)
    return ours, peer.to(device=table.device, dtype=table.execution.dtype)


def decode_rows(table: Table) -> Iterator[Row]:
    """Prompts of 32 tokens, 128 new ones, text included; warmed up."""
    ours, peer = open_both(table)
    count = 8 if table.tiny else 128
    size = sum(p.nbytes for p in ours.network.parameters())
    for batch in (1, 4 if table.tiny else 64):

        def theirs(i: int, batch: int = batch) -> int:
            return sum(map(len, generated(peer, drawn(batch, 32, i), count)))

        rate, spread = engine_rate(table, ours, batch, count)
        used = size * rate / batch / table.bandwidth
        yield Row(
            f"decoding, GPT-2 124M, {batch} at once",
            "tok/s",
            rate,
            "transformers, dynamic cache",
            table.peer_rate(theirs, 1 if batch > 1 else 2),
            f"MBU {used:.0%}",
            {off: engine_rate(table, ours, batch, count, off)[0] for off in table.without},
            spread,
        )


def engine_rate(
    table: Table, model: Model, batch: int, count: int, off: str = ""
) -> tuple[float, float]:
    """Tokens a second, and their spread.

    Other prompts in every round: the prefix cache would know those of the last.
    """
    options: dict[str, Any] = {"slots": batch, "capacity": 512}
    if off == "graphs":
        options["mode"] = "plain"
    if off == "prefix":
        options["prefix"] = 0
    machine = this_machine()
    with (
        pretend(replace(machine, triton=False)) if off == "kernel" else nullcontext(),
        Engine(model, **options) as engine,
    ):

        def work(i: int) -> int:
            return sum(map(len, served(engine, drawn(batch, 32, i), count)))

        table.rate(work, 2)  # records the graphs
        return middle(table.rates(lambda i: work(2 + i), 7))


def large_decode_rows(table: Table) -> Iterator[Row]:
    """One request of GPT-2 1.5B; torch's modules are the peer of our kernels."""
    shape = dict(n_embd=1600, n_layer=48, n_head=25)
    ours, _ = open_both(table, "xl", shape)
    count = 8 if table.tiny else 128
    (fused, spread), (modules, _) = (
        engine_rate(table, ours, 1, count, off) for off in ("", "kernel")
    )
    used = sum(p.nbytes for p in ours.network.parameters()) * fused / table.bandwidth
    yield Row(
        "GPT-2 1.5B", "tok/s", fused, "torch's modules", modules, f"MBU {used:.0%}", spread=spread
    )


def stream_rows(table: Table, streams: int) -> Iterator[Row]:
    """A closed loop of prompts of 16 to 128 tokens, 96 new ones."""
    ours, peer = open_both(table)
    folder = table.folder / "gpt"
    streams, seconds, tokens = (streams // 16, 1.0, 8) if table.tiny else (streams, 4.0, 96)
    load = serve.Load(streams, seconds, tokens, as_engine=True)
    peers = None
    if not table.alone:
        peers = serve.through_transformers(peer, load)["tokens_per_second"]
    engine = [serve.through_engine(ours, load) for _ in range(ROUNDS)]
    server = [serve.over_http("malmoi", folder, load) for _ in range(ROUNDS)]
    # out of step, as clients' answers end
    speed = "out_of_step_tokens_per_second"
    alone, _ = middle([row[speed] for row in engine])
    for what, rows in (("engine, out of step", engine), ("server", server)):
        rate, spread = middle([row.get(speed, row["tokens_per_second"]) for row in rows])
        first, _ = middle([row["first_token_ms_p95"] or 0.0 for row in rows])
        bound = f"first token p95 {first:.0f} ms"
        bound += f"; {rate / alone:.0%} of the engine" if what == "server" else ""
        label = "transformers, generate_batch"
        what = f"{what}, {streams} streams"
        yield Row(what, "tok/s", rate, label, peers, bound, spread=spread)


ROWS: dict[str, Callable[[Table], Iterator[Row]]] = {
    "decode": decode_rows,
    "xl-decode": large_decode_rows,
    "streams": lambda table: stream_rows(table, 64),
    "streams-256": lambda table: stream_rows(table, 256),
    "bert": lambda table: (bert_row(table, n) for n in ((16, 32) if table.tiny else (128, 512))),
    "gpt2": lambda table: iter([gpt2_row(table)]),
    "medium": lambda table: iter([large_row(table, "gpt2-medium", 32)]),
    "xl": lambda table: iter([large_row(table, "gpt2-xl", 16)]),
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, help="a folder for gpu_table.json")
    parser.add_argument("--seconds", type=float, default=900, help="no row begins later")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--without", type=switches(SWITCHES), default=[], help=", ".join(SWITCHES))
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--record", action="store_true", help="keep these figures as the record")
    parser.add_argument("--limit", choices=("tiny",), help="a dry run on a CPU")
    given = parser.parse_args()
    if not given.limit and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --limit tiny is a dry run on a CPU")
    be_quiet()
    end = time.monotonic() + given.seconds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        table = Table(given, Path(folder))
        for name in given.rows:
            if time.monotonic() > end:
                print(f"{name}: not measured, {given.seconds:.0f} seconds are over")
                continue
            for row in ROWS[name](table):
                rows.append(row)
                print(json.dumps(row.facts()), flush=True)
                for line in slower_than_recorded(table.machine(), [row]):
                    print(line)
                if given.record:  # at once: a run may be stopped
                    record_rows(table.machine(), [row])
        for row, peer in reversed(table.peers):
            if time.monotonic() > end:
                break
            table.free_memory()
            row.theirs = peer()
            row.peer = "transformers" if table.tiny else "transformers, compiled"
        print_table(table.machine(), rows)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            found = {"machine": table.machine(), "rows": [row.facts() for row in rows]}
            (given.out / "gpu_table.json").write_text(json.dumps(found, indent=2), "utf-8")


if __name__ == "__main__":
    main()
