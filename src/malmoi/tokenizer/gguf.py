"""Tokenizers as GGUF metadata, read and written: byte-level BPE and SentencePiece BPE.

A tokenizer is written only if llama.cpp tokenizes exactly alike. llama.cpp has no NFC, so
decomposed text (NFD) gets other tokens there: normalise it first.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer as Rust, models, normalizers, pre_tokenizers

from malmoi.errors import UsageError, ensure, nearest
from malmoi.messages import msg
from malmoi.system.untrusted import JsonObject, shown
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.checks import panics_explained
from malmoi.tokenizer.core import Tokenizer
from malmoi.tokenizer.pipeline import SPACE, Merges, State, Vocab

# llama.cpp's token types
NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."
BYTE_TOKEN = re.compile("<0x..>")
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # ours: theirs
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# llama.cpp's default pre-tokenizer
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


def _cut_at(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2])
# tokenizer.ggml.pre: how text is split before merging
PRE_TOKENIZERS: dict[str, Any] = {
    "default": _cut_at(*DEFAULT),
    "gpt-2": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "llama-bpe": _cut_at(LLAMA3),
    "qwen2": _cut_at(QWEN2),
}


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that GGUF metadata describes, with its chat template."""
    given = JsonObject({k.removeprefix(PREFIX): v for k, v in metadata.items()}, where, PREFIX)
    kind = given.text("model", default=None)
    ensure(
        kind in GGUF_TOKENIZERS,
        "{where} has a vocabulary of type {kind}; Malmoi reads {tokenizers}.",
        where=where,
        kind=shown(kind),
        tokenizers=", ".join(GGUF_TOKENIZERS),
    )
    tokens = given.list_of("tokens", str)
    vocab: Vocab = {token: id for id, token in enumerate(tokens)}
    ensure(
        0 < len(tokens) == len(vocab),
        "{where}: a vocabulary has tokens, and each of them once.",
        where=where,
    )
    types = given.list_of("token_type", int, default=[NORMAL] * len(tokens))
    _check_count(where, "token_type", types, tokens)
    ids = {role: given.get(f"{name}_token_id") for role, name in ROLES.items()}
    known = {role: id for role, id in ids.items() if isinstance(id, int) and 0 <= id < len(tokens)}
    names = {role: tokens[id] for role, id in known.items()}
    with panics_explained(msg("{where}: its vocabulary cannot be used", where=where)):
        rust = GGUF_TOKENIZERS[str(kind)](vocab, types, given)
        for token, type in zip(tokens, types, strict=True):
            if type in (UNKNOWN, CONTROL, DEFINED):  # user-defined tokens represent text
                rust.add_tokens([pipeline.added(token, special=type != DEFINED)])
        # SentencePiece adds bos by default
        first = names.get("bos") if given.get("add_bos_token", kind == "llama") else None
        last = names.get("eos") if given.get("add_eos_token", False) else None
        pipeline.with_ends(rust, first, last)
    template = JsonObject(metadata, where).text("tokenizer.chat_template", default=None)
    settings = {f"{role}_token": name for role, name in names.items()}
    return Tokenizer(rust, settings | ({"chat_template": template} if template else {}))


def byte_bpe(vocab: Vocab, types: Sequence[int], given: JsonObject) -> Rust:
    """GPT-2's byte-level BPE with the named pre-tokenizer."""
    cut = given.text("pre", default="default")
    ensure(
        cut in PRE_TOKENIZERS,
        "{where} splits text by the rule {cut}, which Malmoi does not know.{hint}",
        where=given.where,
        cut=shown(cut),
        hint=nearest(cut, PRE_TOKENIZERS),
    )
    lines = [merge.partition(" ") for merge in given.list_of("merges", str)]
    rust = pipeline.gpt2_pipeline(vocab, [(left, right) for left, _, right in lines])
    # llama.cpp's ignore_merges: a word in the vocabulary is one token regardless of the merges
    if cut == "llama-bpe":
        rust.model.ignore_merges = True
    rust.pre_tokenizer = PRE_TOKENIZERS[cut]
    return rust


def sentencepiece(vocab: Vocab, types: Sequence[int], given: JsonObject) -> Rust:
    """SentencePiece BPE: spaces become ▁, unknown characters bytes, merges ordered by score."""
    tokens = list(vocab)
    scores = given.list_of("scores", float)
    _check_count(given.where, "scores", scores, tokens)
    about = list(zip(tokens, scores, types, strict=True))
    merges = merges_by_score({t: score for t, score, type in about if type == NORMAL}, vocab)
    unknown = next((token for token, _, type in about if type == UNKNOWN), None)
    front = bool(given.get("add_space_prefix", True))
    return pipeline.assembled(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        normalizer=_spaces(front=front),
        decoder=pipeline.spaced_bytes_decoder(prefix_space=front),
    )


