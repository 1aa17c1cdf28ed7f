"""Folders of transformers as people have them: settings left out or under other names, weights
copied, untied, renamed and in shards. What Malmoi makes of each is compared with transformers.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import assert_same_logits, make_hf
from malmoi.checkpoint import read_checkpoint, write_checkpoint
from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.errors import MalmoiError

CLASSES = {
    "bert": ("BertForMaskedLM", "BertForPreTraining", "BertForTokenClassification"),
    "roberta": ("RobertaForMaskedLM", "RobertaForSequenceClassification"),
    "xlm-roberta": ("XLMRobertaForMaskedLM",),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertForSequenceClassification"),
    "electra": ("ElectraForMaskedLM", "ElectraForPreTraining"),
    "albert": ("AlbertForMaskedLM", "AlbertForPreTraining"),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertForTokenClassification"),
    "gpt2": ("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    "openai-gpt": ("OpenAIGPTLMHeadModel",),
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "marian": ("MarianMTModel",),
}
SIZES = ("vocab", "width", "depth", "hidden", "context", "embed_width", "encoder_depth", "kv_heads")
HUB_KEYS: dict[str, Any] = {
    "transformers_version": "4.30.0",
    "torch_dtype": "float32",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "use_cache": True,
    "gradient_checkpointing": False,
    "output_past": True,
    "finetuning_task": "sst-2",
    "_num_labels": 5,
    "bad_words_ids": [[1]],
    "num_beams": 6,
    "max_length": 512,
    "n_ctx": 1024,
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "classifier_dropout": None,
    "summary_first_dropout": 0.1,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "unsloth_version": "2025.1",
}
UNSUPPORTED: dict[str, Any] = {
    "position_embedding_type": "relative_key",
    "is_decoder": True,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "inner_group_num": 2,
    "share_encoder_decoder_embeddings": False,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "attention_bias": True,
    "per_layer_config": {"0": {"hidden_act": "relu"}},
}


@dataclass
class Folder:
    """A folder that is being changed, in memory."""

    kind: str
    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    written_as: str = "one file"
    must_open: bool = True

    @property
    def table(self) -> Any:
        return FAMILY_TABLES[self.kind]

    @property
    def tied_names(self) -> tuple[str, str]:
        """The output matrix, and the embedding to which it is tied."""
        ours = {rule.ours: rule.theirs[0] for rule in reversed(self.table.rules)}
        head = ours.get("heads.mlm.weight", ours.get("heads.lm.weight"))
        return head, ours["trunk.embed.token.weight"]

    def noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(5))

    def write(self, folder: Path, rng: random.Random) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        if self.written_as == "shards":
            write_shards(tensors, folder, rng)
        elif self.written_as == "pickle":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_shards(tensors: dict[str, Tensor], folder: Path, rng: random.Random) -> None:
    """Three files in any order, with one tensor in two of them."""
    names = sorted(tensors)
    rng.shuffle(names)
    files = [f"model-{i}-of-3.safetensors" for i in rng.sample((1, 2, 3), 3)]
    parts = {file: names[i::3] for i, file in enumerate(files)}
    parts[files[0]] = [*parts[files[0]], *parts[files[1]][:1]]
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file, {"format": "pt"})
    places = {name: file for file, some in parts.items() for name in some}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ------------------------------------------------------------------ what is changed


def drop_settings(folder: Folder, rng: random.Random) -> None:
    """Defaults stand in for settings that say nothing about sizes."""
    sizes = {field.theirs for field in folder.table.fields if field.ours in SIZES}
    kept = {*sizes, "model_type", "architectures", "id2label", "label2id", "pad_token_id"}
    kept |= {
        "max_position_embeddings",
        "decoder_vocab_size",
        "encoder_ffn_dim",
        "encoder_attention_heads",
    }
    kept |= {"rope_parameters"} if folder.kind == "modernbert" else set()
    names = [name for name in folder.config if name not in kept and "heads" not in name]
    for name in rng.sample(names, min(len(names), 4)):
        del folder.config[name]


def rename_settings(folder: Folder, rng: random.Random) -> None:
    names = transformers.CONFIG_MAPPING[folder.kind].attribute_map
    for alias, name in names.items():
        if name in folder.config and rng.random() < 0.7:
            folder.config[alias] = folder.config[name]
            if rng.random() < 0.7:
                del folder.config[name]


def two_values(folder: Folder, rng: random.Random) -> None:
    names = transformers.CONFIG_MAPPING[folder.kind].attribute_map
    for alias, name in names.items():
        if "heads" in alias and name in folder.config:
            folder.config[alias] = 6
            folder.must_open = False


def add_hub_settings(folder: Folder, rng: random.Random) -> None:
    for name in rng.sample(sorted(HUB_KEYS), 5):
        folder.config.setdefault(name, HUB_KEYS[name])


def add_unknown_setting(folder: Folder, rng: random.Random) -> None:
    folder.config[rng.choice(("favourite_colour", "num_atention_heads"))] = 4


def add_unsupported_setting(folder: Folder, rng: random.Random) -> None:
    name = rng.choice(sorted(UNSUPPORTED))
    folder.config[name] = UNSUPPORTED[name]
    folder.must_open = False


def untie(folder: Folder, rng: random.Random) -> None:
    head, embedding = folder.tied_names
    folder.tensors[head] = folder.noise(folder.tensors[embedding])
    said = rng.choice((None, True, "untouched"))
    if said is None:
        folder.config.pop("tie_word_embeddings", None)
    elif said is True:
        folder.config["tie_word_embeddings"] = True


def copy_tied(folder: Folder, rng: random.Random) -> None:
    head, embedding = folder.tied_names
    folder.tensors.setdefault(head, folder.tensors[embedding])
    for copy, name in folder.table.copies.items():
        folder.tensors[copy] = folder.tensors[name]


def keep_only_the_head(folder: Folder, rng: random.Random) -> None:
    head, embedding = folder.tied_names
    if folder.config.get("tie_word_embeddings") and "LM" in folder.name:
        folder.tensors[head] = folder.tensors.pop(embedding)


def two_biases(folder: Folder, rng: random.Random) -> None:
    for one, other in folder.table.twins.items():
        if other in folder.tensors:
            folder.tensors[one] = folder.noise(folder.tensors[other])


def old_norms(folder: Folder, rng: random.Random) -> None:
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for old, new in ends.items():
        folder.tensors = {name.replace(old, new): t for name, t in folder.tensors.items()}


def drop_prefix(folder: Folder, rng: random.Random) -> None:
    """As the hub's gpt2; transformers does not understand it for the trunk of a Marian."""
    if folder.kind not in ("marian", "modernbert", "llama"):
        prefix = folder.table.prefix
        folder.tensors = {name.removeprefix(prefix): t for name, t in folder.tensors.items()}


