"""Folders that have only SentencePiece's files: ids, texts and models are those of transformers."""

import copy
import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings, strategies as st

import malmoi
from conftest import without_package
from malmoi.errors import MalmoiError
from malmoi.tokenizer import Tokenizer
from tiny_sentencepiece import GERMAN, TEXTS, trained, write_model, write_tokenizer

NASTY = [
    "",
    " ",
    "  two  spaces \n\n and\tlines \r\n",
    "Hello, World! It's 3.14 — “quoted” …",
    "나는 오늘 학교에 갔다. ㅋㅋㅋ 뷁 안녕하세요",
    unicodedata.normalize("NFD", "한글 나눔 café"),
    "e\u0301\u0302\u0303 a\u200d\u200b\ufeffb \x00\x01\x7f\x85 \ufffd",
    "👩‍👩‍👧‍👦 🇰🇷 😀 漢字かな交じり文 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "a" * 300 + " " + "가" * 150,
    "[MASK] x[SEP]y [CLS] <unk> [mask] <s> </s> <pad> <mask> the cat</s>the dog",
    "İstanbul ΣΊΣΥΦΟΣ ﬁ ß Ⅷ ½ ㈱ ｱｲｳ",
    "▁▁under score ▁",
    "مرحبا بالعالم שלום देवनागरी ไทย",
    "\U0001fffe noncharacters \U0001fffe",
    ">>de<< hello",
    ">>fr<<<<",
    "12,345 99, 1,",
    *GERMAN,
]
MASK = {
    "__type": "AddedToken",
    "content": "<mask>",
    "lstrip": True,
    "rstrip": False,
    "normalized": True,
}
LLAMA: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer"}
FOLDERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "xlm-r": ("xlm-roberta", None),
    "xlm-r with settings": (
        "xlm-roberta",
        {"tokenizer_class": "XLMRobertaTokenizerFast", "mask_token": MASK},
    ),
    "albert": ("albert", None),
    "albert cased": ("albert", {"do_lower_case": False, "keep_accents": True}),
    "llama": ("llama", LLAMA),
    "llama, legacy": ("llama", LLAMA | {"legacy": True, "add_bos_token": True}),
    "llama, both ends": ("llama", LLAMA | {"add_bos_token": True, "add_eos_token": True}),
    "llama, more": ("llama", LLAMA | {"add_prefix_space": False, "pad_token": "<pad>"}),
    "marian": ("marian", {"source_lang": "en", "target_lang": "de"}),
    "marian, no settings": ("marian", None),
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("words"), *FOLDERS[request.param])


@cache
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@cache
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_same(mine: Tokenizer, hf: Any, text: str) -> None:
    assert mine.encode(text, parse_special=True).tokens == hf(text)["input_ids"]
    alone = hf(text, add_special_tokens=False)["input_ids"]
    assert mine.ids([text], parse_special=True) == [alone]
    apart = hf(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if not set(apart) & mine.control_ids:  # their pieces may be control tokens, ours may not
        assert mine.ids([text]) == [apart] == [mine.encode(text, specials=False).tokens]
    pair = mine.encode(text, "a pair 한 쌍", parse_special=True)
    assert pair.tokens == hf([text], ["a pair 한 쌍"])["input_ids"][0]
    ids = hf(text)["input_ids"]
    plain = hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert mine.decode(ids) == plain


def test_nasty_texts_equal_transformers(folder: Path) -> None:
    for text in NASTY + TEXTS:
        assert_same(ours(folder), theirs(folder), text)
    assert ours(folder).vocab() == theirs(folder).get_vocab()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=40) | st.text(alphabet="abet ▁<s/>가나다é\u0301\u3000", max_size=40))
def test_any_text_equals_transformers(folder: Path, text: str) -> None:
    assert_same(ours(folder), theirs(folder), text)


