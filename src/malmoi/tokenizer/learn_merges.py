"""Learns merges in C: those of `tokenizers`, in a fifth to a half of its time.

The library takes most of it to split text into words, again wherever one stands. Here every word
is split once, and counted (word_cache.py).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Rust

from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions
from malmoi.tokenizer.pipeline import Merges, Vocab, byte_alphabet
from malmoi.tokenizer.word_cache import addresses, count_words

# one word by BERT's rule, and by GPT-2's; other text is split by the library
BERT_WORD = re.compile(r" ?([a-z0-9가-힣]+|[.,!?;:\"()])")
GPT2_WORD = re.compile(r"( ?(?:[A-Za-z]+|[가-힣]+|[0-9]+|[.,!?;:\"()]+))")
# of more, those that occur once are left out: of 57 MB of Korean 72 of 100,000 tokens are unknown
# then instead of 15, a text has 3 % fewer, and 10 s are enough instead of 23
MANY_WORDS = 500_000
MERGES_PER_TOKEN = 4  # room for pairs that make a token that is there already
_CALLS = (("malmoi_learn_merges", 12),)


class Learned(NamedTuple):
    """A vocabulary, its merges, and how often each word of the text occurs."""

    vocab: Vocab
    merges: Merges
    words: Counter[str]


def learn_merges(
    texts: Iterable[str], rust: Rust, tokens: list[str], size: int, least: int, prefix: str = ""
) -> Learned | None:
    """Grows these tokens to `size` by merges within the words of BERT's or GPT-2's pipeline.

    WordPiece writes `prefix` before a letter that does not begin a word. None without a compiler.
    """
    calls = native_functions("malmoi.tokenizer", "learn_merges.c", _CALLS, this_machine())
    if calls is None:
        return None
    words = _words(texts, rust, pieces=bool(prefix))
    every = [(word[0], *(prefix + letter for letter in word[1:])) for word in words]
    tokens = list(dict.fromkeys([*tokens, *sorted(set[str]().union(*every))]))
    numbers = {token: at for at, token in enumerate(tokens)}
    symbols = np.array([numbers[letter] for word in every for letter in word], np.int32)
    merges: Merges = []
    for left, right in _merged(calls[0], tokens, symbols, words, (size, least, len(prefix))):
        merges.append((tokens[left], tokens[right]))
        name = tokens[left] + tokens[right].removeprefix(prefix)
        if name not in numbers:
            numbers[name] = len(tokens)
            tokens.append(name)
    return Learned(numbers, merges, words)


def _words(texts: Iterable[str], rust: Rust, *, pieces: bool) -> Counter[str]:
    """The words of a text, with their counts; those of GPT-2 in its letters for bytes."""
    plain, words = BERT_WORD if pieces else GPT2_WORD, Counter[str]()
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    for text, count in count_words(texts, MANY_WORDS).items():
        if found := plain.fullmatch(text):
            parts = [found[1] if pieces else text.encode().decode("latin-1").translate(letters)]
        else:
            text = rust.normalizer.normalize_str(text) if pieces else text
            parts = [word for word, _ in rust.pre_tokenizer.pre_tokenize_str(text)]
        for word in parts:
            words[word] += count
    return words


def _merged(
    learn: Callable[..., int],
    tokens: list[str],
    symbols: NDArray[np.int32],
    words: Counter[str],
    limits: tuple[int, int, int],
) -> list[list[int]]:
    """The pairs that are merged, by number; limits are the size, the least count, the prefix."""
    names = [token.encode() for token in tokens]
    ends = np.cumsum([*map(len, names)])
    starts = np.cumsum([0, *map(len, words)])
    counts = np.fromiter(words.values(), np.int64, len(words))
    found = np.empty((MERGES_PER_TOKEN * limits[0], 2), np.int32)
    ends_at, *at, found_at = addresses(ends, symbols, starts, counts, found)
    known = (b"".join(names), ends_at, len(tokens), *at[:2], len(words), at[2])
    done = learn(*known, *limits, found_at, len(found))
    if done < 0:
        raise MemoryError
    return list(found[:done].tolist())
