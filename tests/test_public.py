"""The promised names are there, and cost nothing until they are used."""

import re
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path

import pytest

import malmoi
from malmoi.inference.generation import keywords

ROOT = Path(__file__).parents[1]
GENERATION = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
GENERATION += ("stop", "seed", "n")
PROMISED = {
    "generate": GENERATION,
    "stream": GENERATION,
    "score": ("context", "continuation"),
    "perplexity": ("text", "stride"),
    "bits_per_byte": ("text", "stride"),
    "fill": ("text", "top"),
    "embed": ("texts", "layers", "pool"),
    "predict": ("texts",),
    "logits": ("text",),
    "tokens": ("text",),
    "trace": ("text", "words", "top"),
    "save": ("folder",),
}


def test_every_public_name_is_there() -> None:
    assert {"load", "Tokenizer", "ModelConfig", "__version__"} <= set(malmoi.__all__)
    assert dir(malmoi) == sorted(malmoi.__all__)  # the product and nothing else
    for name in malmoi.__all__:
        assert getattr(malmoi, name) is not None
    with pytest.raises(AttributeError, match="lod"):
        malmoi.lod  # noqa: B018


def parameters_of(method: object) -> set[str]:
    """The names a method takes, those of its `**settings` too."""
    names = set(signature(method).parameters)
    rest = signature(method).parameters.get("options")
    known = re.search(r"Unpack\[(\w+)\]", str(rest))
    return names | (set(vars(keywords)[known[1]].__annotations__) if known else set())


@pytest.mark.parametrize("method", PROMISED)
def test_a_model_has_the_promised_methods(method: str) -> None:
    assert set(PROMISED[method]) <= parameters_of(getattr(malmoi.Model, method))


def test_the_results_have_the_promised_fields() -> None:
    from malmoi import inference

    fields = {
        inference.Score: ("logprob", "tokens", "token_logprobs", "greedy"),
        inference.Fill: ("token", "probability", "text"),
        inference.Prediction: ("label", "scores"),
        inference.Span: ("text", "label", "start", "end", "score"),
    }
    for kind, names in fields.items():
        assert tuple(kind.__dataclass_fields__) == names


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert malmoi.__version__ == project["version"]


def test_importing_malmoi_does_not_import_torch() -> None:
    code = (
        "import sys, malmoi, malmoi.cli; heavy = ('torch', 'numpy', 'tokenizers', 'transformers'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lists_and_help_do_not_import_torch() -> None:
    code = (
        "import sys; from malmoi.cli.app import run_command; from malmoi.system import machine; "
        "gpu = machine._may_have_gpu(); "  # doctor and plan then ask torch for its name
        "lists = ['tasks'], ['tasks', 'sst2'], ['recipes'], ['recipes', 'gpt2-small'], ['plan'], "
        "['doctor'], ['bench', '--list'], ['finetune', '--help']; "
        "print([run_command(one) for one in lists], 'torch' in sys.modules and not gpu)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[0] * 8} False"
