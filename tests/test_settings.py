"""A setting is declared once: commands, keywords and requests have what its record says."""

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from malmoi.api.records import SETTINGS
from malmoi.cli.app import build_app
from malmoi.cli.shared import options_of
from malmoi.corpus.config import CorpusConfig
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import KINDS
from malmoi.finetuning.config import FEATURE_DEFAULTS, GPT_DEFAULTS, FinetuneConfig
from malmoi.finetuning.few_labels import CONTRAST_DEFAULTS
from malmoi.inference.generation.keywords import GenerationSettings
from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig, Sampling
from malmoi.server.config import ServeConfig
from malmoi.settings import Setting, option, require_bounds, setting, settings_of

TOOL = Path(__file__).parents[1] / "tools" / "keywords.py"
# command, its records, and the keywords of the Python function
DOORS = {
    "generate": ((GenerationConfig, ConstraintOptions), GenerationSettings.__annotations__),
    "finetune": ((FinetuneConfig,), SETTINGS["FinetuneOptions"]),
    "serve": ((ServeConfig,), SETTINGS["ServeOptions"]),
    "corpus build": ((CorpusConfig,), SETTINGS["CorpusOptions"]),
}


@pytest.fixture(scope="module")
def keywords() -> Any:
    """The tool that writes the keywords of the functions."""
    spec = importlib.util.spec_from_file_location("keywords", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_of_command(name: str) -> dict[str, Any]:
    command: Any = get_command(build_app())
    for word in name.split():
        command = command.commands[word]
    return {one.name: one for one in command.params}


@pytest.mark.parametrize("door", DOORS)
def test_a_command_has_the_options_of_its_records(door: str) -> None:
    records, known = DOORS[door]
    options = options_of_command(door)
    for name, one in settings_of(*records).items():
        assert name in known
        if one.option:
            flags = list(one.flags) or [f"--{name.replace('_', '-')}"]
            assert options[name].opts == flags
            assert options[name].help == one.help
            assert options[name].show_default == (one.shown_default or False)


def test_the_keywords_are_written_from_the_records(keywords: Any) -> None:
    for path, source in keywords.stubs().items():
        assert path.read_text("utf-8") == source, "run tools/keywords.py"


def test_a_request_has_the_settings_of_sampling() -> None:
    fields = pytest.importorskip("malmoi.server.api.requests").CompletionRequest.model_fields
    shared = settings_of(Sampling).keys() - {"logit_bias"} | {"ignore_eos", "seed", "min_tokens"}
    for name in shared:
        one = settings_of(GenerationConfig, ConstraintOptions)[name]
        assert fields[name].default == one.default
        assert fields[name].description == one.help
        bounds = {
            key: getattr(limit, key)
            for limit in fields[name].metadata
            for key in ("ge", "gt", "le", "lt")
            if hasattr(limit, key)
        }
        assert bounds == one.bounds


def test_a_default_that_is_shown_is_used() -> None:
    """What the model, the kind or the rows decide says so instead of a number."""
    kinds = [getattr(kind, "defaults", {}) for kind in KINDS.values()]
    decided = {name for one in (GPT_DEFAULTS, FEATURE_DEFAULTS, *kinds) for name in one}
    decided |= CONTRAST_DEFAULTS.keys() | {"layer_decay", "average", "holdout"}
    known = settings_of(FinetuneConfig)
    assert {name for name in decided if not known[name].shown} == set()
    for one in settings_of(GenerationConfig).values():
        value = getattr(GenerationConfig(), one.name, getattr(Sampling(), one.name, None))
        assert value == one.default


def test_a_new_setting_is_one_line() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Extended(FinetuneConfig):
        jump: float = option(0.5, "How far to jump.", gt=0, le=1)

    (added,) = [p for p in options_of(Extended).parameters() if p.name == "jump"]
    assert added.annotation.__metadata__[0].help == "How far to jump."
    assert added.annotation.__metadata__[0].show_default == "0.5"
    assert settings_of(Extended)["jump"].bounds == {"gt": 0, "le": 1}
    with pytest.raises(UsageError, match=r"jump must lie in \(0, 1\], not 2"):
        Extended(jump=2)
    assert Extended().override({"jump": "0.25"}).jump == 0.25


@pytest.mark.parametrize(
    ("about", "value", "said"),
    [
        ({"gt": 0}, -1.0, "x must be positive, not -1.0."),
        ({"ge": 0}, -1.0, "x must not be negative, but is -1.0."),
        ({"ge": 3}, 2.0, "x must be at least 3, not 2.0."),
        ({"ge": 0, "lt": 1}, 1.0, "x must lie in [0, 1), not 1.0."),
        ({"ge": 0, "lt": 1}, float("nan"), "x must be a number, not nan."),
        ({"gt": 0}, "high", "x must be a number, not 'high'."),
        ({"ge": 0}, 0.0, ""),
    ],
)
def test_a_value_out_of_bounds_is_named(about: dict[str, float], value: Any, said: str) -> None:
    @dataclass
    class Record:
        x: float = setting(1.0, "A number.", **about)

    with pytest.raises(UsageError) if said else nullcontext() as refused:
        require_bounds(Record(value))
    assert refused is None or str(refused.value) == said
    assert isinstance(settings_of(Record)["x"], Setting)
