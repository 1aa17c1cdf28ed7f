"""GLUE (Wang et al. 2018) in its own file formats, and related data sets: SICK, IMDB.

Korean ones: NSMC (film reviews), KorSTS (Ham et al. 2020), KLUE-NLI (Park et al. 2021).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.evaluation.task import Example, Task, columns
from malmoi.text.rows import BrokenRow, DataRow, any_rows, json_line_rows, table_rows

SCITAIL_COLUMNS = ("premise", "hypothesis", "label")
YES_NO = {"0": "no", "1": "yes"}
NEGATIVE_POSITIVE = {"0": "negative", "1": "positive"}


def labelled(
    name: str,
    rows: Callable[[Path], Iterable[DataRow]],
    example: Callable[[DataRow], Example],
    about: str,
    prompt: str,
    answers: Mapping[str, str],
    **others: Any,
) -> Task:
    """A classification by accuracy; its labels are those with an answer."""
    given = {"metrics": ("accuracy",), "labels": tuple(answers), "answers": answers, **others}
    return Task(name, "classification", rows, example, about, prompt=prompt, **given)


cola_rows = partial(table_rows, header=("source", "label", "mark", "sentence"))


def snli_rows(path: Path) -> Iterator[DataRow]:
    """Reads SNLI's .jsonl or .txt."""
    yield from json_line_rows(path) if ".jsonl" in path.suffixes else table_rows(path)


def scitail_rows(path: Path) -> Iterator[DataRow]:
    """Reads SciTail's tsv_format, which has no header, or its snli_format, JSON in a .txt file."""
    if ".tsv" in path.suffixes:
        yield from table_rows(path, SCITAIL_COLUMNS)
        return
    for row in json_line_rows(path):
        if isinstance(row, BrokenRow):
            yield row
            continue
        label = {"entailment": "entails"}.get(row["gold_label"], row["gold_label"])
        yield DataRow(
            dict(zip(SCITAIL_COLUMNS, (row["sentence1"], row["sentence2"], label), strict=True)),
            row.place,
        )


SST2 = labelled(
    "sst2",
    table_rows,
    columns("sentence"),
    "is a phrase of a film review positive or negative?",
    "Review: {text}\nSentiment:",
    NEGATIVE_POSITIVE,
)
MRPC = labelled(
    "mrpc",
    table_rows,
    columns("#1 String", "#2 String", "Quality"),
    "do two sentences mean the same?",
    "First: {text}\nSecond: {pair}\nDo they say the same?",
    YES_NO,
    metrics=("f1", "accuracy"),
    both_orders=True,
    files=("*train*", "*dev*"),
)
STSB = Task(
    "stsb",
    "regression",
    table_rows,
    columns("sentence1", "sentence2", "score", numeric=True),
    about="how similar are two sentences, 0 to 5?",
    metrics=("spearman", "pearson"),
    both_orders=True,
    prompt="First: {text}\nSecond: {pair}\nHow alike are they, from 0 to 5?",
    answers={str(n): str(n) for n in range(6)},
)
MNLI = labelled(
    "mnli",
    table_rows,
    columns("sentence1", "sentence2", "gold_label"),
    "does a premise entail a hypothesis, contradict it, or neither?",
    "{text}\nQuestion: {pair} True, False, or Neither?\nAnswer:",
    {"contradiction": "False", "entailment": "True", "neutral": "Neither"},
    files=("train*", "dev_matched*"),
)
RTE = labelled(
    "rte",
    table_rows,
    columns("sentence1", "sentence2"),
    "does one sentence follow from another?",
    "{text}\nQuestion: {pair} True or False?\nAnswer:",
    {"entailment": "True", "not_entailment": "False"},
)


