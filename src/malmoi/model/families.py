"""Model families as values: each, when called, is one `ModelConfig`; any field can be overridden.

Sizes are the papers' own (Devlin 2019; Radford 2018, 2019; Brown 2020 table 2.1; Clark 2020; Lan
2020; Sanh 2019; Turc 2019 for the small BERTs; Liu 2019; Conneau 2020; Warner 2024; Zaremba 2014,
Peters 2018 for the LSTMs; Touvron 2023, Grattafiori 2024, Allal 2025 for the LLaMAs).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from malmoi.config import ModelConfig
from malmoi.errors import require_known

# BERT: bidirectional, post-norm, segments, exact GELU, [CLS] with a tanh pooler
bert = partial(
    ModelConfig,
    vocab=30_522,
    context=512,
    segments=2,
    attention=("full",),
    norm="post",
    embed_norm=True,
    final_norm=False,
    eps=1e-12,
    activation="gelu",
    pool="first",
    pooler="tanh",
    init="truncated",
)
# BERT with every second layer and no segments; classifies through a ReLU layer
distilbert = partial(bert, depth=6, segments=0, pooler="relu")
# BERT trained longer (Liu et al. 2019), with one segment. Positions start after the padding id,
# which is 1. The MLM head uses GELU regardless of the blocks' activation.
roberta = partial(
    bert, vocab=50_265, segments=1, position_offset=2, eps=1e-5, mlm_activation="gelu"
)
# A modernised BERT encoder (Warner et al. 2024): rotary positions, pre-norm, GeGLU, no biases; two
# of every three layers attend within 64 tokens
modernbert = partial(
    ModelConfig,
    vocab=50_368,
    context=8192,
    depth=22,
    hidden=1152,
    attention=("full", "local:65", "local:65"),
    positions="rotary",
    rotary_base=160_000.0,
    local_rotary_base=10_000.0,
    norm_bias=False,
    first_norm=False,
    embed_norm=True,
    activation="geglu",
    bias=False,
    mlm_activation="gelu",
    pool="first",
    pooler="gelu",
    head_transform=True,
    dropout=0.0,
    attention_dropout=0.0,
    init="truncated",
    residual_init="scaled",
)
# BERT's trunk trained to detect replaced tokens. Embeddings may be narrower than the trunk. The
# generator's head uses GELU regardless of the blocks.
electra = partial(
    bert, embed_width=128, width=256, heads=4, hidden=1024, pooler="gelu", mlm_activation="gelu"
)
# One block's weights shared by all layers, and factorised embeddings
albert = partial(
    bert,
    vocab=30_000,
    embed_width=128,
    groups=1,
    activation="gelu_tanh",
    dropout=0.0,
    attention_dropout=0.0,
)
# The original GPT decoder: post-norm, as in Vaswani et al.
gpt1 = partial(ModelConfig, vocab=40_478, context=512, norm="post", final_norm=False)
# Pre-norm with a final norm; residual output weights are scaled by 1/√(2·depth)
gpt2 = partial(ModelConfig, vocab=50_257, residual_init="scaled")
# GPT-2 with twice the context and every second layer banded; its dropout is unpublished
gpt3 = partial(
    gpt2,
    context=2048,
    attention=("causal", "causal & local:256"),
    dropout=0.0,
    attention_dropout=0.0,
)
# An LSTM language model with tied embeddings; `hidden` is its units if not its width
lstm = partial(
    ModelConfig,
    vocab=10_000,
    context=256,
    width=650,
    depth=2,
    heads=1,
    mixer="lstm",
    positions="none",
    final_norm=False,
    dropout=0.5,
    attention_dropout=0.0,
    init_std=0.05,
)
# ELMo: an LSTM language model each way, whose layers tasks mix (Peters et al. 2018). Its tokens are
# this project's vocabularies' instead of convolutions over characters.
elmo = partial(
    lstm,
    width=1024,
    embed_width=512,
    hidden=4096,
    mixer="bilstm",
    attention=("full",),
    pool="mean",
    dropout=0.1,
)
# Rotary positions, RMSNorm, SwiGLU, no biases, grouped queries (Touvron et al. 2023)
llama = partial(
    ModelConfig,
    vocab=32_000,
    context=2048,
    positions="rotary",
    norm_kind="rms",
    activation="swiglu",
    bias=False,
    tied=False,
    dropout=0.0,
    attention_dropout=0.0,
)
# A small LLaMA (Allal et al. 2025 §5): deep and thin, three query heads per key head, tied
smollm2 = partial(llama, vocab=49_152, context=8192, rotary_base=100_000.0, tied=True)
# The encoder and decoder of Vaswani et al. 2017: post-norm, sinusoidal positions, ReLU. One matrix
# embeds the source and the target and scores the target (§3.4).
transformer = partial(
    ModelConfig,
    vocab=37_000,
    context=512,
    width=512,
    depth=6,
    encoder_depth=6,
    heads=8,
    positions="sinusoidal_halves",
    embed_scale=True,
    norm="post",
    final_norm=False,
    activation="relu",
    init="xavier",
)


def transformer_xl(**changes: Any) -> ModelConfig:
    """Transformer-XL (Dai et al. 2019): distances instead of positions, memory of earlier segments.

    Every token attends to as many earlier ones as the memory holds (`same_length` in the authors'
    code), so that a text read in segments gives what it gives at once.
    """
    memory = changes.get("memory", 150)
    values: dict[str, Any] = dict(
        vocab=50_257,
        context=150,
        width=410,
        depth=16,
        heads=10,
        hidden=2100,
        attention=(f"causal & local:{memory + 1}",),
        positions="relative",
        memory=memory,
        norm="post",
        final_norm=False,
        activation="relu",
        attention_dropout=0.0,
    )
    return ModelConfig(**(values | changes))


PRESETS: dict[str, Callable[..., ModelConfig]] = {
    "bert-tiny": partial(bert, depth=2, width=128, heads=2),
    "bert-mini": partial(bert, depth=4, width=256, heads=4),
    "bert-small": partial(bert, depth=4, width=512, heads=8),
    "bert-medium": partial(bert, depth=8, width=512, heads=8),
    "bert-base": bert,
    "bert-large": partial(bert, depth=24, width=1024, heads=16),
    "distilbert": distilbert,
    "electra-small": electra,
    "electra-base": partial(
        electra, embed_width=768, width=768, heads=12, hidden=3072, generator_share=1 / 3
    ),
    "albert-base": albert,
    "roberta-base": roberta,
    "roberta-large": partial(roberta, depth=24, width=1024, heads=16),
    "xlm-roberta-base": partial(roberta, vocab=250_002),
    "xlm-roberta-large": partial(roberta, vocab=250_002, depth=24, width=1024, heads=16),
    "modernbert-base": modernbert,
    "modernbert-large": partial(modernbert, depth=28, width=1024, heads=16, hidden=2624),
    "transformer-base": transformer,
    "transformer-big": partial(transformer, width=1024, heads=16, dropout=0.3),
    # for minutes on a CPU
    "transformer-tiny": partial(
        transformer,
        vocab=2_000,
        width=128,
        depth=2,
        encoder_depth=2,
        heads=4,
        hidden=256,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    # Wu et al. 2021 ("Good for Misconceived Reasons"): small enough for 29,000 pairs
    "transformer-small": partial(
        transformer,
        vocab=10_000,
        width=128,
        depth=4,
        encoder_depth=4,
        heads=4,
        hidden=256,
        dropout=0.3,
    ),
    "gpt1": gpt1,
    "gpt2-small": gpt2,
    "gpt2-medium": partial(gpt2, depth=24, width=1024, heads=16),
    "gpt2-large": partial(gpt2, depth=36, width=1280, heads=20),
    "gpt2-xl": partial(gpt2, depth=48, width=1600, heads=25),
    "gpt3-125m": gpt3,
    "gpt3-350m": partial(gpt3, depth=24, width=1024, heads=16),
    "gpt3-760m": partial(gpt3, depth=24, width=1536, heads=16),
    # The paper prints 24 heads of 128 at width 2048, which is inconsistent; 16 heads of 128 match
    # the 1.3B parameters.
    "gpt3-1.3b": partial(gpt3, depth=24, width=2048, heads=16),
    "gpt3-2.7b": partial(gpt3, depth=32, width=2560, heads=32),
    "gpt3-6.7b": partial(gpt3, depth=32, width=4096, heads=32),
    # The paper prints a width of 5140; 40 heads of 128 make 5120.
    "gpt3-13b": partial(gpt3, depth=40, width=5120, heads=40),
    "gpt3-175b": partial(gpt3, depth=96, width=12288, heads=96),
    # Zaremba et al. 2014's medium model
    "lstm": lstm,
    # the ablation of Radford et al. 2018 §5: one layer of 2,048 units instead of the Transformer
    "lstm-gpt1": partial(
        lstm, vocab=40_478, context=512, width=2048, embed_width=768, depth=1, dropout=0.1
    ),
    # 1,024 units and projections of 128: the smallest that its authors released
    "elmo-small": partial(elmo, width=256, embed_width=128, hidden=1024),
    "elmo": elmo,
    # the paper's base has 16 layers of 410 for WikiText-103's 267,735 words
    "transformer-xl-base": transformer_xl,
    "transformer-xl-large": partial(
        transformer_xl,
        depth=18,
        width=1024,
        heads=16,
        hidden=4096,
        context=384,
        memory=384,
        dropout=0.2,
        attention_dropout=0.2,
    ),
    "transformer-xl-small": partial(
        transformer_xl,
        vocab=10_000,
        depth=4,
        width=256,
        heads=4,
        hidden=1024,
        context=64,
        memory=64,
    ),
    "llama-7b": partial(llama, depth=32, width=4096, heads=32, hidden=11008, eps=1e-6),
    "llama3.2-1b": partial(
        llama,
        vocab=128_256,
        context=131_072,
        depth=16,
        width=2048,
        heads=32,
        kv_heads=8,
        hidden=8192,
        tied=True,
        rotary_base=500_000.0,
        rotary_scaling="llama3:32,1,4,8192",
    ),
    "smollm2-135m": partial(smollm2, depth=30, width=576, heads=9, kv_heads=3, hidden=1536),
    "smollm2-360m": partial(smollm2, depth=32, width=960, heads=15, kv_heads=5, hidden=2560),
    "smollm2-1.7b": partial(
        smollm2, depth=24, width=2048, heads=32, hidden=8192, rotary_base=130_000.0
    ),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """A paper's model by name, with any field overridden."""
    require_known(name, PRESETS, "There is no model {name!r}.{hint}")
    return PRESETS[name](**changes)
