"""How a text becomes one vector, as a folder of sentence-transformers says it.

modules.json lists the modules (Transformer, Pooling, Normalize), 1_Pooling/config.json says which
tokens are pooled, and sentence_bert_config.json or the tokenizer where a text is truncated.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from malmoi.errors import ensure
from malmoi.messages import msg
from malmoi.system.files import write_json
from malmoi.system.untrusted import (
    MAX_CONTEXT_TOKENS,
    JsonObject,
    parse,
    read_object,
    read_optional_object,
    read_text,
    shown,
)

MODULES_FILE = "modules.json"
POOLING_FOLDER = "1_Pooling"
LENGTH_FILE = "sentence_bert_config.json"
PooledTokens = Literal["mean", "first", "last"]
# our names by theirs; older versions write a flag for each mode, newer ones the mode's name
POOLED_TOKENS: dict[str, PooledTokens] = {"mean": "mean", "cls": "first", "lasttoken": "last"}
POOLING_FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}


@dataclass(frozen=True)
class SentencePooling:
    """Which of a text's last hidden states become its vector."""

    tokens: PooledTokens = "mean"
    normalize: bool = True  # to length 1
    max_tokens: int = 0  # longer texts are truncated; 0: at the model's context


def read_sentence_pooling(folder: Path) -> SentencePooling | None:
    """The pooling of a folder that sentence-transformers wrote; None if it is not such a folder."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    found = parse(read_text(path), str(path))
    ensure(
        isinstance(found, list) and all(isinstance(one, dict) for one in found),
        "{path} must hold a list of modules, not {found}.",
        path=path,
        found=shown(found),
    )
    modules = [JsonObject(one, str(path)) for one in found]
    names = [one.text("type").rsplit(".", 1)[-1] for one in modules]
    ensure(
        names in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]),
        "{path} lists the modules {names}; to load the encoder alone, remove that file.",
        path=path,
        names=", ".join(names)[:80] or msg("none"),
    )
    inner = modules[1].text("path")
    modules[1].require(
        inner and Path(inner).name == inner, "path", "the name of a folder beside it"
    )
    return SentencePooling(_mode(folder / inner / "config.json"), len(names) == 3, _length(folder))


def _length(folder: Path) -> int:
    """Where a text is truncated; newer versions write the tokenizer's length alone."""
    limits = read_optional_object(folder / LENGTH_FILE)
    if found := limits.whole("max_seq_length", default=0, high=MAX_CONTEXT_TOKENS):
        return found
    tokenizer = read_optional_object(folder / "tokenizer_config.json")
    longest = tokenizer.number("model_max_length", default=0.0)
    return int(longest) if 0 < longest <= MAX_CONTEXT_TOKENS else 0  # 1e30: no limit


def _mode(path: Path) -> PooledTokens:
    config = read_object(path)
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for mode, name in POOLING_FLAGS.items() if config.flag(name, default=False)]
    modes = given if isinstance(given, list) else [given]
    ensure(
        len(modes) == 1 and modes[0] in POOLED_TOKENS,
        "{path} pools by {given}; Malmoi supports one of mean, cls and lasttoken.",
        path=path,
        given=shown(given),
    )
    return POOLED_TOKENS[modes[0]]


def write_sentence_pooling(pooling: SentencePooling | None, folder: Path, width: int) -> None:
    """Writes the files of sentence-transformers; removes an earlier one without a pooling."""
    if pooling is None:
        (folder / MODULES_FILE).unlink(missing_ok=True)
        return
    names = {"Transformer": "", "Pooling": POOLING_FOLDER}
    names |= {"Normalize": "2_Normalize"} if pooling.normalize else {}
    modules = [
        {"idx": i, "name": str(i), "path": at, "type": f"sentence_transformers.models.{name}"}
        for i, (name, at) in enumerate(names.items())
    ]
    modes = POOLING_FLAGS.items()
    flags = {name: POOLED_TOKENS.get(mode) == pooling.tokens for mode, name in modes}
    for at in names.values():
        (folder / at).mkdir(exist_ok=True)
    write_json(folder / POOLING_FOLDER / "config.json", {"word_embedding_dimension": width} | flags)
    if pooling.max_tokens:
        length = {"max_seq_length": pooling.max_tokens, "do_lower_case": False}
        write_json(folder / LENGTH_FILE, length)
    write_json(folder / MODULES_FILE, modules)
