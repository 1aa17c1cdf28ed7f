"""Tokenizers with more tokens: learnt from text, or put around texts. Old tokens keep their ids.

To learn some, words are cut by the old tokenizer, and the most frequent pairs of neighbouring
pieces are merged, as byte-pair encoding would continue (Sennrich et al. 2016). The merges of a BPE
are appended to its own; a WordPiece takes the longest piece that it knows, and a Unigram model the
likeliest.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Rust, models, pre_tokenizers, trainers

from malmoi.errors import ensure, require_that, required
from malmoi.messages import msg
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.core import Tokenizer
from malmoi.tokenizer.training import checked_texts

CONTINUES = "##"  # a WordPiece that is not the first of its word
MIN_FREQUENCY = 2  # of a pair that is merged
SPARE_MERGES = 2  # for each new token: some merges only make tokens that are known
FIRST_LETTER = 0x20000  # ideographs: no spaces among the 180,000 characters from here on
UNIGRAM_BONUS = 0.1
UNKNOWN_SHARE = 0.5  # of the new tokens may be characters that the old tokenizer lacks

Word = tuple[str, ...]  # its pieces


class ExtendedTokenizer(NamedTuple):
    """A tokenizer with new tokens, and the old tokens that each new one is made of."""

    tokenizer: Tokenizer
    pieces: dict[int, tuple[int, ...]]  # by new id; empty for a character that no old token has


def extend_tokenizer(old: Tokenizer, texts: Iterable[str], add: int) -> ExtendedTokenizer:
    """Adds up to `add` tokens that make this text shorter."""
    require_that(add >= 1, "add={add}: give the number of tokens to add, 1 or more.", add=add)
    state = pipeline.parse_pipeline(old._rust)
    kind = state["model"]["type"]
    _check_extensible(old, state)
    words = _words(old._rust, state, texts)
    characters = _unknown_characters(words, state, add) if kind == "WordPiece" else []
    known = old.vocab()
    merges = _learn_merges(words, SPARE_MERGES * add, CONTINUES if kind == "WordPiece" else "")
    tokens, merges = _first_tokens(merges, characters, known, add)
    ensure(tokens, "No token was added: the text has no pair of pieces that occurs twice.")
    ids = {token: id for id, token in enumerate(tokens, old.vocab_size)}
    _extend_model(state, merges, ids)
    made = _spelt(characters, merges)
    pieces = {id: tuple(known[p] for p in made[token] if p in known) for token, id in ids.items()}
    return ExtendedTokenizer(Tokenizer(Rust.from_str(json.dumps(state)), old.settings), pieces)


def _extend_model(state: pipeline.State, merges: list["Merge"], ids: dict[str, int]) -> None:
    model = state["model"]
    if model["type"] == "Unigram":
        _extend_unigram(model, [merge for merge in merges if merge.token in ids], min(ids.values()))
    else:  # an added token that the vocabulary lacks would be numbered after it, as a new one
        model["vocab"] |= {one["content"]: one["id"] for one in state["added_tokens"]} | ids
    if model["type"] == "BPE":
        model["merges"] += [[merge.left, merge.right] for merge in merges]


def _check_extensible(old: Tokenizer, state: pipeline.State) -> None:
    known = state["model"]["type"] in ("BPE", "WordPiece", "Unigram")
    require_that(
        known and state["pre_tokenizer"] is not None and old.kind != "char",
        "This tokenizer cannot be extended: it has no words whose pieces could be merged. "
        "Byte-level BPE (GPT-2), BPE with words (GPT-1), WordPiece (BERT) and Unigram can.",
    )
    require_that(
        not old.morphemes,
        "This tokenizer cannot be extended: its words are morphemes. Train a new one instead.",
    )


def _spelt(characters: Iterable[str], merges: Iterable["Merge"]) -> dict[str, tuple[str, ...]]:
    """The pieces that each token is merged from; none for a character."""
    made: dict[str, tuple[str, ...]] = dict.fromkeys(characters, ())
    for merge in merges:
        left, right = (made.get(part, (part,)) for part in (merge.left, merge.right))
        made.setdefault(merge.token, left + right)
    return made


def _first_tokens(
    merges: Iterable["Merge"], characters: list[str], known: dict[str, int], add: int
) -> tuple[list[str], list["Merge"]]:
    """The first `add` new tokens, and the merges whose parts and result exist."""
    tokens = list(characters)
    usable = {*known, *characters}
    kept = []
    for merge in merges:
        if {merge.left, merge.right} <= usable and (merge.token in usable or len(tokens) < add):
            tokens += [] if merge.token in usable else [merge.token]
            usable.add(merge.token)
            kept.append(merge)
    return tokens, kept


def _words(rust: Rust, state: pipeline.State, texts: Iterable[str]) -> Counter[Word]:
    """How often each word occurs, by the pieces that the old tokenizer cuts it into."""
    counts: Counter[str] = Counter()
    for text in checked_texts(texts):
        plain = rust.normalizer.normalize_str(text) if rust.normalizer else text
        counts.update(word for word, _ in rust.pre_tokenizer.pre_tokenize_str(plain))
    known = rust.get_vocab(with_added_tokens=False)
    unknown = state["model"].get("unk_token")
    found: Counter[Word] = Counter()
    for word, count in counts.items():
        pieces = tuple(token.value for token in rust.model.tokenize(word))
        if unknown in pieces and state["model"]["type"] == "WordPiece":
            pieces = (word[0], *(CONTINUES + letter for letter in word[1:]))
        elif unknown in pieces or not known.keys() >= set(pieces):
            continue  # a character that only more training data could spell
        found[pieces] += count
    return found


def _unknown_characters(words: Counter[Word], state: pipeline.State, add: int) -> list[str]:
    """The most frequent pieces of one character that a WordPiece lacks, so that words are [UNK]."""
    known = state["model"]["vocab"]
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for piece in (piece for piece in word if piece not in known):
            counts[piece] += count
    return sorted(counts, key=lambda p: (-counts[p], p))[: int(add * UNKNOWN_SHARE)]


class Merge(NamedTuple):
    left: str
    right: str
    token: str


def _learn_merges(words: Counter[Word], limit: int, prefix: str) -> list[Merge]:
    """The merges of the most frequent pairs of neighbouring pieces, in order.

    The library learns them on words in which every piece is one character.
    """
    pieces = list(dict.fromkeys(piece for word in words for piece in word))
    letters = {piece: chr(FIRST_LETTER + i) for i, piece in enumerate(pieces)}
    names = {letter: piece for piece, letter in letters.items()}
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=len(pieces) + limit, min_frequency=MIN_FREQUENCY, show_progress=False
    )
    lines = (
        " ".join(["".join(letters[piece] for piece in word)] * count)
        for word, count in words.items()
        if len(word) > 1
    )
    rust.train_from_iterator(lines, trainer)
    found = []
    for left, right in json.loads(rust.model.__getstate__())["merges"]:
        names[left + right] = names[left] + names[right].removeprefix(prefix)
        found.append(Merge(names[left], names[right], names[left + right]))
    return found


def _extend_unigram(model: dict[str, Any], merges: list[Merge], size: int) -> None:
    """Appends pieces that are a little likelier than the two that they replace."""
    require_that(
        len(model["vocab"]) == size,
        "This Unigram tokenizer cannot be extended: it has added tokens after its vocabulary.",
    )
    scores = dict(model["vocab"])
    for merge in merges:
        scores[merge.token] = scores[merge.left] + scores[merge.right] + UNIGRAM_BONUS
        model["vocab"].append([merge.token, scores[merge.token]])


# ------------------------------------------------------------------ special tokens around texts

START = "<s>"
BETWEEN = "<$>"
END = "<e>"
PAD = "<pad>"


def add_frame_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with new tokens around a text and between a pair; other ids are unchanged."""
    rust = Rust.from_str(tokenizer._rust.to_str())
    rust.add_special_tokens([pipeline.added(name) for name in (START, BETWEEN, END, PAD)])
    pair = f"{START}:0 $A:0 {BETWEEN}:0 $B:1 {END}:1"
    pipeline.frame(rust, f"{START}:0 $A:0 {END}:0", pair, START, BETWEEN, END)
    roles = {"bos_token": START, "sep_token": BETWEEN, "eos_token": END, "pad_token": PAD}
    # transformers' own GPT classes would replace this pipeline with theirs
    return Tokenizer(
        rust, tokenizer.settings | roles | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def frame_with_end(tokenizer: Tokenizer) -> Tokenizer:
    """Puts end-of-text before a text and between a pair, for a vocabulary that must not grow.

    There is none at the end: transformers pads with that token, and pools the last one before
    padding.
    """
    end = required(
        tokenizer.specials.eos,
        "This model's tokenizer has no end-of-text token to put around a text.",
    )
    rust = Rust.from_str(tokenizer._rust.to_str())
    name = tokenizer.token(end)
    pipeline.frame(rust, f"{name}:0 $A:0", f"{name}:0 $A:0 {name}:0 $B:1", name)
    roles = {"pad_token": name, "tokenizer_class": "PreTrainedTokenizerFast"}
    return Tokenizer(rust, tokenizer.settings | roles)


def is_framed(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer already adds special tokens."""
    return bool(tokenizer.encode("").tokens)


# ------------------------------------------------------------------ whether a vocabulary fits

MAX_UNKNOWN_SHARE = 0.06  # of the words: more, and words are missing rather than odd signs
MAX_CUT_SHARE = 0.4  # 0.2 at most where the language is the vocabulary's, else 0.6 (docs/lab.md)
LONG_WORD = 3  # letters
SAMPLE_TEXTS = 1000


def unknown_note(tokenizer: Tokenizer, texts: Iterable[str]) -> str | None:
    """A sentence if many words of the first texts are unknown, or cut into single letters."""
    words = " ".join(islice(texts, SAMPLE_TEXTS)).split()
    words = [word for word in words if len(word) >= LONG_WORD]
    rows = tokenizer.ids([f" {word}" for word in words])
    every = max(1, len(words))
    unknown = sum(tokenizer.specials.unk in row for row in rows) / every
    cut = sum(len(row) >= len(word) for row, word in zip(rows, words, strict=True)) / every
    if unknown <= MAX_UNKNOWN_SHARE and (cut <= MAX_CUT_SHARE or tokenizer.kind == "char"):
        return None
    missing = msg("{share:.0%} of the words are unknown to this model's vocabulary", share=unknown)
    split = msg("{share:.0%} of the words are cut into single letters", share=cut)
    return msg(
        "{what}: this model's vocabulary does not fit these texts. Add tokens with malmoi "
        "tokenizer extend, or use another model.",
        what=missing if unknown > MAX_UNKNOWN_SHARE else split,
    )
