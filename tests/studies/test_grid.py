"""Studies as grids: cells are done once, a stopped study resumes, verdicts follow from numbers."""

from functools import partial
from pathlib import Path

import pytest

from malmoi.studies.grid import Cell, Grid, JudgedModel, finished_cells
from malmoi.studies.table import Claim, StudyResults, Words, lower_is_better, table_rows


def counted(judged: JudgedModel, note: Path, value: float) -> dict[str, float]:
    """Notes that it was called; a negative value fails."""
    with note.with_suffix(".log").open("a") as file:
        file.write(f"{value}\n")
    if value < 0:
        raise ValueError("negative")
    return {"accuracy": value + judged.seed}


def test_a_cell_is_judged_once_and_again_if_its_data_changes(tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("one")

    def cells(*values: float) -> list[Cell]:
        judges = [partial(counted, note=data, value=value) for value in values]
        return [Cell(f"row {j.keywords['value']}", seed, j) for seed in (0, 1) for j in judges]

    failed = Grid(cells(3.0, -1.0), tmp_path / "cache").run()
    assert failed == ["row -1.0, seed 0: negative", "row -1.0, seed 1: negative"]
    assert Grid(cells(3.0), tmp_path / "cache").run() == []
    assert data.with_suffix(".log").read_text().split() == ["3.0", "-1.0", "3.0", "-1.0"]
    found = StudyResults(finished_cells(cells(3.0), tmp_path / "cache"))
    assert found.table == {"row 3.0": {"accuracy": [3.0, 4.0]}}
    data.write_text("two")
    assert finished_cells(cells(3.0), tmp_path / "cache") == []


def test_nothing_starts_after_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    judge = partial(counted, note=tmp_path / "x", value=1.0)
    assert Grid([Cell("row", 0, judge)], tmp_path, deadline=0.0).run() == []
    assert not (tmp_path / "x.log").exists()


@pytest.mark.parametrize(
    ("ours", "other", "column", "said"),
    [
        ([90.0, 91.0, 92.0], [80.0, 81.0, 82.0], "SST-2", "agrees (+10.0, error ± 0.816)"),
        ([80.0, 81.0], [90.0, 91.0], "SST-2", "does not at this scale (−10.0, error ± 0.707)"),
        ([90.0, 70.0], [79.0, 81.0], "SST-2", "within noise (+0.000, error ± 10.0)"),
        ([90.0], [80.0], "SST-2", "agrees (+10.0, one seed, spread unknown)"),
        ([3.0, 3.1], [5.0, 5.1], "bits per byte", "agrees (+2.00, error ± 0.071)"),
    ],
)
def test_verdicts(ours: list[float], other: list[float], column: str, said: str) -> None:
    records = [
        {"row": row, "seed": seed, "values": {column: value}, "facts": {}}
        for row, values in (("ours", ours), ("other", other))
        for seed, value in enumerate(values)
    ]
    results = StudyResults(records)
    claim = Claim(Words("x", "가"), "ours", "other", column)
    assert claim.verdict(results).en == said
    assert lower_is_better(column) == (column == "bits per byte")
    head, rows = table_rows(results, {"other": {"theirs": 84.0}})
    assert head == ["", column, "paper: theirs"]
    assert [row[-1] for row in rows] == ["–", "84.0"]
