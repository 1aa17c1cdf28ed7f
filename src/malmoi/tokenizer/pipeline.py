"""Pipelines of the `tokenizers` library for BERT, GPT-1, GPT-2 and character models."""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Rust

from malmoi.tokenizer.chunks import STOP_CHARACTERS
from malmoi.tokenizer.morphemes import MARK

Vocab = dict[str, int]
Merges = list[tuple[str, str]]
State = dict[str, Any]  # a parsed tokenizer.json

SPACE = "▁"  # SentencePiece's sign for a space

# in the order in which transformers registers them
SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
BERT_SPECIALS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
GPT1_SPECIALS = {"unk": "<unk>"}
ROBERTA_SPECIALS = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}
ALBERT_SPECIALS = BERT_SPECIALS | {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "unk": "<unk>",
    "pad": "<pad>",
}
LLAMA_SPECIALS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
MARIAN_FILES = {"source": "source.spm", "target": "target.spm"}
MARIAN_SPECIALS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
GPT2_SPECIALS = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}


def bert_pipeline(
    vocab: Vocab,
    names: dict[str, str],
    *,
    lowercase: bool,
    strip_accents: bool | None,
    chinese: bool,
) -> Rust:
    """WordPiece as in BERT, with [CLS] A [SEP] B [SEP]."""
    rust = Rust(models.WordPiece(vocab, unk_token=names["unk"]))
    rust.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(prefix="##")
    return with_frame(rust, names)


def with_frame(rust: Rust, names: dict[str, str]) -> Rust:
    """Puts [CLS] A [SEP] B [SEP] around texts."""
    cls = names["cls"]
    sep = names["sep"]
    frame(rust, f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", cls, sep)
    return rust


def frame(rust: Rust, single: str, pair: str, *names: str) -> None:
    """Puts special tokens around a text and a pair, as two templates of `tokenizers`."""
    ids = [(name, rust.token_to_id(name)) for name in names]
    rust.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )


def gpt1_pipeline(
    vocab: Vocab,
    merges: Merges,
    *,
    unk: str = "<unk>",
    lowercase: bool = True,
    accents: bool = False,
) -> Rust:
    """BPE as in GPT-1: lowercased, words end in `</w>`; `accents` keeps accents."""
    rust = Rust(
        models.BPE(
            vocab, merges, unk_token=unk, continuing_subword_prefix="", end_of_word_suffix="</w>"
        )
    )
    # None: strip if lowercased, as BERT did. That splits Hangul into Jamo, so tokenizers we train
    # use False.
    rust.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=False if accents else None
    )
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.BPEDecoder(suffix="</w>")
    return rust


def gpt2_pipeline(
    vocab: Vocab, merges: Merges, *, prefix_space: bool = False, lowercase: bool = False
) -> Rust:
    """Byte-level BPE as in GPT-2: lossless, without unknown text."""
    rust = Rust(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    if lowercase:
        rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    rust.decoder = decoders.ByteLevel()
    return rust


def with_ends(rust: Rust, first: str | None, last: str | None) -> None:
    """Puts a first and a last token around every text, if there are such."""
    if first is None and last is None:
        return
    whole = " ".join(part for part in (first, "$A", last) if part)
    second = " ".join(f"{part}:1" for part in (first, "$B", last) if part)
    frame(rust, whole, f"{whole} {second}", *filter(None, (first, last)))


def with_mask(rust: Rust, names: dict[str, str]) -> dict[str, str]:
    """Adds a mask token, and puts the end-of-text token around every text as [CLS] and [SEP].

    A language model's prompt gets only the one before it (`inference.prompt`).
    """
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
    sep = names["sep"]
    cls = names["cls"]
    rust.post_processor = processors.RobertaProcessing(
        (sep, vocab[sep]), (cls, vocab[cls]), add_prefix_space=prefix_space
    )
    return rust


def spaced_bytes_decoder(*, prefix_space: bool) -> Any:
    """Pieces in which ▁ is a space, and unknown characters are bytes."""
    back = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    return decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *back]
    )


def char(vocab: Vocab, *, lowercase: bool = False) -> Rust:
    """One token per character: BPE without merges over the whole text, so white space survives."""
    rust = Rust(models.BPE(vocab, [], unk_token="<unk>"))
    if lowercase:
        rust.normalizer = normalizers.Lowercase()
    rust.decoder = decoders.Fuse()
    return rust


def morpheme_pipeline(model: models.Model, *, lowercase: bool) -> Rust:
    """WordPiece or BPE over morphemes: "▁" is the space before a word, so that text is kept."""
    rust = Rust(model)
    if lowercase:
        rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(MARK, "removed"),
            pre_tokenizers.Split(Regex(r"[\n\t\r]"), "isolated"),
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="never"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    rust.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return rust


def marian_pipeline(vocab: Vocab, names: dict[str, str]) -> Rust:
    """Pieces between marks, which SentencePiece wrote, by their numbers in a vocabulary."""
    rust = Rust(models.WordLevel(vocab, names["unk"]))
    rust.pre_tokenizer = pre_tokenizers.Split(MARK, "removed")
    rust.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    frame(rust, f"$A {names['eos']}", f"$A $B {names['eos']}", names["eos"])
    return rust


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
    rust.normalizer = (
        first if rust.normalizer is None else normalizers.Sequence([first, rust.normalizer])
    )
    return rust


