"""Opens a Hugging Face folder, a GGUF file or a hub id, and notes what did not fit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.checkpoint.sentence_pooling import SentencePooling, read_sentence_pooling
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
from malmoi.system.packages import optional_package
from malmoi.system.paths import local_model, similar_path
from malmoi.system.untrusted import (
    MAX_CLASSES,
    JsonObject,
    named,
    read_object,
    read_optional_object,
    shown,
)
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.hf_files import has_tokenizer

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
        generation=dict(_with_ids(read_optional_object(folder / "generation_config.json"))),
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


def read_model_json(path: Path) -> JsonObject:
    """A JSON object without which a folder is no model."""
    require_that(
        path.is_file(),
        "{at} is not a model folder: it has no {file}.",
        at=path.parent,
        file=path.name,
    )
    return read_object(path)


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