def test_a_saved_tokenizer_is_the_same_here_and_in_transformers(
    folder: Path, tmp_path: Path
) -> None:
    mine = ours(folder)
    mine.save(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    again = Tokenizer.load(tmp_path)
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (again.fingerprint(), again.specials) == (mine.fingerprint(), mine.specials)
    for text in NASTY:
        assert again.encode(text).tokens == copy.deepcopy(mine).encode(text).tokens
        assert hf(text)["input_ids"] == theirs(folder)(text)["input_ids"]


def test_offsets_are_places_in_the_text(folder: Path) -> None:
    text = "the ﬁlm  가나다 학교에"
    found = ours(folder).encode(text, specials=False)
    starts = [start for start, _ in found.offsets]
    assert starts == sorted(starts)
    covered = {at for start, end in found.offsets for at in range(start, end)}
    assert covered >= {at for at, letter in enumerate(text) if letter != " "}


# ------------------------------------------------------------------ models


@torch.no_grad()
def test_a_marian_translates_as_transformers_does(tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", "marian")
    texts = ["the cat sat on the mat", "hello 학교에 world", "a good film, not a bad one"]
    malmoi.load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        model = malmoi.load(tmp_path / folder, device="cpu")
        hf = transformers.MarianMTModel.from_pretrained(tmp_path / folder).eval()
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        found = model.translate(texts, beams=1)
        for text, translation in zip(texts, found, strict=True):
            tokens = words(text, return_tensors="pt")
            limit = min(tokens["input_ids"].size(1) + 50, 60)
            written = hf.generate(**tokens, max_new_tokens=limit, num_beams=1, do_sample=False)
            expected = words.decode(written[0], skip_special_tokens=True)
            assert translation  # the two stop at other lengths
            assert expected.startswith(translation) or translation.startswith(expected)
    german = model.tokenizer.target.encode(GERMAN[0])
    assert german.tokens == words(text_target=GERMAN[0])["input_ids"]
    seen = model.cross_attention(texts[0], GERMAN[0])
    assert seen.target == words.convert_ids_to_tokens(german.tokens)


def test_a_marian_without_generation_settings_starts_as_its_config_says(tmp_path: Path) -> None:
    """Older folders have them in config.json."""
    write_model(tmp_path, "marian")
    before = malmoi.load(tmp_path, device="cpu").translate("the cat sat", beams=2)
    told = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"bad_words_ids": told["bad_words_ids"]})
    )
    assert malmoi.load(tmp_path, device="cpu").translate("the cat sat", beams=2) == before


@torch.no_grad()
@pytest.mark.parametrize("kind", ["xlm-roberta", "albert"])
def test_masks_are_filled_as_transformers_does(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", kind)
    malmoi.load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        hf = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / folder).eval()
        text = f"the cat {words.mask_token} on the mat"
        tokens = words(text, return_tensors="pt")
        at = (tokens["input_ids"][0] == words.mask_token_id).nonzero().item()
        expected = hf(**tokens).logits[0, at].softmax(-1).topk(3)
        found = malmoi.load(tmp_path / folder, device="cpu").fill(text, top=3)
        assert [one.token for one in found] == words.convert_ids_to_tokens(expected.indices)
        assert [one.probability for one in found] == pytest.approx(
            expected.values.tolist(), rel=1e-4
        )


@torch.no_grad()
def test_a_llama_continues_as_transformers_does(tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", "llama", LLAMA | {"add_bos_token": True})
    malmoi.load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        model = malmoi.load(tmp_path / folder, device="cpu")
        text = "the cat sat 뷁"
        tokens = words(text, return_tensors="pt")
        logits = torch.from_numpy(model.logits(text))
        torch.testing.assert_close(logits, hf(**tokens).logits[0], rtol=0, atol=1e-4)
        assert model.generate(text, max_new_tokens=4, temperature=0)


# ------------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is not a SentencePiece model, or it is damaged"),
        (b"IQ== 0\nIg== 1\n", "is not a SentencePiece model, or it is damaged"),
        (trained("llama")[:-3], "is not a SentencePiece model, or it is damaged"),
        (trained("source"), "is no BPE model, which such a tokenizer needs"),
    ],
    ids=["empty", "tiktoken", "truncated", "unigram"],
)
def test_files_that_are_none_are_refused(data: bytes, sentence: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "llama", LLAMA)
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(MalmoiError, match=f"tokenizer.model .*{sentence}"):
        Tokenizer.load(tmp_path)


def test_a_model_that_does_not_tell_its_class_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "albert") / "spiece.model"
    assert Tokenizer.load(path).specials.mask == 4
    (tmp_path / "config.json").unlink()
    with pytest.raises(MalmoiError, match=r"does not tell which .* Known: XLMRobertaTokenizer, A"):
        Tokenizer.load(path)


def test_marians_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "marian", {"separate_vocabs": True})
    with pytest.raises(MalmoiError, match="a vocabulary for each language"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path, "marian", {"eos_token": "<eos>"})
    with pytest.raises(MalmoiError, match="has no <eos>, which a Marian needs"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path, "marian", {})
    with (
        without_package("sentencepiece"),
        pytest.raises(MalmoiError, match="needs the package sentencepiece: pip install"),
    ):
        Tokenizer.load(tmp_path)


def test_half_a_tokenizer_is_not_taken_for_another(tmp_path: Path) -> None:
    """Without its tokenizer.json, vocab.json and merges.txt look like GPT-2's."""
    Tokenizer.load(write_tokenizer(tmp_path / "a", "llama")).save(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").unlink()
    with pytest.raises(MalmoiError, match=r"b has no tokenizer.json, which alone has the rules"):
        Tokenizer.load(tmp_path / "b")


def test_a_vocabulary_with_an_id_twice_is_refused_by_name(tmp_path: Path) -> None:
    Tokenizer.load(write_tokenizer(tmp_path, "llama")).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["vocab"]["▁the"] = state["model"]["vocab"]["▁cat"]
    path.write_text(json.dumps(state))
    with pytest.raises(MalmoiError, match=r"tokenizer\.json: two tokens have the same id"):
        Tokenizer.load(tmp_path)
