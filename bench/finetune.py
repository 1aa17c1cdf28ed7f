"""Fine-tuning a small BERT to classify: ours beside transformers' Trainer on the same weights and
rows, in one run.

    malmoi bench finetune [--device cpu|cuda] [--rows N] [--json]

Random weights, and made-up rows of about SST-2's lengths; one epoch in batches of 32, in bf16 on a
GPU. Training alone is timed, from the first batch to the last; a short run of each comes before. A
ratio above 1 means that we are faster.
"""

import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from _timing import benchmark_parser, print_found, timed
from malmoi import finetune
from malmoi.tokenizer import Tokenizer, train_tokenizer

Shape = tuple[int, int, int]
SHAPES: dict[str, Shape] = {"cpu": (4, 256, 4), "cuda": (6, 384, 12)}  # layers, width, heads
BATCH = 32
WORDS = [
    a + b
    for a in ("ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu")
    for b in ("", "n", "rel", "stam")
]
Row = tuple[str, int]


def made_up_texts(count: int) -> list[str]:
    """Texts of 3 to 50 words, most of them short."""
    chance = random.Random(0)
    return [
        " ".join(chance.choices(WORDS, k=min(50, 3 + int(chance.expovariate(1 / 8)))))
        for _ in range(count)
    ]


def made_up(count: int) -> list[Row]:
    """Texts, each labelled by whether a certain word is there."""
    return [(text, int(WORDS[0] in text.split())) for text in made_up_texts(count)]


def save_bert(folder: Path, tokenizer: Tokenizer, shape: Shape, kind: Any, **more: Any) -> None:
    """A folder that both open: a class of transformers with random weights."""
    layers, width, heads = shape
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        **more,
    )
    kind(config).save_pretrained(folder)
    tokenizer.save(folder)


def model(folder: Path, device: str, rows: list[Row]) -> None:
    tokenizer = train_tokenizer([text for text, _ in rows[:2000]], kind="wordpiece", vocab=400)
    save_bert(folder, tokenizer, SHAPES[device], transformers.BertModel)


def ours(folder: Path, rows: list[Row], device: str, out: Path) -> float:
    """Seconds of training, the evaluations taken out."""
    table = out.with_suffix(".tsv")
    table.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    dev = out.with_suffix(".dev.tsv")
    dev.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows[:64]))
    finetune(
        folder, "classification", table, out, dev, device=device, epochs=1, batch=BATCH, length=128
    )
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds, steps = (
        float(log[-1]["seconds"]) - sum(row.get("judging_seconds", 0.0) for row in log),
        log[-1]["step"],
    )
    return seconds * steps / (steps - 1)  # the first step is not on our clock


def theirs(folder: Path, rows: list[Row], device: str, out: Path) -> float:
    """transformers' Trainer as its guide has it: batches in the order drawn, padded to their
    longest.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=128)
    data: Any = [
        {**{name: column[i] for name, column in encoded.items()}, "labels": label}
        for i, (_, label) in enumerate(rows)
    ]
    settings = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=network,
        args=settings,
        train_dataset=data,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return timed(trainer.train)[0]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--device", choices=tuple(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rows", type=int, help="examples of the epoch (cpu 2,000, cuda 60,000)")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    count = chosen.rows or {"cpu": 2_000, "cuda": 60_000}[chosen.device]
    rows, ways, seconds = made_up(count), {"malmoi": ours, "transformers": theirs}, {}
    with tempfile.TemporaryDirectory() as beside:
        folder = Path(beside, "model")
        model(folder, chosen.device, rows)
        for name, way in ways.items():
            way(folder, rows[: 4 * BATCH], chosen.device, Path(beside, f"{name}-warm"))
            seconds[name] = way(folder, rows, chosen.device, Path(beside, name))
    found = {
        f"{name}_examples_per_second": round(count / spent, 1) for name, spent in seconds.items()
    }
    found["ratio"] = round(seconds["transformers"] / seconds["malmoi"], 2)
    print_found(found, as_json=chosen.json)


if __name__ == "__main__":
    main()
