"""What makes a step faster on a GPU changes nothing: forms that only a compiler takes, beside the
plain ones on a processor; and what is done before the first step.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.model import Network, attention, elementwise, initialise, positions, preset, transformer
from malmoi.text.documents import read_documents
from malmoi.tokenizer import train_tokenizer
from malmoi.training import prepare
from malmoi.training.optim import Muon
from malmoi.training.parallel import ProcessGroup
from malmoi.training.prepare import RunSources
from malmoi.training.pretrain import _sample_run
from malmoi.training.recipes import MODERN_BERT, resolve_recipe
from malmoi.training.sizing import SMALL_TEXT_GPT, size_recipe
from malmoi.training.trainer import Trainer
from tiny_runs import write_corpus

SHAPE: dict[str, Any] = dict(width=32, depth=2, heads=2, hidden=0, vocab=50, context=16)


def as_if_compiled(patch: pytest.MonkeyPatch) -> None:
    for module in (attention, elementwise, positions, transformer):
        patch.setattr(module, "compiles_for_gpu", lambda x: True)


def gradients(config: ModelConfig, head: str) -> tuple[Tensor, dict[str, Tensor]]:
    network = initialise(Network(config, {head: 0}), 0).double()
    generator = torch.Generator().manual_seed(1)
    for weight in network.parameters():  # zeroed ones would hide what comes before them
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.double)
    hidden = network.hidden(torch.arange(32).view(2, 16))
    hidden.sin().sum().backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return hidden.detach(), found


@pytest.mark.parametrize("kind", ["gpt", "bert", "shared keys"])
def test_products_apart_give_the_same_states_and_gradients(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = MODERN_BERT if kind == "bert" else SMALL_TEXT_GPT
    keys = {"kv_heads": 1} if kind == "shared keys" else {}
    config = preset("bert-small" if kind == "bert" else "gpt2-small", **base | SHAPE | keys)
    head = "mlm" if kind == "bert" else "lm"
    plain, slopes = gradients(config, head)
    as_if_compiled(monkeypatch)
    apart, others = gradients(config, head)
    torch.testing.assert_close(apart, plain)
    assert slopes.keys() == others.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(others[name], slope, msg=name)


def test_a_rotation_without_branches_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 1, 5, 4)
    for kind in (torch.float32, torch.bfloat16):
        rows = x.to(kind).requires_grad_()
        plain = positions.rotate(rows, angles)
        (slope,) = torch.autograd.grad(plain.sin().sum(), rows)
        with monkeypatch.context() as patch:
            as_if_compiled(patch)
            turned = positions.rotate(rows, angles)
            (other,) = torch.autograd.grad(turned.sin().sum(), rows)
        assert torch.equal(plain, turned)
        assert torch.equal(slope, other)


@pytest.mark.parametrize("cautious", [False, True])
def test_a_rate_in_a_tensor_is_the_same_rate(cautious: bool) -> None:
    weights = []
    for rate in (0.02, torch.tensor(0.02)):
        torch.manual_seed(0)
        rows = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (8, 4), (4, 8))]
        muon = Muon(rows, lr=0.02, decay=0.5, cautious=cautious)
        muon.param_groups[0]["lr"] = rate
        for _ in range(3):
            for row in rows:
                row.grad = torch.randn(row.shape)
            muon.step()
        weights.append([row.detach() for row in rows])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["gpt", "bert", "both"])
def test_a_rehearsal_takes_a_step_of_the_runs_shapes(kind: str, tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text.txt", documents=300)
    given = {"train.minutes": 0.05, "train.compile": False}
    sized = size_recipe(
        resolve_recipe(kind, given), given, RunSources((str(text),)), ProcessGroup()
    )
    trainer = Trainer(_sample_run(sized, tmp_path, ProcessGroup()))
    c = trainer.config
    passes = trainer.feeds[0]._step(0, c.batch, trainer.micro, torch.device("cpu"))
    losses = trainer.learn_eagerly([one.tensors for one in passes])
    assert trainer.network.config == sized.recipe.model
    assert c.batch == sized.recipe.train.batch
    assert losses["loss"].isfinite()
    assert len(passes) >= (2 if kind == "both" else 1)


def test_a_vocabulary_is_learnt_from_a_part_of_much_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_corpus(tmp_path / "text.txt", documents=400)
    read: list[int] = []

    def learn(texts: Iterable[str], **how: Any) -> Any:
        found = list(texts)
        read.append(sum(map(len, found)))
        return train_tokenizer(found, **how)

    monkeypatch.setattr(prepare, "train_tokenizer", learn)
    whole = sum(len(document.text) for document in read_documents(text))
    for wanted in (10 * whole, whole // 2):
        monkeypatch.setattr(prepare, "CHARACTERS_PER_TOKEN", wanted / 300)
        recipe = resolve_recipe("gpt2-small", {"tokenizer.vocab": 300})
        prepare.learn_tokenizer(recipe, [read_documents(text)])
    assert read[0] == whole
    assert 0.3 * whole < read[1] < 0.7 * whole


def test_a_run_of_one_process_that_compiles_nothing_loads_neither_compiler_nor_sharding(
    tmp_path: Path,
) -> None:
    text = write_corpus(tmp_path / "text.txt", documents=300)
    script = (
        "import sys, malmoi; malmoi.pretrain('gpt', data=sys.argv[1], out=sys.argv[2], "
        "minutes=0.01, device='cpu'); "
        "heavy = {'sympy', 'torch._dynamo', 'torch.distributed.fsdp'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or None)"
    )
    words = [sys.executable, "-c", script, str(text), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
