"""Pipelines of the `tokenizers` library for BERT, GPT-1, GPT-2 and character models, and their
control tokens ([CLS], <|endoftext|>, <|im_start|>…).

The library can ignore special tokens in text (`encode_special_tokens`); where that is not enough to
keep text from becoming one, because merges can build it out of its letters, the control tokens get
secret names instead.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Rust,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from malmoi.errors import ensure
from malmoi.tokenizer.chunks import MARK

Vocab = dict[str, int]
Merges = list[tuple[str, str]]
State = dict[str, Any]  # a parsed tokenizer.json

SPACE = "▁"  # SentencePiece's sign for a space

# in the order in which transformers registers them
SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
BERT_SPECIALS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
GPT1_SPECIALS = {"unk": "<unk>"}
LLAMA_SPECIALS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
ROBERTA_SPECIALS = LLAMA_SPECIALS | {"sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
ALBERT_SPECIALS = BERT_SPECIALS | {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
MARIAN_FILES = {"source": "source.spm", "target": "target.spm"}
MARIAN_SPECIALS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
GPT2_SPECIALS = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}


def assembled(model: models.Model, **parts: Any) -> Rust:
    """A tokenizer of a model and its normalizer, pre_tokenizer and decoder; None: it has none."""
    rust = Rust(model)
    for name, part in parts.items():
        if part is not None:
            setattr(rust, name, part)
    return rust


def bert_pipeline(
    vocab: Vocab,
    names: dict[str, str],
    *,
    lowercase: bool,
    strip_accents: bool | None,
    chinese: bool,
) -> Rust:
    """WordPiece as in BERT, with [CLS] A [SEP] B [SEP]."""
    rust = assembled(
        models.WordPiece(vocab, unk_token=names["unk"]),
        normalizer=normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=chinese,
            strip_accents=strip_accents,
            lowercase=lowercase,
        ),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(prefix="##"),
    )
    return with_frame(rust, names)


def with_frame(rust: Rust, names: dict[str, str]) -> Rust:
    cls, sep = names["cls"], names["sep"]
    return frame(rust, f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", cls, sep)


def frame(rust: Rust, single: str, pair: str, *names: str) -> Rust:
    """Puts special tokens around a text and a pair, as two templates of `tokenizers`."""
    ids = [(name, rust.token_to_id(name)) for name in names]
    rust.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )
    return rust


def gpt1_pipeline(
    vocab: Vocab,
    merges: Merges,
    *,
    unk: str = "<unk>",
    lowercase: bool = True,
    accents: bool = False,
) -> Rust:
    """BPE as in GPT-1: lowercased, words end in `</w>`; `accents` keeps accents."""
    return assembled(
        models.BPE(
            vocab, merges, unk_token=unk, continuing_subword_prefix="", end_of_word_suffix="</w>"
        ),
        # None: strip if lowercased, as BERT did. That splits Hangul into Jamo, so tokenizers we
        # train use False.
        normalizer=normalizers.BertNormalizer(
            lowercase=lowercase, strip_accents=False if accents else None
        ),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.BPEDecoder(suffix="</w>"),
    )


def gpt2_pipeline(
    vocab: Vocab, merges: Merges, *, prefix_space: bool = False, lowercase: bool = False
) -> Rust:
    """Byte-level BPE as in GPT-2: lossless, without unknown text."""
    return assembled(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""),
        normalizer=normalizers.Lowercase() if lowercase else None,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix_space),
        decoder=decoders.ByteLevel(),
    )


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones are themselves, others start at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def with_ends(rust: Rust, first: str | None, last: str | None) -> None:
    """Puts a first and a last token around every text, if there are such."""
    if first is None and last is None:
        return
    whole = " ".join(part for part in (first, "$A", last) if part)
    second = " ".join(f"{part}:1" for part in (first, "$B", last) if part)
    frame(rust, whole, f"{whole} {second}", *filter(None, (first, last)))


def with_mask(rust: Rust, names: dict[str, str]) -> dict[str, str]:
    """Adds a mask token, and puts the end-of-text token around every text as [CLS] and [SEP]."""
    end = names["eos"]
    frame(rust, f"{end}:0 $A:0 {end}:0", f"{end}:0 $A:0 {end}:0 $B:1 {end}:1", end)
    return names | {"cls": end, "sep": end, "pad": end, "mask": BERT_SPECIALS["mask"]}


def with_padding(rust: Rust, names: dict[str, str]) -> dict[str, str]:
    """Adds a padding token, and puts the end-of-text token after every text, as Marian does."""
    end = names["eos"]
    frame(rust, f"$A:0 {end}:0", f"$A:0 {end}:0 $B:1 {end}:1", end)
    return {"eos": end, "unk": end, "pad": "<pad>"}


def roberta_pipeline(
    vocab: Vocab, merges: Merges, names: dict[str, str], *, prefix_space: bool = False
) -> Rust:
    """GPT-2's byte-level BPE with RoBERTa's <s> A </s></s> B </s>."""
    rust = gpt2_pipeline(vocab, merges, prefix_space=prefix_space)
    sep, cls = ((names[role], vocab[names[role]]) for role in ("sep", "cls"))
    rust.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=prefix_space)
    return rust


def spaced_bytes_decoder(*, prefix_space: bool) -> Any:
    """Pieces in which ▁ is a space, and unknown characters are bytes."""
    back = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    return decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *back]
    )


def char(vocab: Vocab, *, lowercase: bool = False) -> Rust:
    """One token per character: BPE without merges over the whole text, so white space survives."""
    return assembled(
        models.BPE(vocab, [], unk_token="<unk>"),
        normalizer=normalizers.Lowercase() if lowercase else None,
        decoder=decoders.Fuse(),
    )


def morpheme_pipeline(model: models.Model, *, lowercase: bool) -> Rust:
    """WordPiece or BPE over morphemes: "▁" is the space before a word, so that text is kept."""
    cuts = [
        pre_tokenizers.Split(MARK, "removed"),
        pre_tokenizers.Split(Regex(r"[\n\t\r]"), "isolated"),
        pre_tokenizers.Metaspace(SPACE, prepend_scheme="never"),
        pre_tokenizers.Punctuation("isolated"),
    ]
    return assembled(
        model,
        normalizer=normalizers.Lowercase() if lowercase else None,
        pre_tokenizer=pre_tokenizers.Sequence(cuts),
        decoder=decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()]),
    )


def marian_pipeline(vocab: Vocab, names: dict[str, str]) -> Rust:
    """Pieces between marks, which SentencePiece wrote, by their numbers in a vocabulary."""
    rust = assembled(
        models.WordLevel(vocab, names["unk"]),
        pre_tokenizer=pre_tokenizers.Split(MARK, "removed"),
        decoder=decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()]),
    )
    return frame(rust, f"$A {names['eos']}", f"$A $B {names['eos']}", names["eos"])


def has_marked_pieces(state: State) -> bool:
    """Whether a pipeline expects SentencePiece's marks (`marian_pipeline`)."""
    return bool((state["pre_tokenizer"] or {}).get("pattern") == {"String": MARK})


