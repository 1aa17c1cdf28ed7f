"""Pairs on a sentence encoder: the network first learns the encoder's own cosine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import malmoi
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError
from malmoi.evaluation.task import Example
from malmoi.finetuning.own_cosines import taught_pairs
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer

SUBJECTS = ("a man", "a woman", "two dogs", "the child", "some people", "an old cat")
ACTS = ("runs fast", "is asleep", "plays the piano", "eats bread", "looks at the sea")
TEXTS = [f"{who} {does}" for who in SUBJECTS for does in ACTS]
ROWS = [
    {"one": text, "other": TEXTS[(7 * i) % len(TEXTS)], "alike": ("yes", "no")[i % 2]}
    for i, text in enumerate(TEXTS)
]
ASKED: dict[str, Any] = dict(text="one", pair="other", label="alike")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = train_tokenizer(TEXTS, kind="wordpiece", vocab=120)
    config = preset("bert-tiny", vocab=words.vocab_size, context=32, width=32, heads=2, depth=2)
    network = initialise(Network(config, {}, pooler=True), 0)
    folder = tmp_path_factory.mktemp("encoder")
    write_checkpoint(Checkpoint(network, words, sentence=SentencePooling()), folder)
    return folder


def test_pairs_are_own_near_and_any_with_the_encoders_cosine(encoder: Path) -> None:
    rows = [Example(row["one"], pair=row["other"]) for row in ROWS]
    pairs = list(taught_pairs(read_checkpoint(encoder), rows, seed=0))
    assert len(pairs) == 3 * len(rows)
    vectors = dict(zip(TEXTS, malmoi.load(encoder).embed(TEXTS), strict=True))

    def cosine(a: str, b: str) -> float:
        return float(
            vectors[a] @ vectors[b] / np.linalg.norm([*vectors[a]]) / np.linalg.norm(vectors[b])
        )

    for row, own, near, any_one in zip(rows, pairs[::3], pairs[1::3], pairs[2::3], strict=True):
        assert {row.text} == {own.text, near.text, any_one.text}
        assert own.pair == row.pair
        others = [text for text in TEXTS if text not in (row.text, row.pair)]
        assert near.pair == max(others, key=lambda text: cosine(row.text, text))
        for pair in (own, near, any_one):
            assert pair.label == pytest.approx(cosine(pair.text, pair.pair or ""), abs=1e-5)


def test_the_lesson_comes_first_and_a_run_resumes_after_it(encoder: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = dict(epochs=1, own_cosines=2, seed=3, **ASKED)
    done = malmoi.finetune(encoder, "classification", ROWS, tmp_path / "out", ROWS, **how)
    plain = dict(how, own_cosines=0)
    without = malmoi.finetune(encoder, "classification", ROWS, tmp_path / "plain", ROWS, **plain)
    weights, others = (
        one.model.checkpoint.network.trunk.embed.token.weight for one in (done, without)
    )
    assert not weights.equal(others)
    assert done.model.predict((TEXTS[0], TEXTS[1])).label in ("yes", "no")
    again = malmoi.finetune(encoder, "classification", ROWS, tmp_path / "out", ROWS, **how)
    assert again.metrics == done.metrics


def test_it_is_refused_where_there_is_no_pair_or_no_sentence_vector(
    encoder: Path, tmp_path: Path
) -> None:
    single = [{"one": row["one"], "alike": row["alike"]} for row in ROWS]
    asked: dict[str, Any] = dict(epochs=1, own_cosines=1, contrastive=False)
    with pytest.raises(UsageError, match="own_cosines needs pairs"):
        malmoi.finetune(
            encoder,
            "classification",
            single,
            tmp_path / "a",
            single,
            text="one",
            label="alike",
            **asked,
        )
    with pytest.raises(UsageError, match="own_cosines needs pairs"):
        malmoi.finetune(
            "malmoi-bert", "classification", ROWS, tmp_path / "b", ROWS, **asked, **ASKED
        )
    with pytest.raises(UsageError, match="own_cosines comes before minutes"):
        malmoi.finetune(
            encoder, "classification", ROWS, tmp_path / "c", ROWS, minutes=1, own_cosines=1, **ASKED
        )
