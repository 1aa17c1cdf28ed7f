"""Which keys of a config.json may be left unread, and why they cannot change what a model computes.

The names are transformers' own, of versions 4 and 5: the attributes of its base class and of each
family's class, the settings of `generate`, and what older versions and popular models of the hub
left in their files. A test compares them with the transformers that is installed.
"""

import re
from collections.abc import Mapping
from typing import Any

from malmoi.checkpoint.table import Table
from malmoi.errors import MalmoiError, nearest
from malmoi.messages import msg

HARMLESS = {
    "names, classes and labels": "_name_or_path name_or_path model_type architectures id2label "
    "label2id num_labels _num_labels problem_type finetuning_task task_specific_params "
    "tokenizer_class model_name language languages license auto_map custom_pipelines prefix "
    "sentence_transformers transformers_version _commit_hash unsloth_version unsloth_fixed "
    "transformers.js_config is_llama_config malmoi",
    "how numbers are kept and computed": "dtype torch_dtype quantization_config use_bfloat16 "
    "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_"
    "internal _experts_implementation experts_implementation chunk_size_feed_forward use_cache "
    "gradient_checkpointing reference_compile deterministic_flash_attn repad_logits_with_grad "
    "reorder_and_upcast_attn pretraining_tp torchscript xla_device kernel_config gpu_id",
    "what is returned": "return_dict output_attentions output_hidden_states output_past "
    "tie_last_hidden_states keys_to_ignore_at_inference use_return_dict sparse_prediction "
    "sparse_pred_ignore_index",
    "training alone": "initializer_range initializer_factor initializer_cutoff_factor init_std "
    "tf_legacy_loss sinusoidal_pos_embds tie_weights_",
    "classes that are not opened": "is_encoder_decoder cross_attention_hidden_size "
    "tie_encoder_decoder",
    "never read by such a class": "layer_norm_eps n_ctx n_special predict_special_tokens "
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type net_structure_type gap_size num_memory_blocks "
    "down_scale_factor add_bias_logits extra_pos_embeddings model_max_length max_seq_length",
    "generation": "bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty "
    "do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty "
    "epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids guidance_scale "
    "length_penalty max_length max_new_tokens max_time min_length min_new_tokens min_p "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores "
    "output_logits penalty_alpha remove_invalid_values renormalize_logits repetition_penalty "
    "return_dict_in_generate sequence_bias suppress_tokens temperature top_k top_p typical_p "
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind num_assistant_tokens "
    "num_assistant_tokens_schedule cache_implementation",
}
UNREAD = frozenset(name for names in HARMLESS.values() for name in names.split())
# every kind of dropout, and the ids of special tokens, which the tokenizer decides
UNREAD_KINDS = re.compile(r".*(dropout|layerdrop|pdrop).*|.*_token_id")


def check_keys(table: Table, theirs: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A note about keys that neither a table reads nor the lists above explain.

    transformers ignores them too; only code that came with the model could read them.
    """
    if "auto_map" in theirs and _is_foreign(table, theirs):
        raise MalmoiError(
            "{where} asks for code of its own (auto_map), which Malmoi does not run: its "
            "class {architectures} is none of transformers.",
            where=where,
            architectures=theirs["architectures"][0],
        )
    unknown = [
        name
        for name in table.unread(theirs, where)
        if name not in UNREAD and not UNREAD_KINDS.fullmatch(name)
    ]
    if not unknown:
        return ()
    hint = nearest(unknown[0], table.known)
    names = ", ".join(unknown[:4])
    return (
        msg(
            "config.json has settings that no {model_type} of transformers has: {names}.{hint}",
            model_type=table.model_type,
            names=names,
            hint=hint,
        ),
    )


def _is_foreign(table: Table, theirs: Mapping[str, Any]) -> bool:
    classes = theirs.get("architectures") or [""]
    return isinstance(classes, list) and classes[0] not in ("", *table.architectures)
