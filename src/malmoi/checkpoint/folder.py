"""Checkpoints are Hugging Face folders: reading them, and noting what did not fit.

A folder of sentence-transformers says too how a text becomes one vector: modules.json lists the
modules (Transformer, Pooling, Normalize), 1_Pooling/config.json says which tokens are pooled, and
sentence_bert_config.json or the tokenizer where a text is truncated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.checkpoint.translate import check_labels, empty, fill_network, from_hf, is_same, is_tied
from malmoi.checkpoint.weights import (
    Weight,
    check_memory,
    check_sizes,
    memory_explained,
    read_weights,
)
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, ensure, first_line, nearest, require_that, required
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.pair import BERT, GPT, shipped
from malmoi.system.files import write_json
from malmoi.system.limits import MAX_CLASSES, MAX_CONTEXT_TOKENS, shown
from malmoi.system.packages import optional_package
from malmoi.system.paths import local_model, similar_path
from malmoi.system.untrusted import JsonObject, named, parse, read_object, read_text
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.hf_files import has_tokenizer

MODULES_FILE = "modules.json"
POOLING_FOLDER = "1_Pooling"
NORMALIZE_FOLDER = "2_Normalize"
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
    limits = read_model_json(folder / LENGTH_FILE, required=False)
    if found := limits.whole("max_seq_length", default=0, high=MAX_CONTEXT_TOKENS):
        return found
    tokenizer = read_model_json(folder / "tokenizer_config.json", required=False)
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
    names |= {"Normalize": NORMALIZE_FOLDER} if pooling.normalize else {}
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


HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.bpe", "*.model", "*.spm", "pytorch_model*.bin"]
OWN_MODEL_TYPE = "malmoi"  # model_type of models that Hugging Face cannot express
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
# what older folders say in config.json, and newer ones in generation_config.json
TRANSLATION_SETTINGS = ("decoder_start_token_id", "bad_words_ids")


@dataclass
class Checkpoint:
    """A network with everything needed to use it."""

    network: Network
    tokenizer: Tokenizer | None = None
    labels: tuple[str, ...] = ()  # of its classify or tag head
    generation: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # weights that were missing or unused
    # a task's own settings: config.json's "malmoi", and its problem_type
    extra: dict[str, Any] = field(default_factory=dict)
    source: Path | None = None  # where it was read from
    # config.json's model_type, architectures, and ids unless another file or the tokenizer has them
    source_config: dict[str, Any] = field(default_factory=dict)
    bits: int = 0  # bits per weight if the folder is quantised, else 0
    dtype: torch.dtype | None = None  # to save in; None: the network's
    sentence: SentencePooling | None = None  # of a folder that sentence-transformers opens

    def generation_setting(self, name: str) -> Any:
        """A setting from generation_config.json, else from config.json."""
        return self.generation.get(name, self.source_config.get(name))

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text: generation_config.json's, else the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.specials.eos
        ends = self.generation.get("eos_token_id", own)
        return tuple(end for end in (ends if isinstance(ends, list) else [ends]) if end is not None)

    @property
    def required_tokenizer(self) -> Tokenizer:
        return required(
            self.tokenizer,
            "This model's folder has no tokenizer; put its tokenizer.json beside the weights.",
        )


def read_checkpoint(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    packed: bool = False,
) -> Checkpoint:
    """Opens a folder written by us or by transformers, a GGUF file, or a hub id.

    With `packed`, a quantised folder's weights stay quantised if this machine has a kernel for
    them; otherwise they are unpacked and can be trained.
    """
    file = Path(source).expanduser()
    if file.suffix == ".gguf" and file.is_file():
        checkpoint = _read_gguf(file)
        checkpoint.network.eval().to(device=device, dtype=dtype)
        return checkpoint
    folder = find_on_hub(source)
    config = read_model_json(folder / "config.json")
    kind = config.text("model_type", default="")
    ensure(
        kind == OWN_MODEL_TYPE or kind in FAMILY_TABLES,
        "{where} says model_type {kind}, which Malmoi does not know.{hint}",
        where=config.where,
        kind=shown(kind),
        hint=nearest(kind, [*FAMILY_TABLES, OWN_MODEL_TYPE]),
    )
    tensors = read_weights(folder)
    weights: dict[str, Weight] = {**tensors}
    quantization = config.get("quantization_config")
    if quantization:
        from malmoi.checkpoint import quantized
        from malmoi.kernels.int8 import kernels

        packed = packed and kernels() is not None
    check_memory(tensors, dtype, folder, packed=packed)
    with memory_explained(folder):
        if quantization:
            weights = quantized.read_quantized(tensors, config, folder)
            weights = weights if packed else quantized.unpacked(weights)
        if kind == OWN_MODEL_TYPE:
            network, notes = _read_own(folder, config, weights)
        else:
            network, notes = from_hf(FAMILY_TABLES[kind], weights, config, folder)
        network.eval().to(device=device, dtype=dtype)
    problem = config.text("problem_type", default=None)
    extra = {} if problem is None else {"problem_type": problem}
    checkpoint = Checkpoint(
        network,
        Tokenizer.load(folder) if has_tokenizer(folder) else None,
        labels=_labels(config, network),
        generation=dict(
            _with_ids(read_model_json(folder / "generation_config.json", required=False))
        ),
        notes=notes,
        extra={**config.object("malmoi", default={}), **extra},
        source=folder.absolute(),
        source_config=_kept_config(config),
        bits=quantized.bits_of(quantization, folder) if quantization else 0,
        sentence=read_sentence_pooling(folder),
    )
    _check_fit(checkpoint, folder)
    return checkpoint


def _kept_config(config: JsonObject) -> dict[str, Any]:
    ids = _with_ids(config)
    names = ("model_type", *TOKEN_IDS, *TRANSLATION_SETTINGS)
    kept = {name: ids[name] for name in names if ids.get(name) is not None}
    return kept | {"architectures": config.list_of("architectures", str, default=[])}


def _labels(config: JsonObject, network: Network) -> tuple[str, ...]:
    """Class names in order of their ids; as many as the head has."""
    names = config.map_of("id2label", str, default={})
    config.require(
        all(number.isdecimal() and len(number) < 10 for number in names),
        "id2label",
        "class names by index, from 0",
    )
    labels = tuple(names[number] for number in sorted(names, key=int))
    check_labels(network, labels, config.where)
    return labels


def _with_ids(values: JsonObject) -> JsonObject:
    """The values, once their special tokens are checked to be ids (-1: none) or lists of ids."""
    for word in values.list_of("bad_words_ids", list, default=[]):
        JsonObject({"bad_words_ids": word}, values.where).list_of("bad_words_ids", int)
    values.whole("decoder_start_token_id", default=None)
    for name in TOKEN_IDS:
        if isinstance(values.get(name), list):
            values.list_of(name, int)
        else:
            values.whole(name, default=None, low=-1)
    return values


def _read_gguf(file: Path) -> Checkpoint:
    from malmoi.checkpoint.gguf import read_gguf  # imported here because few models need it

    with memory_explained(file):
        config, weights, tokenizer, generation = read_gguf(file)
        network, notes = from_hf(FAMILY_TABLES["llama"], {**weights}, config, file)
    checkpoint = Checkpoint(
        network, tokenizer, generation=generation, notes=notes, source=file.absolute()
    )
    _check_fit(checkpoint, file)
    return checkpoint


def _read_own(
    folder: Path, values: JsonObject, weights: dict[str, Weight]
) -> tuple[Network, tuple[str, ...]]:
    from malmoi.model import FeatureConfig

    heads = values.object("heads", default={})
    classes = {name: heads.whole(name, high=MAX_CLASSES) for name in heads}
    with named(values.where):
        config = ModelConfig.from_dict(values.object("model"))
        check_sizes(config, weights, values.where)
        features = (
            FeatureConfig.from_dict(values.object("features")) if values.get("features") else None
        )
        pooler = values.flag("pooler", default=False)
        network = empty(config, classes, pooler=pooler, features=features)
    shapes = {name: t.shape for name, t in network.state_dict().items()}
    wrong = [k for k, v in weights.items() if k not in shapes or v.shape != shapes[k]]
    embedding = weights.get("trunk.embed.token.weight")
    if config.tied and embedding is not None:
        wrong += [k for k, v in weights.items() if is_tied(k) and not is_same(v, embedding)]
    ensure(
        not wrong,
        "{folder}: the tensor {name} does not fit config.json.",
        folder=folder,
        name="".join(wrong[:1]),
    )
    return network, fill_network(network, weights, folder, {})


def _check_fit(checkpoint: Checkpoint, folder: Path) -> None:
    size = 0 if checkpoint.tokenizer is None else checkpoint.tokenizer.vocab_size
    ensure(
        size <= checkpoint.network.config.vocab,
        "{folder}: the tokenizer has {size} tokens, more than the model; they do not fit together.",
        folder=folder,
        size=size,
    )


def read_model_json(path: Path, *, required: bool = True) -> JsonObject:
    """A JSON object in a model's folder; empty if the file is absent and not `required`."""
    if path.is_file():
        return read_object(path)
    require_that(
        not required,
        "{at} is not a model folder: it has no {file}.",
        at=path.parent,
        file=path.name,
    )
    return JsonObject({}, str(path))


