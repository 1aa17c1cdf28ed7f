"""Files that anybody may have written, damaged in every way a seed draws: what comes of each is
told.

`python campaign.py KIND FIRST COUNT` tries some mutations of one kind in this process and writes a
line of JSON before and after each, so that its parent can tell which one crashed or hung.
See test_campaign.py.
"""

import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentencepiece import sentencepiece_model_pb2

import folder_mutations
import malmoi
from campaign_data import DATA_KINDS
from malmoi.adapters.attach import attach_adapter
from malmoi.adapters.config import AdapterConfig
from malmoi.adapters.store import write_adapter
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.quantized import Packing
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError
from malmoi.kernels.int8 import quantize_int8, why_not
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.recipes import resolve_recipe
from mutations import Kind, mutate_bytes, mutate_header, mutate_json, mutate_tensors, quiet
from tiny_sentencepiece import write_tokenizer as write_pieces

TEXT = "the state of the union is strong"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
SMALL: dict[str, Any] = dict(
    context=32, width=16, depth=2, heads=2, dropout=0.0, attention_dropout=0.0
)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "bert": ("bert-tiny", {}, {"mlm": 0, "nsp": 0}),
    "bert-classes": ("bert-tiny", {}, {"classify": 3}),
    "gpt2": ("gpt2-small", {}, {"lm": 0}),
    "gpt1": ("gpt1", {}, {"lm": 0}),
    "distilbert": ("distilbert", {}, {"mlm": 0}),
    "electra": ("electra-small", {"embed_width": 8, "hidden": 32}, {"detect": 0}),
    "albert": ("albert-base", {"embed_width": 8}, {"mlm": 0}),
    "llama": ("smollm2-135m", {"kv_heads": 1, "hidden": 24}, {"lm": 0}),
    "own": ("gpt2-small", {"attention": ("causal & local:8",), "positions": "rotary"}, {"lm": 0}),
}
# ------------------------------------------------------------------ what is damaged


@cache
def words(kind: str) -> Tokenizer:
    made = train_tokenizer(
        [TEXT, "User: yes\nAssistant: no", "가나다 라마바"] * 5, kind=kind, vocab=300
    )
    return Tokenizer(made._rust, made.settings | {"chat_template": TEMPLATE})


def network_of(family: str) -> tuple[Network, Tokenizer]:
    size, changes, heads = FAMILIES[family]
    tokenizer = words("byte-bpe" if "lm" in heads else "wordpiece")
    config: ModelConfig = preset(size, vocab=tokenizer.vocab_size, **{**SMALL, **changes})
    return initialise(Network(config, heads), 0), tokenizer


def make_model(family: str, folder: Path, **how: Any) -> None:
    network, tokenizer = network_of(family)
    labels = ("a", "b", "c") if "classify" in network.heads else ()
    extra = {"length": 16, "both": False} if labels else {}
    write_checkpoint(Checkpoint(network, tokenizer, labels, extra=extra), folder, **how)


def make_packed(folder: Path) -> None:
    make_model("llama", folder, packing=Packing(4, 8))


def make_int8(folder: Path) -> None:
    network, tokenizer = network_of("gpt2")
    write_checkpoint(Checkpoint(quantize_int8(network), tokenizer), folder)


INT8 = {} if why_not() else {"int8": make_int8}


