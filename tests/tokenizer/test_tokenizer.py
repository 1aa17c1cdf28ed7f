"""The tokenizer against transformers, token by token, on real vocabularies; its laws on
arbitrary text; its errors.
"""

import copy
import inspect
import json
import pickle
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from malmoi.errors import MalmoiError, UsageError
from malmoi.tokenizer import Tokenizer, core, hf_files, pipeline, train_tokenizer
from malmoi.tokenizer.chunks import truncated

pytestmark = pytest.mark.usefixtures("every_letter")
REAL = Path(__file__).parents[3] / "shared" / "tokenizers"
LOWERS = {
    "bert-base-uncased": True,
    "bert-base-cased": False,
    "kcbert-base": False,
    "koelectra": False,
}
NAMES = [*LOWERS, "gpt2", "openai-gpt"]
needs_real = pytest.mark.skipif(
    not REAL.is_dir(), reason="the real vocabularies are not on this machine"
)
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(quick, max_examples=80)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog's friends don't mind.",
    "나는 오늘 학교에 갔다. 말모이는 처음으로 낱말을 모은 사전이다!",
    "Café naïve résumé — ÀÉÎ 漢字 1,234.5 😀👩‍👩‍👧",
    "학교에서 학교까지, 낱말을 낱말로 모은다.\nThe end.\tReally?",
] * 3
HARD = [
    "",
    " ",
    "  two  spaces \n\n and\tlines \r\n",
    "Hello, World! It's 3.14 — “quoted” …",
    "나는 오늘 학교에 갔다. ㅋㅋㅋ 뷁 안녕하세요",
    unicodedata.normalize("NFD", "한글 나눔 café"),
    "e\u0301\u0302\u0303 a\u200d\u200b\ufeffb \x00\x01\x7f\x85 \ufffd",
    "👩‍👩‍👧‍👦 🇰🇷 😀 漢字かな交じり文 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "a" * 300 + " " + "가" * 150,
    "[MASK] x[SEP]y [CLS] <|endoftext|><unk> [UNK] [mask]",
    "İstanbul ΣΊΣΥΦΟΣ ﬁ ß Ⅷ ½",
]
pieces = st.one_of(
    st.text(max_size=30),
    st.text(alphabet=st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), max_size=12),
    st.text(alphabet="abcdeABC '.,-\n\t \u0301\u200d", max_size=40),
    st.sampled_from(HARD),
)
texts = st.lists(pieces, max_size=4).map("".join)


@cache
def ours(name: str) -> Tokenizer:
    return Tokenizer.load(REAL / name)


@cache
def theirs(name: str) -> Any:
    """transformers' own tokenizer of the same files."""
    import transformers

    folder = REAL / name
    if name in LOWERS:
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        vocab = {token: at for at, token in enumerate(lines)}
        return transformers.BertTokenizer(vocab=vocab, do_lower_case=LOWERS[name])
    files = (
        ("vocab.json", "merges.txt")
        if name == "gpt2"
        else ("encoder_bpe_40000.json", "vocab_40000.bpe")
    )
    vocab = json.loads((folder / files[0]).read_text(encoding="utf-8"))
    lines = (folder / files[1]).read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    family = transformers.GPT2Tokenizer if name == "gpt2" else transformers.OpenAIGPTTokenizer
    return family(vocab=vocab, merges=merges)


@cache
def trained(kind: str) -> Tokenizer:
    return train_tokenizer(iter(CORPUS), kind=kind, vocab=600)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "bpe", "char"])
