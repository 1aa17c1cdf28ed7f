"""GPT folders of every kind of task: the class of transformers that opens them, and its scores
beside ours.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import malmoi
from malmoi import finetune
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.evaluation.kinds import custom_task
from malmoi.evaluation.tasks import named_task
from malmoi.inference import Model
from malmoi.inference.predict import Predictor, score_choices, score_classes, token_scores
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer

GOOD, BAD, CONTEXT = (
    "a good great film",
    "a bad weak film",
    "Alice lives in Seoul . Bob lives in Paris .",
)
FAMILIES = {"gpt1": ("gpt1", "bpe", "OpenAIGPT"), "gpt2": ("gpt2-small", "byte-bpe", "GPT2")}
ROWS: dict[str, tuple[str, str]] = {
    "classification": ("a.csv", f"text,label\n{GOOD},yes\n{BAD},no\n"),
    "similarity": ("a.tsv", f"sentence1\tsentence2\tscore\n{GOOD}\t{BAD}\t1\n{GOOD}\t{GOOD}\t4\n"),
    "choice": (
        "a.csv",
        f"text,first,second,label\nthe film,{GOOD},{BAD},0\nthe film,{BAD},{GOOD},1\n",
    ),
    "tagging": (
        "a.jsonl",
        json.dumps({"text": CONTEXT.split(), "label": ["B-PER", *["O"] * 9]}) + "\n",
    ),
    "answer": (
        "a.jsonl",
        json.dumps({"text": "where is Alice", "context": CONTEXT, "label": "Seoul"}) + "\n",
    ),
}
OPENS = {  # what transformers calls it after the family's name; nothing: it has no such class
    "gpt1": {
        "classification": "ForSequenceClassification",
        "similarity": "ForSequenceClassification",
        "choice": "DoubleHeadsModel",
        "tagging": "",
        "answer": "",
    },
    "gpt2": {
        "classification": "ForSequenceClassification",
        "similarity": "ForSequenceClassification",
        "choice": "DoubleHeadsModel",
        "tagging": "ForTokenClassification",
        "answer": "ForQuestionAnswering",
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, kind, _ = FAMILIES[family]
    words = train_tokenizer([GOOD, BAD, CONTEXT, "where is the film"] * 3, kind=kind, vocab=330)
    config = preset(name, vocab=words.vocab_size, context=64, width=32, depth=2, heads=2)
    folder = tmp_path_factory.mktemp(family)
    write_checkpoint(Checkpoint(initialise(Network(config, {"lm": 0}), 0), words), folder)
    return folder


@pytest.fixture(params=ROWS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tuned(base: Path, kind: str, tmp_path: Path) -> Path:
    name, text = ROWS[kind]
    (tmp_path / name).write_text(text, "utf-8")
    more: dict[str, Any] = {"choices": ("first", "second")} if kind == "choice" else {}
    chosen = named_task("stsb") if kind == "similarity" else custom_task(kind, **more)  # type: ignore[arg-type]
    finetune(
        base,
        chosen,
        tmp_path / name,
        tmp_path / "out",
        tmp_path / name,
        steps=3,
        lr=1e-2,
        precision="fp32",
    )
    return tmp_path / "out"


def test_transformers_opens_it_with_the_same_scores(family: str, kind: str, tuned: Path) -> None:
    ours, name = malmoi.load(tuned), OPENS[family][kind]
    config = json.loads((tuned / "config.json").read_text("utf-8"))
    if not name:
        # Malmoi alone opens what transformers has no class for
        assert config["model_type"] == "malmoi"
        assert (
            ours.predict(CONTEXT if kind == "tagging" else ("where is Alice", CONTEXT)) is not None
        )
        return
    assert config["architectures"] == [FAMILIES[family][2] + name]
    theirs = getattr(transformers, config["architectures"][0]).from_pretrained(tuned).eval()
    found, wanted = SCORES[kind](ours, theirs)
    assert found.flatten().tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-4)


def tokens_of(model: Model, *text: str) -> torch.Tensor:
    return torch.tensor([model.tokenizer.encode(*text).tokens])


@torch.no_grad()
def of_a_text(ours: Model, theirs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return score_classes(Predictor.of(ours.checkpoint), [GOOD]), theirs(
        tokens_of(ours, GOOD)
    ).logits


@torch.no_grad()
def of_both_orders(ours: Model, theirs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """GPT-1 §3.3: the two readings are added before the linear layer, which has no bias: so are
    the scores.
    """
    there = [theirs(tokens_of(ours, *pair)).logits for pair in ((GOOD, BAD), (BAD, GOOD))]
    return score_classes(Predictor.of(ours.checkpoint), [(GOOD, BAD)]), there[0] + there[1]


@torch.no_grad()
def of_choices(ours: Model, theirs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = score_choices(Predictor.of(ours.checkpoint), [("the film", (GOOD, BAD))])[0]
    rows = [tokens_of(ours, "the film", choice) for choice in (GOOD, BAD)]
    read = [theirs(row[None], mc_token_ids=torch.tensor([[row.size(1) - 1]])) for row in rows]
    return found, torch.cat([one.mc_logits.flatten() for one in read])


@torch.no_grad()
def of_words(ours: Model, theirs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    encoding = ours.tokenizer.encode(CONTEXT)
    return token_scores(ours.network, [encoding], "tag")[0], theirs(
        tokens_of(ours, CONTEXT)
    ).logits[0]


@torch.no_grad()
def of_spans(ours: Model, theirs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    asked = ("where is Alice", CONTEXT)
    found = token_scores(ours.network, [ours.tokenizer.encode(*asked)], "span")[0]
    there = theirs(tokens_of(ours, *asked))
    return found.T, torch.stack([there.start_logits[0], there.end_logits[0]])


SCORES = {
    "classification": of_a_text,
    "similarity": of_both_orders,
    "choice": of_choices,
    "tagging": of_words,
    "answer": of_spans,
}
