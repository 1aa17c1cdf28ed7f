"""Compression methods compared by score, size and speed on one task."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.compression.cost import cost_of
from malmoi.compression.distil import distil_model
from malmoi.compression.prune import prune_model
from malmoi.compression.quantize import quantize_model
from malmoi.compression.result import folder_size
from malmoi.compression.share import share_layers
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import metric_names
from malmoi.finetuning.finetune import run_finetuning
from malmoi.inference import load
from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.system.files import folder_lock

WHOLE = "whole"
STUDENT = "distilled student, half of the layers"
HALF_LAYERS = "half of the layers"
ROUNDED = "4 bits, rounded"
GPTQ = "4 bits, GPTQ"
SIZE = "MB"
RATE = "rows per second"
GROUP = 16  # inputs per scale: widths of small models are not multiples of 32


def _quantized(source: Path, out: Path, **options: Any) -> None:
    quantize_model(source, out, group=GROUP, **options)


def _half_layers(source: Path, out: Path) -> None:
    depth = load(source, device="cpu").config.depth
    prune_model(source, out, layers=list(range(0, depth, 2)))


def _half_heads(source: Path, out: Path) -> None:
    heads = load(source, device="cpu").config.heads
    prune_model(source, out, heads=max(1, heads // 2) / heads)


def _shared(source: Path, out: Path) -> None:
    share_layers(source, out, groups=1)


Change = Callable[[Path, Path], None]
# applied to the pre-trained model, which recovers during fine-tuning
BEFORE_TUNING: dict[str, Change] = {
    HALF_LAYERS: _half_layers,
    "half of the heads": _half_heads,
    "shared layers": _shared,
}
AFTER_TUNING: dict[str, dict[str, int]] = {
    "8 bits": {"bits": 8},
    ROUNDED: {"bits": 4},
    GPTQ: {"bits": 4},
}
ROWS = (WHOLE, *AFTER_TUNING, *BEFORE_TUNING, STUDENT)


def compressed(
    judged: JudgedModel, row: str, task: StudyTask, options: dict[str, Any], text: Path
) -> dict[str, float]:
    """Score, bytes and speed of a model compressed with one method."""
    found = task.load()
    assert task.train is not None
    tuned = judged.folder / "tuned"  # shared by the rows that start from it
    source = judged.folder
    if row in BEFORE_TUNING:
        tuned = judged.scratch / "tuned"
        source = judged.scratch / "before"
        BEFORE_TUNING[row](judged.folder, source)
    with folder_lock(tuned.with_name("tuned.lock"), wait=True):
        if not (tuned / "report.json").is_file():
            rows = (task.train, tuned, task.dev)
            run_finetuning(source, found, *rows, device=judged.device, **options)
    final = tuned
    if row in AFTER_TUNING:
        final = judged.scratch / "after"
        calibration = {"calibration": text} if row == GPTQ else {}
        _quantized(tuned, final, device=judged.device, **AFTER_TUNING[row], **calibration)
    if row == STUDENT:
        final = judged.scratch / "student"
        learning = {**options, "task": found, "dev": task.dev, "device": judged.device}
        distil_model(tuned, final, task.train, **learning)
    model = load(final, device=judged.device)
    score = evaluate_model(model, found, task.dev)[metric_names(found)[0]]
    return {task.name: 100 * score, SIZE: folder_size(final) / 1e6, RATE: cost_of(model).rate}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for task in plan.tasks("sentence")[:1]:
        for seed in plan.seeds:
            depth = max(4, plan.scale.recipe("bert", seed).model.depth)  # half of it is two layers
            recipe = plan.scale.recipe("bert", seed, **{"model.depth": depth})
            for row in ROWS:
                judge = partial(
                    compressed,
                    row=row,
                    task=task,
                    options=plan.scale.tuning(seed),
                    text=plan.data.held_out,
                )
                yield Cell(row, seed, judge, recipe, plan.data.text)


def _claims(results: StudyResults) -> list[Claim]:
    score = next((c for c in results.columns if c not in (SIZE, RATE)), "")
    return [
        Claim(
            Words(
                "At 4 bits GPTQ loses less than rounding", "4비트에서 GPTQ는 반올림보다 덜 잃는다"
            ),
            GPTQ,
            ROUNDED,
            score,
        ),
        Claim(
            Words(
                "A student that learns from the whole model beats the same layers alone",
                "전체 모델에서 증류한 학생은 층만 줄인 모델보다 낫다",
            ),
            STUDENT,
            HALF_LAYERS,
            score,
        ),
        Claim(Words("4 bits are the smallest", "4비트가 가장 작다"), GPTQ, HALF_LAYERS, SIZE),
    ]


STUDY = Study(
    "compression",
    Words(
        "quantization, pruning, sharing and distillation compared",
        "비트, 헤드, 층, 공유, 증류로 줄일 때의 이득과 손실",
    ),
    "Sanh et al. 2019; Michel et al. 2019; Lan et al. 2020; Frantar et al. 2023",
    _cells,
    _claims,
    caption=Words(
        "Score, size on disk and speed of a fine-tuned BERT for each way to make it smaller; bars "
        "are one standard deviation over seeds.",
        "방법에 따라 줄인 BERT의 미세 조정 점수, 디스크 크기, 속도. 막대는 시드에 따른 표준편차 "
        "하나.",
    ),
)
