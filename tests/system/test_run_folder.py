"""A folder knows which run it holds: the same resumes, a finished one is not done again, another
is refused.
"""

from pathlib import Path
from typing import Any

import pytest

from malmoi.errors import MalmoiError, UsageError
from malmoi.system.run_folder import FINISHED, RunFolder

SETTINGS: dict[str, Any] = {
    "name": "a",
    "train": {"lr": 0.1, "steps": 3, "sizes": (1, 2)},
    "of": "ab12",
}


def place(folder: Path, **changes: Any) -> RunFolder:
    return RunFolder(
        folder, "run.json", "fine-tuning", unreadable={"of": "of other examples"}, **changes
    )


def test_the_same_run_resumes_and_a_finished_one_is_known(tmp_path: Path) -> None:
    run = place(tmp_path)
    assert run.read() == {}
    assert run.begin(SETTINGS) == SETTINGS
    assert FINISHED not in run.begin(SETTINGS)
    run.finish(SETTINGS, {"steps": 3})
    assert run.begin(SETTINGS)[FINISHED] == {"steps": 3}
    run.restart()
    assert FINISHED not in run.begin(SETTINGS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "b"}, r'holds another fine-tuning \(name was "a"\)'),
        ({"train": {**SETTINGS["train"], "lr": 0.2}}, r"train\.lr was 0\.1"),
        ({"of": "cd34"}, r"\(of other examples\)"),
        ({"new": 1}, r"new was null"),
    ],
)
def test_another_run_is_refused_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    place(tmp_path).begin(SETTINGS)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UsageError, match=said):
        place(tmp_path).begin({**SETTINGS, **changes})
    assert (tmp_path / "run.json").read_bytes() == before


def test_what_is_free_may_change_and_is_kept(tmp_path: Path) -> None:
    more = {**SETTINGS, "train": {**SETTINGS["train"], "steps": 9}}
    place(tmp_path).begin(SETTINGS)
    place(tmp_path).begin(more, free={"train.steps"})
    assert place(tmp_path).read()["train"]["steps"] == 9


@pytest.mark.parametrize("content", ["{", "[1]", "3", "\udcff"])
def test_a_damaged_record_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        MalmoiError, match=r"run\.json is not a valid record of a fine-tuning.*--overwrite"
    ):
        place(tmp_path, can_restart=True).begin(SETTINGS)
