"""The GPT-2, GPT-3, Korean and compression studies: each runs, and says what it must."""

import json
import math
from pathlib import Path
from random import Random

import pytest

from malmoi.errors import UsageError
from malmoi.studies.run import StudyRunConfig, run_study
from malmoi.studies.study import SCALES, named_study
from malmoi.studies.tables import fit_power_law, patterns, training_flops


def test_a_power_law_is_found_again_with_an_error_that_covers_it() -> None:
    rng = Random(0)
    exact = [(10.0**i, (10.0**i / 5e7) ** -0.05) for i in range(-2, 4)]
    law = fit_power_law(exact)
    assert law.exponent == pytest.approx(0.05)
    assert law.scale == pytest.approx(5e7)
    assert law.error == pytest.approx(0, abs=1e-9)
    noisy = [(c, loss * math.exp(rng.gauss(0, 0.01))) for c, loss in exact]
    law = fit_power_law(noisy)
    assert 0 < law.error < 0.005
    assert abs(law.exponent - 0.05) < 3 * law.error


def test_sparse_layers_cost_less_per_token() -> None:
    base = SCALES["cpu"].recipe("gpt", 0)
    cost = {
        row: training_flops(base.override({"model.attention": attention}))
        for row, attention in patterns(base.model.context).items()
    }
    assert cost["strided"] < cost["banded"] < cost["dense"]


def test_korean_names_the_files_that_it_needs(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"word {i} and so on." for i in range(200)))
    with pytest.raises(UsageError, match=r"ratings_train\.txt"):
        run_study(
            named_study("korean"), tmp_path / "out", StudyRunConfig(scale="tiny", data=[str(text)])
        )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["gpt2-zeroshot", "gpt3-scaling", "gpt3-contamination", "gpt3-sparse", "compression"]
)
def test_a_study_runs_from_the_built_in_text(name: str, tmp_path: Path) -> None:
    result = run_study(named_study(name), tmp_path, StudyRunConfig(scale="tiny"))
    facts = json.loads((tmp_path / "results.json").read_text())
    assert len(facts["rows"]) > 1
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")
    assert facts["claims"]
    assert result.report.is_file()


@pytest.mark.heavy
def test_korean_runs_on_a_miniature(tmp_path: Path) -> None:
    rng = Random(0)
    words = {
        "1": ["정말", "좋았다", "최고의", "영화였다"],
        "0": ["너무", "지루했다", "돈이", "아깝다"],
    }
    for part, count in (("train", 400), ("test", 40)):
        rows = [(i, str(i % 2)) for i in range(count)]
        lines = [f"{i}\t{' '.join(rng.choices(words[label], k=6))}\t{label}" for i, label in rows]
        path = tmp_path / f"ratings_{part}.txt"
        path.write_text("\n".join(["id\tdocument\tlabel", *lines]) + "\n", "utf-8")
    options = StudyRunConfig(scale="tiny", data=[str(tmp_path)])
    result = run_study(named_study("korean"), tmp_path / "out", options)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {"WordPiece", "BPE", "byte-level BPE", "characters"} <= set(rows)
    assert all(rows[row]["tokens per character"]["mean"] > 0 for row in rows)
    assert "NSMC" in result.report.read_text("utf-8")