def test_a_model_that_was_read_is_not_parsed_again(kind: str) -> None:
    whole = pipeline.parse_pipeline(trained(kind)._rust)
    # a special token of that name must not be taken for the model
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "model", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            name: {"id": name, "ids": [1], "tokens": [name]} for name in ("a", "model", "z")
        },
    }
    rust, model = hf_files.parse_rust(json.dumps(whole, indent=1), "here")
    assert model == whole["model"]
    assert pipeline.parse_pipeline(rust, model) == pipeline.parse_pipeline(rust)
    # as older files have them
    whole["model"]["merges"] = [" ".join(pair) for pair in whole["model"].get("merges", [])] or [
        "a b"
    ]
    old = {name: part for name, part in whole["model"].items() if name != "type"}
    for written in (whole, whole | {"model": old}) if "bpe" in kind else ():
        assert hf_files.parse_rust(json.dumps(written), "here")[1] is None


def auto(folder: Path, model_type: str) -> Any:
    """What transformers makes of a folder we wrote, with a model's config.json beside it."""
    from transformers import AutoTokenizer

    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(folder)


def assert_same(
    mine: Tokenizer, hf: Any, text: str, pair: str | None = None, limit: int | None = None
) -> None:
    expected = hf(
        [text],  # a batch: transformers takes a lone empty pair for none
        None if pair is None else [pair],
        truncation="longest_first" if limit else False,
        max_length=limit,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    got = mine.encode(text, pair, max_tokens=limit, parse_special=True)
    assert got.tokens == expected["input_ids"][0]
    if not mine._composes or all(
        unicodedata.is_normalized("NFC", one) for one in (text, pair or "")
    ):
        assert got.offsets == expected["offset_mapping"][0]  # else theirs end within a character
    assert got.words == expected.word_ids(0)
    if mine.kind == "wordpiece":
        assert got.segments == expected["token_type_ids"][0]


@needs_real
@pytest.mark.parametrize("name", NAMES)
def test_hard_texts_equal_transformers(name: str) -> None:
    for text in HARD:
        assert_same(ours(name), theirs(name), text)
        assert_same(ours(name), theirs(name), text, "a pair 한 쌍", 12)
        plain = theirs(name)(text, add_special_tokens=False)["input_ids"]
        assert ours(name).ids([text], parse_special=True) == [plain]
        assert ours(name).encode(text, specials=False, parse_special=True).tokens == plain
        apart = theirs(name)(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours(name).ids([text]) == [ours(name).encode(text, specials=False).tokens] == [apart]
    assert ours(name).vocab_size == len(theirs(name))
    assert ours(name).vocab() == theirs(name).get_vocab()


@needs_real
@pytest.mark.parametrize("name", NAMES)
@many
@given(text=texts, pair=st.none() | texts, limit=st.none() | st.integers(3, 40))
def test_any_text_equals_transformers(
    name: str, text: str, pair: str | None, limit: int | None
) -> None:
    assert_same(ours(name), theirs(name), text, pair, limit)


@needs_real
@pytest.mark.parametrize("name", NAMES)
@many
@given(text=texts)
def test_decoding_equals_transformers(name: str, text: str) -> None:
    tokens = ours(name).encode(text, parse_special=True).tokens
    for skip in (True, False):
        expected = theirs(name).decode(
            tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert ours(name).decode(tokens, skip_specials=skip) == expected


@needs_real
@pytest.mark.parametrize("name", ["bert-base-uncased", "kcbert-base", "gpt2", "openai-gpt"])
def test_saved_real_vocabularies_open_in_transformers(name: str, tmp_path: Path) -> None:
    model_type = {"gpt2": "gpt2", "openai-gpt": "openai-gpt"}.get(name, "bert")
    ours(name).save(tmp_path)
    again, hf = Tokenizer.load(tmp_path), auto(tmp_path, model_type)
    assert again.fingerprint() == ours(name).fingerprint()
    assert again.specials == ours(name).specials
    for text in HARD:
        assert_same(again, hf, text, "둘째 second")
        assert hf(text)["input_ids"] == theirs(name)(text)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("wordpiece", "bert"), ("byte-bpe", "gpt2"), ("bpe", "openai-gpt"), ("char", "gpt2")],
)
@pytest.mark.parametrize("lowercase", [None, True])
def test_trained_ones_open_in_transformers(
    kind: str, model_type: str, lowercase: bool | None, tmp_path: Path
) -> None:
    mine = train_tokenizer(iter(CORPUS), kind=kind, vocab=600, lowercase=lowercase)
    mine.save(tmp_path)
    again, hf = Tokenizer.load(tmp_path), auto(tmp_path, model_type)
    assert (again.kind, again.specials, again.fingerprint()) == (
        kind,
        mine.specials,
        mine.fingerprint(),
    )
    for text in HARD + CORPUS:
        assert_same(again, hf, text, "둘째 second", 20)
        assert hf(text)["input_ids"] == mine.encode(text, parse_special=True).tokens
        assert hf(text, split_special_tokens=True)["input_ids"] == mine.encode(text).tokens
    for role, id in vars(mine.specials).items():
        assert kind == "char" or getattr(hf, f"{role}_token_id") == id


CALLS: list[dict[str, Any]] = [
    {},
    {"padding": True, "truncation": True, "max_length": 12, "return_tensors": "np"},
    {"padding": "max_length", "truncation": True, "max_length": 30, "return_tensors": "pt"},
    {"truncation": True, "max_length": 9, "add_special_tokens": False},
]


@pytest.mark.parametrize(("kind", "model_type"), [("wordpiece", "bert"), ("byte-bpe", "gpt2")])
def test_a_tokenizer_is_called_as_in_transformers(
    kind: str, model_type: str, tmp_path: Path
) -> None:
    trained(kind).save(tmp_path)
    again, hf = Tokenizer.load(tmp_path), auto(tmp_path, model_type)
    batch = [HARD[3], "the [MASK] of <|endoftext|>", "a"]
    for options in CALLS:
        if kind == "byte-bpe":  # a GPT has no padding token
            options = options | {"padding": False, "return_tensors": None}
        for asked in ([batch], [batch, batch[::-1]], ["a text"]):
            mine, expected = again(*asked, **options), hf(*asked, **options)
            assert mine.keys() == expected.keys()
            for name, rows in mine.items():
                assert type(rows) is type(expected[name])
                same, as_lists = (
                    one if isinstance(one, list) else one.tolist() for one in (rows, expected[name])
                )
                assert same == as_lists


def test_a_call_without_padding_names_the_option() -> None:
    with pytest.raises(UsageError, match="pass padding=True"):
        trained("wordpiece")(["a", "a longer text"], return_tensors="np")
    with pytest.raises(UsageError, match="no padding token"):
        trained("byte-bpe")(["a", "a longer text"], padding=True)
    assert "<td" in trained("wordpiece")._repr_html_()


@many
@given(text=texts)
def test_byte_level_gives_every_text_back(text: str) -> None:
    mine, whole = trained("byte-bpe"), unicodedata.normalize("NFC", text)
    assert mine.decode(mine.encode(text).tokens, skip_specials=False) == whole
    assert mine.decode(mine.ids([text])[0], skip_specials=False) == whole


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_rare_letters_leave_room_for_words(kind: str) -> None:
    """Korean text has more syllables than a small vocabulary has room for."""
    rare = "".join(chr(0xAC00 + at) for at in range(0, 11172, 7))
    made = train_tokenizer(["학교에서 낱말을 모은다 " * 50, " ".join(rare)], kind=kind, vocab=600)
    assert len(made.encode("학교에서 낱말을", specials=False).tokens) == 2
    assert made.vocab_size <= 600


@quick
@given(text=st.text(alphabet="".join(sorted(set("".join(CORPUS)))) + "<unk>", max_size=60))
def test_characters_come_back_and_strangers_are_unknown(text: str) -> None:
    mine = train_tokenizer(iter([*CORPUS, "<unk>"]), kind="char")
    encoded = mine.encode(text)
    assert mine.decode(encoded.tokens) == text
    assert [text[start:end] for start, end in encoded.offsets] == list(text)
    assert mine.encode("뷁").tokens == [mine.specials.unk]


@many
@given(first=st.integers(0, 40), second=st.integers(1, 40), room=st.integers(0, 60))
def test_truncation_takes_from_the_longer(first: int, second: int, room: int) -> None:
    # google's truncate_seq_pair; only who keeps an odd last token is transformers'
    a, b = first, second
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    got = truncated(first, second, room)
    assert sum(got) == a + b
    assert got == (a, b) or (abs(got[0] - got[1]) == 1 and got == (b, a) and first <= second)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
@quick
@given(
    some=st.lists(texts, max_size=4),
    others=st.lists(texts, min_size=4, max_size=4),
    paired=st.booleans(),
    limit=st.none() | st.integers(3, 12),
)
def test_rows_are_encodings_without_the_rest(
    kind: str, some: list[str], others: list[str], paired: bool, limit: int | None
) -> None:
    pairs = others[: len(some)] if paired else None
    rows = trained(kind).rows(some, pairs, max_tokens=limit)
    encodings = trained(kind).encode_batch(some, pairs, max_tokens=limit)
    assert [(row.tokens.tolist(), row.segments.tolist()) for row in rows] == [
        (e.tokens, e.segments) for e in encodings
    ]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "byte-bpe", "char"])