def split_at_morphemes(rust: Rust) -> Rust:
    """The same pipeline over morphemes; byte-level tokens have their spaces already."""
    parts = [pre_tokenizers.Split(MARK, "removed"), rust.pre_tokenizer]
    rust.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return rust


def cuts_morphemes(state: State) -> bool:
    """Whether a tokenizer splits words where morphemes are marked."""
    parts = (state["pre_tokenizer"] or {}).get("pretokenizers") or [{}]
    return bool(parts[0].get("pattern") == {"String": MARK})


def composed(rust: Rust) -> Rust:
    """The same pipeline after NFC, for decomposed text (from macOS or PDFs)."""
    first = normalizers.NFC()
    rust.normalizer = normalizers.Sequence([first, rust.normalizer]) if rust.normalizer else first
    return rust


def composes(state: State) -> bool:
    return has_type(state["normalizer"], "NFC")


def normalizer_of(state: State) -> Any:
    """The normalizer without NFC: None, one part, or a Sequence."""
    part = state["normalizer"] or {"type": "Sequence", "normalizers": []}
    parts = part["normalizers"] if part["type"] == "Sequence" else [part]
    others = [one for one in parts if one != {"type": "NFC"}]
    if len(others) > 1:
        return part | {"normalizers": others}
    return others[0] if others else None