def composes(state: State) -> bool:
    """Whether a tokenizer composes characters (NFC)."""
    return "NFC" in types(state["normalizer"])


def normalizer_of(state: State) -> Any:
    """The normalizer without NFC: None, one part, or a Sequence."""
    part = state["normalizer"]
    if part is None or part["type"] != "Sequence":
        return None if part == {"type": "NFC"} else part
    others = [one for one in part["normalizers"] if one != {"type": "NFC"}]
    if len(others) == 1:
        return others[0]
    return part | {"normalizers": others} if others else None


def added(token: str | dict[str, Any], *, special: bool = True) -> AddedToken:
    """An added token, from its name or from an object in tokenizer_config.json."""
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    flags = {key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "single_word")}
    normalized = bool(token.get("normalized", not special))
    return AddedToken(token["content"], special=special, normalized=normalized, **flags)


def types(part: Any) -> Iterator[str]:
    """Every component type in a part of a tokenizer.json, recursively."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from types(value)
    elif isinstance(part, list):
        for value in part:
            yield from types(value)


def kind(state: State) -> str:
    """The kind of a tokenizer.json: "wordpiece", "bpe", "byte-bpe", "char" or "other"."""
    model = state["model"]
    if model["type"] == "WordPiece":
        return "wordpiece"
    if model["type"] != "BPE":
        return "other"
    parts = [state["normalizer"], state["pre_tokenizer"], state["decoder"]]
    if any("ByteLevel" in types(part) for part in parts):
        return "byte-bpe"
    bare = not model["merges"] and state["pre_tokenizer"] is None
    return "char" if bare and "Fuse" in types(state["decoder"]) else "bpe"


def splits_safely(state: State) -> bool:
    """Whether splitting a text at `chunks.SAFE_CUT` cannot change its tokens.

    True of BERT's and GPT-1's pipelines (spaces only separate), of GPT-2's (a space starts the next
    token) and of characters, unless an added token could contain a cut or take the spaces after it.
    """
    normalizer = normalizer_of(state)
    pre = state["pre_tokenizer"]
    if normalizer is not None and normalizer["type"] not in ("BertNormalizer", "Lowercase"):
        return False
    if any(
        token["rstrip"] or set(STOP_CHARACTERS).intersection(token["content"])
        for token in state["added_tokens"]
    ):
        return False
    if pre is None:
        return kind(state) == "char"
    return bool(pre["type"] == "BertPreTokenizer") or (
        pre["type"] == "ByteLevel" and pre.get("use_regex", True)
    )


def hf_class(state: State, names: dict[str, str], vocab: Vocab) -> str:
    """The transformers class that rebuilds exactly this pipeline, or the generic one.

    transformers' BertTokenizer, GPT2Tokenizer and OpenAIGPTTokenizer keep a tokenizer.json's
    vocabulary but build their own pipeline, so they would give other ids for any other pipeline.
    """
    family = kind(state)
    if has_marked_pieces(state):
        return "MarianTokenizer"
    if (
        family == "wordpiece"
        and names.keys() >= BERT_SPECIALS.keys()
        and _is_bert(state, names, vocab)
    ):
        return "BertTokenizer"
    if family == "byte-bpe":
        prefix_space = bool((state["pre_tokenizer"] or {}).get("add_prefix_space", False))
        if _same(state, gpt2_pipeline({}, [], prefix_space=prefix_space)):
            framed = (state["post_processor"] or {}).get("type") == "RobertaProcessing"
            return "RobertaTokenizer" if framed else "GPT2Tokenizer"
    if family == "bpe" and "unk" in names and _same(state, gpt1_pipeline({}, [], unk=names["unk"])):
        return "OpenAIGPTTokenizer"
    return "PreTrainedTokenizerFast"


def _is_bert(state: State, names: dict[str, str], vocab: Vocab) -> bool:
    normalizer = state["normalizer"]
    if (normalizer or {}).get("type") != "BertNormalizer":
        return False
    rebuilt = bert_pipeline(
        {name: vocab[name] for name in names.values()},
        names,
        lowercase=normalizer["lowercase"],
        strip_accents=normalizer["strip_accents"],
        chinese=normalizer["handle_chinese_chars"],
    )
    return (
        _same(state, rebuilt)
        and state["post_processor"] == parse_pipeline(rebuilt)["post_processor"]
    )


def _same(state: State, rust: Rust) -> bool:
    return _skeleton(state) == _skeleton(parse_pipeline(rust))


def _skeleton(state: State) -> State:
    """What the transformers classes set themselves: all but vocabulary and post-processor."""
    learnt = ("vocab", "merges")
    model = {key: value or None for key, value in state["model"].items() if key not in learnt}
    # trimming of byte-level offsets does not affect ids
    pre = {**(state["pre_tokenizer"] or {}), "trim_offsets": None}
    return {"model": model, "normalizer": state["normalizer"], "pre_tokenizer": pre}


def parse_pipeline(rust: Rust) -> State:
    """The tokenizer.json of a tokenizer, parsed."""
    state: State = json.loads(rust.to_str())
    return state


def vocabulary(state: State, rust: Rust) -> dict[str, int]:
    """All tokens and their ids; asking Rust for them would copy each once more."""
    tokens = state["model"].get("vocab")
    if not isinstance(tokens, dict):  # Unigram's is a list of tokens with scores
        return rust.get_vocab(with_added_tokens=True)
    return tokens | {token["content"]: token["id"] for token in state["added_tokens"]}
