"""The numbers of a study's cells: functions from a pre-trained model to columns of the table."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import metric_names, named_task
from malmoi.finetuning.finetune import run_finetuning
from malmoi.inference import load
from malmoi.model import count_parameters
from malmoi.studies.data import StudyTask
from malmoi.studies.study import JudgedModel
from malmoi.system.machine import pick_device

BITS_CHARACTERS = 200_000  # of held-out text that bits per byte are measured on
WRITTEN_TOKENS = 32
READ_TEXTS = 64


def fine_tuned(
    judged: JudgedModel, task: StudyTask, options: dict[str, Any], column: str = ""
) -> dict[str, float]:
    """The task's first metric on its test rows after fine-tuning, in percent."""
    rows = task.load()
    assert task.train is not None, f"{task.name} has no rows to learn from"
    result = run_finetuning(
        judged.folder, rows, task.train, judged.scratch, task.dev, device=judged.device, **options
    )
    return {column or task.name: 100 * result.metrics[metric_names(rows)[0]]}


def zero_shot(
    judged: JudgedModel, task: StudyTask, column: str = "", **asking: Any
) -> dict[str, float]:
    """The task's first metric without fine-tuning (minimal pairs, last words), in percent."""
    rows = task.load()
    model = load(judged.folder, device=judged.device)
    facts = evaluate_model(model, rows, task.dev, **asking)
    return {column or task.name: 100 * facts[metric_names(rows)[0]]}


def minimal_pairs(judged: JudgedModel, task: StudyTask) -> dict[str, float]:
    """Accuracy on minimal pairs, and on each phenomenon."""
    facts = evaluate_model(load(judged.folder, device=judged.device), task.load(), task.dev)
    whole = {task.name: 100 * facts["accuracy"]}
    groups = (n for n in facts if f"{n}_error" in facts and n != "accuracy")
    return whole | {f"{task.name}: {name}": 100 * facts[name] for name in groups}


def held_out_bits(judged: JudgedModel, text: Path) -> dict[str, float]:
    """Bits per byte of held-out text, of which half of each window is context."""
    model = load(judged.folder, device=judged.device)
    return {"bits per byte": model.bits_per_byte(text.read_text("utf-8")[:BITS_CHARACTERS])}


def snapshot_scores(
    judged: JudgedModel, step: int, tasks: Sequence[StudyTask], text: Path
) -> dict[str, float]:
    """Bits per byte and task scores of the model after a step (0: the final model)."""
    folder = judged.folder / "snapshots" / f"{step:06d}" if step else judged.folder
    then = replace(judged, folder=folder)
    scores = held_out_bits(then, text)
    for task in tasks:
        scores |= zero_shot(then, task)
    return scores


def mlm_perplexity(judged: JudgedModel) -> dict[str, float]:
    """Perplexity of masked words in the validation text."""
    return {"perplexity": math.exp(judged.facts()["mlm_loss"])}


def text_perplexity(judged: JudgedModel, task: str, path: Path, column: str) -> dict[str, float]:
    """Perplexity per word, with the data set's markup removed as in GPT-2 §3.1."""
    model = load(judged.folder, device=judged.device)
    return {column: evaluate_model(model, task, path)[metric_names(named_task(task))[0]]}


def millions(judged: JudgedModel) -> dict[str, float]:
    return {"millions of weights": judged.facts()["parameters"] / 1e6}


def clean_and_dirty(judged: JudgedModel, task: StudyTask, leaked: Path) -> dict[str, float]:
    """The task's first metric on all, clean and dirty items, as in `evaluate --contamination`.

    For both models the dirty items are those that the second one could have seen.
    """
    from malmoi.corpus.decontaminate import find_overlaps

    rows = task.load()
    model = load(judged.folder, device=judged.device)

    def overlaps(items: object) -> object:
        return find_overlaps(items, [str(leaked)])  # type: ignore[arg-type]

    facts = evaluate_model(model, rows, task.dev, contamination=overlaps)
    scores = facts["contamination"]["scores"][metric_names(rows)[0]]
    return {part: 100 * scores[part] for part in ("all", "clean", "dirty") if part in scores}


def speed(judged: JudgedModel, text: Path, *, writes: bool) -> dict[str, float]:
    """Milliseconds to encode a few sentences and to generate a token; memory in use."""
    device = pick_device(judged.device)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0  # of cells that ran here earlier
    model = load(judged.folder, device=judged.device)
    words = " ".join(text.read_text("utf-8").split())
    each = model.config.context // 4 - 1  # in characters, each at most four tokens of bytes
    texts = [words[i * each : (i + 1) * each] for i in range(READ_TEXTS)]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = {"reading ms": 1000 * _seconds(lambda: model.embed(texts)) / len(texts)}
    if writes:
        spent = _seconds(lambda: model.generate(texts[0], max_new_tokens=WRITTEN_TOKENS, seed=0))
        times["writing ms"] = 1000 * spent / WRITTEN_TOKENS
    weights = 4 * count_parameters(model.network)
    used = torch.cuda.max_memory_allocated(device) - before if cuda else weights
    return {**times, "memory MB": used / 1e6}


def _seconds(call: Callable[[], object]) -> float:
    """The fastest of three calls, because other processes may slow one down."""
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return min(spent)
