"""Verbalizer loss: a language model keeps its head and learns the words of the right label.

B examples, T tokens, A tokens of the longest answer, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.evaluation.features import TrainingItem
from malmoi.evaluation.kinds import task_prompt
from malmoi.evaluation.task import Example, Task
from malmoi.inference.predict import Predictor, Verbalizer
from malmoi.inference.score import encode_pairs, fit_context
from malmoi.tokenizer import TokenRow
from malmoi.training.losses import IGNORE_LABEL, ForwardPass, Objective
from malmoi.training.losses.base import Term


def task_verbalizer(task: Task, labels: tuple[str, ...]) -> Verbalizer:
    """The task's prompt and the words for each label."""
    words = task_prompt(replace(task, labels=labels), Example("")).choices
    if len(set(words)) < len(words):
        raise UsageError(
            "Two labels of {task} have the same label word: {words}.",
            task=task.name,
            words=", ".join(words),
        )
    return Verbalizer(task.prompt, words)


def verbalizer_items(
    examples: Sequence[Example], reading: Predictor, words: Verbalizer
) -> list[TrainingItem]:
    """Each example's prompt followed by the right words; the loss covers only the words."""
    right = dict(zip(reading.labels, words.said, strict=True))
    queries = [words.query(example.text, example.pair or "") for example in examples]
    answers = [right[example.label] for example in examples]
    items = []
    for pair in encode_pairs(reading.tokenizer, list(zip(queries, answers, strict=True))):
        row = fit_context(pair, reading.max_tokens)
        shown = np.array(row.tokens[:-1], np.int32)
        labels = [IGNORE_LABEL] * (row.first - 1) + row.tokens[row.first :]
        items.append(TrainingItem((TokenRow(shown, np.zeros_like(shown)),), labels))
    return items


def verbalizer_loss(items: Sequence[TrainingItem]) -> Objective:
    """−log P(the right words | soft tokens, text) (Lester et al. 2021 §2), at the end of each row.

    Only there, because the product with the vocabulary dominates the cost of a step, and a row has
    only as many targets as its label has tokens.
    """
    longest = max(sum(label != IGNORE_LABEL for label in item.label) for item in items)

    def total(done: ForwardPass) -> Tensor:
        hidden, labels = _ends(done, longest)
        scores = done.network.heads["lm"](hidden).float()
        return F.cross_entropy(
            scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )

    return Objective((Term("lm", "labels", total),))


def _ends(done: ForwardPass, n: int) -> tuple[Tensor, Tensor]:
    """The last n tokens of each row before padding: hidden states [B, n, D], labels [B, n]."""
    labels = done.batch["labels"]
    keep = done.batch.get("keep")
    steps = torch.arange(-n, 0, device=labels.device)
    at = (labels.size(1) if keep is None else keep.sum(1, keepdim=True)) + steps.expand(
        len(labels), n
    )
    inside = at.clamp(min=0)
    hidden = done.hidden.gather(1, inside[..., None].expand(-1, -1, done.hidden.size(-1)))
    return hidden, labels.gather(1, inside).masked_fill(at < 0, IGNORE_LABEL)
