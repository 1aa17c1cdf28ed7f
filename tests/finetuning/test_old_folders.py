"""Folders of 0.1.0 are read, with defaults for the settings that are newer than they are."""

import json
from pathlib import Path

from malmoi.finetuning.results import finetuning_folder


def test_run_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "finetune.json").write_text(
        json.dumps({"task": "sst2", "from_scratch": True}), "utf-8"
    )
    read = finetuning_folder(tmp_path).read()
    assert (read["task"], read["from_scratch"], read["batch"]) == ("sst2", True, 32)
