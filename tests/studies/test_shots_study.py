"""The in-context study: each rule is what it says, and held-out words stay out of training."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given, strategies as st

from live_server import gpt_folder
from malmoi.cli.app import run_command
from malmoi.errors import MalmoiError
from malmoi.evaluation.examples import generate_examples
from malmoi.evaluation.in_context.run import InContextConfig, evaluate_in_context
from malmoi.evaluation.tasks.language_modelling import frequent_words
from malmoi.inference import load
from malmoi.studies.in_context import (
    CONTEXT_CHARACTERS,
    HIDDEN_RULES,
    MAX_ANSWER_CHARACTERS,
    PROPERTIES,
    SCALES,
    UNSEEN_RULES,
    VOWELS,
    HiddenRule,
    accuracy_by_examples,
    halves,
    held_out,
    rule_document,
    rule_task,
    write_rule_documents,
)
from malmoi.studies.study import JudgedModel

WORDS = [
    a + b + c
    for a in ("bel", "cor", "dan", "fim", "gus")
    for b in "aeiou"
    for c in ("ta", "ren", "lo", "mip")
]
by_name = {rule.name: rule for rule in (*HIDDEN_RULES, *UNSEEN_RULES)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a hundred words, long enough for a window of each kind."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    rng = Random(0)
    path.write_text("\n\n".join(" ".join(rng.sample(WORDS, 100)) for _ in range(40)), "utf-8")
    return path


def undo_caesar(x: str, y: str, by: int) -> bool:
    return all((ord(b) - ord(a) - by) % 26 == 0 for a, b in zip(x, y, strict=True))


# (x, y, parameter) → whether y is right, found another way than the rule goes
CHECKS: dict[str, Any] = {
    "random-insertion": lambda x, y, _: x[::2] == y and not set(x[1::2]) - set(".!/ "),
    "reverse": lambda x, y, _: all(y[-1 - i] == letter for i, letter in enumerate(x)),
    "double": lambda x, y, _: y[::2] == y[1::2] == x,
    "swap-ends": lambda x, y, _: (y[0], y[-1], y[1:-1]) == (x[-1], x[0], x[1:-1]),
    "drop-vowels": lambda x, y, _: (
        Counter(x) - Counter(y) == Counter(letter for letter in x if letter in VOWELS)
    ),
    "sort": lambda x, y, _: Counter(x) == Counter(y) and all(a <= b for a, b in pairwise(y)),
    "cycle": lambda x, y, by: all(y[i] == x[(i + by) % len(x)] for i in range(len(x))),
    "caesar": undo_caesar,
    "letter": lambda x, y, at: list(x)[at] == y,
    "ending": lambda x, y, end: y.removesuffix(end) == x and len(y) == len(x) + 2,
    "replace": lambda x, y, two: all(
        b == (two[1] if a == two[0] else a) for a, b in zip(x, y, strict=True)
    ),
    "vowels": lambda x, y, others: y.translate(str.maketrans(others, VOWELS)) == x,
    "group": lambda x, y, hidden: (y == hidden[1]) == PROPERTIES[hidden[0]](x) and y in hidden[1:],
    "add": lambda x, y, n: int(y) - int(x) == n,
    "reverse+double": lambda x, y, _: y[::-2] == x,
    "swap-ends+drop-vowels": lambda x, y, _: (
        sorted(y) == sorted(letter for letter in x if letter not in VOWELS)
    ),
    "reverse+ending": lambda x, y, end: y == x[::-1] + end,
}


@given(
    st.sampled_from(sorted(by_name)),
    st.text(ascii_lowercase, min_size=5, max_size=7),
    st.integers(0, 2**32),
)
def test_each_rule_does_what_its_name_says(name: str, word: str, seed: int) -> None:
    rule, rng = by_name[name], Random(seed)
    hidden = rule.draw(rng)
    x, y = rule.pair(str(seed % 800 + 100) if rule.items == "numbers" else word, hidden, rng)
    assert CHECKS[name](x, y, hidden)
    assert "\n" not in x + y


def test_held_out_words_and_parameters_are_in_no_document(text: Path, tmp_path: Path) -> None:
    training, asked = halves([str(text)])
    assert not set(training.words) & set(asked.words)
    assert set(training.words) | set(asked.words) == set(frequent_words(str(text)))
    write_rule_documents(tmp_path / "d.jsonl", training, 300)
    lines = [
        line
        for row in (tmp_path / "d.jsonl").read_text("utf-8").splitlines()
        for line in json.loads(row)["text"].split("\n")
    ]
    left = {line.partition(" = ")[0] for line in lines}
    plain = {x[::2] if len(x) > 1 and not x[1].isalnum() else x for x in left}
    assert plain & set(training.words)
    assert not plain & {*asked.words, *asked.numbers}
    ending = by_name["ending"]
    drawn = {
        half.held: {half.hidden(ending, Random(n)) for n in range(200)}
        for half in (training, asked)
    }
    assert not drawn[False] & drawn[True]
    assert all(held_out(f"ending:{hidden}") for hidden in drawn[True])


def test_a_document_is_one_rule_in_the_form_of_the_questions(text: Path) -> None:
    training, asked = halves([str(text)])
    texts = [rule_document(by_name["caesar"], training, Random(seed)) for seed in range(40)]
    instructed = [one.startswith(by_name["caesar"].instruction + "\n") for one in texts]
    assert 10 < sum(instructed) < 30
    lines = texts[0].removeprefix(by_name["caesar"].instruction + "\n").strip("\n").split("\n")
    shifts = {(ord(line.split(" = ")[1][0]) - ord(line[0])) % 26 for line in lines}
    assert len(shifts) == 1
    assert texts[0].endswith("\n\n")
    rows = {
        told: generate_examples(rule_task(by_name["caesar"], asked, 0, instructed=told), 0).rows
        for told in (False, True)
    }
    assert rows[False] == rows[True]
    assert {row.text for row in rows[True]} <= set(asked.words)


@pytest.mark.parametrize("rule", by_name.values(), ids=by_name)
def test_sixteen_examples_of_any_rule_fit(rule: HiddenRule) -> None:
    lines = [
        rule.pair("950" if rule.items == "numbers" else "letters", rule.draw(Random(n)), Random(n))
        for n in range(50)
    ]
    longest, answer = (
        max(map(len, some)) for some in ([f"{x} = {y}\n" for x, y in lines], [y for _, y in lines])
    )
    assert len(rule.instruction) + 1 + 17 * longest + MAX_ANSWER_CHARACTERS <= CONTEXT_CHARACTERS
    assert answer + 2 <= MAX_ANSWER_CHARACTERS


# ------------------------------------------------------------------ the command


def test_the_command_asks_every_model_once(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    words = [
        "study",
        "in-context",
        "--data",
        str(text),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--workers",
        "1",
    ]
    words += ["--scale", "tiny"]
    assert run_command([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["rows"]) == ["small", "medium"]
    small = facts["rows"]["small"]
    shots = ("0 examples", "2 examples")
    rules = {name.split(": ")[1] for name in small if name.startswith("after ")}
    assert rules == {"reverse", "ending", "reverse+ending"}
    for column in shots:
        seen = [small[f"after {column}: {rule}"]["mean"] for rule in ("reverse", "ending")]
        assert small[column]["mean"] == pytest.approx(sum(seen) / 2)
        assert f"with the instruction: {column}" in small
    gain = small[shots[1]]["mean"] - small[shots[0]]["mean"]
    assert small["gain from examples"]["mean"] == pytest.approx(gain)
    assert (out / "figure.svg").read_text("utf-8").count("<polyline") == 4
    report = (out / "report.md").read_text("utf-8")
    assert "| reverse+ending | " in report
    assert "GPT-3 175B" in report
    models = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    assert run_command(words) == 0
    assert capsys.readouterr().out == report
    assert {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")} == models


def test_accuracies_equal_those_of_evaluate(text: Path, tmp_path: Path) -> None:
    folder = gpt_folder(tmp_path / "gpt")
    _, asked = halves([str(text)])
    scale = replace(SCALES["tiny"], rules=("random-insertion",), draws=2)
    found = accuracy_by_examples(JudgedModel(folder, tmp_path, 3, "cpu"), asked, scale)
    model = load(folder, device="cpu")
    asking = InContextConfig("0,2", seed=3, limit=scale.questions)
    rule = by_name["random-insertion"]
    tasks = [rule_task(rule, asked, draw, instructed=True) for draw in range(2)]
    results = [list(evaluate_in_context(model, task, None, asking)) for task in tasks]
    for number, shots in enumerate(scale.shots):
        matches = [one[number].verdict.measures["match"].mean for one in results]
        assert found[f"with the instruction: {shots} examples"] == 50 * sum(matches)


def test_mistakes_are_sentences(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["study"]) == 0
    assert "in-context\t" in capsys.readouterr().out
    for words, said in (
        (
            ["study", "in-contxt", "--out", str(tmp_path)],
            "There is no study 'in-contxt'. Did you mean 'in-context'?",
        ),
        (["study", "in-contxt"], "There is no study 'in-contxt'."),  # said before a folder is
        (["study", "in-context"], "needs a folder"),
    ):
        assert run_command(words) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "few.txt").write_text("only some words here", "utf-8")
    with pytest.raises(MalmoiError, match="only 1 words of 5 to 7 Latin letters"):
        halves([str(tmp_path / "few.txt")])
