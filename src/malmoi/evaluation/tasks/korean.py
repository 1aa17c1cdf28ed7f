"""Korean tasks: NSMC (film reviews), KorSTS (Ham et al. 2020), KLUE-NLI (Park et al. 2021)."""

from dataclasses import replace

from malmoi.evaluation.task import Task, columns
from malmoi.evaluation.tasks.glue import NLI_LABELS, STSB
from malmoi.text.rows import any_rows, table_rows

NSMC = Task(
    "nsmc",
    "classification",
    table_rows,
    columns("document", id="id"),
    about="is a Korean film review positive or negative?",
    metrics=("accuracy",),
    labels=("0", "1"),
    files=("*train*", "*test*"),
    prompt="리뷰: {text}\n감정:",
    answers={"0": "부정", "1": "긍정"},
)
KORSTS = replace(
    STSB,
    name="korsts",
    about="how similar are two Korean sentences, 0 to 5?",
    files=("*train*", "*dev*"),
    prompt="문장 1: {text}\n문장 2: {pair}\n얼마나 비슷한가? (0에서 5)\n답:",
)
KLUE_NLI = Task(
    "klue-nli",
    "classification",
    any_rows,
    columns("premise", "hypothesis", "gold_label", id="guid"),
    about="does a Korean premise entail a hypothesis, contradict it, or neither?",
    metrics=("accuracy",),
    labels=NLI_LABELS,
    files=("*train*", "*dev*"),
    prompt="{text}\n질문: {pair} 참, 거짓, 알 수 없음?\n답:",
    answers={"contradiction": "거짓", "entailment": "참", "neutral": "알 수 없음"},
)

TASKS = (NSMC, KORSTS, KLUE_NLI)
