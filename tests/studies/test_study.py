"""The in-context study: rules are what they say, held-out words stay out, every part is done
once.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malmoi.cli.app import run_command
from malmoi.errors import MalmoiError
from malmoi.evaluation.in_context.run import InContextConfig, evaluate_in_context
from malmoi.evaluation.tasks import generate_examples
from malmoi.evaluation.tasks.generated import frequent_words
from malmoi.inference import load
from malmoi.studies.in_context import sizes
from malmoi.studies.in_context.curves import Cell, cell_accuracy
from malmoi.studies.in_context.documents import halves, held_out, rule_document
from malmoi.studies.in_context.rules import (
    HIDDEN_RULES,
    PROPERTIES,
    UNSEEN_RULES,
    VOWELS,
    HiddenRule,
)
from malmoi.studies.in_context.sequences import DOCUMENTS_PER_CHUNK, write_rule_documents
from malmoi.studies.in_context.study import (
    MAX_ANSWER_CHARACTERS,
    InContextStudyConfig,
    rule_task,
    run_in_context_study,
)

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
def test_each_rule_is_what_it_says(name: str, word: str, seed: int) -> None:
    rule, rng = by_name[name], Random(seed)
    hidden = rule.draw(rng)
    x, y = rule.pair(str(seed % 800 + 100) if rule.items == "numbers" else word, hidden, rng)
    assert CHECKS[name](x, y, hidden)
    assert "\n" not in x + y


def test_held_out_words_and_parameters_are_in_no_document(text: Path, tmp_path: Path) -> None:
    training, asked = halves([str(text)])
    assert not set(training.words) & set(asked.words)
    assert set(training.words) | set(asked.words) == set(frequent_words(str(text)))
    write_rule_documents(tmp_path / "d.jsonl", training, 300, processes=1)
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
    assert (
        len(rule.instruction) + 1 + 17 * longest + MAX_ANSWER_CHARACTERS <= sizes.CONTEXT_CHARACTERS
    )
    assert answer + 2 <= MAX_ANSWER_CHARACTERS


def test_documents_are_the_same_for_any_number_of_processes(text: Path, tmp_path: Path) -> None:
    training, _ = halves([str(text)])
    for processes in (1, 3):
        write_rule_documents(
            tmp_path / str(processes),
            training,
            2 * DOCUMENTS_PER_CHUNK + 3,
            seed=5,
            processes=processes,
        )
    one, three = ((tmp_path / name).read_bytes() for name in ("1", "3"))
    assert one == three
    assert one.count(b"\n") == 2 * DOCUMENTS_PER_CHUNK + 3
    write_rule_documents(tmp_path / "other", training, 10, seed=6, processes=1)
    assert not one.startswith((tmp_path / "other").read_bytes())


def test_the_error_of_an_accuracy_is_that_of_its_questions() -> None:
    cells = [Cell("a", False, 0, 3, 10), Cell("b", False, 0, 10, 10)]
    found = cell_accuracy(cells)
    assert found.mean == 13 / 20
    # the second rule has no spread
    assert found.standard_error == pytest.approx((10 * 0.3 * 0.7 * 10 / 9) ** 0.5 / 20)


# ------------------------------------------------------------------ the command

TINY = dict(
    documents=40, batch=2, shots="0,2", draws=1, limit=3, rules="reverse,ending", processes=1
)


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, depth in (("small", 1), ("medium", 1), ("large", 2)):
        monkeypatch.setitem(sizes.SIZES, name, sizes.StudySize(depth, 32, 2, 1e-3, 0.02))


def order(text: Path, out: Path, *more: str) -> list[str]:
    changes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    return [
        "study",
        "in-context",
        "--data",
        str(text),
        "--out",
        str(out),
        "--device",
        "cpu",
        *changes,
        *more,
    ]


@pytest.mark.usefixtures("small_sizes")
def test_the_command_does_each_part_once(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(order(text, tmp_path, "--sizes", "medium", "--tokens", "2048")) == 0
    assert capsys.readouterr().out.startswith("size\t0 examples\t2 examples\nmedium\t")
    first = (tmp_path / "medium" / "model.safetensors").stat().st_mtime_ns
    assert run_command([*order(text, tmp_path, "--json")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (tmp_path / "medium" / "model.safetensors").stat().st_mtime_ns == first
    assert list(facts["sizes"]) == ["small", "medium", "large"]
    # all see what the first has seen
    assert {one["tokens"] for one in facts["sizes"].values()} == {2048}
    assert [point["shots"] for point in facts["sizes"]["large"]["curve"]] == [0, 2]
    assert set(facts["sizes"]["small"]["rules"]) == {"reverse", "ending", "reverse+ending"}
    assert json.loads((tmp_path / "study.json").read_text("utf-8")) == facts
    assert (tmp_path / "curve.svg").read_text("utf-8").count("<polyline") == 6
    report = (tmp_path / "report.md").read_text("utf-8")
    assert "| reverse | " in report
    assert "## What these models cannot do" in report
    assert run_command(order(text, tmp_path, "--seed", "1")) == 2
    assert "seed was 0" in capsys.readouterr().err


def test_what_is_counted_is_what_evaluate_says(
    text: Path, tmp_path: Path, small_sizes: None
) -> None:
    changes = {name: str(value) for name, value in TINY.items()} | {
        "tokens": "1024",
        "rules": "random-insertion",
    }
    plan = InContextStudyConfig(
        data=(str(text),), out=str(tmp_path), sizes=("small",), device="cpu"
    ).override(changes)
    run_in_context_study(plan)
    kept = json.loads((tmp_path / "small" / "asked.json").read_text("utf-8"))["cells"]
    model, (_, asked) = load(tmp_path / "small", device="cpu"), halves([str(text)])
    task = rule_task(by_name["random-insertion"], asked, 0, instructed=True)
    found = [
        result.verdict.measures["match"].mean
        for result in evaluate_in_context(model, task, None, InContextConfig("0,2", limit=3))
    ]
    assert [cell["right"] / 3 for cell in kept if cell["instructed"]] == pytest.approx(found)


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
        (["study", "in-context"], "needs a folder"),
        (
            order(text, tmp_path, "--sizes", "smal"),
            "There is no size 'smal'. Did you mean 'small'?",
        ),
        (
            order(text, tmp_path, "--set", "rules=revers"),
            "There is no rule 'revers'. Did you mean 'reverse'?",
        ),
        (
            order(text, tmp_path, "--set", "document=3"),
            "InContextStudyConfig has no field 'document'.",
        ),
        (order(text, tmp_path, "--set", "shots=0,50"), "too few to show 50 examples"),
    ):
        assert run_command(words) == (1 if "too few" in said else 2)
        assert said in capsys.readouterr().err
    (tmp_path / "few.txt").write_text("only some words here", "utf-8")
    with pytest.raises(MalmoiError, match="only 1 words of 5 to 7 Latin letters"):
        halves([str(tmp_path / "few.txt")])
