"""Names that users may have typed before: they work for one more release, with a note."""

import json
from pathlib import Path

from malmoi.finetuning.config import finetune_config
from malmoi.finetuning.results import finetuning_folder
from malmoi.settings import current_fields
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import named_recipe


def test_old_settings_of_a_recipe_mean_the_new_ones() -> None:
    recipe = named_recipe("gpt1")
    new = recipe.override({"train.gradient_checkpointing": True, "train.muon_lr": 0.5})
    assert recipe.override({"train.rematerialise": True, "train.matrix_lr": "0.5"}) == new
    old = new.to_dict()
    old["train"]["rematerialise"] = old["train"].pop("gradient_checkpointing")
    old["train"]["matrix_lr"] = old["train"].pop("muon_lr")
    assert Recipe.from_json(json.dumps(old)) == new
    assert finetune_config({"untrained": True}).from_scratch
    assert current_fields("TrainConfig", {"lr": 1.0}) == {"lr": 1.0}


def test_run_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "finetune.json").write_text(
        json.dumps({"task": "sst2", "untrained": False}), "utf-8"
    )
    read = finetuning_folder(tmp_path).read()
    assert (read["task"], read["from_scratch"], read["batch"]) == ("sst2", False, 32)
