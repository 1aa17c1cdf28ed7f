"""What the small files beside a vocabulary say: special tokens, casing, chat template; read as transformers does."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Rust

from malmoi.errors import MalmoiError
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.pipeline import ROLES, State

Settings = dict[str, Any]
LIKELY = {  # what the roles are called where no tokenizer_config.json says so
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
}


def read_settings(folder: Path) -> Settings:
    """tokenizer_config.json, with special_tokens_map.json, added_tokens.json and chat_template.jinja folded in."""
    settings = _optional(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # as transformers has it: the newer key makes the older files moot
        settings |= _optional(folder / "special_tokens_map.json")
        older = _optional(folder / "added_tokens.json")
        if older:
            settings["added_tokens_decoder"] = {str(id): {"content": token} for token, id in older.items()}
    template = folder / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = read_text(template)
    return settings


def register(rust: Rust, settings: Settings) -> None:
    """Add the tokens that the settings name and the tokenizer lacks, in transformers' order, so with its ids."""
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    added = settings.get("added_tokens_decoder") or {}
    roles = [settings.get(f"{role}_token") for role in ROLES]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    named = [*roles, *(extra.values() if isinstance(extra, dict) else extra)]
    wanted = [added[id] for id in sorted(added, key=int)] + named
    names = {_content(token) for token in named}
    for token in wanted:
        content = _content(token)
        if content is None or content in known:
            continue
        known.add(content)
        special = content in names or bool(token.get("special"))  # those named by no role are dicts
        rust.add_tokens([pipeline.added(token, special=special)])


def special_names(state: State, settings: Settings) -> dict[str, str]:
    """What each role's token is called: as the settings say, else as the model or the family has it."""
    known = {token["content"] for token in state["added_tokens"]}
    names = {role: name for role in ROLES if (name := named(settings, role)) is not None}
    model_unk = state["model"].get("unk_token")
    if isinstance(model_unk, str):
        names.setdefault("unk", model_unk)
    for role, likely in LIKELY.items():
        found = next((name for name in likely if name in known), None)
        if found is not None and f"{role}_token" not in settings:
            names.setdefault(role, found)
    return names


def named(settings: Settings, role: str) -> str | None:
    """The token that tokenizer_config.json gives a role, written as str or as dict."""
    return _content(settings.get(f"{role}_token"))


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def class_name(settings: Settings) -> str:
    """The transformers class a tokenizer was saved from, without "Fast"; empty where nothing says."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def _optional(path: Path) -> Settings:
    return read_object(path) if path.exists() else {}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise MalmoiError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); was it cut short? Copy or download it again."
        ) from None
    if not isinstance(value, dict):
        raise MalmoiError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_text(path: Path) -> str:
    """A UTF-8 text file; newlines of any system."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MalmoiError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise MalmoiError(f"{path} cannot be read: {error.strerror or error}.") from None
