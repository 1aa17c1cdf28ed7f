"""Names that users may have typed before: they work for one more release, with a note."""

import json
from pathlib import Path

import pytest

from malmoi.cli.deprecated import current_options
from malmoi.config import current_fields
from malmoi.evaluation.in_context.templates import current_template
from malmoi.finetuning.config import finetune_config
from malmoi.finetuning.run_state import finetuning_folder
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import named_recipe


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["finetune", "sst2", "--again"], ["finetune", "sst2", "--overwrite"]),
        (["finetune", "sst2", "--untrained"], ["finetune", "sst2", "--from-scratch"]),
        (
            ["corpus", "build", "a", "--good", "b", "--against=c"],
            ["corpus", "build", "a", "--quality-reference", "b", "--decontaminate=c"],
        ),
        (["plan", "gpt1", "--rematerialise"], ["plan", "gpt1", "--gradient-checkpointing"]),
        (["generate", "--", "--again"], ["generate", "--", "--again"]),
        (["finetune", "--", "--again"], ["finetune", "--", "--again"]),
    ],
)
def test_old_options_mean_the_new_ones(
    typed: list[str], meant: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert current_options(typed) == meant
    assert ("will be removed" in caplog.text) == (typed != meant)


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
    assert finetuning_folder(tmp_path).read() == {"task": "sst2", "from_scratch": False}


def test_old_fields_of_a_template_mean_the_new_ones() -> None:
    given = {"prompt": "{text}", "between": "\n", "after": "!", "most": 3}
    assert current_template(given) == {
        "prompt": "{text}",
        "separator": "\n",
        "suffix": "!",
        "max_answer_tokens": 3,
    }
