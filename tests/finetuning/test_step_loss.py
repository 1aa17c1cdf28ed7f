"""The loss of a fine-tuning step is the mean over its own labels, whatever its length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import malmoi
from malmoi.evaluation.features import AnswerItem
from malmoi.finetuning.trainer import LM_WEIGHTS, pack_answers
from malmoi.tokenizer import TokenRow
from tiny_models import tiny_bert, tiny_gpt

SHORT, LONG = "Alice met Bob", "Carol met Alice and Bob and Alice met Carol and Bob"
TINY = dict(context=64, width=32, depth=1, heads=2, dropout=0.0, attention_dropout=0.0)
# learns next to nothing, so that the folder holds the weights of every step
STILL: dict[str, Any] = dict(batch=2, steps=2, lr=1e-12, warmup=0.0, precision="fp32", average=0.0)


def losses_of(model: Path, rows: list[dict[str, Any]], out: Path, **options: Any) -> list[float]:
    """The losses of two steps, of two short rows and of two long ones, in this order."""
    data = out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    malmoi.finetune(model, data=data, dev=data, out=out, **STILL, **options)
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [row for row in found if "loss" in row]
    before = [0, *(row["tokens"] for row in steps)]
    sizes = [row["tokens"] - read for row, read in zip(steps, before, strict=False)]
    return [row["loss"] for _, row in sorted(zip(sizes, steps, strict=True), key=lambda x: x[0])]


def test_tags_are_averaged_over_the_words_of_the_step(tmp_path: Path) -> None:
    import transformers

    model = tiny_bert(tmp_path / "bert", [SHORT, LONG] * 3, 150, **TINY)
    rows = [
        {"text": text.split(), "label": ["B-PER" if w[0].isupper() else "O" for w in text.split()]}
        for text in (SHORT, SHORT, LONG, LONG)
    ]
    found = losses_of(model, rows, tmp_path / "out", task="tagging")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for row, loss in zip(rows[1:3], found, strict=True):
        inputs = tokenizer(" ".join(row["text"]), return_tensors="pt")
        assert inputs["input_ids"].size(1) == len(row["text"]) + 2  # every word is one token
        tags = [theirs.config.label2id[name] for name in row["label"]]
        labels = torch.tensor([[-100, *tags, -100]])
        wanted = theirs(**inputs, labels=labels).loss
        assert loss == pytest.approx(wanted.item(), abs=2e-5)  # the log rounds to five digits


def test_gpt1s_auxiliary_loss_is_the_mean_over_rows_of_their_means(tmp_path: Path) -> None:
    """As in the authors' code: lm_losses / ΣM of each row, then averaged over the rows."""
    import transformers

    model = tiny_gpt(tmp_path / "gpt", [SHORT, LONG] * 3, 330, init_std=0.3, **TINY)
    # two rows of one step differ in length: by the token, the longer one would weigh more
    rows = [
        {"text": text, "label": label}
        for text, label in ((SHORT, "a"), (f"{SHORT} and Bob", "b"), (LONG, "b"), (LONG, "a"))
    ]
    found = losses_of(model, rows, tmp_path / "out", task="classification", lm=0.5)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    theirs.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for pair, loss in zip((rows[:2], rows[2:]), found, strict=True):
        parts = []
        for row in pair:
            tokens = tokenizer(row["text"], return_tensors="pt")["input_ids"]
            hidden = theirs.transformer(tokens).last_hidden_state[0]
            label = torch.tensor(theirs.config.label2id[row["label"]])
            words = hidden[:-1] @ theirs.transformer.wte.weight.T
            parts.append(
                F.cross_entropy(theirs.score(hidden[-1]), label)
                + 0.5 * F.cross_entropy(words, tokens[0, 1:])
            )
        assert loss == pytest.approx(torch.stack(parts).mean().item(), abs=2e-5)


@pytest.mark.parametrize("kind", ["classification", "writing"])
def test_a_rows_loss_does_not_depend_on_what_the_other_batches_hold(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_gpt(tmp_path / "gpt", [SHORT, LONG] * 3, 330, init_std=0.3, **TINY)

    def row(text: str) -> dict[str, str]:
        return (
            {"prompt": "who", "answer": text}
            if kind == "writing"
            else {"text": text, "label": text[0]}
        )

    pairs = {name: [row(text)] * 2 for name, text in (("short", SHORT), ("long", LONG))}
    options = dict(task=kind, lm=0.5, seed=3)
    mixed = losses_of(model, pairs["short"] + pairs["long"], tmp_path / "mixed", **options)
    longer = [row(LONG + " and Carol met Bob")] * 2
    beside_longer = losses_of(model, pairs["short"] + longer, tmp_path / "beside", **options)
    assert mixed[0] == pytest.approx(beside_longer[0], abs=2e-5)


def test_packed_conversations_weigh_one_each() -> None:
    tokens = [list(range(1, 4)), list(range(1, 9)), [5]]
    items = [
        AnswerItem((TokenRow(*2 * (np.array(ids, np.int32),)),), [-100] * len(ids))
        for ids in tokens
    ]
    batch = pack_answers(items, 64, lm=True)
    assert len(batch["tokens"]) == 2  # two share a row
    shares = batch[LM_WEIGHTS][batch["lm_labels"] != -100]
    assert sorted(shares.tolist()) == pytest.approx([1 / 7] * 7 + [1 / 2] * 2)
