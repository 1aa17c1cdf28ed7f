"""The rule that chooses a size: it finds what was measured, grows with compute and text, says why,
and refuses what cannot work.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import malmoi
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.messages import translate
from malmoi.system.machine import pretend, this_machine
from malmoi.system.run_folder import read_metrics
from malmoi.text.documents import read_documents
from malmoi.text.sentences import split_sentences
from malmoi.tokenizer import train_tokenizer
from malmoi.training.data.encode import build_stores
from malmoi.training.data.pairs import Pairs
from malmoi.training.pretrain import explain_size
from malmoi.training.sizing import (
    MAX_EPOCHS,
    SizeChoice,
    Speed,
    choose_size,
    measure_text,
    vocabulary_size,
)
from tiny_runs import write_corpus

H200 = Speed(720e12, "cuda", half=True, name="H200")


def size(tokens: float, seconds: float, speed: Speed = H200, **given: Any) -> SizeChoice:
    return choose_size("gpt", int(tokens), 8192, seconds, speed, given)


def test_the_rule_finds_the_sizes_that_were_measured_to_be_best() -> None:
    for tokens, seconds, shape in ((7.7e6, 70, (9, 512)), (23.5e6, 290, (10, 640))):
        found = size(tokens, seconds)
        assert (found.model.depth, found.model.width, found.model.context) == (*shape, 512)
        assert 7 < found.epochs <= MAX_EPOCHS["gpt"]
    assert [vocabulary_size(n) for n in (1_100_000, 12_000_000, 94_000_000)] == [1024, 4096, 8192]
    english = "the state of the union " * 50
    korean = "".join(map(chr, range(0xAC00, 0xAC00 + 1800)))
    assert vocabulary_size(146_000_000, [english]) == 8192
    assert vocabulary_size(146_000_000, [korean, english]) == 16_384
    assert [vocabulary_size(57_000_000, [korean], each) for each in (2, 4)] == [8192, 16_384]


def test_more_compute_takes_larger_models_and_more_text_reads_it_less_often() -> None:
    weights = [size(1e9, seconds).weights for seconds in (1, 10, 100, 1000, 10_000)]
    assert weights == sorted(set(weights))
    epochs = [size(tokens, 300).epochs for tokens in (1e6, 1e7, 1e8, 1e9)]
    assert epochs == sorted(epochs, reverse=True)
    for flops, shape in ((5e9, (2, 64)), (7e10, (2, 128))):
        cores = Speed(flops, "cpu", half=False, name="two cores")
        slow = choose_size("gpt", 2_500_000, 4096, 100, cores, {})
        assert (slow.model.depth, slow.model.width) == shape
    assert size(2e6, 100, width=96).model.heads == 3


def test_given_sizes_are_kept() -> None:
    found = size(23.5e6, 290, width=512, context=256)
    assert (found.model.width, found.model.heads, found.model.context) == (512, 8, 256)
    found = size(23.5e6, 290, width=256, depth=20)
    assert (found.model.width, found.model.depth) == (256, 20)
    assert size(23.5e6, 290, width=100).model.heads == 2
    assert size(23.5e6, 290, width=100, heads=5).model.heads == 5
    assert size(23.5e6, 290, heads=7).model.width % 7 == 0


def test_minutes_that_the_text_cannot_use_are_left() -> None:
    found = size(450_000, 3600)
    assert found.minutes < 60
    assert found.epochs == 2 * MAX_EPOCHS["gpt"]
    assert found.weights - 8192 * found.model.width <= 20 * 450_000


def test_a_run_ends_when_its_text_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many minutes are left, and however often the command is given."""
    corpus = write_corpus(tmp_path / "text.txt", documents=120)
    out = tmp_path / "run"
    settings = {"model.context": 16, "train.batch": 8, "train.max_epochs": 0.2}
    for _ in range(2):
        with caplog.at_level("INFO"):
            malmoi.pretrain("gpt", data=corpus, out=out, device="cpu", minutes=600, **settings)
        read = read_metrics(out / "metrics.jsonl")[-1]["tokens"]
        text = re.search(r"([\d,]+) training tokens", caplog.text)
        assert text
        assert read == pytest.approx(int(text[1].replace(",", "")) / 5, rel=0.1)
    assert "until the text is used up" in caplog.text


def test_a_speed_that_cannot_be_measured_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(execution: object) -> float:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("malmoi.training.device.measured_flops", fail)
    corpus = write_corpus(tmp_path / "text.txt", documents=120)
    settings = {"model.context": 16, "train.batch": 8, "train.max_epochs": 0.05}
    with caplog.at_level("INFO"):
        malmoi.pretrain("gpt", data=corpus, out=tmp_path, device="cpu", minutes=1, **settings)
    assert caplog.text.count("could not be measured (no kernel image is available)") == 1
    assert "20 GFLOP/s assumed" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["valid_loss"] > 0


