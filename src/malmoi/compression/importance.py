"""The importance of heads and neurons to a loss: |∂L / ∂gate| of each, over rows or text.

A gate multiplies a part's output, so its gradient is the sum of activation · gradient over the part
(Michel et al. 2019 eq. 2; Molchanov et al. 2017 for neurons). One forward and backward pass finds
all of them. B rows, T tokens, N parts.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.examples import load_examples, require_labels
from malmoi.evaluation.features import FeatureView
from malmoi.evaluation.kinds import encode_examples, head_kind
from malmoi.evaluation.tasks import Task, named_task
from malmoi.finetuning.trainer import collate
from malmoi.inference.predict import Predictor
from malmoi.model import Network
from malmoi.text.documents import read_documents
from malmoi.training.losses import IGNORE_LABEL, ForwardPass, Objective, lm

# limits: rows in total, rows per batch, tokens of each text
MAX_SAMPLE_ROWS = 512
ROWS_PER_BATCH = 8
MAX_SAMPLE_TOKENS = 512
SampleBatch = Mapping[str, Tensor]


def part_importance(
    checkpoint: Checkpoint, part: str, task: str | Task | None, data: Path, device: torch.device
) -> list[Tensor]:
    """The importance [N] of each block's "heads" (groups, if they share keys) or "neurons"."""
    network = checkpoint.network.to(device)
    objective, batches = (
        _of_text(checkpoint, data) if task is None else _of_rows(checkpoint, task, data)
    )
    count = network.config.key_heads if part == "heads" else network.config.mlp_width
    found = torch.zeros(network.config.distinct, count, device=device)
    for batch in batches:
        sent = {name: tensor.to(device) for name, tensor in batch.items()}
        for block, change in gradients(network, part, objective, sent):
            found[block] += change.unflatten(1, (count, -1)).sum(-1).abs().sum(0)
    network.to("cpu")
    return list(found.cpu())


@torch.enable_grad()
def gradients(
    network: Network, part: str, objective: Objective, batch: SampleBatch
) -> list[tuple[int, Tensor]]:
    """Activation · gradient of each block's heads or neurons, summed over tokens: [B, width]."""
    seen: list[tuple[int, Tensor]] = []

    def see(block: int, module: Any, given: tuple[Tensor]) -> None:
        seen.append((block, given[0]))

    writers: list[Any] = [
        b.attend.out if part == "heads" else b.mlp.down  # type: ignore[union-attr]
        for b in network.trunk.blocks
    ]
    hooks = [writer.register_forward_pre_hook(partial(see, i)) for i, writer in enumerate(writers)]
    try:
        done = ForwardPass.of(network, batch)
        loss = torch.stack([term.total(done) for term in objective.terms]).sum()
        slopes = torch.autograd.grad(loss, [active for _, active in seen])
    finally:
        for hook in hooks:
            hook.remove()
    pairs = zip(seen, slopes, strict=True)
    return [(block, (active.detach() * slope).float().sum(1)) for (block, active), slope in pairs]


def _of_rows(
    checkpoint: Checkpoint, task: str | Task, data: Path
) -> tuple[Objective, Iterator[SampleBatch]]:
    task = named_task(task) if isinstance(task, str) else task
    reading = Predictor.of(checkpoint)
    kind = head_kind(task)
    if kind.head not in checkpoint.network.heads:
        raise UsageError(
            "This model has no {head} head, which the task {task} needs.",
            head=kind.head,
            task=task.name,
        )
    examples = load_examples(task, data).rows[:MAX_SAMPLE_ROWS]
    require_labels(examples)
    view = FeatureView.of(reading, reading.labels)
    items = encode_examples(task, examples, view)
    batches = (
        collate(items[i : i + ROWS_PER_BATCH], checkpoint.network.config)
        for i in range(0, len(items), ROWS_PER_BATCH)
    )
    return kind.objective(None), batches


def _of_text(checkpoint: Checkpoint, data: Path) -> tuple[Objective, Iterator[SampleBatch]]:
    if "lm" not in checkpoint.network.heads or checkpoint.tokenizer is None:
        raise UsageError(
            "Ranking by plain text needs a GPT and its tokenizer; for this model give the --task "
            "of the rows."
        )
    text = "\n\n".join(document.text for document in read_documents(data))
    tokens = torch.tensor(checkpoint.tokenizer.encode(text, specials=False).tokens)
    rows = tokens.split(min(checkpoint.network.config.context, MAX_SAMPLE_TOKENS))
    return lm(), (
        {"tokens": row[None], "lm_labels": F.pad(row[None, 1:], (0, 1), value=IGNORE_LABEL)}
        for row in islice(rows, MAX_SAMPLE_ROWS)
        if len(row) > 1
    )
