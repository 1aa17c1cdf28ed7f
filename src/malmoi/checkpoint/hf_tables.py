"""Hugging Face's names, known only here: one reversible table per family."""

from collections.abc import Mapping, Sequence
from typing import Any

from malmoi.checkpoint.table import (
    COPY,
    HALVES,
    ONE_ROW,
    SPLIT_HEADS,
    THRICE,
    TRANSPOSE,
    TWICE,
    Field,
    FieldGroup,
    Table,
    TensorRule,
    Via,
    affine,
    layer_patterns,
)
from malmoi.config import ModelConfig
from malmoi.errors import ensure
from malmoi.model import families
from malmoi.model.positions import sinusoid_table
from malmoi.settings import coerce
from malmoi.system.untrusted import MAX_LAYERS, is_a, shown

# Rotary scaling in a Hugging Face config (`rope_parameters`) and here ("llama3:8,1,4,8192")

PLACE = "rope_parameters."
SCALING_NUMBERS = {  # the names of each rule's numbers there, in our order
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
WHOLE_NUMBERS = {"original_max_position_embeddings"}  # transformers warns if this is a float
ASSUMED_NUMBERS = {"beta_fast": 32, "beta_slow": 1}
SCALING_FIELDS = ("rope_type", *(n for names in SCALING_NUMBERS.values() for n in names))


def read_scaling(theirs: Mapping[str, Any]) -> dict[str, str]:
    """The rule with its numbers; empty if positions are not scaled."""
    given = {k.removeprefix(PLACE): v for k, v in theirs.items() if k.startswith(PLACE)}
    kind = given.get("rope_type", "default")
    ensure(
        kind in ("default", *SCALING_NUMBERS),
        "config.json asks for the rotary positions {kind}; Malmoi supports default, {numbers}.",
        kind=shown(kind),
        numbers=", ".join(SCALING_NUMBERS),
    )
    if kind == "default":
        return {"rotary_scaling": ""}
    assumed = {"original_max_position_embeddings": theirs.get("max_position_embeddings")}
    given = assumed | ASSUMED_NUMBERS | given
    for name in SCALING_NUMBERS[kind]:
        ensure(
            is_a(given.get(name), float) and given[name] > 0,
            "config.json asks for the rotary positions {kind!r} but gives no number for {name}.",
            kind=kind,
            name=name,
        )
    numbers = (repr(float(given[name])).removesuffix(".0") for name in SCALING_NUMBERS[kind])
    return {"rotary_scaling": f"{kind}:{','.join(numbers)}"}


def write_scaling(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Under the current name, and as `rope_scaling`, the only name transformers 4 knows."""
    kind, _, rest = ours["rotary_scaling"].partition(":")
    numbers = zip(SCALING_NUMBERS.get(kind, ()), rest.split(","), strict=False)
    rule = {"rope_type": kind or "default"} | {
        name: int(float(number)) if name in WHOLE_NUMBERS else float(number)
        for name, number in numbers
    }
    places = (PLACE, "rope_scaling.") if kind else (PLACE,)
    return {place + name: value for place in places for name, value in rule.items()}


ROPE = FieldGroup(read_scaling, write_scaling, tuple(PLACE + name for name in SCALING_FIELDS))


ACTIVATION = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
BLOCK_NAME = "trunk.blocks.{}"
BLOCK_PARTS = ("attend.qkv", "attend.out", "attend_norm", "mlp.up", "mlp.down", "mlp_norm")


def _block(theirs: str, *names: str, ours: str = BLOCK_NAME, via: Via = COPY) -> list[TensorRule]:
    """A block's linear maps and norms, in the order of `BLOCK_PARTS`; several names are joined."""
    rules = []
    for part, name in zip(BLOCK_PARTS, names, strict=True):
        places = [f"{theirs}.{one}" for one in name.split()]
        joined = {1: via, 2: HALVES, 3: SPLIT_HEADS}[len(places)]
        rules += affine(f"{ours}.{part}", *places, via=COPY if part.endswith("_norm") else joined)
    return rules


def _embeddings(prefix: str) -> list[TensorRule]:
    """BERT's three embeddings and their norm."""
    names = {"token": "word", "position": "position", "segment": "token_type"}
    places = [
        (f"trunk.embed.{one}", f"{prefix}.{there}_embeddings") for one, there in names.items()
    ]
    tables = [TensorRule(f"{ours}.weight", (f"{theirs}.weight",)) for ours, theirs in places]
    return tables + affine("trunk.embed.norm", f"{prefix}.LayerNorm")


def _bert_layers(prefix: str) -> list[TensorRule]:
    return _block(
        f"{prefix}.encoder.layer.{{}}",
        "attention.self.query attention.self.key attention.self.value",
        "attention.output.dense",
        "attention.output.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    )


def _gpt_layers() -> list[TensorRule]:
    names = ("attn.c_attn", "attn.c_proj", "ln_1", "mlp.c_fc", "mlp.c_proj", "ln_2")
    return _block("transformer.h.{}", *names, via=TRANSPOSE)


def _mlm(dense: str, norm: str, *scores: str) -> list[TensorRule]:
    parts = [
        ("heads.mlm.dense", dense),
        ("heads.mlm.norm", norm),
        *(("heads.mlm", name) for name in scores),
    ]
    return [rule for ours, theirs in parts for rule in affine(ours, theirs, head="mlm")]


def _bert_mlm(predictions: str, transform: str, norm: str = "LayerNorm") -> list[TensorRule]:
    """BERT's MLM head; untied, its bias is the decoder's, and transformers ignores the other."""
    bias = f"{predictions}.bias"
    decoder = f"{predictions}.decoder"
    return [
        *_mlm(f"{transform}.dense", f"{transform}.{norm}"),
        TensorRule("heads.mlm.weight", (f"{decoder}.weight",), COPY, "mlm"),
        TensorRule("heads.mlm.bias", (bias,), COPY, "mlm", tied=True),
        TensorRule("heads.mlm.bias", (f"{decoder}.bias", bias), TWICE, "mlm", tied=False),
    ]


def _task_heads(*names: str) -> list[TensorRule]:
    rules: list[TensorRule] = []
    for name in names:
        theirs = "qa_outputs" if name == "span" else "classifier"
        rules += affine(f"heads.{name}.linear", theirs, head=name)
    return rules


def _encoder_classes(name: str) -> dict[str, tuple[str, ...]]:
    """The transformers classes that every encoder has, and their heads."""
    return {
        f"{name}Model": (),
        f"{name}ForMaskedLM": ("mlm",),
        f"{name}ForSequenceClassification": ("classify",),
        f"{name}ForTokenClassification": ("tag",),
        f"{name}ForQuestionAnswering": ("span",),
        f"{name}ForMultipleChoice": ("choice",),
    }


def _gpt_classes(name: str) -> dict[str, tuple[str, ...]]:
    """The classes that GPT-1 and GPT-2 have, and their heads."""
    return {
        f"{name}Model": (),
        f"{name}LMHeadModel": ("lm",),
        f"{name}ForSequenceClassification": ("classify",),
        f"{name}DoubleHeadsModel": ("lm", "choice"),
    }


def _gpt_heads() -> list[TensorRule]:
    return [
        TensorRule("heads.lm.weight", ("lm_head.weight",), COPY, "lm"),
        TensorRule("heads.classify.linear.weight", ("score.weight",), COPY, "classify"),
        *affine("heads.choice.linear", "multiple_choice_head.summary", head="choice"),
    ]


_SIZES = (
    Field("vocab", "vocab_size"),
    Field("context", "max_position_embeddings"),
    Field("width", "hidden_size"),
    Field("depth", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
    Field("hidden", "intermediate_size"),
    Field("init_std", "initializer_range"),
    Field("tied", "tie_word_embeddings"),
)
_BERT_FIELDS = (
    *_SIZES,
    Field("segments", "type_vocab_size", at_least=1),
    Field("eps", "layer_norm_eps"),
    Field("dropout", "hidden_dropout_prob"),
    Field("attention_dropout", "attention_probs_dropout_prob"),
    Field("activation", "hidden_act", ACTIVATION),
)


def _renamed(fields: Sequence[Field], **theirs: str) -> list[Field]:
    """The same fields of ours, some with other names there; without a field whose name is ""."""
    renamed = [field._replace(theirs=theirs.get(field.ours, field.theirs)) for field in fields]
    return [field for field in renamed if field.theirs]


_GPT_FIELDS = (
    *_renamed(
        _SIZES, context="n_positions", width="n_embd", depth="n_layer", heads="n_head", hidden=""
    ),
    Field("eps", "layer_norm_epsilon"),
    Field("dropout", "resid_pdrop"),
    Field("attention_dropout", "attn_pdrop"),
)

_GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_ENCODER_ONLY = {"position_embedding_type": "absolute", "is_decoder": False}
_NO_CROSS_ATTENTION = {"add_cross_attention": False}

# Tensors that older versions wrote although they are the same in every model
POSITION_IDS = (".position_ids",)  # 0, 1, 2, …
# which keys a query sees, and what hides the others
CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias", *POSITION_IDS)
ROTARY_ANGLES = (".inv_freq",)  # follow from rope_theta

# How transformers pools a text for its multiple-choice heads, which the weights alone do not tell.
_GPT_CHOICE = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_proj_to_labels": True,
    "summary_activation": None,
}
_GPT_COMMON: dict[str, Any] = {
    "prefix": "transformer.",
    "only_for": {"choice": _GPT_CHOICE},
    "write": {"embd_pdrop": "dropout"},
    "aliases": _GPT_ALIASES,
    "buffers": CAUSAL_MASKS,
    "free": ("lm",),
}

BERT_TABLE = Table(
    model_type="bert",
    family=families.bert,
    prefix="bert.",
    fields=_BERT_FIELDS,
    rules=(
        *_embeddings("bert.embeddings"),
        *_bert_layers("bert"),
        *affine("pooler.dense", "bert.pooler.dense"),
        *_bert_mlm("cls.predictions", "cls.predictions.transform"),
        *affine("heads.nsp.linear", "cls.seq_relationship", head="nsp"),
        *_task_heads("classify", "choice", "tag", "span"),
    ),
    architectures=_encoder_classes("Bert")
    | {"BertForPreTraining": ("mlm", "nsp"), "BertForNextSentencePrediction": ("nsp",)},
    only=_ENCODER_ONLY,
    legacy=_NO_CROSS_ATTENTION,
    twins={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    buffers=POSITION_IDS,
)


# RoBERTa's positions begin after its padding id: the rows before that are not in the context
def _read_positions(theirs: Mapping[str, Any]) -> dict[str, int]:
    names = ("pad_token_id", "max_position_embeddings")
    pad, rows = (coerce(theirs[name], int, name) for name in names)
    ensure(
        0 <= pad < rows - 1,
        "config.json says pad_token_id = {pad} and max_position_embeddings = {rows}: none is left.",
        pad=pad,
        rows=rows,
    )
    return {"context": rows - pad - 1, "position_offset": pad + 1}


def _write_positions(ours: Mapping[str, Any]) -> dict[str, int]:
    offset = ours["position_offset"]
    ensure(offset >= 1, "Hugging Face has no RoBERTa whose positions start at row 0.")
    return {"max_position_embeddings": ours["context"] + offset, "pad_token_id": offset - 1}


def _roberta_table(model_type: str, name: str) -> Table:
    """RoBERTa and XLM-R, which differ only in vocabulary. Their classifier has its own pooler."""
    return Table(
        model_type=model_type,
        family=families.roberta,
        prefix="roberta.",
        fields=tuple(field for field in _BERT_FIELDS if field.ours != "context"),
        groups=(FieldGroup(_read_positions, _write_positions, ("pad_token_id",)),),
        rules=(
            *_embeddings("roberta.embeddings"),
            *_bert_layers("roberta"),
            *affine("pooler.dense", "roberta.pooler.dense"),
            *affine("pooler.dense", "classifier.dense", head="classify"),
            *_bert_mlm("lm_head", "lm_head", "layer_norm"),
            *affine("heads.classify.linear", "classifier.out_proj", head="classify"),
            *_task_heads("choice", "tag", "span"),
        ),
        architectures=_encoder_classes(name),
        only=_ENCODER_ONLY,
        legacy=_NO_CROSS_ATTENTION,
        defaults={
            "max_position_embeddings": 512,
            "pad_token_id": 1,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
        },
        twins={"lm_head.decoder.bias": "lm_head.bias"},
        buffers=POSITION_IDS,
    )


ROBERTA_TABLE = _roberta_table("roberta", "Roberta")
XLM_ROBERTA_TABLE = _roberta_table("xlm-roberta", "XLMRoberta")

DISTILBERT_TABLE = Table(
    model_type="distilbert",
    family=families.distilbert,
    prefix="distilbert.",
    fields=(
        *_renamed(_SIZES, width="dim", depth="n_layers", heads="n_heads", hidden="hidden_dim"),
        Field("dropout", "dropout"),
        Field("attention_dropout", "attention_dropout"),
        Field("activation", "activation", ACTIVATION),
    ),
    rules=(
        *(r for r in _embeddings("distilbert.embeddings") if "segment" not in r.ours),
        *_block(
            "distilbert.transformer.layer.{}",
            "attention.q_lin attention.k_lin attention.v_lin",
            "attention.out_lin",
            "sa_layer_norm",
            "ffn.lin1",
            "ffn.lin2",
            "output_layer_norm",
        ),
        *affine("pooler.dense", "pre_classifier"),
        *_mlm("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        *_task_heads("classify", "choice", "tag", "span"),
    ),
    architectures=_encoder_classes("DistilBert"),
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    buffers=POSITION_IDS,
)

ELECTRA_TABLE = Table(
    model_type="electra",
    family=families.electra,
    prefix="electra.",
    fields=(*_BERT_FIELDS, Field("embed_width", "embedding_size")),
    rules=(
        *_embeddings("electra.embeddings"),
        *affine("trunk.embed.project", "electra.embeddings_project"),
        *_bert_layers("electra"),
        *_mlm(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
        ),
        *affine("heads.detect.dense", "discriminator_predictions.dense", head="detect"),
        *affine("heads.detect.linear", "discriminator_predictions.dense_prediction", head="detect"),
        *affine("pooler.dense", "classifier.dense", head="classify"),
        *affine("heads.classify.linear", "classifier.out_proj", head="classify"),
        *affine("pooler.dense", "sequence_summary.summary", head="choice"),
        *_task_heads("choice", "tag", "span"),
    ),
    architectures=_encoder_classes("Electra") | {"ElectraForPreTraining": ("detect",)},
    only=_ENCODER_ONLY,
    legacy=_NO_CROSS_ATTENTION,
    buffers=POSITION_IDS,
    only_for={
        "choice": {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
    },
)


def _albert(**fields: Any) -> ModelConfig:
    """ALBERT always has an embedding projection; at equal widths ours is part of the embedding."""
    config = families.albert(**fields)
    ensure(
        config.token_width != config.width,
        "config.json says embedding_size = hidden_size = {width}; an albert's must be narrower.",
        width=config.width,
    )
    return config


ALBERT_TABLE = Table(
    model_type="albert",
    family=_albert,
    prefix="albert.",
    fields=(
        *_BERT_FIELDS,
        Field("embed_width", "embedding_size"),
        Field("groups", "num_hidden_groups"),
    ),
    rules=(
        *_embeddings("albert.embeddings"),
        *affine("trunk.embed.project", "albert.encoder.embedding_hidden_mapping_in"),
        *_block(
            "albert.encoder.albert_layer_groups.{}.albert_layers.0",
            "attention.query attention.key attention.value",
            "attention.dense",
            "attention.LayerNorm",
            "ffn",
            "ffn_output",
            "full_layer_layer_norm",
        ),
        *affine("pooler.dense", "albert.pooler"),
        *_bert_mlm("predictions", "predictions"),
        *affine("heads.nsp.linear", "sop_classifier.classifier", head="nsp"),
        *_task_heads("classify", "choice", "tag", "span"),
    ),
    architectures=_encoder_classes("Albert") | {"AlbertForPreTraining": ("mlm", "nsp")},
    only={"position_embedding_type": "absolute", "inner_group_num": 1},
    defaults={"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384},
    twins={"predictions.decoder.bias": "predictions.bias"},
    buffers=POSITION_IDS,
)

GPT2_TABLE = Table(
    model_type="gpt2",
    family=families.gpt2,
    fields=(
        *_GPT_FIELDS,
        Field("hidden", "n_inner"),
        Field("activation", "activation_function", ACTIVATION),
    ),
    rules=(
        TensorRule("trunk.embed.token.weight", ("transformer.wte.weight",)),
        TensorRule("trunk.embed.position.weight", ("transformer.wpe.weight",)),
        *_gpt_layers(),
        *affine("trunk.norm", "transformer.ln_f"),
        *_gpt_heads(),
        *_task_heads("tag", "span"),
    ),
    architectures=_gpt_classes("GPT2")
    | {"GPT2ForTokenClassification": ("tag",), "GPT2ForQuestionAnswering": ("span",)},
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    **_GPT_COMMON,
)

GPT1_TABLE = Table(
    model_type="openai-gpt",
    family=families.gpt1,
    # Hugging Face's "gelu" means the tanh form here, and only here.
    fields=(*_GPT_FIELDS, Field("activation", "afn", {"gelu": "gelu_tanh", "relu": "relu"})),
    rules=(
        TensorRule("trunk.embed.token.weight", ("transformer.tokens_embed.weight",)),
        TensorRule("trunk.embed.position.weight", ("transformer.positions_embed.weight",)),
        *_gpt_layers(),
        *_gpt_heads(),
    ),
    architectures=_gpt_classes("OpenAIGPT"),
    **_GPT_COMMON,
)


def _read_bias(theirs: Mapping[str, Any]) -> dict[str, bool]:
    attention, mlp = (
        bool(coerce(theirs.get(name, False), bool, name)) for name in ("attention_bias", "mlp_bias")
    )
    ensure(
        attention == mlp,
        "attention_bias = {attention}, mlp_bias = {mlp}: give a bias in both or in neither.",
        attention=attention,
        mlp=mlp,
    )
    return {"bias": attention}


BIAS = FieldGroup(
    _read_bias,
    lambda ours: {"attention_bias": ours["bias"], "mlp_bias": ours["bias"]},
    ("attention_bias", "mlp_bias"),
)


LLAMA_TABLE = Table(
    model_type="llama",
    family=families.llama,
    prefix="model.",
    fields=(
        *_SIZES,
        Field("kv_heads", "num_key_value_heads"),
        Field("head_width", "head_dim"),
        Field("eps", "rms_norm_eps"),
        Field("rotary_base", "rope_parameters.rope_theta"),
        Field("attention_dropout", "attention_dropout"),
    ),
    groups=(BIAS, ROPE),
    rules=(
        TensorRule("trunk.embed.token.weight", ("model.embed_tokens.weight",)),
        *_block(
            "model.layers.{}",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "self_attn.o_proj",
            "input_layernorm",
            "mlp.gate_proj mlp.up_proj",
            "mlp.down_proj",
            "post_attention_layernorm",
        ),
        TensorRule("trunk.norm.weight", ("model.norm.weight",)),
        TensorRule("heads.lm.weight", ("lm_head.weight",), COPY, "lm"),
        TensorRule("heads.classify.linear.weight", ("score.weight",), COPY, "classify"),
        *affine("heads.tag.linear", "score", head="tag"),
    ),
    architectures={
        "LlamaModel": (),
        "LlamaForCausalLM": ("lm",),
        "LlamaForSequenceClassification": ("classify",),
        "LlamaForTokenClassification": ("tag",),
    },
    only={"hidden_act": "silu"},
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
    },
    write={"rope_theta": "rotary_base"},
    # transformers 4 has rope_theta at the top level and any scaling in rope_scaling; older files
    # call its rule "type"
    aliases={
        "rope_theta": "rope_parameters.rope_theta",
        "partial_rotary_factor": "rope_parameters.partial_rotary_factor",
        "original_max_position_embeddings": "rope_parameters.original_max_position_embeddings",
        "rope_scaling.": "rope_parameters.",
        "rope_parameters.type": "rope_parameters.rope_type",
    },
    # only whole heads are rotated, in halves
    legacy={PLACE + "partial_rotary_factor": 1, "rope_interleaved": False},
    buffers=ROTARY_ANGLES,
    free=("lm",),
)

# ModernBERT (Warner et al. 2024): Hugging Face lists every layer's attention, we write a cycle
FULL_LAYER = "full_attention"
LOCAL_LAYER = "sliding_attention"
_THETA = "rope_parameters.{}.rope_theta"


def _read_layers(theirs: Mapping[str, Any]) -> dict[str, Any]:
    depth, every, window = (
        coerce(theirs[name], int, name)
        for name in ("num_hidden_layers", "global_attn_every_n_layers", "local_attention")
    )
    if not 0 < depth <= MAX_LAYERS:
        return {}  # refused later, when the sizes are checked
    usual = [LOCAL_LAYER if i % max(every, 1) else FULL_LAYER for i in range(depth)]
    kinds = coerce(theirs.get("layer_types", usual), tuple[str, ...], "layer_types")
    patterns = {FULL_LAYER: "full", LOCAL_LAYER: f"local:{window // 2 + 1}"}
    ensure(
        len(kinds) == depth and patterns.keys() >= set(kinds),
        "config.json says layer_types = {kinds}; give {known} for each of the {depth} layers.",
        kinds=shown(kinds),
        depth=depth,
        known=" or ".join(patterns),
    )
    lengths = range(1, depth + 1)
    cycle = next(n for n in lengths if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return {"attention": tuple(patterns[kind] for kind in kinds[:cycle])}


def _write_layers(ours: Mapping[str, Any]) -> dict[str, Any]:
    patterns = layer_patterns(ours["attention"], ours["depth"])
    windows = {text.removeprefix("local:") for text in patterns if text != "full"}
    ensure(
        len(windows) <= 1 and all(window.isdecimal() for window in windows),
        "Hugging Face's ModernBERT does not support the attention pattern {patterns}.",
        patterns=", ".join(patterns),
    )
    kinds = [FULL_LAYER if text == "full" else LOCAL_LAYER for text in patterns]
    window = 2 * (int(windows.pop()) - 1) if windows else LOCAL_WINDOW
    every = next((i for i, kind in enumerate(kinds) if i and kind == FULL_LAYER), len(kinds))
    # transformers 4 knows only the rule
    by_rule = kinds == [LOCAL_LAYER if i % every else FULL_LAYER for i in range(len(kinds))]
    older = {"global_attn_every_n_layers": every} if by_rule else {}
    return {"layer_types": kinds, "local_attention": window, **older}


LOCAL_WINDOW = 128
_NO_SPECIALS = {f"{role}_token_id": None for role in ("pad", "bos", "eos", "cls", "sep")}


def _modernbert_head(head: str, before: str) -> list[TensorRule]:
    """A head, and the transform before it."""
    return [
        *affine(f"{before}.dense", "head.dense", head=head),
        *affine(f"{before}.norm", "head.norm", head=head),
        *affine(f"heads.{head}.linear", "classifier", head=head),
    ]


MODERNBERT_TABLE = Table(
    model_type="modernbert",
    family=families.modernbert,
    prefix="model.",
    fields=(
        *_SIZES,
        Field("eps", "norm_eps"),
        Field("norm_bias", "norm_bias"),
        Field("activation", "hidden_activation", {"gelu": "geglu", "silu": "swiglu"}),
        Field("rotary_base", _THETA.format(FULL_LAYER)),
        Field("local_rotary_base", _THETA.format(LOCAL_LAYER)),
        Field("pool", "classifier_pooling", {"cls": "first", "mean": "mean"}),
        Field("dropout", "mlp_dropout"),
        Field("attention_dropout", "attention_dropout"),
    ),
    # null unless a tokenizer sets them: transformers' defaults are ids of its own vocabulary
    groups=(
        BIAS,
        FieldGroup(_read_layers, _write_layers, ("layer_types",)),
        FieldGroup(lambda theirs: {}, lambda ours: _NO_SPECIALS),
    ),
    rules=(
        TensorRule("trunk.embed.token.weight", ("model.embeddings.tok_embeddings.weight",)),
        *affine("trunk.embed.norm", "model.embeddings.norm"),
        *_block(
            "model.layers.{}", "attn.Wqkv", "attn.Wo", "attn_norm", "mlp.Wi", "mlp.Wo", "mlp_norm"
        ),
        *affine("trunk.norm", "model.final_norm"),
        *_mlm("head.dense", "head.norm", "decoder"),
        *_modernbert_head("classify", "pooler"),
        *_modernbert_head("choice", "pooler"),
        *_modernbert_head("tag", "heads.tag"),
        *_modernbert_head("span", "heads.span"),
    ),
    architectures=_encoder_classes("ModernBert"),
    only={
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "decoder_bias": True,
        f"rope_parameters.{FULL_LAYER}.rope_type": "default",
        f"rope_parameters.{LOCAL_LAYER}.rope_type": "default",
    },
    defaults={
        "num_hidden_layers": 22,
        "local_attention": LOCAL_WINDOW,
        "global_attn_every_n_layers": 3,
    },
    write={
        "embedding_dropout": "dropout",
        "classifier_dropout": "dropout",
        # transformers 4's names
        "global_rope_theta": "rotary_base",
        "local_rope_theta": "local_rotary_base",
    },
    aliases={
        "global_rope_theta": _THETA.format(FULL_LAYER),
        "local_rope_theta": _THETA.format(LOCAL_LAYER),
    },
    legacy={"rope_scaling": {}, "position_embedding_type": "absolute"},
    buffers=ROTARY_ANGLES,
)

# Marian: the Transformer of Vaswani et al. 2017, embeddings shared by encoder and decoder


_MARIAN_BLOCK = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attn.out_proj",
    "self_attn_layer_norm",
    "fc1",
    "fc2",
    "final_layer_norm",
)
# one matrix, which transformers keeps three times unless the output is tied to it too
_MARIAN_EMBEDDINGS = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
_MARIAN_CROSS = "model.decoder.layers.{}.encoder_attn"
_MARIAN_SIDES = {  # a field that must be equal to another of theirs, and our field
    "encoder_attention_heads": ("decoder_attention_heads", "heads"),
    "encoder_ffn_dim": ("decoder_ffn_dim", "hidden"),
    "decoder_vocab_size": ("vocab_size", "vocab"),
}


def _read_marian(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses an encoder and a decoder of different shapes."""
    for one, (other, _) in _MARIAN_SIDES.items():
        ensure(
            theirs.get(one, theirs.get(other)) == theirs.get(other),
            "config.json says {one} = {first} and {other} = {second}; they must be equal.",
            one=one,
            first=shown(theirs.get(one)),
            other=other,
            second=shown(theirs.get(other)),
        )
    return {}


def _write_marian(ours: Mapping[str, Any]) -> dict[str, Any]:
    sides = {theirs: ours[name] for theirs, (_, name) in _MARIAN_SIDES.items()}
    fixed = {"is_encoder_decoder": True, "forced_eos_token_id": None, "activation_dropout": 0.0}
    # null unless a tokenizer sets them: transformers' defaults are ids of its own vocabulary
    return sides | fixed | {"decoder_start_token_id": 0, "pad_token_id": None, "eos_token_id": None}


MARIAN_TABLE = Table(
    model_type="marian",
    family=families.transformer,
    prefix="model.",
    fields=(
        Field("vocab", "vocab_size"),
        Field("context", "max_position_embeddings"),
        Field("width", "d_model"),
        Field("depth", "decoder_layers"),
        Field("encoder_depth", "encoder_layers"),
        Field("heads", "decoder_attention_heads"),
        Field("hidden", "decoder_ffn_dim"),
        Field("activation", "activation_function", ACTIVATION | {"swish": "silu"}),
        Field("embed_scale", "scale_embedding"),
        Field("dropout", "dropout"),
        Field("attention_dropout", "attention_dropout"),
        Field("init_std", "init_std"),
        Field("tied", "tie_word_embeddings"),
        Field("lm_bias", "lm_bias"),  # ours: without it transformers adds zeros
    ),
    groups=(FieldGroup(_read_marian, _write_marian, tuple(_MARIAN_SIDES)),),
    rules=(
        TensorRule("trunk.embed.token.weight", _MARIAN_EMBEDDINGS[:1], tied=True),
        TensorRule("trunk.embed.token.weight", _MARIAN_EMBEDDINGS, THRICE, tied=False),
        *_block("model.encoder.layers.{}", *_MARIAN_BLOCK, ours="trunk.encoder.blocks.{}"),
        *_block("model.decoder.layers.{}", *_MARIAN_BLOCK),
        *affine(f"{BLOCK_NAME}.cross.query", f"{_MARIAN_CROSS}.q_proj"),
        *affine(
            f"{BLOCK_NAME}.cross.key_value",
            f"{_MARIAN_CROSS}.k_proj",
            f"{_MARIAN_CROSS}.v_proj",
            via=HALVES,
        ),
        *affine(f"{BLOCK_NAME}.cross.out", f"{_MARIAN_CROSS}.out_proj"),
        *affine(f"{BLOCK_NAME}.cross_norm", "model.decoder.layers.{}.encoder_attn_layer_norm"),
        TensorRule("heads.lm.weight", ("lm_head.weight",), COPY, "lm"),
        TensorRule("heads.lm.bias", ("final_logits_bias",), ONE_ROW, "lm"),
    ),
    architectures={"MarianModel": (), "MarianMTModel": ("lm",)},
    only={"share_encoder_decoder_embeddings": True},
    legacy={
        "is_decoder": False,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
    },
    aliases={
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    },
    copies=dict.fromkeys(_MARIAN_EMBEDDINGS[1:], _MARIAN_EMBEDDINGS[0]),
    constants={
        ".embed_positions.weight": lambda c: sinusoid_table(c.context, c.width, halves=True)
    },
    defaults={
        "vocab_size": 58_101,
        "max_position_embeddings": 1024,
        "d_model": 1024,
        "decoder_layers": 12,
        "encoder_layers": 12,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "activation_function": "gelu",
        "scale_embedding": False,
        "attention_dropout": 0.0,
        "lm_bias": True,
    },
    free=("lm",),
)

FAMILY_TABLES = {
    table.model_type: table
    for table in (
        BERT_TABLE, GPT2_TABLE, GPT1_TABLE, DISTILBERT_TABLE, ELECTRA_TABLE, ALBERT_TABLE,
        LLAMA_TABLE, ROBERTA_TABLE, XLM_ROBERTA_TABLE, MODERNBERT_TABLE, MARIAN_TABLE,
    )
}  # fmt: skip