@quick
@given(
    parts=st.lists(texts | st.text(alphabet="aか・。、！ー゛\n '1[", min_size=9), max_size=5),
    times=st.integers(1, 3_000),
)
def test_long_texts_in_pieces_are_the_same_tokens(kind: str, parts: list[str], times: int) -> None:
    mine, text = (
        trained(kind),
        ("".join([" the dog 학교에\n", "漢字。かな、学校", *parts]) * times)[:24_000],
    )
    whole = mine._rust.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "MANY_CHARACTERS", 1000)
        found = mine.ids([text, "the end", text[:50]])
    assert found == [whole, *mine.ids(["the end"]), *mine.ids([text[:50]])]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_hangul_stays_whole(kind: str) -> None:
    mine = train_tokenizer(iter(CORPUS), kind=kind, vocab=600, lowercase=True)
    shown = "".join(mine.token(token) for token in mine.encode("학교에 갔다 Café").tokens)
    assert "학교에" in shown
    assert not any("\u1100" <= letter <= "\u11ff" for token in mine.vocab() for letter in token)
    assert mine.decode(mine.encode("학교에서 낱말").tokens) == "학교에서 낱말"


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "byte-bpe", "char"])
@many
@given(text=texts)
def test_text_in_parts_is_read_as_whole_characters(kind: str, text: str) -> None:
    """macOS and PDFs give Hangul as Jamo and accents apart (NFD): the same tokens, over the text
    as it was given.
    """
    mine, whole = trained(kind), unicodedata.normalize("NFC", text)
    parts = unicodedata.normalize("NFD", text)
    encoded, same = mine.encode(parts), mine.encode(whole)
    assert encoded.tokens == same.tokens
    assert mine.ids([parts])[0] == mine.encode(whole, specials=False).tokens
    for (start, end), (first, last) in zip(encoded.offsets, same.offsets, strict=True):
        assert unicodedata.normalize("NFC", parts[start:end]) == whole[first:last]


