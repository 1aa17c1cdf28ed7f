"""Control tokens ([CLS], <|endoftext|>, <|im_start|>…), and how to keep text from becoming one.

`tokenizers` can ignore special tokens in text (`encode_special_tokens`); where that is not enough,
because merges can build one out of its letters, the control tokens get secret names instead.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Rust

from malmoi.errors import MalmoiError
from malmoi.tokenizer.pipeline import State, Vocab, parse_pipeline


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
    known = names.keys() & _pieces(model)
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
    if any(made_anew.token_to_id(secret[name]) != id for name, id in names.items()):
        raise MalmoiError(
            "This tokenizer's control tokens get other ids when it is loaded again; save it again."
        )
    return made_anew


def names_pattern(names: Vocab) -> re.Pattern[str] | None:
    """Finds control tokens by name, the longest first; None if there are none."""
    if not names:
        return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _pieces(model: Any) -> set[str]:
    vocab = model["vocab"]
    return set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