def make_adapter(kind: str, folder: Path) -> None:
    base = folder / "base"
    make_model("bert" if kind == "lora" else "gpt2", base)
    start = malmoi.load(base, device="cpu").checkpoint
    tokenizer = start.tokenizer
    assert tokenizer is not None
    learnt = malmoi.load(base, device="cpu").checkpoint
    adapter = AdapterConfig(kind=kind, rank=2, tokens=3)  # type: ignore[arg-type]
    attach_adapter(learnt.network, adapter, tokenizer)
    for name, parameter in learnt.network.named_parameters():
        parameter.requires_grad_(
            ".patches." in name or name in ("trunk.soft_prompt", "trunk.prefix_kv")
        )
    labels: tuple[str, ...] = ()
    if kind == "lora":
        for head in list(learnt.network.heads):
            del learnt.network.heads[head]
        learnt.network.add("classify", 2)
        labels = ("no", "yes")
    write_adapter(Checkpoint(learnt.network, tokenizer, labels), start, adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    config["base_model_name_or_path"] = "base"
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")


def make_gguf(folder: Path) -> None:
    pytest.importorskip("gguf", reason="what writes such files")
    from malmoi.checkpoint.export_gguf import export_gguf

    folder.mkdir(parents=True)
    export_gguf(Checkpoint(*network_of("llama")), folder / "model.gguf")


def make_run(folder: Path) -> None:
    from tiny_runs import train as pretrain_tiny, write_corpus

    folder.mkdir(parents=True)
    corpus = write_corpus(folder / "corpus.txt", 20)
    pretrain_tiny("gpt", corpus, folder / "run", steps=3, **{"train.save_every": 2})


# ------------------------------------------------------------------ what is tried


def use(source: Path) -> None:
    """Loads a model and does with it what it can: every number that comes out must be one."""
    model = malmoi.load(source, device="cpu")
    if model.checkpoint.tokenizer is None:
        return
    if "logits" in model.abilities:
        _finite(model.logits(TEXT))
    _finite(model.embed(TEXT))
    if "generate" in model.abilities:
        model.generate(TEXT, max_new_tokens=3, seed=0)
    if "chat" in model.abilities:
        model.chat("yes", max_new_tokens=3, seed=0)
    if "predict" in model.abilities:
        model.predict(TEXT)


def _finite(values: Any) -> None:
    if not np.isfinite(values).all():
        raise AssertionError("numbers came out that are none")


def use_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    found = tokenizer.encode(TEXT, "가나다")
    tokenizer.decode(found.tokens)
    tokenizer.rows([TEXT, "x" * 500])
    tokenizer.ids([TEXT * 20])
    tokenizer.save(folder / "again")
    from malmoi.tokenizer.chat_template import render_chat

    render_chat(tokenizer, [{"role": "user", "content": "yes"}])


def use_recipe(folder: Path) -> None:
    resolve_recipe(str(folder / "recipe.json"), {})


def use_run(folder: Path) -> None:
    from tiny_runs import train as pretrain_tiny

    pretrain_tiny("gpt", folder / "corpus.txt", folder / "run", steps=4, **{"train.save_every": 2})


# ------------------------------------------------------------------ kinds


def _one_of(*names: str) -> Callable[[Path, random.Random], str]:
    """Damages one of the JSON files that are there."""

    def damage(folder: Path, rng: random.Random) -> str:
        name = rng.choice([name for name in names if (folder / name).is_file()])
        return f"{name}: {mutate_json(folder / name, rng)}"

    return damage


def damage_tokenizer(folder: Path, rng: random.Random) -> str:
    names = ["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]
    if rng.random() < 0.3:  # the older files, without the new one
        (folder / "tokenizer.json").unlink()
        names = ["vocab.txt", "vocab.json", "merges.txt", "tokenizer_config.json"]
    if rng.random() < 0.1:
        (folder / "added_tokens.json").write_text('{"<new>": 300}')
        names.append("added_tokens.json")
    name = rng.choice([name for name in names if (folder / name).is_file()])
    change = mutate_json if name.endswith(".json") else mutate_bytes
    return f"{name}: {change(folder / name, rng)}"


def damage_weights(folder: Path, rng: random.Random) -> str:
    index = folder / "model.safetensors.index.json"
    if index.is_file() and rng.random() < 0.5:
        return f"index: {mutate_json(index, rng)}"
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    return f"{path.name}: {rng.choice((mutate_header, mutate_tensors, mutate_bytes))(path, rng)}"


def damage_adapter(folder: Path, rng: random.Random) -> str:
    if rng.random() < 0.6:
        return _one_of("adapter_config.json", "adapter_config.json", "adapter.json")(folder, rng)
    path = folder / "adapter_model.safetensors"
    return rng.choice((mutate_header, mutate_tensors, mutate_bytes))(path, rng)


def damage_gguf(folder: Path, rng: random.Random) -> str:
    """Mostly in its first part, where it says what it holds."""
    path = folder / "model.gguf"
    data = bytearray(path.read_bytes())
    how, end = (
        rng.choice(("turn", "turn", "number", "cut", "anywhere")),
        rng.choice((64, 1000, 20_000, len(data))),
    )
    at = rng.randrange(min(end, len(data) - 8))
    if how == "turn":
        data[at] = rng.randrange(256)
    elif how == "number":
        struct.pack_into("<Q", data, at, rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, 255)))
    elif how == "cut":
        del data[at:]
    else:
        for _ in range(20):
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    return f"{how} at {at}"