def test_unseen_parts_are_not_unknown() -> None:
    for kind in ("wordpiece", "bpe", "char"):
        mine = trained(kind)
        assert (
            mine.specials.unk
            not in mine.encode(unicodedata.normalize("NFD", "학교에서 모은 낱말")).tokens
        )
    learnt = train_tokenizer(
        [unicodedata.normalize("NFD", text) for text in CORPUS], kind="wordpiece", vocab=600
    )
    assert learnt.fingerprint() == trained("wordpiece").fingerprint()
    context = unicodedata.normalize("NFD", "나는 오늘 학교에 갔다.")
    encoded = learnt.encode("어디?", context)
    words = [
        context[start:end]
        for (start, end), segment in zip(encoded.offsets, encoded.segments, strict=True)
        if segment
    ]
    assert unicodedata.normalize("NFC", "".join(words)) == "나는오늘학교에갔다."


def spelled(names: list[str]) -> st.SearchStrategy[str]:
    """Any text, with names of control tokens in it, whole, cut, or as normalizers would make
    them.
    """
    forms = [
        form
        for name in names
        for form in (name, name.lower(), name.upper(), name[:-1], name[1:], f" {name} ")
    ]
    # NFKC: itself
    wide = [name.translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)}) for name in names]
    return st.lists(st.sampled_from([*forms, *wide, *HARD]) | st.text(max_size=8), max_size=6).map(
        "".join
    )


