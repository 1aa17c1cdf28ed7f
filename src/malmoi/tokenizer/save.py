"""Writes the tokenizer files that transformers opens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Rust

from malmoi.errors import MalmoiError
from malmoi.system.files import atomic_write, output_folder, write_text
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.hf_settings import BERT_SETTINGS, content_of
from malmoi.tokenizer.pipeline import MARIAN_FILES, State

if TYPE_CHECKING:
    from malmoi.tokenizer.marian import MarianPieces

PATHS = ("name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file")
# not saved: paths on another machine, and tokens that tokenizer.json has already
DROPPED = (*PATHS, "added_tokens_decoder")


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
    texts = {"tokenizer_config.json": _json(config(state, settings, names))}
    texts |= vocabulary_files(state)
    texts |= {} if pieces else {"tokenizer.json": rust.to_str(pretty=True)}
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
        raise MalmoiError(
            "The tokenizer cannot be written to {folder}: {strerror}.",
            folder=folder,
            strerror=error.strerror or error,
        ) from None


def config(state: State, settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A tokenizer_config.json from which transformers rebuilds the same tokenizer."""
    added = {token["content"]: token["id"] for token in state["added_tokens"]}
    known = {role: name for role, name in names.items() if name in added}
    values = {key: value for key, value in settings.items() if key not in DROPPED}
    # transformers makes every token named here special; a character model's <unk> must remain five
    # characters of text.
    values |= {f"{role}_token": name for role, name in known.items()}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(values.get(key), list):
            values[key] = list(map(content_of, values[key]))
    values.setdefault("tokenizer_class", pipeline.hf_class(state, known, added))
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
    if model["type"] == "WordLevel":
        return {"vocab.json": _json(model["vocab"])}
    if model["type"] == "BPE" and model["merges"]:
        merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
        return {"vocab.json": _json(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}"}
    return {}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
