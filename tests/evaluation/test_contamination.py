"""Clean and dirty items: overlaps against brute force, and scores against files of each part."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import malmoi
from malmoi.cli import run_command
from malmoi.corpus.build import run_build
from malmoi.corpus.decontaminate import find_overlaps
from tiny_models import tiny_gpt

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu") for b in ("ren", "do", "pi", "sa", "nu")]
DIRTY = (2, 5, 11)


def text(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


ITEMS = [text(f"item {n}", 12) for n in range(16)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def corpus_rows() -> list[dict[str, Any]]:
    """Documents of which three have an item inside, in capitals and with commas."""
    inside = {n: ITEMS[item].upper().replace(" ", ", ") for n, item in enumerate(DIRTY)}
    return [
        {"text": f"{text(f'a{n}', 40)}. {inside.get(n, '')} {text(f'b{n}', 40)}."}
        for n in range(20)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    return tiny_gpt(folder, ITEMS, 300, context=64, width=16, heads=2, depth=1)


def test_overlaps_are_those_of_brute_force(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(text(f"line {n}", 30) for n in range(40)))
    lines = corpus.read_text().split("\n")
    # runs of 7 to 10 words out of the corpus, before and after other words
    items = [[" ".join([*text(f"{n}", 4).split(), *lines[n].split()[5 : 12 + n % 4],
                        *text(f"{n}!", 4).split()]), "a pair"] for n in range(12)]  # fmt: skip
    items += [["only three words"], [text("other", 10)], []]
    found = find_overlaps(items, [str(corpus)])
    runs = {
        tuple(words[at : at + found.words])
        for words in map(str.split, lines)
        for at in range(len(words) - found.words + 1)
    }

    def overlaps(item: list[str]) -> bool:
        words = item[0].split() if item else []
        return any(tuple(words[at : at + found.words]) in runs for at in range(len(words)))

    assert found.words == 8
    assert list(found.dirty) == [overlaps(item) for item in items]
    assert sum(found.dirty) == 9
    assert [n for n, short in enumerate(found.short) if short] == [12, 14]


def choice_rows() -> list[dict[str, Any]]:
    return [
        {"query": item, "choices": [text(f"x{n}", 2), text(f"y{n}", 3)], "gold": n % 2}
        for n, item in enumerate(ITEMS)
    ]


@pytest.mark.parametrize("built", [True, False])
def test_scores_of_clean_and_dirty_items(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, built: bool
) -> None:
    corpus = write_rows(tmp_path / "raw.jsonl", corpus_rows())
    if built:
        run_build([str(corpus)], tmp_path / "corpus", min_words=5)
        corpus = tmp_path / "corpus"
    rows = choice_rows()
    data = write_rows(tmp_path / "copa.jsonl", rows)
    line = ["evaluate", "copa", str(data), "-m", str(model), "--shots", "0"]
    line += ["--contamination", str(corpus), "--device", "cpu"]
    assert run_command([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["contamination"]
    assert (found["words"], found["items"], found["dirty"], found["short"]) == (12, 16, 3, 0)
    assert found["places"] == [f"{data}:{n + 1}" for n in DIRTY]
    parts = {
        "dirty": [row for n, row in enumerate(rows) if n in DIRTY],
        "clean": [row for n, row in enumerate(rows) if n not in DIRTY],
        "all": rows,
    }
    for name, some in parts.items():
        alone = malmoi.evaluate(model, "copa", write_rows(tmp_path / "some.jsonl", some), shots=0)
        for measure, row in found["scores"].items():
            assert row[name] == pytest.approx(alone[measure])
    row = found["scores"]["accuracy"]
    assert row["clean_minus_all"] == pytest.approx(row["clean"] - row["all"])
    assert run_command(line) == 0
    printed = capsys.readouterr().out
    assert "3 of 16 items share a run of 12 words" in printed
    assert "clean − all" in printed


def test_a_fine_tuned_model_and_text_without_overlap(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": item, "label": "ab"[n % 2]} for n, item in enumerate(ITEMS)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "tuned"
    malmoi.finetune(model, "classification", data, out, data, steps=1, batch=4, precision="fp32")
    corpus = write_rows(tmp_path / "raw.jsonl", corpus_rows())
    found = malmoi.evaluate(out, data=data, contamination=[str(corpus)])["contamination"]
    row = found["scores"]["accuracy"]
    assert found["dirty"] == 3
    assert row["clean"] * 13 + row["dirty"] * 3 == pytest.approx(row["all"] * 16)
    write_rows(corpus, corpus_rows()[3:])
    line = ["evaluate", "-m", str(out), str(data), "--contamination"]
    assert run_command([*line, str(corpus)]) == 0
    assert "0 of 16 items" in capsys.readouterr().out
    assert run_command([*line, str(tmp_path / "missing")]) != 0
    assert "There is no file or folder" in capsys.readouterr().err
