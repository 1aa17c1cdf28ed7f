"""Small random models of transformers of every family, and their outputs beside ours."""

from pathlib import Path

import torch
import transformers

from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.model import Network

VOCAB, LENGTH = 77, 9
BERT = dict(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=40,
    vocab_size=VOCAB,
)
BERT |= dict(max_position_embeddings=33, pad_token_id=0)
ROBERTA = BERT | dict(pad_token_id=3)
MODERN = BERT | dict(
    num_hidden_layers=5,
    local_attention=6,
    global_attn_every_n_layers=3,
    rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=900.0),
        sliding_attention=dict(rope_type="default", rope_theta=50.0),
    ),
    bos_token_id=None,
    eos_token_id=None,
    cls_token_id=None,
    sep_token_id=None,
)
GPT = dict(n_embd=24, n_layer=3, n_head=3, vocab_size=VOCAB, n_positions=33)
MARIAN = dict(
    vocab_size=VOCAB,
    d_model=24,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_position_embeddings=33,
    pad_token_id=VOCAB - 1,
    eos_token_id=0,
    decoder_start_token_id=VOCAB - 1,
    forced_eos_token_id=None,
    activation_function="swish",
    scale_embedding=True,
)
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**BERT),
    "electra": lambda: transformers.ElectraConfig(embedding_size=10, **BERT),
    "albert": lambda: transformers.AlbertConfig(embedding_size=10, **BERT),
    "distilbert": lambda: transformers.DistilBertConfig(
        dim=24, n_layers=3, n_heads=3, hidden_dim=40, vocab_size=VOCAB, max_position_embeddings=33
    ),
    "gpt2": lambda: transformers.GPT2Config(n_inner=52, **GPT),
    "openai-gpt": lambda: transformers.OpenAIGPTConfig(**GPT),
    "llama": lambda: transformers.LlamaConfig(num_key_value_heads=1, **BERT),
    "roberta": lambda: transformers.RobertaConfig(type_vocab_size=1, **ROBERTA),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**ROBERTA),
    "modernbert": lambda: transformers.ModernBertConfig(**MODERN),
    "marian": lambda: transformers.MarianConfig(**MARIAN),
}


def make_hf(kind: str, name: str, **changes: object) -> transformers.PreTrainedModel:
    config = CONFIGS[kind]()
    config.update({"pad_token_id": config.pad_token_id or 0, **changes})
    config.num_labels = (
        2 if "Question" in name or "PreTraining" in name else 1 if "Choice" in name else 5
    )
    if "DoubleHeads" in name:
        config.num_labels = 1
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def make_inputs(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pad = 3 if "roberta" in kind else 0
    tokens = torch.randint(pad + 1, VOCAB, (2, LENGTH), generator=generator)
    keep = torch.ones_like(tokens)
    keep[1, 6:] = 0
    inputs = dict(input_ids=tokens.masked_fill(keep == 0, pad), attention_mask=keep)
    if kind in ("bert", "electra", "albert"):
        inputs["token_type_ids"] = torch.randint(0, 2, tokens.shape, generator=generator)
    if kind == "marian":
        inputs["decoder_input_ids"] = torch.randint(1, VOCAB - 1, tokens.shape, generator=generator)
    return inputs


@torch.no_grad()
def theirs(
    name: str, model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Their outputs, in the order of the table's heads."""
    if "Choice" in name or "DoubleHeads" in name:
        ends = inputs["attention_mask"].sum(1, keepdim=True) - 1
        inputs = {k: v[:, None] for k, v in inputs.items()}
        if "DoubleHeads" in name:
            inputs["mc_token_ids"] = ends
            if name.startswith("OpenAI"):  # transformers' own code does not take a mask here
                del inputs["attention_mask"]
    out = model(**inputs)
    if "start_logits" in out:
        return [torch.stack((out.start_logits, out.end_logits), -1)]
    names = ("prediction_logits", "logits", "mc_logits", "seq_relationship_logits", "sop_logits")
    return [out[n] for n in names if n in out] or [out.last_hidden_state]


def assert_same_logits(network: Network, name: str, model: transformers.PreTrainedModel) -> None:
    kind = model.config.model_type
    inputs = make_inputs(kind)
    keep = inputs["attention_mask"].bool()
    tokens = inputs["input_ids"]
    if kind == "marian":
        target = inputs["decoder_input_ids"]
        hidden = network.hidden(target, source=tokens, source_keep=keep)
    else:
        hidden = network.trunk(tokens, segments=inputs.get("token_type_ids"), keep=keep)
    ours = [
        network.read(head, hidden, keep) for head in FAMILY_TABLES[kind].architectures[name]
    ] or [hidden]
    for mine, other in zip(ours, theirs(name, model, inputs), strict=True):
        other = other.reshape(mine.shape)
        per_token = mine.dim() >= 2 and mine.shape[:2] == keep.shape
        difference = (mine - other)[keep] if per_token else mine - other
        assert difference.abs().max() < 1e-5


def opened_by_transformers(folder: Path, kind: type) -> transformers.PreTrainedModel:
    """The model in a folder of ours; nothing in it is missing, nothing is left over."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model
