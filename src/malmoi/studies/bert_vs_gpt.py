"""BERT or GPT? Five models compared at equal size, text and training time."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from malmoi.evaluation.evaluate import evaluate_model
from malmoi.inference import load
from malmoi.model import count_parameters
from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import bits_per_byte, tuned_cell, zero_shot
from malmoi.studies.table import (
    Claim,
    StudyResults,
    Words,
    best_rows,
    lower_is_better,
    number,
    with_spread,
)
from malmoi.system.machine import pick_device

BERT = "BERT"
GPT = "GPT"
BOTH = "both at once"
ELECTRA = "ELECTRA"
LSTM = "LSTM"
MODELS = {BERT: "bert", GPT: "gpt", BOTH: "both", ELECTRA: "electra", LSTM: "lstm"}
WRITERS = (GPT, BOTH, LSTM)  # models that predict the next token
WRITTEN_TOKENS = 32
READ_TEXTS = 64


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
    found = {"reading ms": 1000 * _seconds(lambda: model.embed(texts)) / len(texts)}
    if writes:
        spent = _seconds(lambda: model.generate(texts[0], max_new_tokens=WRITTEN_TOKENS, seed=0))
        found["writing ms"] = 1000 * spent / WRITTEN_TOKENS
    weights = 4 * count_parameters(model.network)
    used = torch.cuda.max_memory_allocated(device) - before if cuda else weights
    return {**found, "memory MB": used / 1e6}


def _seconds(call: Callable[[], object]) -> float:
    """The fastest of three calls, because other processes may slow one down."""
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return min(spent)


def minimal_pairs(judged: JudgedModel, task: StudyTask) -> dict[str, float]:
    """Accuracy on minimal pairs, and on each phenomenon."""
    model = load(judged.folder, device=judged.device)
    facts = evaluate_model(model, task.load(), task.dev)
    whole = {task.name: 100 * facts["accuracy"]}
    groups = (n for n in facts if f"{n}_error" in facts and n != "accuracy")
    return whole | {f"{task.name}: {name}": 100 * facts[name] for name in groups}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    scale = plan.scale
    for seed in plan.seeds:
        for row, kind in MODELS.items():
            recipe = scale.recipe(kind, seed)
            if not scale.faithful:
                recipe = recipe.override(
                    {"train.steps": 0, "train.minutes": scale.minutes, "train.snapshots": False}
                )
            if row == BERT:
                recipe = recipe.override({"objective": "mlm"})
            for task in plan.tasks(
                "sentence", "acceptability", "pair", "similarity", "tokens", "span"
            ):
                yield tuned_cell(plan, row, recipe, task)
            for judge in _judges(plan, row):
                yield Cell(row, seed, judge, recipe, plan.data.text)


def _judges(plan: StudyPlan, row: str) -> Iterator["partial[dict[str, float]]"]:
    """Judges that need no fine-tuning; ELECTRA's head gives no token likelihoods."""
    if row != ELECTRA:
        for task in plan.data.of("minimal pairs", dev_rows=4 * plan.scale.dev_rows):
            yield partial(minimal_pairs, task=task)
        for task in plan.tasks("sentence"):
            if task.task == "sst2":
                column = f"{task.name}, examples in context"
                yield partial(zero_shot, task=task, column=column, shots="max", train=task.train)
        for task in plan.tasks("last word"):
            yield partial(zero_shot, task=task)
    if row in WRITERS:
        yield partial(bits_per_byte, text=plan.data.held_out)
    yield partial(speed, text=plan.data.held_out, writes=row in WRITERS)


def _claims(results: StudyResults) -> list[Claim]:
    tokens = results.first_column("CoNLL-2003", "capitals")
    sentence = results.first_column("SST-2", "era")
    return [
        Claim(
            Words("BERT reads tokens better than GPT", "토큰 과제는 BERT가 GPT보다 잘한다"),
            BERT,
            GPT,
            tokens,
        ),
        Claim(
            Words("BERT reads sentences better than GPT", "문장 분류는 BERT가 GPT보다 잘한다"),
            BERT,
            GPT,
            sentence,
        ),
        Claim(
            Words(
                "ELECTRA beats BERT (Clark et al. 2020)", "ELECTRA가 BERT보다 낫다 (Clark 외 2020)"
            ),
            ELECTRA,
            BERT,
            sentence,
        ),
        Claim(
            Words("GPT predicts text better than an LSTM", "텍스트 예측은 GPT가 LSTM보다 낫다"),
            GPT,
            LSTM,
            "bits per byte",
        ),
        Claim(
            Words(
                "Trained both ways, a GPT reads tokens better (Charpentier & Samuel 2024)",
                "양쪽으로 학습한 GPT는 토큰 과제를 더 잘한다 (Charpentier & Samuel 2024)",
            ),
            BOTH,
            GPT,
            tokens,
        ),
    ]


def _notes(results: StudyResults) -> list[Words]:
    """The best model of each column, and those within the error of it."""
    said_en = []
    said_ko = []
    for column in results.columns:
        best = best_rows(results, column)
        if not best:
            continue
        figure = with_spread(results.at(best[0], column), results.seeds(best[0], column))
        also = ", ".join(best[1:])
        said_en.append(f"{column}: {best[0]} ({figure}){f'; within noise {also}' if also else ''}")
        said_ko.append(f"{column}: {best[0]} ({figure}){f', 오차 범위 안 {also}' if also else ''}")
    return [
        Words(
            "\n".join(("The best of each column, and those not clearly worse:", *said_en)),
            "\n".join(("칸마다 가장 나은 모델과, 오차 범위 안이라 가릴 수 없는 모델:", *said_ko)),
        ),
        *_overall(results),
    ]


def _overall(results: StudyResults) -> Iterator[Words]:
    """The mean over tasks after fine-tuning, and the models that can generate text."""
    columns = [c for c in results.columns if not lower_is_better(c) and _all_models(results, c)]
    if not columns:
        return
    means = {
        row: sum(_mean(results, row, column) for column in columns) / len(columns)
        for row in results.rows
    }
    order = sorted(means, key=lambda row: -means[row])
    listed = ", ".join(f"{row} {number(means[row])}" for row in order)
    writers = ", ".join(row for row in results.rows if row in WRITERS)
    yield Words(
        f"Mean over {len(columns)} tasks that all models were tuned for ({', '.join(columns)}): "
        f"{listed}. Only {writers} can write text.",
        f"모든 모델을 미세 조정한 과제 {len(columns)}개({', '.join(columns)})의 평균: {listed}. "
        f"텍스트를 쓸 수 있는 모델은 {writers}뿐이다.",
    )


def _all_models(results: StudyResults, column: str) -> bool:
    return all(results.at(row, column) is not None for row in results.rows)


def _mean(results: StudyResults, row: str, column: str) -> float:
    found = results.at(row, column)
    return found.mean if found else 0.0


STUDY = Study(
    "bert-vs-gpt",
    Words(
        "BERT, GPT and others at equal text, size and training time",
        "같은 텍스트, 같은 크기, 같은 시간으로 가려 본, 일마다 알맞은 모델",
    ),
    "No single paper compares them all",
    _cells,
    _claims,
    caption=Words(
        "Five models pre-trained for the same minutes: tasks after fine-tuning, likelihoods "
        "without, speed. Bars are one standard deviation over seeds.",
        "같은 시간 동안 사전 학습한 다섯 모델: 미세 조정한 과제, 미세 조정 없는 우도, 속도. 막대는 "
        "시드에 따른 표준편차 하나.",
    ),
    notes=_notes,
)