# ------------------------------------------------------------------ paths and hub ids


def find_on_hub(source: str | Path) -> Path:
    """The folder itself, one that comes with the package, or a hub model in the usual cache."""
    folder = shipped(source) or local_model(source)
    if folder is None:
        return _download(str(source))
    require_that(
        not folder.is_file(),
        "{source} is a file; give the folder that holds config.json and the weights.",
        source=source,
    )
    return folder


def _download(name: str) -> Path:
    hub = optional_package(
        "huggingface_hub",
        msg("There is no folder {name!r}, and a download from the hub", name=name),
    )
    try:
        return Path(hub.snapshot_download(name, allow_patterns=HUB_FILES))
    # every transport raises errors of its own; all become one message
    except Exception as error:
        raise MalmoiError(
            "There is no folder {name!r}, nor could the hub send one ({error}).{hint}",
            name=name,
            error=first_line(error),
            hint=similar_path(Path(name)) or nearest(name, (BERT, GPT)),
        ) from error


# ------------------------------------------------------------------ a larger vocabulary


@torch.no_grad()
def grow_vocabulary(
    checkpoint: Checkpoint, tokenizer: Tokenizer, pieces: Mapping[int, Sequence[int]]
) -> Checkpoint:
    """The model with this tokenizer: a new token starts as the mean of its old pieces.

    That holds for the input and the output matrix and an output bias; a token without old pieces
    starts as the mean of all (Hewitt 2021).
    """
    old = checkpoint.network
    special = old.features is not None or "generator" in old.heads or old.config.encoder_depth
    require_that(not special, "Tokens can be added only to a plain encoder or decoder.")
    config = replace(old.config, vocab=max(old.config.vocab, tokenizer.vocab_size))
    network = Network(config, old.classes, pooler=old.pooler is not None).to(old.device, old.dtype)
    before = old.state_dict()
    for name, weight in network.state_dict().items():
        tensor = before[name]
        if tensor.shape == weight.shape and len(tensor) != old.config.vocab:
            weight.copy_(tensor)
        else:
            _fill_rows(weight, tensor, pieces)
    network.tie()
    return replace(checkpoint, network=network.eval(), tokenizer=tokenizer, generation={})


def _fill_rows(weight: Tensor, old: Tensor, pieces: Mapping[int, Sequence[int]]) -> None:
    """Copies the old rows, and sets each new one to the mean of its pieces."""
    weight[: len(old)] = old
    mean = old.float().mean(0)
    weight[len(old) :] = mean.to(weight)
    for token, parts in pieces.items():
        weight[token] = (old[list(parts)].float().mean(0) if parts else mean).to(weight)