def change_file(folder: Folder, rng: random.Random) -> None:
    folder.written_as = rng.choice(("shards", "shards", "pickle"))


def add_buffers(folder: Folder, rng: random.Random) -> None:
    for end in folder.table.buffers:
        folder.tensors[f"{folder.table.prefix}h.0{end}"] = torch.arange(5)


def add_other_head(folder: Folder, rng: random.Random) -> None:
    heads = set(folder.table.architectures[folder.name])
    rules = [r for r in folder.table.rules if r.head and r.head not in heads]
    taken = {name for r in folder.table.rules if r.head in heads for name in r.theirs}
    for name in [name for r in rules for name in r.theirs if name not in taken][:3]:
        folder.tensors.setdefault(name, torch.randn(4, 4))


def add_strange_tensor(folder: Folder, rng: random.Random) -> None:
    name = rng.choice(("something.else", f"{folder.table.prefix}extra.weight"))
    folder.tensors[name] = torch.randn(3)
    folder.must_open = False


def fewer_layers(folder: Folder, rng: random.Random) -> None:
    field = next(field for field in folder.table.fields if field.ours == "depth")
    folder.config[field.theirs] = 2
    folder.config.pop("layer_types", None)
    folder.must_open = False


def lose_tensor(folder: Folder, rng: random.Random) -> None:
    folder.tensors.pop(rng.choice(sorted(folder.tensors)))
    folder.must_open = False


def change_copy(folder: Folder, rng: random.Random) -> None:
    for copy, name in folder.table.copies.items():
        folder.tensors[copy] = folder.noise(folder.tensors[name])
        folder.must_open = False


def null_setting(folder: Folder, rng: random.Random) -> None:
    names = [f.theirs for f in folder.table.fields if f.theirs in folder.config]
    folder.config[rng.choice(names)] = None
    folder.must_open = False


MUTATIONS: tuple[Callable[[Folder, random.Random], None], ...] = (
    drop_settings,
    rename_settings,
    two_values,
    add_hub_settings,
    add_unknown_setting,
    add_unsupported_setting,
    untie,
    copy_tied,
    two_biases,
    add_buffers,
    add_other_head,
    add_strange_tensor,
    fewer_layers,
    change_copy,
    null_setting,
    keep_only_the_head,
    lose_tensor,
    old_norms,
    drop_prefix,
    change_file,
)


# ------------------------------------------------------------------ what comes of it


def compare(kind: str, seed: int, scratch: Path) -> tuple[str, str]:
    """What was done to a folder of this family, and what came of it: right, refused or wrong."""
    rng = random.Random(f"{kind} {seed}")
    name = rng.choice(CLASSES[kind])
    make_hf(kind, name).save_pretrained(scratch / "made")
    config = json.loads((scratch / "made" / "config.json").read_text())
    folder = Folder(kind, name, config, load_file(scratch / "made" / "model.safetensors"))
    chosen = rng.sample(MUTATIONS, rng.choice((1, 1, 2, 3)))
    for change in sorted(chosen, key=MUTATIONS.index):  # names are changed last
        change(folder, rng)
    said = f"{name}: {', '.join(change.__name__ for change in chosen)}"
    folder.write(scratch / "theirs", rng)
    return said, _outcome(folder, scratch)


@torch.no_grad()
def _outcome(folder: Folder, scratch: Path) -> str:
    kind = getattr(transformers, folder.name)
    try:
        checkpoint = read_checkpoint(scratch / "theirs")
    except MalmoiError as error:
        return f"wrong: refused: {error}" if folder.must_open else f"refused: {error}"
    if not set(folder.table.architectures[folder.name]) <= set(checkpoint.network.heads):
        return "wrong: no head" if folder.must_open else "refused: opened without its head"
    try:
        theirs = kind.from_pretrained(scratch / "theirs").eval()
    except Exception as error:
        return f"refused by transformers: {error!r:.80}"
    if any("newly initialised" in note for note in checkpoint.notes):
        return "refused: with new weights"
    try:
        assert_same_logits(checkpoint.network, folder.name, theirs)
        write_checkpoint(checkpoint, scratch / "ours")
        back = kind.from_pretrained(scratch / "ours").eval()
        assert_same_logits(checkpoint.network, folder.name, back)
    except Exception as error:
        return f"wrong: {error!r:.300}"
    return "right"