def test_text_is_counted_and_sampled(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("가나다 " * 20_000, "utf-8")
    (tmp_path / "b.txt").write_text("one\n\ntwo", "utf-8")
    text = measure_text([read_documents([tmp_path])])
    assert text.exact
    assert text.bytes == pytest.approx(20_000 * 10, rel=0.01)
    assert {"one", "two"} <= set(text.sample)


def test_a_source_counts_by_its_length_not_by_its_sample(tmp_path: Path) -> None:
    """A BERT's rows start at drawn tokens: three quarters of them in long documents."""
    for name, text, count in (("long", "a" * 300, 5_000), ("short", "b" * 20, 25_000)):
        lines = (json.dumps({"text": text}) for _ in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    text = measure_text([read_documents([tmp_path])])
    letters = train_tokenizer(["ab"], kind="char", vocab=8)
    assert text.tokens(letters) == pytest.approx(2_000_000, rel=0.001)
    assert text.row_tokens(letters, 100) == 80  # rows of 100 and of 22


@pytest.mark.parametrize("separator", ["\n", " "])
def test_a_berts_rows_are_as_long_as_foreseen(tmp_path: Path, separator: str) -> None:
    """Of lines, of very different lengths, and of longer texts of several sentences."""
    draw = random.Random(0)
    texts = [" ".join(["Word"] * draw.choice([2, 5, 40])) + "." for _ in range(3000)]
    parts = [separator.join(texts[i : i + 5]) for i in range(0, len(texts), 5)]
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n".join(parts), "utf-8")
    words = train_tokenizer(["Word ."], kind="wordpiece", vocab=40)
    text = measure_text([read_documents([corpus])])
    stores = build_stores(
        read_documents([corpus]), words, tmp_path, sentences=split_sentences, valid=0.0
    )
    rows = Pairs(stores.train, 64, 0, specials=words.specials, next=None, short=0.0)
    mean = rows.batch(range(5000))["lengths"].mean()
    assert text.row_tokens(words, 64) == pytest.approx(mean, rel=0.05)


def test_a_run_sizes_itself_and_resumes_with_the_same_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says why, the run follows it, and the same command resumes with the same size."""
    corpus = write_corpus(tmp_path / "text.txt", documents=120)
    settings = {"minutes": 0.02, "model.context": 16, "train.batch": 4}
    sized = explain_size("gpt", [str(corpus)], device="cpu", **settings)
    assert 6 <= len(sized.reasons) <= 11
    assert any("epochs: so dropout" in sentence for sentence in sized.reasons)
    assert sized.recipe.train.batch == 4
    assert not sized.recipe.train.fit_batch
    out = tmp_path / "run"
    malmoi.pretrain("gpt", data=corpus, out=out, device="cpu", **settings)
    begun = (out / "recipe.json").read_text()
    assert read_metrics(out / "metrics.jsonl")[-1]["valid_loss"] > 0
    malmoi.pretrain("gpt", data=corpus, out=out, device="cpu", **settings)
    assert (out / "recipe.json").read_text() == begun
    with pytest.raises(MalmoiError, match="holds another pre-training run"):
        malmoi.pretrain("bert", data=corpus, out=out, device="cpu", **settings)
    command = ["pretrain", "bert", "--data", str(corpus), "--out", str(tmp_path / "no")]
    assert run_command([*command, "--minutes", "1", "--dry-run"]) == 0
    assert "Size: 2 layers × 64" in capsys.readouterr().out
    assert not (tmp_path / "no").exists()


def test_a_short_run_encodes_what_it_can_read_and_a_longer_one_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("malmoi.training.sizing.MIN_ENCODED_BYTES", 20_000)
    corpus = write_corpus(tmp_path / "text.txt", documents=1200)
    settings = {"model.context": 16, "train.batch": 4, "train.compile": False}

    def run(out: Path, minutes: float, **more: Any) -> tuple[int, bytes, float]:
        with pretend(replace(this_machine(), flops=3e7)):
            chosen = settings | more
            malmoi.pretrain("gpt", data=corpus, out=out, device="cpu", minutes=minutes, **chosen)
        train, valid = (out / "data" / part / "tokens.bin" for part in ("train", "valid"))
        recipe = json.loads((out / "recipe.json").read_text())
        return len(train.read_bytes()), valid.read_bytes(), recipe["data"]["fraction"]

    with caplog.at_level("INFO"):
        part, valid, fraction = run(tmp_path / "short", 0.002)
    assert "drawn evenly: 0.002 minutes can read no more." in caplog.text
    assert 0 < fraction < 0.3
    words = malmoi.load(tmp_path / "short").tokenizer
    whole = len(words.ids([corpus.read_text()])[0]) * 2  # two bytes a token
    assert part == pytest.approx(0.9 * fraction * whole, rel=0.2)
    assert len(valid) == pytest.approx(0.1 * whole, rel=0.4)  # of all documents
    assert run(tmp_path / "short", 0.002) == (part, valid, fraction)  # resumed
    longer = run(tmp_path / "short", 0.02)
    assert longer[1:] == (valid, 1.0)
    assert longer[0] + len(valid) == pytest.approx(whole, rel=0.05)
    assert run(tmp_path / "all", 0.002, **{"data.fraction": 1.0})[2] == 1.0


def test_a_berts_batch_counts_the_tokens_of_short_texts(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(f"a short review of film number {i}" for i in range(1000)))
    sized = explain_size("bert", [str(lines)], device="cpu", minutes=1)
    assert sized.recipe.train.batch >= 32
    assert not sized.recipe.train.fit_batch
    assert sized.recipe.data.packed
    assert any("tokens on average (at most" in sentence for sentence in sized.reasons)
    assert not [one for one in sized.reasons if translate(one, "ko") == one]


def test_every_reason_is_given_in_korean_too(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text.txt", documents=120)
    with pretend(replace(this_machine(), flops=1e12)):
        sized = explain_size("gpt", [str(corpus)], device="cpu", minutes=600)
    assert any("of the 600, when the text has been read 18 times" in s for s in sized.reasons)
    assert not [one for one in sized.reasons if translate(one, "ko") == one]


def test_a_bert_with_much_compute_detects_replaced_words_too(tmp_path: Path) -> None:
    """From DETECTING_FLOPS on, unless an objective is given; half as much time for its steps."""
    corpus = [str(write_corpus(tmp_path / "text.txt", documents=120))]
    with pretend(replace(this_machine(), flops=1e15)):
        for settings, wanted in (({}, "mlm+rtd"), ({"objective": "mlm"}, "mlm")):
            sized = explain_size("bert", corpus, device="cpu", minutes=60, **settings)
            recipe = sized.recipe
            assert recipe.objective == wanted
            assert (recipe.data.mask_rate, recipe.model.generator_depth) == (
                (0.3, 2) if wanted == "mlm+rtd" else (0.25, 0)
            )
            assert not [one for one in sized.reasons if translate(one, "ko") == one]
    assert explain_size("bert", corpus, device="cpu", minutes=1).recipe.objective == "mlm"


def test_what_is_given_decides_what_is_chosen(tmp_path: Path) -> None:
    """A width that seven heads divide, and masked rows that a context of 200 divides into."""
    corpus = [str(write_corpus(tmp_path / "text.txt", documents=120))]
    model = explain_size("gpt", corpus, device="cpu", minutes=1, heads=7).recipe.model
    assert (model.heads, model.width % 14, model.head_width) == (7, 0, 0)
    for context, length in ((200, 100), (256, 128), (96, 0), (211, 0)):
        settings = {"context": context, "batch": 4, "causal_share": 0.99}
        sized = explain_size("both", corpus, device="cpu", minutes=1, **settings)
        assert sized.recipe.data.masked_length == length
        said = (
            f"Rows: 3 of 4 are read from left to right, the others with masks, {length or context}"
        )
        assert any(sentence.startswith(said) for sentence in sized.reasons)
        assert not [one for one in sized.reasons if translate(one, "ko") == one]
    with pytest.raises(UsageError, match="masked_length=100 does not divide the 16 tokens"):
        explain_size("both", corpus, device="cpu", minutes=1, context=16, masked_length=100)


def test_impossible_sizes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("To be, or not to be. " * 90)
    with pytest.raises(UsageError, match=r"There are 1\.9 kB of text, too little"):
        malmoi.pretrain("gpt", data=tiny, out=tmp_path / "run", device="cpu", minutes=1)
    corpus = write_corpus(tmp_path / "text.txt", documents=120)
    with pytest.raises(UsageError, match=r"context=100000 is longer than the text .* about \d,\d+"):
        explain_size("gpt", [str(corpus)], device="cpu", minutes=1, context=100_000)
    with pytest.raises(UsageError, match="follows from its time: give --minutes"):
        malmoi.pretrain("bert", data=tiny, out=tmp_path / "run", device="cpu")
    tiny.write_text("")
    with pytest.raises(MalmoiError, match="every source is empty"):
        malmoi.pretrain("gpt-char", data=tiny, out=tmp_path / "run", device="cpu", minutes=1)
    assert not (tmp_path / "run").exists()
