"""tokenizer_config.json and the other small files, read as transformers does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Rust

from malmoi.messages import msg
from malmoi.system.limits import (
    MAX_TEMPLATE_CHARACTERS,
    MAX_TOKEN_CHARACTERS,
    MAX_VOCABULARY_TOKENS,
)
from malmoi.system.untrusted import JsonObject, read_object, read_text
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.pipeline import SPECIAL_ROLES, State

Settings = dict[str, Any]
FLAGS = ["do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space"]
FLAGS += ["keep_accents", "legacy", "add_bos_token", "add_eos_token", "separate_vocabs"]
BERT_SETTINGS = {  # of BERT's classes, which override the normalizer's
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
LIKELY = {  # usual names of the roles if there is no tokenizer_config.json
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
}


def read_settings(folder: Path) -> Settings:
    """tokenizer_config.json merged with the special token, added token and template files."""
    settings = dict(_optional(folder / "tokenizer_config.json"))
    # as in transformers: the newer key overrides the older files
    if "added_tokens_decoder" not in settings:
        settings |= _optional(folder / "special_tokens_map.json")
        older = _optional(folder / "added_tokens.json")
        if older:
            settings["added_tokens_decoder"] = {
                str(older.whole(token)): {"content": token} for token in older
            }
    template = folder / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = read_text(template, max_bytes=4 * MAX_TEMPLATE_CHARACTERS)
    _check(JsonObject(settings, str(folder / "tokenizer_config.json")))
    return settings


def _check(settings: JsonObject) -> None:
    """Checks the types of all settings that are used."""
    for flag in FLAGS:
        settings.flag(flag, default=False)
    settings.number("model_max_length", default=0.0)
    settings.text("tokenizer_class", default="")
    added = settings.object("added_tokens_decoder", default={})
    for id in added:
        if not id.isdecimal() or len(id) > 9 or int(id) > MAX_VOCABULARY_TOKENS:
            raise settings.wrong(
                "added_tokens_decoder",
                msg("tokens by their ids, up to {most:,}", most=MAX_VOCABULARY_TOKENS),
            )
        _check_token(added, id)
    for role in SPECIAL_ROLES:
        _check_token(settings, f"{role}_token")
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = settings.get(name) or {}
        tokens = dict(enumerate(extra)) if isinstance(extra, list) else extra
        if not isinstance(tokens, dict):
            raise settings.wrong(name, "a list of tokens")
        named = JsonObject(
            {str(i): token for i, token in tokens.items()}, f"{settings.where}, {name}"
        )
        for i in named:
            _check_token(named, i)


def _check_token(values: JsonObject, key: str) -> None:
    """Requires a token to be a string, an object with its string, or null for none."""
    found = values.get(key)
    content = values.object(key).text("content", default="") if isinstance(found, dict) else found
    if content is not None and (
        not isinstance(content, str) or len(content) > MAX_TOKEN_CHARACTERS
    ):
        raise values.wrong(key, "a token: its text, or an object with its content")


def register(rust: Rust, settings: Settings) -> None:
    """Adds tokens that the settings name and the tokenizer lacks, with transformers' ids."""
    here = list(rust.get_added_tokens_decoder().values())
    known = {None, "", *(token.content for token in here)}
    added = settings.get("added_tokens_decoder") or {}
    roles = [settings.get(f"{role}_token") for role in SPECIAL_ROLES]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    named = [*roles, *(extra.values() if isinstance(extra, dict) else extra)]
    names = {content_of(token) for token in named}
    for token in here:  # tokens with a role are special even if tokenizer.json disagrees
        if token.content in names and not token.special:
            token.special = True
            rust.add_special_tokens([token])
    for token in [*(added[id] for id in sorted(added, key=int)), *named]:
        content = content_of(token)
        if content not in known:
            known.add(content)
            # tokens without a role are dicts
            special = content in names or bool(token.get("special"))
            rust.add_tokens([pipeline.added(token, special=special)])


def special_names(state: State, settings: Settings) -> dict[str, str]:
    """The token of each role: from the settings, else from the model or by its usual name."""
    known = {token["content"] for token in state["added_tokens"]}
    given = {role: special_token_settings(settings, role) for role in SPECIAL_ROLES}
    names = {role: name for role, name in given.items() if name is not None}
    model_unk = state["model"].get("unk_token")
    if isinstance(model_unk, str):
        names.setdefault("unk", model_unk)
    usual = LIKELY
    if "<mask>" in known:  # RoBERTa and XLM-R, whose cls and sep are also bos and eos
        usual = LIKELY | {"cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>")}
    for role, likely in usual.items():
        found = next((name for name in likely if name in known), None)
        if found is not None and f"{role}_token" not in settings:
            names.setdefault(role, found)
    return names


def special_token_settings(settings: Settings, role: str) -> str | None:
    """The token that tokenizer_config.json assigns to a role."""
    return content_of(settings.get(f"{role}_token"))


def content_of(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def class_name(settings: Mapping[str, Any]) -> str:
    """The transformers class it was saved from, without "Fast"; empty if unknown."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def _optional(path: Path) -> JsonObject:
    return read_object(path) if path.exists() else JsonObject({}, str(path))