def added(token: str | dict[str, Any], *, special: bool = True) -> AddedToken:
    """An added token, from its name or from an object in tokenizer_config.json."""
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    flags = {key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "single_word")}
    normalized = bool(token.get("normalized", not special))
    return AddedToken(token["content"], special=special, normalized=normalized, **flags)


def has_type(part: Any, name: str) -> bool:
    """Whether it has a component of this type, at any depth."""
    return f'"type": "{name}"' in json.dumps(part)


def kind(state: State) -> str:
    """The kind of a tokenizer.json: "wordpiece", "bpe", "byte-bpe", "char" or "other"."""
    model = state["model"]
    if model["type"] == "WordPiece":
        return "wordpiece"
    if model["type"] != "BPE":
        return "other"
    parts = [state["normalizer"], state["pre_tokenizer"], state["decoder"]]
    if has_type(parts, "ByteLevel"):
        return "byte-bpe"
    bare = not model["merges"] and state["pre_tokenizer"] is None
    return "char" if bare and has_type(state["decoder"], "Fuse") else "bpe"


def parse_pipeline(rust: Rust, model: State | None = None) -> State:
    """All settings of a tokenizer; its model, which takes nearly all the time, may be known."""
    text = rust.to_str()
    if model is None:
        return dict(json.loads(text))
    # the last key, and no part of a model has that name and is an object
    return dict(json.loads(text.rpartition(',"model":{')[0] + "}"), model=model)


def vocabulary(state: State, rust: Rust) -> dict[str, int]:
    """All tokens and their ids; asking Rust for them would copy each once more."""
    tokens = state["model"].get("vocab")
    if not isinstance(tokens, dict):  # Unigram's is a list of tokens with scores
        return rust.get_vocab(with_added_tokens=True)
    return tokens | {token["content"]: token["id"] for token in state["added_tokens"]}


# ------------------------------------------------------------------ control tokens


def control_names(state: State, roles: Mapping[str, str], vocab: Vocab) -> Vocab:
    """The special tokens and those with a role, by name; [UNK] only if it is special.

    A single character is always text, such as "!" used as padding: there is no other way to write
    it.
    """
    special = {token["content"]: token["id"] for token in state["added_tokens"] if token["special"]}
    named = {name: vocab[name] for role, name in roles.items() if role != "unk" and name in vocab}
    return {name: id for name, id in (special | named).items() if len(name) > 1}


def is_reachable(state: State, names: Vocab) -> bool:
    """Whether plain text can encode to a control token even if names are not looked for."""
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    if not special.issuperset(names):
        return True
    model = state["model"]
    pre = state["pre_tokenizer"] or {}
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        ends = {name[-1] for name in names}  # most merges end otherwise, and need not be made
        return any(
            right[-1:] in ends and left + right.removeprefix(prefix) in names
            for left, right in model["merges"]
        )
    vocab = model["vocab"]  # Unigram's is a list of tokens with scores
    known = names.keys() & (vocab if isinstance(vocab, dict) else {piece for piece, _ in vocab})
    cut_by_bert = pre.get("type") == "BertPreTokenizer"  # splits at every punctuation mark
    return any(not cut_by_bert or not set(string.punctuation).intersection(name) for name in known)


def secret_names(names: Vocab) -> dict[str, str]:
    """An unguessable name for each control token, which no normalizer changes."""
    key = secrets.token_hex(16)
    return {name: f"<{key}:{id}>" for name, id in names.items()}


def renamed(rust: Rust, names: Vocab, secret: Mapping[str, str]) -> Rust:
    """The same tokenizer, with control tokens under their secret names only."""
    state = parse_pipeline(rust)
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {secret.get(token, token): id for token, id in model["vocab"].items()}
    else:  # Unigram: [[piece, score], …]
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in secret:
        model["unk_token"] = secret[model["unk_token"]]
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if secret.keys().isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]
    for token in state["added_tokens"]:
        token["content"] = secret.get(token["content"], token["content"])
    made_anew = Rust.from_str(json.dumps(state))
    ensure(
        not any(made_anew.token_to_id(secret[name]) != id for name, id in names.items()),
        "This tokenizer's control tokens get other ids when it is loaded again; save it again.",
    )
    return made_anew


def names_pattern(names: Vocab) -> re.Pattern[str] | None:
    """Finds control tokens by name, the longest first; None if there are none."""
    if not names:
        return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
