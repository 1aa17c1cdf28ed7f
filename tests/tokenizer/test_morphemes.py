"""Vocabularies over Kiwi's morphemes: the text comes back, offsets point at it."""

import subprocess
import sys
from pathlib import Path

import pytest

from malmoi.errors import UsageError
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.tokenizer.chunks import MARK

pytest.importorskip("kiwipiepy", reason="it finds the morphemes; optional: pip install kiwipiepy")

TEXTS = [
    "말모이는 우리말 사전을 만드는 일이었다.",
    "나는 어제 학교에 갔다. 😀 이모지 뒤의 글은 어때요?",
    "재밌었음!!  두 칸 띄움\n새 줄이에요. The 사전은 2권.",
] * 3
KINDS = ("wordpiece", "bpe", "byte-bpe")


@pytest.fixture(scope="module", params=KINDS)
def words(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TEXTS, kind=request.param, vocab=500, lowercase=False, morphemes="kiwi")


def test_the_text_comes_back_and_offsets_point_at_it(words: Tokenizer) -> None:
    for text in TEXTS[:3]:
        encoding = words.encode(text, "사전은 좋다")
        first = [i for i, s in enumerate(encoding.segments) if s == 0 and not encoding.specials[i]]
        if words.kind != "wordpiece":  # without segments both texts are one sequence to the model
            first = [i for i in first if i < len(words.encode(text).tokens)]
        assert words.decode([encoding.tokens[i] for i in first]) == text
        for i in first:
            start, end = encoding.offsets[i]
            token = words.decode([encoding.tokens[i]])
            if "�" not in token:  # part of a character's bytes
                assert text[start:end].strip() == token.strip()
        assert words.decode(words.ids([text])[0]) == text
        assert words.ids([text])[0] == words.encode(text, specials=False).tokens


def test_no_token_crosses_a_morpheme(words: Tokenizer) -> None:
    pieces = [words.decode([t]) for t in words.ids([" 사전을 만드는 사전을"])[0]]
    assert [piece.strip() for piece in pieces] == ["사전", "을", "만드", "는", "사전", "을"]


def test_a_folder_remembers(words: Tokenizer, tmp_path: Path) -> None:
    words.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.morphemes
    assert again.ids(TEXTS) == words.ids(TEXTS)
    assert again.fingerprint() == words.fingerprint()
    missing = (
        "import sys; sys.modules['kiwipiepy'] = None; from malmoi.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True)
    assert "pip install kiwipiepy" in done.stderr


def test_a_mark_in_the_text_is_no_cut(words: Tokenizer) -> None:
    text = f"가{MARK}나 사전"
    encoding = words.encode(text, specials=False)
    assert encoding.offsets[-1] == (3, 6)
    masked = train_tokenizer(TEXTS, kind="wordpiece", vocab=500, morphemes="kiwi")
    mask = masked.specials.mask
    assert mask in masked.encode_masked("말모이는 우리말 [MASK] 만드는 일이었다.").tokens


def test_char_tokenizers_do_not_support_morphemes() -> None:
    with pytest.raises(UsageError, match="does not support morphemes"):
        train_tokenizer(TEXTS, kind="char", vocab=50, morphemes="kiwi")
