"""Folders as people have them on the hub: opened as transformers opens them, or refused in a
sentence, and never silently as another model.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import folder_mutations
from hf_models import assert_same_logits, make_hf
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.checkpoint.translate import UNREAD, UNREAD_KINDS
from malmoi.errors import MalmoiError
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2

SEEDS = 5
# config.json of models that many people download, as they are on the hub
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": dict(
        activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
        bos_token_id=50256, embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02,
        layer_norm_epsilon=1e-05, model_type="gpt2", n_ctx=1024, n_embd=768, n_head=12, n_layer=12,
        n_positions=1024, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
        summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
        vocab_size=50257,
    ),
    "bert-base-multilingual-cased": dict(
        architectures=["BertForMaskedLM"], attention_probs_dropout_prob=0.1, directionality="bidi",
        hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=768, initializer_range=0.02,
        intermediate_size=3072, layer_norm_eps=1e-12, max_position_embeddings=512,
        model_type="bert", num_attention_heads=12, num_hidden_layers=12, pad_token_id=0,
        pooler_fc_size=768, pooler_num_attention_heads=12, pooler_num_fc_layers=3,
        pooler_size_per_head=128, pooler_type="first_token_transform", type_vocab_size=2,
        vocab_size=119547,
    ),
    "distilbert-sst2": dict(
        activation="gelu", architectures=["DistilBertForSequenceClassification"],
        attention_dropout=0.1, dim=768, dropout=0.1, finetuning_task="sst-2", hidden_dim=3072,
        id2label={"0": "NEGATIVE", "1": "POSITIVE"}, initializer_range=0.02,
        label2id={"NEGATIVE": 0, "POSITIVE": 1}, max_position_embeddings=512,
        model_type="distilbert", n_heads=12, n_layers=6, output_past=True, pad_token_id=0,
        qa_dropout=0.1, seq_classif_dropout=0.2, sinusoidal_pos_embds=False, tie_weights_=True,
        vocab_size=30522,
    ),
    "albert-base-v2": dict(
        architectures=["AlbertForMaskedLM"], attention_probs_dropout_prob=0, bos_token_id=2,
        classifier_dropout_prob=0.1, down_scale_factor=1, embedding_size=128, eos_token_id=3,
        gap_size=0, hidden_act="gelu_new", hidden_dropout_prob=0, hidden_size=768,
        initializer_range=0.02, inner_group_num=1, intermediate_size=3072, layer_norm_eps=1e-12,
        max_position_embeddings=512, model_type="albert", net_structure_type=0,
        num_attention_heads=12, num_hidden_groups=1, num_hidden_layers=12, num_memory_blocks=0,
        pad_token_id=0, type_vocab_size=2, vocab_size=30000,
    ),
    "smollm2": dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
        bos_token_id=0, eos_token_id=0, hidden_act="silu", hidden_size=576,
        initializer_range=0.041666666666666664, intermediate_size=1536, is_llama_config=True,
        max_position_embeddings=8192, mlp_bias=False, model_type="llama", num_attention_heads=9,
        num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05,
        rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
        torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True, vocab_size=49152,
    ),
    "modernbert-base": dict(
        architectures=["ModernBertForMaskedLM"], attention_bias=False, attention_dropout=0.0,
        bos_token_id=50281, classifier_activation="gelu", classifier_bias=False,
        classifier_dropout=0.0, classifier_pooling="mean", cls_token_id=50281, decoder_bias=True,
        deterministic_flash_attn=False, embedding_dropout=0.0, eos_token_id=50282,
        global_attn_every_n_layers=3, global_rope_theta=160000.0, gradient_checkpointing=False,
        hidden_activation="gelu", hidden_size=768, initializer_cutoff_factor=2.0,
        initializer_range=0.02, intermediate_size=1152, layer_norm_eps=1e-05, local_attention=128,
        local_rope_theta=10000.0, max_position_embeddings=8192, mlp_bias=False, mlp_dropout=0.0,
        model_type="modernbert", norm_bias=False, norm_eps=1e-05, num_attention_heads=12,
        num_hidden_layers=22, pad_token_id=50283, position_embedding_type="absolute",
        sep_token_id=50282, tie_word_embeddings=True, torch_dtype="float32",
        transformers_version="4.47.0.dev0", vocab_size=50368,
    ),
    "opus-mt-en-de": dict(
        _num_labels=3, activation_dropout=0.0, activation_function="swish", add_bias_logits=False,
        add_final_layer_norm=False, architectures=["MarianMTModel"], attention_dropout=0.0,
        bad_words_ids=[[58100]], bos_token_id=0, classif_dropout=0.0, classifier_dropout=0.0,
        d_model=512, decoder_attention_heads=8, decoder_ffn_dim=2048, decoder_layerdrop=0.0,
        decoder_layers=6, decoder_start_token_id=58100, decoder_vocab_size=58101, dropout=0.1,
        encoder_attention_heads=8, encoder_ffn_dim=2048, encoder_layerdrop=0.0, encoder_layers=6,
        eos_token_id=0, forced_eos_token_id=0, gradient_checkpointing=False, init_std=0.02,
        is_encoder_decoder=True, max_length=512, max_position_embeddings=512, model_type="marian",
        normalize_before=False, normalize_embedding=False, num_beams=6, num_hidden_layers=6,
        pad_token_id=58100, scale_embedding=True, share_encoder_decoder_embeddings=True,
        static_position_embeddings=True, transformers_version="4.22.0.dev0", use_cache=True,
        vocab_size=58101,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", folder_mutations.CLASSES)
def test_a_changed_folder_is_what_transformers_makes_of_it_or_is_refused(
    kind: str, tmp_path: Path
) -> None:
    for seed in range(SEEDS):
        said, outcome = folder_mutations.compare(kind, seed, tmp_path / str(seed))
        assert not outcome.startswith("wrong"), f"seed {seed}, {said}: {outcome}"


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_the_hubs_own_configs_are_read_without_a_word(name: str) -> None:
    theirs = HUB_CONFIGS[name]
    table = FAMILY_TABLES[theirs["model_type"]]
    table.read_config(theirs)
    assert not {n for n in table.unread(theirs, name) if not _is_listed(n)}


@pytest.mark.parametrize("kind", FAMILY_TABLES)
def test_every_setting_of_transformers_is_read_or_known_to_be_harmless(kind: str) -> None:
    theirs = transformers.CONFIG_MAPPING[kind]
    table = FAMILY_TABLES[kind]
    names = {field.name for field in dataclasses.fields(theirs)} | set(theirs().to_dict())
    names |= set(transformers.GenerationConfig._get_default_generation_params())
    known = {name.partition(".")[0] for name in table.known}
    assert not {name for name in names - known if not _is_listed(name)}
    assert theirs.attribute_map.items() <= table.aliases.items()


def _is_listed(name: str) -> bool:
    return name in UNREAD or UNREAD_KINDS.fullmatch(name) is not None


# ------------------------------------------------------------------ one by one


def changed(folder: Path, kind: str, name: str, **settings: Any) -> dict[str, Tensor]:
    """Writes a model with other settings; returns its tensors, to be changed and saved."""
    make_hf(kind, name).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return load_file(folder / "model.safetensors")


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    whole = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def test_an_output_matrix_of_its_own_is_not_tied_and_is_saved(tmp_path: Path) -> None:
    tensors = changed(tmp_path / "theirs", "gpt2", "GPT2LMHeadModel")
    tensors["lm_head.weight"] = torch.randn_like(tensors["transformer.wte.weight"])
    save(tensors, tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.notes[0].startswith("read as untied: lm_head.weight")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").eval()
    assert_same_logits(checkpoint.network, "GPT2LMHeadModel", theirs)
    write_checkpoint(checkpoint, tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], tensors["lm_head.weight"])
    assert not json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"]


@torch.no_grad()
def test_heads_under_their_other_name_are_read(tmp_path: Path) -> None:
    changed(tmp_path, "gpt2", "GPT2LMHeadModel", num_attention_heads=6)
    with pytest.raises(MalmoiError, match="n_head = 3 and num_attention_heads = 6, which are two"):
        read_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["n_head"]
    path.write_text(json.dumps(config))
    network = read_checkpoint(tmp_path).network
    assert network.config.heads == 6
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert_same_logits(network, "GPT2LMHeadModel", theirs)


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "sentence"),
    [
        ("bert", "BertForMaskedLM", "something.else", "holds something.else, which a bert with"),
        ("llama", "LlamaForCausalLM", "model.layers.0.self_attn.q_proj.bias", "q_proj.bias, which"),
        ("gpt2", "GPT2LMHeadModel", "transformer.h.3.ln_1.weight", "h.3.ln_1.weight, which a gpt2"),
        (
            "marian",
            "MarianMTModel",
            "model.decoder.embed_tokens.weight",
            "is not equal to its copy under another name",
        ),
        (
            "marian",
            "MarianMTModel",
            "model.encoder.embed_positions.weight",
            "embed_positions.weight, which a marian",
        ),
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused(
    kind: str, name: str, tensor: str, sentence: str, tmp_path: Path
) -> None:
    tensors = changed(tmp_path, kind, name)
    save(tensors | {tensor: torch.randn(77, 24)}, tmp_path)
    with pytest.raises(MalmoiError, match=sentence):
        read_checkpoint(tmp_path)


@torch.no_grad()
def test_a_marian_whose_output_is_not_tied_keeps_one_embedding(tmp_path: Path) -> None:
    """transformers then has four matrices; three are equal in every model that was trained."""
    tensors = changed(tmp_path / "theirs", "marian", "MarianMTModel", tie_word_embeddings=False)
    shared = tensors["model.shared.weight"]
    tensors |= {f"model.{side}.embed_tokens.weight": shared for side in ("encoder", "decoder")}
    save(tensors | {"lm_head.weight": torch.randn_like(shared)}, tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.notes == ()
    write_checkpoint(checkpoint, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        theirs = transformers.MarianMTModel.from_pretrained(tmp_path / folder).eval()
        assert_same_logits(checkpoint.network, "MarianMTModel", theirs)


@torch.no_grad()
def test_of_two_biases_the_decoders_counts(tmp_path: Path) -> None:
    tensors = changed(tmp_path / "theirs", "bert", "BertForMaskedLM")
    tensors["cls.predictions.decoder.bias"] = torch.randn(77)
    save(tensors, tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.notes[0].endswith(
        "predictions.bias differs from cls.predictions.decoder.bias"
    )
    write_checkpoint(checkpoint, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / folder).eval()
        assert_same_logits(checkpoint.network, "BertForMaskedLM", theirs)


def test_our_own_folders_do_not_tie_what_differs_either(tmp_path: Path) -> None:
    config = gpt2(vocab=60, width=16, depth=1, heads=2, positions="rotary")
    write_checkpoint(Checkpoint(initialise(Network(config, {"lm": 0}), 0)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save(tensors | {"heads.lm.weight": torch.randn(60, 16)}, tmp_path)
    with pytest.raises(MalmoiError, match=r"heads.lm.weight does not fit config.json"):
        read_checkpoint(tmp_path)


def test_heads_of_another_class_are_named(tmp_path: Path) -> None:
    """As in bert-base-uncased, whose class has no next-sentence head."""
    changed(tmp_path, "bert", "BertForPreTraining", architectures=["BertForMaskedLM"])
    (note,) = read_checkpoint(tmp_path).notes
    assert note.startswith("not used, since its class has no such head: cls.seq_relationship.")


def test_unknown_settings_are_named_and_code_is_refused(tmp_path: Path) -> None:
    changed(tmp_path, "bert", "BertForMaskedLM", num_atention_heads=4)
    (note,) = read_checkpoint(tmp_path).notes
    assert "num_atention_heads. Did you mean 'num_attention_heads'?" in note
    changed(tmp_path, "bert", "BertForMaskedLM", auto_map={}, architectures=["JinaBertModel"])
    with pytest.raises(MalmoiError, match=r"code of its own .* JinaBertModel is none of"):
        read_checkpoint(tmp_path)


def test_shards_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    tensors = changed(tmp_path, "gpt2", "GPT2LMHeadModel")
    (tmp_path / "model.safetensors").unlink()
    name = "transformer.wte.weight"
    other = {name: tensors[name] + 1}
    for file, some in (("a.safetensors", tensors), ("b.safetensors", other)):
        save_file(some, tmp_path / file)
    places = dict.fromkeys(tensors, "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places | {name: "b.safetensors"}}))
    with pytest.raises(MalmoiError, match="two of its files hold a different"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": places | {"lm_head.weight": "a.safetensors"}}))
    with pytest.raises(MalmoiError, match=r"names the tensor 'lm_head.weight', which is in none"):
        read_checkpoint(tmp_path)


def test_a_bare_trunk_is_saved_as_one(tmp_path: Path) -> None:
    make_hf("gpt2", "GPT2Model").save_pretrained(tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert "lm" in checkpoint.network.heads
    write_checkpoint(checkpoint, tmp_path / "ours")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before.keys() == after.keys()
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["GPT2Model"]
