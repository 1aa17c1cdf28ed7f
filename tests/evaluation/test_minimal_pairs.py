"""Minimal pairs by likelihood and by pseudo-likelihood, against sums token by token."""

import lzma
from pathlib import Path

import pytest
import torch

import malmoi
from malmoi.checkpoint import Checkpoint
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.tasks import named_task
from malmoi.inference import Model
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores, sentence_logprobs
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.tokenizer import Tokenizer, train_tokenizer

TEXTS = [
    "The law is strong.",
    "The people are free.",
    "We work.",
    "Peace and the union are strong.",
]


def network(words: Tokenizer, *, masked: bool = False, both: bool = False) -> Network:
    make = bert if masked else gpt2
    config = make(vocab=words.vocab_size, context=32, width=16, depth=2, heads=2)
    config = config.override({"both_ways": both, "dropout": 0.0})
    return initialise(Network(config, {"mlm" if masked else "lm": 0}), 3).eval()


def tokenizer(kind: str, *, mask: bool = False) -> Tokenizer:
    return train_tokenizer(TEXTS * 3, kind=kind, vocab=280, special="mask" if mask else "none")


def test_a_gpts_likelihood_is_that_of_its_score() -> None:
    words = tokenizer("byte-bpe")
    net = network(words)
    model = Model(Checkpoint(net, words))
    expected = [model.score("", text).logprob for text in TEXTS]
    assert sentence_logprobs(net, words, TEXTS) == pytest.approx(expected, rel=1e-5)


def test_a_berts_likelihood_hides_each_token_in_turn() -> None:
    words = tokenizer("wordpiece")
    net = network(words, masked=True)
    expected = [
        score.logprob for score in pseudo_scores(net, words, [SplitText("", t) for t in TEXTS])
    ]
    assert sentence_logprobs(net, words, TEXTS) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_model_of_both_hides_tokens_and_looks_one_place_to_the_left() -> None:
    words = tokenizer("byte-bpe", mask=True)
    net = network(words, both=True)
    masked = net.masked()
    text = "The unpeaceful are strong."
    found = sentence_logprobs(masked, words, [text])
    encoding = words.encode(text)
    tokens, number = encoding.tokens, encoding.words
    total = 0.0
    for place in range(1, len(tokens) - 1):
        row = torch.tensor([tokens])
        rest = [p for p in range(place, len(tokens)) if number[p] == number[place]]
        row[0, rest] = words.specials.mask or 0
        scores = net.heads["lm"](masked.hidden(row))[0, place - 1].log_softmax(-1)
        total += float(scores[tokens[place]])
    assert found == pytest.approx([total], rel=1e-5)


def test_unreadable_pairs_are_refused() -> None:
    words = tokenizer("byte-bpe")
    net = network(words)
    with pytest.raises(UsageError, match="more than this model's context of 32"):
        sentence_logprobs(net, words, ["peace " * 40])
    with pytest.raises(UsageError, match="Only a causal or a masked language model"):
        sentence_logprobs(Network(net.config, {"classify": 2}), words, TEXTS)


def test_blimp_and_kontrast_are_read(tmp_path: Path) -> None:
    line = '{"good": "Cats sleep.", "bad": "Cats sleeps.", "paradigm": "p", "phenomenon": "verbs"}'
    with lzma.open(tmp_path / "blimp.jsonl.xz", "wt") as file:
        file.write(line + "\n")
    (row,) = load_examples(named_task("blimp"), tmp_path / "blimp.jsonl.xz").rows
    assert (row.choices, row.label, row.group) == (("Cats sleep.", "Cats sleeps."), 0, "verbs")
    published = '{"sentence_good": "a", "sentence_bad": "b", "linguistics_term": "islands"}'
    (tmp_path / "own.jsonl").write_text(published)
    (row,) = load_examples(named_task("blimp"), tmp_path / "own.jsonl").rows
    assert row.group == "islands"
    header = "\ufeffid,sentence_A,sentence_B,gold_label\n"
    (tmp_path / "k.csv").write_text(f"{header}1,수도뿐이다.,수도이다.,B\n", "utf-8")
    (row,) = load_examples(named_task("kontrast"), tmp_path / "k.csv").rows
    assert (row.text, row.label) == ("수도이다.", 1)
    (tmp_path / "bad.csv").write_text(f"{header}1,가,나,C\n", "utf-8")
    with pytest.raises(MalmoiError, match="gold_label is A or B, not 'C'"):
        load_examples(named_task("kontrast"), tmp_path / "bad.csv")


def test_both_readings_of_one_folder_are_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tokenizer("byte-bpe", mask=True)
    Model(Checkpoint(network(words, both=True), words)).save(tmp_path / "model")
    rows = [
        f'{{"good": "{good}", "bad": "{bad}", "phenomenon": "{group}"}}'
        for group in ("order", "verbs")
        for good, bad in zip(TEXTS, reversed(TEXTS), strict=True)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(rows))
    model = malmoi.load(tmp_path / "model", device="cpu")
    scores = sentence_logprobs(model.network, model.tokenizer, TEXTS)
    right = [float(a > b) for a, b in zip(scores, reversed(scores), strict=True)]
    found = malmoi.evaluate(model, "blimp", data)
    assert found["accuracy"] == found["verbs"] == sum(right) / 4
    assert found["examples"] == 8
    assert found["order_error"] > found["accuracy_error"] > 0
    masked = malmoi.evaluate(model, "blimp", data, reading="masked")
    assert masked == malmoi.evaluate(model.masked, "blimp", data)
    command = ["evaluate", "blimp", "--model", str(tmp_path / "model"), "--data", str(data)]
    assert run_command([*command, "--reading", "masked"]) == 0
    assert "order" in capsys.readouterr().out
    with pytest.raises(UsageError, match="There is no reading mode 'maskd'"):
        malmoi.evaluate(model, "blimp", data, reading="maskd")  # type: ignore[arg-type]
    gpt = Model(Checkpoint(network(model.tokenizer), model.tokenizer))
    with pytest.raises(UsageError, match="reads left to right only"):
        malmoi.evaluate(gpt, "blimp", data, reading="masked")
    with pytest.raises(UsageError, match="does not read left to right"):
        malmoi.evaluate(model.masked, "blimp", data, reading="causal")
