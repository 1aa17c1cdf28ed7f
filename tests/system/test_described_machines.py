"""The main paths of training on machines that are not this one: described by a value, run for a
few steps.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from malmoi import finetune
from malmoi.system.machine import BF16_FEATURES, GIB, Machine, detect, pretend
from tiny_runs import STILL, losses, train, write_corpus

HERE = replace(detect(), accelerators=())
MACHINES = {
    "no bf16": replace(HERE, features=HERE.features - set(BF16_FEATURES)),
    "no compiler": replace(HERE, compiler=None),
    "one core": replace(HERE, cores=1),
    "little memory": replace(HERE, memory=GIB),
    "bare": Machine(architecture=HERE.architecture, memory=GIB),
}
MUON: dict[str, Any] = {"train.optimizer": "muon", "train.precision": "auto", **STILL}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with pretend(MACHINES[request.param]) as described:
        yield described


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def begun(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("begun")
    train("bert", corpus, out, steps=2, **{"data.lengths": [32], "data.shares": [1.0]})
    return out


@pytest.mark.parametrize(
    ("kind", "changes"), [("gpt", MUON), ("bert", {"train.lr": 1e-2, **STILL})]
)
@pytest.mark.usefixtures("machine")
def test_a_model_is_pre_trained(
    kind: str, changes: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    train(kind, corpus, tmp_path, steps=12, **changes)
    found = losses(tmp_path)
    assert sum(found[-3:]) / 3 < found[0] - 0.1


@pytest.mark.usefixtures("machine")
def test_a_model_is_fine_tuned(begun: Path, tmp_path: Path) -> None:
    rows = [("we work for peace", "yes"), ("the law is strong", "no")] * 16
    data = tmp_path / "rows.csv"
    data.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows), "utf-8")
    out = tmp_path / "tuned"
    done = finetune(
        begun, "classification", data, out, data, device="cpu", epochs=10, batch=8, lr=1e-2
    )
    assert losses(out)[-1] < losses(out)[0]
    assert done.metrics["accuracy"] == 1.0
