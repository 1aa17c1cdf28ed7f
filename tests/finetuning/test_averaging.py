"""The mean of runs: of their weights, and only if it still does what each of them learnt."""

import copy
from pathlib import Path

import pytest
import torch

import malmoi
from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.search import mean_if_it_fits
from malmoi.finetuning.task_data import load_data
from tiny_models import tiny_bert

ROWS = [{"text": text, "label": text[0]} for text in ("good film", "bad film")] * 10


def weights(run: Checkpoint) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in run.network.state_dict().values()])


def scaled(run: Checkpoint, factor: float) -> Checkpoint:
    other = copy.deepcopy(run)
    other.network.load_state_dict({n: factor * t for n, t in run.network.state_dict().items()})
    return other


def test_a_mean_that_does_not_fit_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "bert"
    tiny_bert(base, ["good bad film"] * 3, 60, context=16, width=16, depth=1, heads=2)
    how = {"epochs": 60, "lr": 5e-3, "device": "cpu", "prompt": False, "contrastive": False}
    how |= {"precision": "fp32"}  # bf16, where the processor has it, learns these rows later
    run = malmoi.finetune(base, "classification", ROWS, tmp_path / "o", ROWS, **how)  # type: ignore[arg-type]
    assert run.metrics["accuracy"] == 1
    first = run.model.checkpoint
    start = malmoi.load(base, device="cpu").checkpoint
    settings = FinetuneConfig()
    task = named_task("classification")
    work = load_data(task, ROWS, ROWS, settings, start, torch.device("cpu"))
    own = weights(first).clone()
    kept, members = mean_if_it_fits(work, [first, scaled(first, -1)])  # all weights would be 0
    assert (members, torch.equal(weights(kept), own)) == (1, True)
    assert "does not fit the training rows" in caplog.text
    kept, members = mean_if_it_fits(work, [first, scaled(first, 1.1), scaled(first, 1.2)])
    assert members == 3
    assert torch.allclose(weights(kept), 1.1 * own, atol=1e-6)
