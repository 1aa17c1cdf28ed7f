"""Builds a task's network: a pre-trained trunk, a new head, and special tokens for a GPT."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from malmoi.adapters.attach import attach_adapter
from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import require_that
from malmoi.evaluation.features import AnswerItem, TrainingItem
from malmoi.evaluation.kinds import head_kind, task_prompt
from malmoi.evaluation.task import Example, Task, read_columns
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.frozen_features import feature_config
from malmoi.inference.predict import Predictor, Verbalizer
from malmoi.inference.predictors import CHOICE, SENTENCE, WRITING, TaskHead
from malmoi.inference.score import encode_pairs, fit_context
from malmoi.model import Network, initialise
from malmoi.tokenizer import Tokenizer, TokenRow
from malmoi.tokenizer.chat_template import with_template
from malmoi.tokenizer.extend import add_frame_tokens, frame_with_end, is_framed
from malmoi.training.losses import IGNORE_LABEL

SENTENCE_DROPOUT = 0.1  # SimCSE's
MAX_ROW_TOKENS = 512  # default limit of a row


def build_task_network(
    start: Checkpoint, task: Task, labels: tuple[str, ...], settings: FinetuneConfig
) -> Checkpoint:
    """Builds the task's network: the pre-trained trunk, one new output layer, a GPT's new tokens.

    With an adapter only it and the new layer are trained; with label words there is no new layer.
    """
    said = _says_words(start, task, settings)
    causal = start.network.config.pool == "last"
    output = head_kind(task).output
    if output is SENTENCE:
        return _sentence_encoder(start, task, settings)
    head = "lm" if said else output.head
    tokenizer = _task_tokenizer(start, output, settings, framed=causal and not said)
    config = start.network.config
    config = replace(config, vocab=max(config.vocab, tokenizer.vocab_size))
    if settings.contrastive and start.sentence is not None:  # the sentence vector is classified
        config = replace(config, pool=start.sentence.tokens, pooler="none", head_transform=False)
    require_that(
        not settings.lm or causal,
        "lm (the auxiliary language model of GPT-1) needs a GPT; this model is bidirectional.",
    )
    heads = {"lm": 0} if settings.lm else {}
    # transformers' multiple-choice GPT also has a language head; tied, it costs nothing
    heads |= dict.fromkeys(output.beside, 0) if causal else {}
    small = feature_config(start, task, settings)
    heads |= {head: 0 if said else len(labels)}
    seed = settings.seed if settings.init_seed is None else settings.init_seed
    network = Network(config, heads, features=small)
    _fill(network, start, settings, seed, head if start.labels == labels else None)
    _freeze(network, settings)
    if settings.adapter.kind != "none":
        _hold(network)
        attach_adapter(network, settings.adapter, tokenizer, settings.seed)
    extra = _reading_settings(task, settings, network.config.context, causal=causal)
    if said:
        words = task_verbalizer(task, labels)
        extra["words"] = {"prompt": words.prompt, "said": list(words.said)}  # a list, as in JSON
    return Checkpoint(
        network,
        tokenizer,
        labels,
        generation=dict(start.generation),
        extra=extra,
        source_config=start.source_config,
    )


def _task_tokenizer(
    start: Checkpoint, output: TaskHead, settings: FinetuneConfig, *, framed: bool
) -> Tokenizer:
    """The tokenizer with a chat template to write, or with a GPT's tokens around a text."""
    if output is WRITING:
        _check_writer(start, settings)
        return with_template(start.required_tokenizer)
    tokenizer = start.required_tokenizer
    return _framed(tokenizer, settings.adapter.kind) if framed else tokenizer


def task_facts(task: Task) -> dict[str, Any]:
    """What a model's folder says of its task."""
    columns = read_columns(task)
    return {"task": task.name, "kind": task.kind, **({"columns": columns} if columns else {})}


def _reading_settings(
    task: Task, settings: FinetuneConfig, context: int, *, causal: bool
) -> dict[str, Any]:
    """What a model's folder says of its task, and of how the network reads a row."""
    output = head_kind(task).output
    length = min(settings.length or MAX_ROW_TOKENS, context)
    facts = {**task_facts(task), "length": length, "stride": min(settings.stride, length)}
    where_they_hold = {
        "both": causal and task.both_orders,
        "choice_apart": causal and output is CHOICE,
        "problem_type": output.problem_type,
        "answer_tokens": task.max_answer_tokens if output is WRITING else None,
    }
    return facts | {name: value for name, value in where_they_hold.items() if value}


def _check_writer(start: Checkpoint, settings: FinetuneConfig) -> None:
    require_that(
        "lm" in start.network.heads, "The kind writing needs a GPT; this model has no lm head."
    )
    require_that(
        not settings.freeze and not settings.features,
        "The kind writing adds no layer to train: use --adapter lora or freeze_layers.",
    )


def _sentence_encoder(start: Checkpoint, task: Task, settings: FinetuneConfig) -> Checkpoint:
    """The encoder itself, without a new layer, and how its tokens are pooled."""
    config = start.network.config
    require_that(
        config.pool != "last",
        "{kind} needs a bidirectional model such as a BERT, not a GPT.",
        kind=task.kind,
    )
    require_that(
        settings.adapter.kind == "none" and not settings.features and not settings.lm,
        "{kind} trains the encoder itself: leave adapter, features, lm out.",
        kind=task.kind,
    )
    # two passes of one sentence differ by dropout, which models trained here may lack
    config = replace(config, dropout=config.dropout or SENTENCE_DROPOUT)
    network = Network(config, {}, pooler=start.network.pooler is not None)
    _fill(network, start, settings, settings.seed)
    _freeze(network, settings)
    before = start.sentence or SentencePooling()
    length = min(settings.length or before.max_tokens or MAX_ROW_TOKENS, config.context)
    pooling = replace(before, normalize=True, max_tokens=length)
    return Checkpoint(
        network,
        start.tokenizer,
        generation=dict(start.generation),
        extra={**task_facts(task), "length": length},
        source_config=start.source_config,
        sentence=pooling,
    )


