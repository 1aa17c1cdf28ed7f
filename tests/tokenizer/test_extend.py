"""New tokens from text: old ids stay, new rows are means, transformers opens the folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Rust, decoders, models, pre_tokenizers, trainers

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.tokenizer.extend import extend_tokenizer
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import resolve_recipe

ENGLISH = ["the state of the union is strong", "free people work for peace and law"] * 3
KOREAN = ["국회는 법률안을 의결한다. 국회의원은 법률안을 발의한다.", "법률안의 제안 이유"] * 4


def unigram() -> Tokenizer:
    rust = Rust(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    rust.train_from_iterator([*ENGLISH, *KOREAN[:1]], trainer)
    return Tokenizer(rust)


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece", "bpe", "unigram"])
def test_text_becomes_shorter_and_old_ids_stay(kind: str) -> None:
    old = unigram() if kind == "unigram" else train_tokenizer(ENGLISH, kind=kind, vocab=280)
    new_text = KOREAN if kind in ("byte-bpe", "wordpiece") else ["unionwork statelaw"] * 4
    found = extend_tokenizer(old, new_text, 30)
    new = found.tokenizer
    assert all(new.vocab()[token] == id for token, id in old.vocab().items())
    assert sorted(found.pieces) == list(range(old.vocab_size, new.vocab_size))
    before, after = ([len(ids) for ids in words.ids(new_text)] for words in (old, new))
    if kind != "wordpiece":  # whose words were [UNK]
        assert sum(after) < 0.9 * sum(before)
        assert [new.decode(ids) for ids in new.ids(new_text)] == [
            old.decode(ids) for ids in old.ids(new_text)
        ]
    else:
        unknown = [words.ids(new_text)[0].count(old.specials.unk) for words in (old, new)]
        assert unknown[0] > 2 * unknown[1]
    assert new.ids(["the peace"]) == old.ids(["the peace"])  # nothing was learnt about these
    again = extend_tokenizer(old, new_text, 30).tokenizer
    assert again.fingerprint() == new.fingerprint()


def test_an_added_token_after_the_vocabulary_keeps_its_id() -> None:
    old = train_tokenizer(ENGLISH, kind="byte-bpe", vocab=280, special="mask")
    new = extend_tokenizer(old, KOREAN, 30).tokenizer
    assert all(new.vocab()[token] == id for token, id in old.vocab().items())
    assert sorted(new.vocab().values()) == list(range(new.vocab_size))
    assert new.encode_masked("the [MASK]").tokens == old.encode_masked("the [MASK]").tokens


def test_new_rows_are_means_of_their_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = train_tokenizer(ENGLISH, kind="byte-bpe", vocab=280)
    config = preset(
        "gpt2-small", vocab=words.vocab_size, context=128, width=16, heads=2, depth=1, tied=False
    )
    write_checkpoint(Checkpoint(initialise(Network(config, {"lm": 0}), 0), words), tmp_path / "gpt")
    recipe = resolve_recipe("gpt2-small", {})
    recipe = replace(recipe, model=replace(config, vocab=280))
    (tmp_path / "gpt" / "recipe.json").write_text(recipe.to_json(), "utf-8")
    text = tmp_path / "bills.txt"
    text.write_text("\n\n".join(KOREAN), "utf-8")
    command = ["tokenizer", "extend", "--model", str(tmp_path / "gpt"), "--data", str(text)]
    assert run_command([*command, "--add", "20", "-o", str(tmp_path / "ko"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["added"] == 20
    assert told["tokens_per_character"][1] < told["tokens_per_character"][0]
    resumed = Recipe.from_json((tmp_path / "ko" / "recipe.json").read_text("utf-8"))
    assert resumed == replace(recipe, model=replace(config, vocab=told["vocab"]))
    old, new = malmoi.load(tmp_path / "gpt"), malmoi.load(tmp_path / "ko")
    pieces = extend_tokenizer(words, KOREAN, 20).pieces
    for part in ("trunk.embed.token.weight", "heads.lm.weight"):
        before, after = (m.network.state_dict()[part].numpy() for m in (old, new))
        assert np.array_equal(after[: len(before)], before)
        for token, some in pieces.items():
            assert abs(after[token] - before[list(some)].mean(0)).max() < 1e-6
    assert abs(old.logits("the state")[:, :280] - new.logits("the state")[:, :280]).max() < 1e-5
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ko")
    encode = transformers.AutoTokenizer.from_pretrained(tmp_path / "ko")
    ids = encode(KOREAN[0])["input_ids"]
    assert ids == new.tokenizer.encode(KOREAN[0]).tokens
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].numpy()
    assert abs(logits - new.logits(KOREAN[0])).max() < 1e-5


def test_what_cannot_be_extended_is_refused() -> None:
    letters = train_tokenizer(ENGLISH, kind="char", vocab=40)
    with pytest.raises(UsageError, match="cannot be extended"):
        extend_tokenizer(letters, KOREAN, 10)
    words = train_tokenizer(ENGLISH, kind="byte-bpe", vocab=280)
    with pytest.raises(MalmoiError, match="No token was added"):
        extend_tokenizer(words, ["a b"], 10)
    with pytest.raises(UsageError, match="add=0"):
        extend_tokenizer(words, KOREAN, 0)
