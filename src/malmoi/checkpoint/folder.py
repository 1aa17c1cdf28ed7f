"""Checkpoints are Hugging Face folders: reading them, and noting what did not fit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.checkpoint.sentence_pooling import SentencePooling, read_sentence_pooling
from malmoi.checkpoint.sizes import check_memory, check_sizes, memory_explained
from malmoi.checkpoint.translate import (
    check_labels,
    empty,
    fill_network,
    from_hf,
    is_same,
    is_tied,
)
from malmoi.checkpoint.weights import Weight, read_weights
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, UsageError, first_line, nearest
from malmoi.model import Network
from malmoi.pair import shipped
from malmoi.system.limits import MAX_CLASSES, shown
from malmoi.system.paths import local_model, similar_path
from malmoi.system.untrusted import JsonObject, named, read_object
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.hf_files import has_tokenizer

if TYPE_CHECKING:
    from malmoi.model import FeatureConfig

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
        if self.tokenizer is None:
            raise UsageError(
                "This model's folder has no tokenizer; put its tokenizer.json beside the weights."
            )
        return self.tokenizer


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
    if kind != OWN_MODEL_TYPE and kind not in FAMILY_TABLES:
        hint = nearest(kind, [*FAMILY_TABLES, OWN_MODEL_TYPE])
        raise MalmoiError(
            "{where} says model_type {kind}, which Malmoi does not know.{hint}",
            where=config.where,
            kind=shown(kind),
            hint=hint,
        )
    tensors = read_weights(folder)
    weights: dict[str, Weight] = {**tensors}
    quantization = config.get("quantization_config")
    if quantization:
        from malmoi.checkpoint import quantized

        packed = packed and quantized.has_kernel()
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
    checkpoint = Checkpoint(
        network,
        _read_tokenizer(folder),
        labels=_labels(config, network),
        generation=dict(
            _with_ids(read_model_json(folder / "generation_config.json", required=False))
        ),
        notes=notes,
        extra=_extra(config),
        source=folder.absolute(),
        source_config=_kept_config(config),
        bits=quantized.bits_of(quantization, folder) if quantization else 0,
        sentence=read_sentence_pooling(folder),
    )
    _check_fit(checkpoint, folder)
    return checkpoint


def _extra(config: JsonObject) -> dict[str, Any]:
    extra = dict(config.object("malmoi", default={}))
    if config.get("problem_type") is not None:
        extra["problem_type"] = config.text("problem_type")
    return extra


def _kept_config(config: JsonObject) -> dict[str, Any]:
    ids = _with_ids(config)
    names = ("model_type", *TOKEN_IDS, *TRANSLATION_SETTINGS)
    kept = {name: ids[name] for name in names if ids.get(name) is not None}
    return kept | {"architectures": config.list_of("architectures", str, default=[])}


def _labels(config: JsonObject, network: Network) -> tuple[str, ...]:
    """Class names in order of their ids; as many as the head has."""
    names = config.map_of("id2label", str, default={})
    numbers = {
        number: name for number, name in names.items() if number.isdecimal() and len(number) < 10
    }
    if len(numbers) < len(names):
        raise config.wrong("id2label", "class names by index, from 0")
    labels = tuple(numbers[number] for number in sorted(numbers, key=int))
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
        read = read_gguf(file)
        network, notes = from_hf(FAMILY_TABLES["llama"], {**read.weights}, read.config, file)
    checkpoint = Checkpoint(
        network, read.tokenizer, generation=read.generation, notes=notes, source=file.absolute()
    )
    _check_fit(checkpoint, file)
    return checkpoint


def _read_own(
    folder: Path, values: JsonObject, weights: dict[str, Weight]
) -> tuple[Network, tuple[str, ...]]:
    heads = values.object("heads", default={})
    classes = {name: heads.whole(name, high=MAX_CLASSES) for name in heads}
    with named(values.where):
        config = ModelConfig.from_dict(values.object("model"))
        check_sizes(config, weights, values.where)
        features = _feature_config(values) if values.get("features") else None
        pooler = values.flag("pooler", default=False)
        network = empty(config, classes, pooler=pooler, features=features)
    shapes = {name: t.shape for name, t in network.state_dict().items()}
    wrong = [k for k, v in weights.items() if k not in shapes or v.shape != shapes[k]]
    embedding = weights.get("trunk.embed.token.weight")
    if config.tied and embedding is not None:
        wrong += [k for k, v in weights.items() if is_tied(k) and not is_same(v, embedding)]
    if wrong:
        raise MalmoiError(
            "{folder}: the tensor {wrong} does not fit config.json; they belong to different "
            "models.",
            folder=folder,
            wrong=wrong[0],
        )
    return network, fill_network(network, weights, folder, {})


def _feature_config(values: JsonObject) -> "FeatureConfig":
    from malmoi.model import FeatureConfig

    return FeatureConfig.from_dict(values.object("features"))


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if has_tokenizer(folder) else None


def _check_fit(checkpoint: Checkpoint, folder: Path) -> None:
    tokenizer = checkpoint.tokenizer
    vocab = checkpoint.network.config.vocab
    if tokenizer is not None and tokenizer.vocab_size > vocab:
        raise MalmoiError(
            "{folder}: the tokenizer has {vocab_size} tokens but the model only {vocab}; they "
            "do not belong together.",
            folder=folder,
            vocab_size=tokenizer.vocab_size,
            vocab=vocab,
        )


def read_model_json(path: Path, *, required: bool = True) -> JsonObject:
    """A JSON object in a model's folder; empty if the file is absent and not `required`."""
    if path.is_file():
        return read_object(path)
    if required:
        raise UsageError(
            "{parent} is not a model folder: it has no {path}.", parent=path.parent, path=path.name
        )
    return JsonObject({}, str(path))


# ------------------------------------------------------------------ paths and hub ids


def find_on_hub(source: str | Path) -> Path:
    """The folder itself, one that comes with the package, or a hub model in the usual cache."""
    folder = shipped(source) or local_model(source)
    if folder is None:
        return _download(str(source))
    if folder.is_file():
        raise UsageError(
            "{source} is a file; give the folder that holds config.json and the weights.",
            source=source,
        )
    return folder


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        hint = "install it with: pip install huggingface_hub"
        raise MalmoiError(
            "There is no folder {name!r}; downloading from the hub needs huggingface_hub, {hint}.",
            name=name,
            hint=hint,
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    # every transport raises errors of its own; all become one message
    except Exception as error:
        raise MalmoiError(
            "There is no folder {name!r}, and it could not be downloaded from the hub "
            "({error}).{hint}",
            name=name,
            error=first_line(error),
            hint=similar_path(Path(name)),
        ) from error