def _says_words(start: Checkpoint, task: Task, settings: FinetuneConfig) -> bool:
    """Whether label words are trained instead of a new head: on request, or with a soft prompt."""
    can = "lm" in start.network.heads and head_kind(task).exclusive
    require_that(
        not settings.words or can,
        "words needs a language model and a classification task, not {task} on this model.",
        task=task.name,
    )
    return can and settings.adapter.kind == "prompt" if settings.words is None else settings.words


@lru_cache(maxsize=1)  # shared by all runs, so that cached encodings are reused
def _framed(tokenizer: Tokenizer, adapter: str) -> Tokenizer:
    if is_framed(tokenizer):
        return tokenizer
    return add_frame_tokens(tokenizer) if adapter == "none" else frame_with_end(tokenizer)


def _transferred(network: Network, settings: FinetuneConfig) -> int:
    """How many of the pre-trained layers are kept."""
    distinct = network.config.distinct
    layers = distinct if settings.layers_transferred is None else settings.layers_transferred
    require_that(
        0 <= layers <= distinct,
        "layers_transferred={layers}: this model has {distinct} layers, so give 0 to {distinct}.",
        layers=layers,
        distinct=distinct,
    )
    return layers


@torch.no_grad()
def _fill(
    network: Network,
    start: Checkpoint,
    settings: FinetuneConfig,
    seed: int,
    head: str | None = None,
) -> None:
    """Draws only what is new, since that takes seconds, and copies the rest, or its first rows."""
    weights = network.state_dict()
    layers = _transferred(network, settings)
    known = {} if settings.from_scratch else _inherited(network, start.network, head, layers)
    found = {
        name: old
        for name, old in known.items()
        if name in weights and old.shape[1:] == weights[name].shape[1:]
    }
    whole = {name for name, old in found.items() if old.shape == weights[name].shape}
    initialise(network, seed, skip=whole)
    for name, old in found.items():
        weights[name][: len(old)] = old.to(weights[name])


def _inherited(
    network: Network, old: Network, head: str | None, layers: int
) -> dict[str, torch.Tensor]:
    """The old network's weights that the new one starts from: a pooler goes with the last layer."""
    kinds = ("trunk.", "heads.lm.") + ((f"heads.{head}.",) if head else ())
    kinds += ("pooler.",) if layers == network.config.distinct else ()
    fresh = tuple(f"trunk.blocks.{i}." for i in range(layers, network.config.distinct))
    state = old.state_dict()
    kept = [name for name in state if name.startswith(kinds) and not name.startswith(fresh)]
    return _learnt_transform(old) | {name: state[name] for name in kept}


def _learnt_transform(old: Network) -> dict[str, torch.Tensor]:
    """The transform of the MLM head, which ModernBERT's heads start from, as in transformers."""
    if not old.config.head_transform:
        return {}
    learnt = ("heads.mlm.dense.", "heads.mlm.norm.")
    return {
        name.replace("heads.mlm", place): tensor
        for name, tensor in old.state_dict().items()
        if name.startswith(learnt)
        for place in ("pooler", "heads.tag", "heads.span")
    }


def _hold(network: Network) -> None:
    """Freezes all but an adapter's task: the new layer, and a pooler that may be random."""
    for name, weight in network.named_parameters():
        new = name.startswith(("heads.", "pooler.")) and not name.startswith("heads.lm.")
        weight.requires_grad_(new)


def _freeze(network: Network, settings: FinetuneConfig) -> None:
    layers = network.config.distinct if settings.freeze else settings.freeze_layers
    if not layers:
        return
    require_that(
        layers <= network.config.distinct,
        "freeze_layers={layers} is more than the {distinct} layers of this model.",
        layers=layers,
        distinct=network.config.distinct,
    )
    parts = [network.trunk.embed, *network.trunk.blocks[:layers]]
    for module in [network.trunk] if settings.freeze else parts:
        module.requires_grad_(requires_grad=False)


# ------------------------------------------------------------------ label words


def task_verbalizer(task: Task, labels: tuple[str, ...]) -> Verbalizer:
    """The task's prompt and the words for each label."""
    words = task_prompt(replace(task, labels=labels), Example("")).choices
    require_that(
        len(set(words)) >= len(words),
        "Two labels of {task} have the same label word: {words}.",
        task=task.name,
        words=", ".join(words),
    )
    return Verbalizer(task.prompt, words)


def verbalizer_items(
    examples: Sequence[Example], reading: Predictor, words: Verbalizer
) -> list[TrainingItem]:
    """Each example's prompt, answered by the right words (Lester et al. 2021 §2)."""
    right = dict(zip(reading.labels, words.said, strict=True))
    pairs = [(words.query(one.text, one.pair or ""), right[one.label]) for one in examples]
    items: list[TrainingItem] = []
    for pair in encode_pairs(reading.tokenizer, pairs):
        row = fit_context(pair, reading.max_tokens)
        shown = np.array(row.tokens[:-1], np.int32)
        labels = [IGNORE_LABEL] * (row.first - 1) + row.tokens[row.first :]
        items.append(AnswerItem((TokenRow(shown, np.zeros_like(shown)),), labels))
    return items