def damage_run(folder: Path, rng: random.Random) -> str:
    run = folder / "run"
    state = rng.choice(sorted(run.glob("train_state/step-*")))
    files = [
        state / "state.json",
        state / "state.json",
        run / "recipe.json",
        run / "data" / "train" / "store.json",
    ]
    path = rng.choice(
        [*files, *state.glob("*.safetensors"), run / "data" / "journal.json", run / "config.json"]
    )
    if not path.is_file():
        path = state / "state.json"
    change = mutate_json if path.suffix == ".json" else rng.choice((mutate_header, mutate_bytes))
    return f"{path.name}: {change(path, rng)}"


def damage_pieces(folder: Path, rng: random.Random) -> str:
    """Bytes of a SentencePiece model or what it says, or the small files beside it."""
    models = [*folder.glob("*.model"), *folder.glob("*.spm")]
    path = rng.choice(sorted([*models, *models, *folder.glob("*.json")]))
    if path.suffix == ".json":
        change: Callable[[Path, random.Random], str] = mutate_json
    else:
        change = rng.choice((mutate_bytes, mutate_pieces, mutate_pieces))
    return f"{path.name}: {change(path, rng)}"


def mutate_pieces(path: Path, rng: random.Random) -> str:
    """Changes one statement of a SentencePiece model, which is still one."""
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    piece = rng.choice(model.pieces)
    how = rng.choice(("score", "text", "type", "kind", "unknown", "table", "flags", "fewer"))
    if how == "score":
        piece.score = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0))
    elif how == "text":
        piece.piece = rng.choice(("", "a" * 70_000, "\x00", "<s>", model.pieces[5].piece))
    elif how == "type":
        piece.type = rng.choice((1, 2, 3, 4, 5, 6))
    elif how == "kind":
        model.trainer_spec.model_type = rng.choice((1, 2, 3, 4))
    elif how == "unknown":
        model.trainer_spec.unk_id = rng.choice((-1, 5, 2**31 - 1))
    elif how == "table" and model.normalizer_spec.precompiled_charsmap:
        table = bytearray(model.normalizer_spec.precompiled_charsmap)
        for _ in range(rng.choice((1, 20, 2000))):
            table[rng.randrange(len(table))] = rng.randrange(256)
        model.normalizer_spec.precompiled_charsmap = bytes(table)
    elif how == "flags":
        model.normalizer_spec.add_dummy_prefix = rng.random() < 0.5
        model.trainer_spec.byte_fallback = rng.random() < 0.5
        model.trainer_spec.treat_whitespace_as_suffix = rng.random() < 0.5
    else:
        del model.pieces[rng.randrange(len(model.pieces)) :]
    path.write_bytes(model.SerializeToString())
    return how


