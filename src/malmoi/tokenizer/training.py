"""Trains a tokenizer in one pass; the same text always gives the same vocabulary.

Merges are learnt in C where there is a compiler: those of `tokenizers`, in a fifth to a half of its
time. The library takes most of it to split text into words, again wherever one stands. Here every
word is split once, and counted (word_cache.py).
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Rust, models, pre_tokenizers, trainers

from malmoi.errors import ensure, require_known, require_that
from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions
from malmoi.system.progress import Progress, report_progress
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.checks import encoding_explained
from malmoi.tokenizer.chunks import Morphemes, load_kiwi, mark_morphemes
from malmoi.tokenizer.core import Tokenizer
from malmoi.tokenizer.pipeline import BERT_SPECIALS, GPT1_SPECIALS, GPT2_SPECIALS, Merges, Vocab
from malmoi.tokenizer.word_cache import addresses, count_words

Special = Literal["none", "mask", "pad"]
Options = dict[str, Any]  # of a trainer
Trained = tuple[Rust, dict[str, str]]  # a tokenizer, and the names of its special tokens
BERT_ORDER = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS_BETWEEN_EVENTS = 1000  # progress events
SPARE_MERGES = 8192  # for letters that the library counts but `alphabet` leaves out (rare Hangul)
OVERLONG_RUN = re.compile(r"\S{1000}|\s{1000}")  # not a word: it would only slow down every merge
# Blocks of all characters that occur in words of two or more: all but ideographs (each a word to
# BERT) and private use.
UNICODE_BLOCKS = (
    (0x21, 0x3400),
    (0x4DC0, 0x4E00),
    (0xA000, 0xD800),
    (0xF900, 0x20000),
    (0x2CEB0, 0x32400),
)


def train_tokenizer(  # noqa: PLR0913  # the fields of a recipe's tokenizer, by their names
    texts: Iterable[str],
    *,
    kind: str = "wordpiece",
    vocab: int = 30_000,
    lowercase: bool | None = None,
    min_frequency: int = 2,
    special: Special = "none",
    morphemes: Morphemes = "none",
) -> Tokenizer:
    """Trains a tokenizer of at most `vocab` tokens: wordpiece, bpe, byte-bpe or char.

    `lowercase=None` uses the family's default: only GPT-1's bpe lowercases. Accents are kept, so
    that Hangul is never split into Jamo, and decomposed text (NFD) is composed (NFC) first. For
    char, `vocab` keeps the most frequent characters. A byte-bpe may have the special token mask,
    to read both ways, or pad, to translate. `morphemes="kiwi"` cuts Korean words into morphemes
    first (kiwipiepy), which no token crosses; such a wordpiece or bpe keeps spaces as "▁".
    """
    require_known(kind, RECIPES, "There is no kind of tokenizer {name!r}.{hint}")
    require_that(
        not isinstance(texts, str),
        "Training takes an iterable of texts; wrap a single text in a list.",
    )
    learn, least = RECIPES[kind]
    require_that(
        vocab >= least,
        "vocab={vocab} is too small for {kind}: its special tokens and alphabet need {least}.",
        vocab=vocab,
        kind=kind,
        least=least,
    )
    require_that(
        special == "none" or kind == "byte-bpe",
        "Only a byte-bpe tokenizer is given a {special} token, not {kind}.",
        special=special,
        kind=kind,
    )
    lower = kind == "bpe" if lowercase is None else lowercase
    if morphemes != "none":
        learn = _morpheme_recipe(kind, morphemes)
    rust, names = learn(
        checked_texts(texts),
        vocab - (special != "none"),
        {"min_frequency": min_frequency, "show_progress": False},
        lowercase=lower,
    )
    if special != "none":
        names = (pipeline.with_mask if special == "mask" else pipeline.with_padding)(rust, names)
    rust = pipeline.composed(rust)
    for role, name in names.items():  # such a mask includes the space before it, as tokens do
        spaced = special == role == "mask"
        rust.add_special_tokens([pipeline.added({"content": name, "lstrip": spaced})])
    return Tokenizer(rust, {f"{role}_token": name for role, name in names.items()})


def checked_texts(texts: Iterable[str]) -> Iterator[str]:
    """The texts, each checked and in NFC; raises if all are empty."""
    # the trainer iterates in another thread
    return _checked(texts, copy_context())


def _checked(texts: Iterable[str], context: Context) -> Iterator[str]:
    empty = True
    for number, text in enumerate(texts):
        require_that(
            isinstance(text, str),
            "Training takes texts; text {at} is {type}.",
            at=number,
            type=type(text).__name__,
        )
        with encoding_explained([text]):
            text.isascii() or text.encode()
        empty = empty and not text.strip()
        if number % TEXTS_BETWEEN_EVENTS == TEXTS_BETWEEN_EVENTS - 1:
            context.run(report_progress, Progress("read", number + 1, None, "texts"))
        yield from without_runs(unicodedata.normalize("NFC", text))
    context.run(report_progress, Progress("learn the vocabulary", 0))
    ensure(not empty, "There is no text to train a tokenizer on: every source is empty.")


def without_runs(text: str) -> Iterator[str]:
    """Splits a text inside runs of 1,000 characters without spaces, or of spaces only."""
    start = 0
    for run in OVERLONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    if start < len(text):
        yield text[start:]


def _wordpiece(texts: Iterable[str], size: int, options: Options, *, lowercase: bool) -> Trained:
    build = {"lowercase": lowercase, "strip_accents": False, "chinese": True}
    rust = pipeline.bert_pipeline(_numbered(BERT_ORDER), BERT_SPECIALS, **build)
    # The library numbers `##x` in hash-table order and breaks ties between merges by number, so
    # every run would learn another vocabulary. Numbering every possible `##x` beforehand makes
    # training deterministic.
    pins = ["##" + letter for letter in joinable()]
    known, most = BERT_ORDER + pins, size + len(pins) + SPARE_MERGES
    found = learn_merges(texts, rust, known, most, options["min_frequency"], "##")
    if found is None:
        trainer = trainers.WordPieceTrainer(vocab_size=most, special_tokens=known, **options)
        found = Learned(_learned(rust, trainer, texts)["vocab"], [], _words(trainer))
    letters, joining = alphabet(found.words, size, len(BERT_ORDER))
    kept = set(letters)
    tokens = BERT_ORDER + letters + ["##" + letter for letter in joining]
    tokens += [
        token
        for token in sorted(found.vocab, key=found.vocab.__getitem__)
        if len(bare := token.removeprefix("##")) > 1
        and token not in BERT_ORDER
        and kept.issuperset(bare)
    ]
    return pipeline.bert_pipeline(_numbered(tokens[:size]), BERT_SPECIALS, **build), BERT_SPECIALS


def _bpe(texts: Iterable[str], size: int, options: Options, *, lowercase: bool) -> Trained:
    rust = pipeline.gpt1_pipeline({}, [], lowercase=lowercase, accents=True)
    pins = [letter + "</w>" for letter in joinable()]  # as in _wordpiece
    trainer = trainers.BpeTrainer(
        vocab_size=size + len(pins) + SPARE_MERGES,
        special_tokens=["<unk>", *pins],
        end_of_word_suffix="</w>",
        **options,
    )
    learned = _learned(rust, trainer, texts)
    letters, joining = alphabet(_words(trainer), size, 1)
    tokens = ["<unk>", *joining, *(letter + "</w>" for letter in letters)]
    vocab, merges = _first_merges(tokens, learned["merges"], size)
    return pipeline.gpt1_pipeline(vocab, merges, lowercase=lowercase, accents=True), GPT1_SPECIALS


def _byte_bpe(texts: Iterable[str], size: int, options: Options, *, lowercase: bool) -> Trained:
    rust, tokens = pipeline.gpt2_pipeline({}, []), sorted(pipeline.byte_alphabet())
    limits = ([GPT2_SPECIALS["eos"], *tokens], size, options["min_frequency"])
    found = None if lowercase else learn_merges(texts, rust, *limits)
    if found is None:
        return _library_byte_bpe(texts, size, options, lowercase=lowercase)
    return pipeline.gpt2_pipeline(found.vocab, found.merges), GPT2_SPECIALS


def _library_byte_bpe(
    texts: Iterable[str], size: int, options: Options, *, lowercase: bool
) -> Trained:
    # marks between morphemes, if there are any, separate words as in the finished pipeline
    rust = pipeline.split_at_morphemes(pipeline.gpt2_pipeline({}, [], lowercase=lowercase))
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[GPT2_SPECIALS["eos"]], initial_alphabet=letters, **options
    )
    learned = _learned(rust, trainer, texts)
    merges = [tuple(merge) for merge in learned["merges"]]
    return pipeline.gpt2_pipeline(learned["vocab"], merges, lowercase=lowercase), GPT2_SPECIALS


def _char(texts: Iterable[str], size: int, options: Options, *, lowercase: bool) -> Trained:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.lower() if lowercase else text)
    tokens = ["<unk>", *_most_frequent(counts, size - 1)]
    return pipeline.char(_numbered(tokens), lowercase=lowercase), {}


# how each kind is learnt, and its least tokens, for special ones and an alphabet
RECIPES: dict[str, tuple[Callable[..., Trained], int]] = {
    "wordpiece": (_wordpiece, 7),
    "bpe": (_bpe, 3),
    "byte-bpe": (_byte_bpe, 257),
    "char": (_char, 2),
}


def _morpheme_recipe(kind: str, morphemes: str) -> Callable[..., Trained]:
    require_that(
        morphemes == "kiwi", "morphemes must be kiwi or none, not {name!r}.", name=morphemes
    )
    require_that(
        kind != "char",
        "A char tokenizer does not support morphemes: choose wordpiece, bpe or byte-bpe.",
    )
    load_kiwi()  # raise here if it is missing, not in a thread of the trainer
    return _byte_morphemes if kind == "byte-bpe" else partial(_morphemes, kind)


def _morphemes(
    kind: str, texts: Iterable[str], size: int, options: Options, *, lowercase: bool
) -> Trained:
    options = options | {"vocab_size": size, "limit_alphabet": max(size // 4, min(size // 2, 256))}
    if kind == "wordpiece":
        trainer: Any = trainers.WordPieceTrainer(
            special_tokens=BERT_ORDER, continuing_subword_prefix="", **options
        )
        vocab = _numbered([BERT_SPECIALS["unk"]])
        model: models.Model = models.WordPiece(
            vocab, unk_token=BERT_SPECIALS["unk"], continuing_subword_prefix=""
        )
    else:
        trainer = trainers.BpeTrainer(special_tokens=[GPT1_SPECIALS["unk"]], **options)
        model = models.BPE(unk_token=GPT1_SPECIALS["unk"])
    rust = pipeline.morpheme_pipeline(model, lowercase=lowercase)
    rust.train_from_iterator(map(mark_morphemes, texts), trainer)
    if kind == "bpe":
        return rust, GPT1_SPECIALS
    return pipeline.with_frame(rust, BERT_SPECIALS), BERT_SPECIALS


def _byte_morphemes(
    texts: Iterable[str], size: int, options: Options, *, lowercase: bool
) -> Trained:
    rust, names = _library_byte_bpe(map(mark_morphemes, texts), size, options, lowercase=lowercase)
    return pipeline.split_at_morphemes(rust), names


@cache
def joinable() -> list[str]:
    """Every character that a longer word can contain: letters, marks, numbers and symbols."""
    letters = (chr(code) for start, end in UNICODE_BLOCKS for code in range(start, end))
    return [letter for letter in letters if unicodedata.category(letter)[0] in "LMNS"]


def alphabet(words: dict[str, int], size: int, specials: int) -> tuple[list[str], list[str]]:
    """The letters to keep, and those that occur inside longer words.

    Each letter takes up to two tokens. They may fill a small vocabulary, but only half of a large
    one: web text has thousands of characters that occur once.
    """
    counts: Counter[str] = Counter()
    joined: set[str] = set()
    for word, count in words.items():
        for letter in word:
            counts[letter] += count
        if len(word) > 1:
            joined.update(word)
    letters = _most_frequent(counts, max(size // 4, min((size - specials) // 2, 256)))
    return letters, [letter for letter in letters if letter in joined]


def _most_frequent(counts: Counter[str], limit: int) -> list[str]:
    return sorted(sorted(counts, key=lambda letter: (-counts[letter], letter))[:limit])


def _first_merges(tokens: list[str], learned: list[list[str]], size: int) -> tuple[Vocab, Merges]:
    """The vocabulary grown from the letters by the learned merges, in order, until it is full."""
    vocab = _numbered(tokens)
    merges: Merges = []
    for left, right in learned:
        if left in vocab and right in vocab:
            if left + right not in vocab and len(vocab) == size:
                break
            vocab.setdefault(left + right, len(vocab))
            merges.append((left, right))
    return vocab, merges


def _learned(rust: Rust, trainer: Any, texts: Iterable[str]) -> dict[str, Any]:
    rust.train_from_iterator(iter(texts), trainer)
    return dict(json.loads(rust.model.__getstate__()))


def _words(trainer: Any) -> Counter[str]:
    state = json.loads(trainer.__getstate__())
    inner = state.get("WordPieceTrainer", state).get("bpe_trainer") or state["BpeTrainer"]
    return Counter(inner["words"])


def _numbered(tokens: list[str]) -> Vocab:
    return {token: at for at, token in enumerate(tokens)}


def first_texts(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts up to this many characters in all, enough to learn a vocabulary from."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


# ------------------------------------------------------------------ merges in C

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
    words = _counted_words(texts, rust, pieces=bool(prefix))
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


def _counted_words(texts: Iterable[str], rust: Rust, *, pieces: bool) -> Counter[str]:
    """The words of a text, with their counts; those of GPT-2 in its letters for bytes."""
    plain, words = BERT_WORD if pieces else GPT2_WORD, Counter[str]()
    letters = {byte: letter for letter, byte in pipeline.byte_alphabet().items()}
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
