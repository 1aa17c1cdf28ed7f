"""tokenizer_config.json and the other small files, read and written as transformers does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Rust

from malmoi.errors import MalmoiError
from malmoi.messages import msg
from malmoi.system.files import atomic_write, output_folder, write_text
from malmoi.system.untrusted import (
    MAX_TEMPLATE_CHARACTERS,
    MAX_TOKEN_CHARACTERS,
    MAX_VOCABULARY_TOKENS,
    JsonObject,
    read_optional_object,
    read_text,
)
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.pipeline import MARIAN_FILES, SPECIAL_ROLES, State

if TYPE_CHECKING:
    from malmoi.tokenizer.sentencepiece_model import MarianPieces

Settings = dict[str, Any]
FLAGS = (
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space"),
    *("keep_accents", "legacy", "add_bos_token", "add_eos_token", "separate_vocabs"),
)
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
    settings = dict(read_optional_object(folder / "tokenizer_config.json"))
    # as in transformers: the newer key overrides the older files
    if "added_tokens_decoder" not in settings:
        settings |= read_optional_object(folder / "special_tokens_map.json")
        older = read_optional_object(folder / "added_tokens.json")
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
        extra = settings.get(name) or []
        settings.require(isinstance(extra, list | dict), name, "a list of tokens")
        for token in extra.values() if isinstance(extra, dict) else extra:
            _check_token(JsonObject({name: token}, settings.where), name)


def _check_token(values: JsonObject, key: str) -> None:
    """Requires a token to be a string, an object with its string, or null for none."""
    found = values.get(key) or ""
    content = values.object(key).text("content", default="") if isinstance(found, dict) else found
    values.require(
        isinstance(content, str) and len(content) <= MAX_TOKEN_CHARACTERS,
        key,
        "a token: its text, or an object with its content",
    )


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
    return content_of(settings.get(f"{role}_token"))


def content_of(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def class_name(settings: Mapping[str, Any]) -> str:
    """The transformers class it was saved from, without "Fast"; empty if unknown."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


# ------------------------------------------------------------------ writing

# not saved: paths on another machine, and tokens that tokenizer.json has already
DROPPED = {
    *("name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file"),
    "added_tokens_decoder",
}


def write_tokenizer(
    rust: Rust,
    settings: dict[str, Any],
    names: dict[str, str],
    folder: Path,
    pieces: "MarianPieces | None" = None,
) -> None:
    """Writes tokenizer_config.json, the family's vocabulary files and tokenizer.json.

    In this order: the first names the class, so that what is there of a tokenizer whose writing
    was interrupted is not taken for another one. A Marian has its models instead of the last.
    """
    state = pipeline.parse_pipeline(rust)
    texts = {
        "tokenizer_config.json": _json(config(state, settings, names)),
        **vocabulary_files(state),
        **({} if pieces else {"tokenizer.json": rust.to_str(pretty=True)}),
    }
    models = {file: getattr(pieces, side) for side, file in MARIAN_FILES.items()} if pieces else {}
    try:
        with output_folder(folder) as place:
            for name, text in texts.items():
                write_text(place / name, text)
            for name, model in models.items():
                with atomic_write(place / name) as file:
                    file.write(model)
            if pieces:
                (place / "tokenizer.json").unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise MalmoiError("{folder} cannot be written: {why}.", folder=folder, why=why) from None


def config(state: State, settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A tokenizer_config.json from which transformers rebuilds the same tokenizer."""
    added = {token["content"]: token["id"] for token in state["added_tokens"]}
    values = {
        **{key: value for key, value in settings.items() if key not in DROPPED},
        # transformers makes every token named here special; a character model's <unk> must remain
        # five characters of text.
        **{f"{role}_token": name for role, name in names.items() if name in added},
    }
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(values.get(key), list):
            values[key] = list(map(content_of, values[key]))
    # the classes of families keep a tokenizer.json's vocabulary but build a pipeline of their own
    generic = "MarianTokenizer" if pipeline.has_marked_pieces(state) else "PreTrainedTokenizerFast"
    values.setdefault("tokenizer_class", generic)
    return values | _pipeline_settings(state, values)


def _pipeline_settings(state: State, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings by which transformers' classes rebuild a pipeline."""
    values: dict[str, Any] = {}
    family = pipeline.kind(state)
    normalizer = pipeline.normalizer_of(state) or {}
    if family == "wordpiece" and normalizer.get("type") == "BertNormalizer":
        values |= {key: normalizer[field] for key, field in BERT_SETTINGS.items()}
    if family != "other" and "model_input_names" not in settings:
        segments = ["token_type_ids"] if family == "wordpiece" else []  # BPEs have no segments
        values["model_input_names"] = ["input_ids", *segments, "attention_mask"]
    if (state["pre_tokenizer"] or {}).get("type") == "ByteLevel":
        values["add_prefix_space"] = state["pre_tokenizer"]["add_prefix_space"]
    return values


def vocabulary_files(state: State) -> dict[str, str]:
    """vocab.txt of a WordPiece, vocab.json and merges.txt of a BPE with merges."""
    model = state["model"]
    if model["type"] == "WordPiece":
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return {"vocab.txt": "".join(f"{token}\n" for token in tokens)}
    files = {}
    if model["type"] == "WordLevel" or model.get("merges"):
        files["vocab.json"] = _json(model["vocab"])
    if model.get("merges"):
        merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
        files["merges.txt"] = f"#version: 0.2\n{merges}"
    return files


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