class Compared(Kind):
    """Folders of transformers that are whole, but odd: what comes of one must be the same there."""

    def run(self, seed: int, scratch: Path) -> tuple[str, Callable[[], None]]:
        family = sorted(self.makers)[seed % len(self.makers)]
        shutil.rmtree(scratch, ignore_errors=True)

        def act() -> None:
            said, outcome = folder_mutations.compare(family, seed, scratch)
            if outcome.startswith("wrong"):
                raise AssertionError(f"{said}: {outcome}")
            if outcome != "right":
                raise MalmoiError(f"{said}: {outcome.rstrip('.')}.")

        return f"{family} {seed}", act


def _models(*names: str, **how: Any) -> dict[str, Callable[[Path], None]]:
    return {name: lambda folder, name=name: make_model(name, folder, **how) for name in names}  # type: ignore[misc]


KINDS: dict[str, Kind] = {
    "config": Kind(
        {**_models(*FAMILIES), "packed": make_packed, **INT8},
        _one_of("config.json", "config.json", "config.json", "generation_config.json"),
        lambda folder: use(folder),
    ),
    "tokenizer": Kind(_models("bert", "gpt2", "gpt1", "llama"), damage_tokenizer, use_tokenizer),
    "sentencepiece": Kind(
        {
            name: lambda folder, name=name: write_pieces(folder, name, {})  # type: ignore[misc]
            for name in ("xlm-roberta", "albert", "llama", "marian")
        },
        damage_pieces,
        use_tokenizer,
    ),
    "odd folders": Compared(
        dict.fromkeys(folder_mutations.CLASSES, lambda folder: None), None, use
    ),
    "weights": Kind(
        {**_models("bert", "gpt2", "llama", "own"), "packed": make_packed, **INT8}
        | {
            f"{name} in shards": one
            for name, one in _models("bert", "gpt2", shard_bytes=6000).items()
        },
        damage_weights,
        use,
    ),
    "adapter": Kind(
        {
            kind: lambda folder, kind=kind: make_adapter(kind, folder)
            for kind in ("lora", "prompt", "prefix")
        },  # type: ignore[misc]
        damage_adapter,
        use,
    ),
    "gguf": Kind({"llama": make_gguf}, damage_gguf, lambda folder: use(folder / "model.gguf")),
    "recipe": Kind(
        {
            name: lambda folder, name=name: _write_recipe(name, folder)  # type: ignore[misc]
            for name in ("gpt2-small", "bert-tiny", "gpt3-125m", "gpt-char")
        },
        _one_of("recipe.json"),
        use_recipe,
    ),
    "state": Kind({"gpt": make_run}, damage_run, use_run),
    **DATA_KINDS,
}


def _write_recipe(name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(resolve_recipe(name, {"steps": 10}).to_json(), "utf-8")


# ------------------------------------------------------------------ one mutation


def attempt(kind: str, seed: int, scratch: Path) -> dict[str, Any]:
    """What came of one mutation: right, told in a sentence, or a fault."""
    said, act = KINDS[kind].run(seed, scratch)
    memory, start = peak_bytes(), time.process_time()
    try:
        with quiet():
            act()
        outcome, sentence = "right", ""
    except MalmoiError as error:
        outcome, sentence = "told", str(error)
        if len(sentence) > 1500 or not sentence.rstrip().endswith((".", "?", ")", "!")):
            outcome = "fault: no sentence"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        outcome, sentence = f"fault: {type(error).__name__}", str(error)[:300]
    seconds, grown = time.process_time() - start, peak_bytes() - memory
    if grown > 2**30:
        outcome = f"fault: {grown / 2**30:.1f} GB"
    return {
        "kind": kind,
        "seed": seed,
        "did": said,
        "outcome": outcome,
        "said": sentence[:300],
        "seconds": seconds,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def main() -> None:
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    # a bomb becomes a MemoryError here rather than the machine's trouble
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(first, first + count):
            print(json.dumps({"begun": seed}), flush=True)
            print(json.dumps(attempt(kind, seed, Path(scratch) / "it")), flush=True)


if __name__ == "__main__":
    main()