NAMED = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "<|endoftext|>",
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
]


def awkward(kind: str) -> Tokenizer:
    """Tokenizers whose model would build a control token from its letters, were its name not
    kept from it.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer as Rust,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    letters = [chr(code) for code in range(0x21, 0x7F)]
    special = ["<s>", "</s>", "<mask>"]
    if kind == "unigram":
        rust = Rust(
            models.Unigram(
                [
                    ("<unk>", 0.0),
                    *((name, 0.0) for name in special),
                    *((c, -3.0) for c in "▁" + "".join(letters)),
                ],
                unk_id=0,
            )
        )
        rust.normalizer, rust.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        rust.decoder = decoders.Metaspace()
    elif kind == "words":
        vocab = {
            name: at
            for at, name in enumerate(["[UNK]", *special, *letters, *("##" + c for c in letters)])
        }
        rust = Rust(models.WordPiece(vocab, unk_token="[UNK]"))
        rust.normalizer, rust.pre_tokenizer = (
            normalizers.Lowercase(),
            pre_tokenizers.WhitespaceSplit(),
        )
        rust.decoder = decoders.WordPiece()
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        vocab = {token: at for at, token in enumerate([*sorted(alphabet), "<s", *special])}
        rust = Rust(models.BPE(vocab, [("<", "s"), ("<s", ">")], ignore_merges=kind == "whole"))
        rust.pre_tokenizer, rust.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            decoders.ByteLevel(),
        )
    rust.add_special_tokens(
        [AddedToken(name, special=True, normalized=kind == "words") for name in special]
    )
    rust.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(rust, {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"})


def any_tokenizer(name: str) -> Tokenizer:
    if name in NAMES:
        return ours(name)
    return (
        trained(name) if name in ("wordpiece", "bpe", "byte-bpe", "char") else awkward_cached(name)
    )


awkward_cached = cache(awkward)


ALL = ["wordpiece", "bpe", "byte-bpe", "char", "unigram", "words", "merging", "whole"]


@pytest.mark.parametrize("name", [*ALL, *(pytest.param(name, marks=needs_real) for name in NAMES)])
@settings(many, max_examples=40)
@given(data=st.data())
def test_text_never_becomes_a_control_token(name: str, data: st.DataObject) -> None:
    mine = any_tokenizer(name)
    text = data.draw(spelled([*mine.control_tokens, *NAMED]))
    encoded = mine.encode(text, specials=False)
    assert mine.control_ids.isdisjoint(encoded.tokens)
    assert not any(encoded.specials)
    assert [row.tokens.tolist() for row in mine.rows([text])] == [mine.encode(text).tokens]
    assert mine.ids([text]) == [encoded.tokens]
    for_corpora, _ = mine.encode_texts([text, "the [SEP]", text])
    assert for_corpora.tolist() == [
        id for some in mine.ids([text, "the [SEP]", text]) for id in some
    ]
    shown = mine.decode(encoded.tokens, skip_specials=False)
    if mine.kind == "byte-bpe":
        assert shown == (unicodedata.normalize("NFC", text) if mine._composes else text)
    elif mine.specials.unk not in encoded.tokens and name != "unigram":
        rule = mine._rust.normalizer
        wanted = rule.normalize_str(text) if rule else text
        assert "".join(shown.split()) == "".join(wanted.split())


@pytest.mark.parametrize("name", ["wordpiece", "byte-bpe", "unigram", "words", "merging", "whole"])
def test_control_tokens_come_as_ids_or_by_parse_special(name: str) -> None:
    mine = any_tokenizer(name)
    for control, id in mine.control_tokens.items():
        before, after = (
            mine.encode("ab", specials=False).tokens,
            mine.encode("c", specials=False).tokens,
        )
        parsed = mine.encode(f"ab {control} c", specials=False, parse_special=True)
        parts = mine.encode_parts(["ab ", id, " c"])
        assert parts == parsed
        assert id in parts.tokens
        assert (
            id == mine.specials.unk
            or id not in mine.encode(f"ab {control} c", specials=False).tokens
        )
        assert (before[0], after[-1]) == (parts.tokens[0], parts.tokens[-1])
    with pytest.raises(UsageError, match="is not a control token"):
        mine.encode_parts([mine.encode("a", specials=False).tokens[0]])


def test_a_copy_keeps_text_apart() -> None:
    for name in ("wordpiece", "unigram"):
        mine = any_tokenizer(name)
        for again in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
            assert again.ids(["a <s> [SEP]"]) == mine.ids(["a <s> [SEP]"])
            assert again.control_ids.isdisjoint(again.ids(["a <s> [SEP]"])[0])


def test_fill_reads_only_the_mask_as_a_control_token() -> None:
    mine = trained("wordpiece")
    text = "나는 [MASK] 갔다[MASK]. [SEP] [CLS] the"
    encoded = mine.encode_masked(text)
    assert (encoded.tokens.count(mine.specials.mask), encoded.tokens.count(mine.specials.sep)) == (
        2,
        1,
    )
    masks = [
        place
        for place, id in zip(encoded.offsets, encoded.tokens, strict=True)
        if id == mine.specials.mask
    ]
    assert [text[start:end] for start, end in masks] == ["[MASK]", "[MASK]"]
    assert text[slice(*encoded.offsets[-2])] == "the"
    both = mine.encode_masked("the [MASK]", text)
    parsed = mine.encode("the [MASK]", text.replace("[SEP] [CLS]", "x"), parse_special=True)
    assert both.tokens.count(mine.specials.mask) == parsed.tokens.count(mine.specials.mask) == 3
    assert text[slice(*both.offsets[-2])] == "the"
    assert mine.encode_masked("the [MASK]", "나는 [MASK].") == mine.encode(
        "the [MASK]", "나는 [MASK].", parse_special=True
    )


def test_what_tokenizer_config_gives_a_role_is_special(tmp_path: Path) -> None:
    mine = trained("byte-bpe")
    mine.save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    state["added_tokens"].append(
        {**state["added_tokens"][0], "id": mine.vocab_size, "content": "<|end|>", "special": False}
    )
    state["added_tokens"].append(
        {
            **state["added_tokens"][0],
            "id": mine.vocab_size + 1,
            "content": "<tool>",
            "special": False,
        }
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": "<|end|>"}), encoding="utf-8"
    )
    again, hf = Tokenizer.load(tmp_path), auto(tmp_path, "gpt2")
    text = "the<|end|> <tool>dog"
    assert again.encode(text, parse_special=True).tokens == hf(text)["input_ids"]
    assert again.encode(text).tokens == hf(text, split_special_tokens=True)["input_ids"]
    assert (
        again.specials.eos in again.encode(text).tokens,
        again.id("<tool>") in again.encode(text).tokens,
    ) == (False, True)


def fingerprints() -> list[str]:
    """Of every kind, trained on words with many ties between merges."""
    import random

    from malmoi.tokenizer import train_tokenizer

    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefg가나다라마바사", k=draw.randint(1, 6))) for _ in range(900)
    ]
    texts = [" ".join(draw.choices(words, k=20)) for _ in range(99)]
    kinds = ("wordpiece", "bpe", "byte-bpe", "char")
    return [
        train_tokenizer((text for text in texts), kind=kind, vocab=400).fingerprint()
        for kind in kinds
    ]


def test_training_is_the_same_in_every_process() -> None:
    code = f"{inspect.getsource(fingerprints)}\nprint(*fingerprints())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.stdout.split() == fingerprints(), other.stderr


def test_vocabularies_hold_what_was_asked() -> None:
    for kind, size in (("wordpiece", 150), ("bpe", 90), ("byte-bpe", 300), ("char", 30)):
        assert (
            train_tokenizer(iter(CORPUS), kind=kind, vocab=size, min_frequency=1).vocab_size == size
        )
    mine = trained("wordpiece")
    assert [mine.token(id) for id in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert list(vars(mine.specials).values()) == [0, 1, 2, 3, 4, None, None]
    unseen = mine.encode(
        "xof god, 다사 교학!", specials=False
    ).tokens  # known letters in new orders
    assert mine.specials.unk not in unseen
    gpt = trained("byte-bpe").specials
    assert gpt.eos == gpt.bos == gpt.unk == trained("byte-bpe").id("<|endoftext|>")
    assert gpt.pad is None


def test_encodings_say_where_and_what() -> None:
    mine = trained("wordpiece")
    encoded = mine.encode("나는 [MASK] 갔다 뷁", "the dog", parse_special=True)
    at = encoded.tokens.index(mine.specials.mask)
    assert encoded.specials[at]
    assert encoded.offsets[at] == (3, 9)
    unknown = encoded.tokens.index(mine.specials.unk)
    assert not encoded.specials[unknown]
    assert (encoded.tokens[0], encoded.specials[0], encoded.words[0]) == (
        mine.specials.cls,
        True,
        None,
    )
    second = encoded.segments.index(1)
    assert encoded.offsets[second : second + 2] == [(0, 3), (4, 7)]
    assert encoded.words[second : second + 2] == [0, 1]
    assert mine.encode_batch(["a", "b"], ["c", "d"], max_tokens=4) == [
        mine.encode("a", "c", max_tokens=4),
        mine.encode("b", "d", max_tokens=4),
    ]


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
@pytest.mark.parametrize("unit", ["a", "가 ", "?!"])
def test_a_line_without_end(kind: str, unit: str) -> None:
    assert trained(kind).ids([unit * (200_000 // len(unit))])[0]  # in hours, if words had no end


def test_training_survives_a_word_without_end() -> None:
    texts = ["ab" * 500_000, " " * 1_000_000, "the dog"]
    assert train_tokenizer(texts, kind="byte-bpe", vocab=400).vocab_size <= 400


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda t: t.encode("a\ud800b"), MalmoiError, "U\\+D800 at character 1"),
        (lambda t: t.ids(["fine", "\udfff"]), MalmoiError, "Text 1 is not valid Unicode"),
        (lambda t: t.encode(3), UsageError, "item 0 of texts is int"),
        (lambda t: t.encode("a", b"b"), UsageError, "pairs is bytes"),
        (lambda t: t.ids("abc"), UsageError, "list of str"),
        (lambda t: t.ids([("a", "b")]), UsageError, "tuple"),
        (lambda t: t.encode_batch(["a"], ["b", "c"]), UsageError, "1 texts but 2 pairs"),
        (lambda t: t.encode("a", "b", max_tokens=2), UsageError, "special tokens alone take 3"),
        (lambda t: t.encode("a", max_tokens=0, specials=False), UsageError, "at least 1"),
        (lambda t: t.token(10**6), UsageError, "no token with id 1000000"),
        (lambda t: t.decode([1, -2]), UsageError, "no token with id -2"),
        (lambda t: t.decode([1.5]), UsageError, "must be integers"),
        (
            lambda t: train_tokenizer(["a"], kind="wordpeice"),
            UsageError,
            "Did you mean 'wordpiece'",
        ),
        (lambda t: train_tokenizer("text"), UsageError, "in a list"),
        (lambda t: train_tokenizer([]), MalmoiError, "no text"),
        (lambda t: train_tokenizer(["a", None]), UsageError, "text 1 is NoneType"),
        (lambda t: train_tokenizer(["\ud800"], kind="bpe"), MalmoiError, "lone surrogate"),
        (lambda t: train_tokenizer(["a"], kind="byte-bpe", vocab=100), UsageError, "need 257"),
        (lambda t: Tokenizer.from_json('{"model": {"type": "BPE"'), MalmoiError, "not JSON"),
        (
            lambda t: Tokenizer.from_json('{"model": {"type": "Nonsense"}}'),
            MalmoiError,
            "can be used",
        ),
        (lambda t: Tokenizer.load("no/such/place"), MalmoiError, "no such file or folder"),
    ],
)
def test_invalid_requests_are_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        call(trained("wordpiece"))
    assert type(caught.value) is error


FIVE = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no tokenizer in"),
        ({"vocab.txt": ""}, "vocab.txt is empty"),
        ({"vocab.txt": FIVE + "a\nb\na\n"}, "line 8: 'a' is already on line 6"),
        ({"vocab.txt": "a\nb\n"}, r"has no \[UNK\]"),
        ({"vocab.txt": b"\xb0\xa1\n"}, "not UTF-8"),
        (
            {
                "vocab.txt": FIVE,
                "tokenizer_config.json": '{"tokenizer_class": "BertJapaneseTokenizer"}',
            },
            "Japanese",
        ),
        (
            {"vocab.txt": FIVE, "tokenizer_config.json": "{"},
            "tokenizer_config.json is not JSON: .* at line 1",
        ),
        ({"tokenizer.json": '{"version": "1.0", "mod'}, "tokenizer.json is not JSON: .* cut short"),
        ({"tokenizer.json": "[]"}, "must hold a JSON object"),
        (
            {"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "#version: 0.2\na b\n"},
            "merges.txt, line 2: 'ab' is not in",
        ),
        (
            {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\na\n"},
            "line 2: 'a' is not a merge",
        ),
        ({"vocab.json": '{"a": "x"}', "merges.txt": ""}, "vocab.a must be a whole number"),
        ({"vocab.json": '{"a": 1, "b": 1}', "merges.txt": ""}, "same id"),
        ({"vocab.json": "{}", "merges.txt": ""}, "is empty"),
    ],
)
def test_broken_files_give_the_location(
    files: dict[str, str | bytes], says: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MalmoiError, match=says):
        Tokenizer.load(tmp_path)


def test_settings_beside_the_vocabulary_count(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        FIVE.replace("[MASK]", "<m>") + "cafe\ncafé\nCafé\n", encoding="utf-8"
    )
    mask = {
        "content": "<m>",
        "lstrip": True,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    template = "{% for m in messages %}{{ m }}{% endfor %}\n"
    config = {
        "do_lower_case": True,
        "strip_accents": False,
        "model_max_length": 300,
        "chat_template": template,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"mask_token": mask, "bos_token": "[BOS]"})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<New>": 8, "[BOS]": 9}))
    for folder in (tmp_path, tmp_path / "again"):
        mine, hf = Tokenizer.load(folder), auto(folder, "bert")
        assert (mine.specials.mask, mine.specials.bos, mine.vocab_size) == (4, 9, 10)
        assert (mine.model_max_length, mine.chat_template) == (300, template)
        for text in ("Café <m> cafe<new> <New>[BOS]café", "CAFÉ"):
            assert_same(mine, hf, text)
        mine.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "vocab.txt").encode("Café").tokens == [2, 6, 3]


def test_saving_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("byte-bpe").save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MalmoiError, match="The disk is full"):
        trained("wordpiece").save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