TASKS = (
    labelled(
        "cola",
        cola_rows,
        columns("sentence"),
        "is a sentence good English?",
        "Sentence: {text}\nIs this good English?",
        YES_NO,
        metrics=("matthews", "accuracy"),
    ),
    Task(
        "cola-likelihood",
        "acceptability",
        cola_rows,
        columns("sentence"),
        about="is a sentence good English? By its likelihood alone (GPT-1 §5)",
        labels=("0", "1"),
    ),
    SST2,
    MRPC,
    STSB,
    replace(
        MRPC,
        name="qqp",
        example=columns("question1", "question2", "is_duplicate"),
        about="do two questions ask the same?",
        files=("train*", "dev*"),
        prompt="First: {text}\nSecond: {pair}\nDo they ask the same?",
    ),
    MNLI,
    replace(
        MNLI,
        name="mnli-mm",
        about="MNLI, evaluated on genres not seen in training",
        files=("train*", "dev_mismatched*"),
    ),
    labelled(
        "qnli",
        table_rows,
        columns("question", "sentence"),
        "does a sentence answer a question?",
        "{pair}\nQuestion: does this answer “{text}”?\nAnswer:",
        {"entailment": "yes", "not_entailment": "no"},
    ),
    RTE,
    replace(
        RTE,
        name="wnli",
        about="does a sentence with its pronoun replaced follow?",
        labels=("0", "1"),
        answers={"0": "False", "1": "True"},
    ),
    replace(
        MNLI,
        name="snli",
        rows=snli_rows,
        example=columns("sentence1", "sentence2", "gold_label", id="pairID"),
        about="entailment, contradiction or neither, of image captions (Bowman et al. 2015)",
        no_label="-",  # its annotators disagreed
        files=("*train*", "*dev*"),
    ),
    replace(
        RTE,
        name="scitail",
        rows=scitail_rows,
        example=columns("premise", "hypothesis", "label"),
        about="does a science sentence entail an answer? (Khot et al. 2018)",
        labels=("entails", "neutral"),
        files=("*train*", "*dev*"),
        answers={"entails": "True", "neutral": "False"},
    ),
    replace(
        MNLI,
        name="sick",
        example=columns("sentence_A", "sentence_B", "entailment_judgment", id="pair_ID"),
        about="entailment, contradiction or neither, in plain sentences",
        labels=("CONTRADICTION", "ENTAILMENT", "NEUTRAL"),
        files=("*train*", "*trial*"),
        answers={name.upper(): word for name, word in MNLI.answers.items()},
    ),
    replace(
        STSB,
        name="sick-r",
        example=columns(
            "sentence_A", "sentence_B", "relatedness_score", id="pair_ID", numeric=True
        ),
        about="how related are two plain sentences, 1 to 5?",
        metrics=(),
        files=("*train*", "*trial*"),
        prompt="First: {text}\nSecond: {pair}\nHow related are they, from 1 to 5?",
        answers={str(n): str(n) for n in range(1, 6)},
    ),
    replace(
        SST2,
        name="imdb",
        example=columns("text"),
        about="is a film review positive or negative?",
        labels=("neg", "pos"),
        files=("*train*", "*test*"),
        answers={"neg": "negative", "pos": "positive"},
    ),
    labelled(
        "nsmc",
        table_rows,
        columns("document", id="id"),
        "is a Korean film review positive or negative?",
        "리뷰: {text}\n감정:",
        {"0": "부정", "1": "긍정"},
        files=("*train*", "*test*"),
    ),
    replace(
        STSB,
        name="korsts",
        about="how similar are two Korean sentences, 0 to 5?",
        files=("*train*", "*dev*"),
        prompt="문장 1: {text}\n문장 2: {pair}\n얼마나 비슷한가? (0에서 5)\n답:",
    ),
    labelled(
        "klue-nli",
        any_rows,
        columns("premise", "hypothesis", "gold_label", id="guid"),
        "does a Korean premise entail a hypothesis, contradict it, or neither?",
        "{text}\n질문: {pair} 참, 거짓, 알 수 없음?\n답:",
        {"contradiction": "거짓", "entailment": "참", "neutral": "알 수 없음"},
        files=("*train*", "*dev*"),
    ),
)