def _spaces(*, front: bool) -> Any:
    first = [normalizers.Prepend(SPACE)] if front else []
    return normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])


def merges_by_score(scores: Mapping[str, float], vocab: Vocab) -> Merges:
    """Every way to make a piece from two others, best score first."""
    found = [
        (-score, -cut, -(len(piece) - cut), piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:3])]


GGUF_TOKENIZERS = {"gpt2": byte_bpe, "llama": sentencepiece}  # tokenizer.ggml.model


def _check_count(where: str, name: str, values: Sequence[object], tokens: Sequence[str]) -> None:
    ensure(
        len(values) == len(tokens),
        "{where} has {values:,} {name} for {tokens:,} tokens; it is damaged.",
        where=where,
        values=len(values),
        name=name,
        tokens=len(tokens),
    )


# ------------------------------------------------------------------ writing


def gguf_vocabulary(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    """All of `tokenizer.*` for a network of `size` tokens; ids the tokenizer lacks are unused."""
    state = pipeline.parse_pipeline(tokenizer._rust)
    kind, described = _described(tokenizer, state)
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [UNUSED] * size
    for token, id in tokenizer._vocab.items():
        is_byte = kind == "llama" and BYTE_TOKEN.fullmatch(token)
        tokens[id] = token
        types[id] = BYTE if is_byte else NORMAL
    for token in state["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else DEFINED
    if kind == "llama" and tokenizer.specials.unk is not None:
        types[tokenizer.specials.unk] = UNKNOWN
    values = {
        "model": kind,
        "tokens": tokens,
        "token_type": types,
        **described,
        **_ids(tokenizer, kind),
    }
    if kind == "llama":
        values["scores"] = _scores(state, tokens)
    named = {f"{PREFIX}{name}": value for name, value in values.items()}
    template = tokenizer.chat_template
    return named | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _described(tokenizer: Tokenizer, state: State) -> tuple[str, dict[str, Any]]:
    """llama.cpp's tokenizer model, and the metadata of its splitting or joining."""
    model = state["model"]
    if tokenizer.kind == "byte-bpe" and pipeline.normalizer_of(state) is None:
        pre = state["pre_tokenizer"]
        cuts = ((name, _parsed("pre_tokenizer", cut)) for name, cut in PRE_TOKENIZERS.items())
        cut = next((name for name, other in cuts if _plain(pre) == _plain(other)), None)
        if cut is not None and model.get("ignore_merges", False) == (cut == "llama-bpe"):
            return "gpt2", {"pre": cut, "merges": [" ".join(pair) for pair in model["merges"]]}
    if model["type"] == "BPE" and model.get("byte_fallback") and state["pre_tokenizer"] is None:
        for front in (True, False):
            if state["normalizer"] == _parsed("normalizer", _spaces(front=front)):
                return "llama", {"pre": "default", "add_space_prefix": front}
    raise UsageError(
        "llama.cpp does not split text as this tokenizer ({kind}) does: it supports "
        "byte-level BPE as in {tokenizers}, without lowercasing, and SentencePiece's BPE.",
        kind=tokenizer.kind,
        tokenizers=", ".join(PRE_TOKENIZERS),
    )


def _ids(tokenizer: Tokenizer, kind: str) -> dict[str, Any]:
    specials = tokenizer.specials
    marks = tokenizer.encode("").tokens
    known = {
        f"{theirs}_token_id": id
        for ours, theirs in ROLES.items()
        if (id := getattr(specials, ours)) is not None and (ours != "unk" or kind == "llama")
    }
    first = bool(marks) and marks[0] == specials.bos
    last = len(marks) > first and marks[-1] == specials.eos
    return known | {"add_bos_token": first, "add_eos_token": last}


def _scores(state: State, tokens: list[str]) -> list[float]:
    """SentencePiece merges the best score first, so earlier merges get higher scores."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(state["model"]["merges"]):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _parsed(part: str, value: Any) -> Any:
    """A normalizer or pre_tokenizer as a tokenizer.json has it."""
    return pipeline.parse_pipeline(pipeline.assembled(models.BPE(), **{part: value}))[part]


def _plain(pre: Any) -> Any:
    """A pre-tokenizer without `trim_offsets`, which does not affect ids."""
    return json.loads(re.sub(r'"trim_offsets": \w+', '"trim_offsets": 0', json.dumps(pre)))
