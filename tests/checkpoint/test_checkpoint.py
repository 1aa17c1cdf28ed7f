"""Folders: equal logits with transformers both ways, for every class of every family; damage is
refused clearly.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hf_models import BERT, VOCAB, assert_same_logits, make_hf, opened_by_transformers
from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.errors import MalmoiError, UsageError
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.sampling import new_sequences
from malmoi.model import Network, initialise
from malmoi.model.families import albert, bert, electra, gpt1, gpt2, gpt3
from malmoi.tokenizer import train_tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# an encoder-decoder has two inputs: tests/model/test_encoder_decoder.py
ONE_INPUT = {kind: table for kind, table in FAMILY_TABLES.items() if kind != "marian"}
CLASSES = [(kind, name) for kind, table in ONE_INPUT.items() for name in table.architectures]


@pytest.mark.parametrize(("kind", "name"), CLASSES)
@torch.no_grad()
def test_logits_equal_transformers_and_the_folder_goes_back_bit_exact(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = make_hf(kind, name)
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.notes == ()
    assert_same_logits(checkpoint.network, name, model)
    write_checkpoint(checkpoint, tmp_path / "ours")
    back = opened_by_transformers(tmp_path / "ours", type(model))
    assert all(torch.equal(t, back.state_dict()[k]) for k, t in model.state_dict().items())
    # a batch, for which its config must know the padding
    assert_same_logits(checkpoint.network, name, back)


UNTIED = dict(tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("bert", "BertForMaskedLM", UNTIED),
        ("bert", "BertForPreTraining", UNTIED),
        ("bert", "BertForMaskedLM", dict(hidden_act="relu2")),
        ("albert", "AlbertForMaskedLM", UNTIED),
        ("albert", "AlbertForPreTraining", UNTIED),
        ("distilbert", "DistilBertForMaskedLM", UNTIED),
        ("electra", "ElectraForMaskedLM", UNTIED),
        # the head of its generator keeps its GELU
        ("electra", "ElectraForMaskedLM", dict(hidden_act="relu")),
        ("electra", "ElectraForMaskedLM", dict(hidden_act="gelu_new")),
        ("electra", "ElectraForPreTraining", dict(hidden_act="relu")),
        ("electra", "ElectraForSequenceClassification", dict(hidden_act="relu")),
        ("gpt2", "GPT2LMHeadModel", UNTIED),
        ("roberta", "RobertaForMaskedLM", UNTIED),
        ("roberta", "RobertaForMaskedLM", dict(hidden_act="relu")),
        ("modernbert", "ModernBertForMaskedLM", UNTIED),
        ("modernbert", "ModernBertForMaskedLM", dict(norm_bias=True, hidden_activation="silu")),
        (
            "modernbert",
            "ModernBertForTokenClassification",
            dict(attention_bias=True, mlp_bias=True),
        ),
        ("modernbert", "ModernBertForSequenceClassification", dict(classifier_pooling="mean")),
        ("modernbert", "ModernBertForMultipleChoice", dict(classifier_pooling="mean")),
        (
            "modernbert",
            "ModernBertModel",
            dict(layer_types=["sliding_attention"] * 2 + ["full_attention"] * 3),
        ),
        ("openai-gpt", "OpenAIGPTLMHeadModel", dict(afn="relu", **UNTIED)),
    ],
    ids=str,
)
@torch.no_grad()
def test_settings_that_change_a_head_are_read_and_written(
    kind: str, name: str, changes: dict, tmp_path: Path
) -> None:
    model = make_hf(kind, name, **changes)
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.notes == ()
    assert_same_logits(checkpoint.network, name, model)
    write_checkpoint(checkpoint, tmp_path / "ours")
    back = opened_by_transformers(tmp_path / "ours", type(model))
    assert_same_logits(checkpoint.network, name, back)


@pytest.mark.parametrize(
    ("name", "kept"), [("BertForMaskedLM", "bias"), ("BertForMaskedLM", "decoder.bias")]
)
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_bias_of_two_names_is_found_under_either(
    name: str, kept: str, tied: bool, tmp_path: Path
) -> None:
    """transformers 4 keeps one of the two, and which one depends on its version."""
    model = make_hf("bert", name, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    value = model.cls.predictions.decoder.bias.detach().clone()
    biases = {"cls.predictions.bias", "cls.predictions.decoder.bias"}
    one = {f"cls.predictions.{kept}": value}
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k not in biases} | one)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    assert_same_logits(checkpoint.network, name, model)


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("electra", "ElectraForMultipleChoice", dict(summary_activation="tanh")),
        ("electra", "ElectraForMultipleChoice", dict(summary_type="last")),
        ("gpt2", "GPT2DoubleHeadsModel", dict(summary_type="mean")),
        ("gpt2", "GPT2DoubleHeadsModel", dict(summary_activation="tanh")),
    ],
    ids=str,
)
def test_unsupported_head_settings_are_refused_but_ignored_without_that_head(
    kind: str, name: str, changes: dict, tmp_path: Path
) -> None:
    make_hf(kind, name, **changes).save_pretrained(tmp_path)
    ((setting, value),) = changes.items()
    with pytest.raises(
        MalmoiError, match=f"{setting} = '{value}', and Malmoi has {kind} only with"
    ):
        read_checkpoint(tmp_path)
    make_hf(kind, next(iter(FAMILY_TABLES[kind].architectures)), **changes).save_pretrained(
        tmp_path / "bare"
    )
    assert read_checkpoint(tmp_path / "bare").notes == ()


NOT_THERE = {
    "gpt1 with relu2": (gpt1(vocab=60, width=16, depth=2, heads=2, activation="relu2"), "lm"),
    "gpt2 with swiglu": (gpt2(vocab=60, width=16, depth=2, heads=2, activation="swiglu"), "lm"),
    "bert with swiglu": (bert(vocab=60, width=16, depth=2, heads=2, activation="swiglu"), "mlm"),
    "bert without segments": (bert(vocab=60, width=16, depth=2, heads=2, segments=0), "mlm"),
    "albert without segments": (
        albert(vocab=60, width=16, depth=2, heads=2, segments=0, embed_width=8),
        "mlm",
    ),
    "electra without segments": (electra(vocab=60, segments=0, embed_width=8), "detect"),
    "electra without GELU": (
        electra(vocab=60, activation="relu", mlm_activation="relu", embed_width=8),
        "mlm",
    ),
}


@pytest.mark.parametrize("what", NOT_THERE)
@torch.no_grad()
def test_models_that_transformers_cannot_run_are_written_as_malmoi(
    what: str, tmp_path: Path
) -> None:
    config, head = NOT_THERE[what]
    network = initialise(Network(config, {head: 0}), 0).eval()
    write_checkpoint(Checkpoint(network), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "malmoi"
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(
        read_checkpoint(tmp_path).network(tokens)[head], network(tokens)[head], rtol=0, atol=1e-5
    )


def saved(folder: Path, heads: tuple[str, ...] = ("mlm", "nsp")) -> Path:
    network = initialise(
        Network(bert(vocab=60, width=16, depth=2, heads=2, context=24), dict.fromkeys(heads, 0)), 0
    )
    write_checkpoint(Checkpoint(network), folder)
    return folder


def rewrite(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def test_old_spellings_buffers_and_a_missing_prefix_load(tmp_path: Path) -> None:
    want = load_file(saved(tmp_path) / "model.safetensors")

    def old(tensors: dict) -> dict:
        names = {
            k: k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            for k in tensors
        }
        tensors = {names[k].removeprefix("bert."): v for k, v in tensors.items()}
        return tensors | {"embeddings.position_ids": torch.arange(24)[None]}

    rewrite(tmp_path, old)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    write_checkpoint(checkpoint, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert want.keys() == again.keys()
    assert all(torch.equal(want[k], again[k]) for k in want)


def test_a_head_that_is_missing_is_left_out_and_the_rest_works(tmp_path: Path) -> None:
    rewrite(
        saved(tmp_path),
        lambda tensors: {k: v for k, v in tensors.items() if "seq_relationship" not in k},
    )
    assert set(read_checkpoint(tmp_path).network.heads) == {"mlm"}
    rewrite(
        tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "transform.dense" not in k}
    )
    assert (
        "newly initialised: cls.predictions.transform.dense.weight"
        in read_checkpoint(tmp_path).notes[0]
    )


def test_shards_and_torch_files_load(tmp_path: Path) -> None:
    network = initialise(
        Network(gpt2(vocab=60, width=16, depth=2, heads=2, context=24), {"lm": 0}), 0
    )
    write_checkpoint(Checkpoint(network), tmp_path / "shards", shard_bytes=8_000)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    tokens = torch.randint(0, 60, (1, 8))
    want = network.eval()(tokens)["lm"]
    torch.testing.assert_close(
        read_checkpoint(tmp_path / "shards").network(tokens)["lm"], want, rtol=0, atol=1e-5
    )
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    torch.testing.assert_close(hf(tokens).logits, want, rtol=0, atol=1e-5)
    torch.save(hf.state_dict(), tmp_path / "shards" / "pytorch_model.bin")
    for file in (tmp_path / "shards").glob("model*safetensors*"):
        file.unlink()
    torch.testing.assert_close(
        read_checkpoint(tmp_path / "shards").network(tokens)["lm"], want, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        ("우리나라의 역사와 문화에 대한 이야기", 'generate("우리나라의")'),
        ("a story about the history and culture", 'generate("The state of")'),
    ],
)
def test_a_card_shows_an_example_in_the_tokenizers_language(
    tmp_path: Path, text: str, usage: str
) -> None:
    tokenizer = train_tokenizer([text] * 8, kind="byte-bpe", vocab=320)
    network = Network(gpt2(vocab=tokenizer.vocab_size, width=16, depth=1, heads=2), {"lm": 0})
    write_checkpoint(Checkpoint(initialise(network, 0), tokenizer), tmp_path)
    assert usage in (tmp_path / "README.md").read_text("utf-8")


def test_models_without_a_hugging_face_class_round_trip(tmp_path: Path) -> None:
    config = gpt3(
        vocab=60, width=16, depth=2, heads=2, context=24, attention=("causal", "causal & local:4")
    )
    network = initialise(Network(config, {"lm": 0}), 0).eval()
    write_checkpoint(Checkpoint(network), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "malmoi"
    assert "A model of Malmoi's own type" in (tmp_path / "README.md").read_text()
    tokens = torch.randint(0, 60, (1, 8))
    again = read_checkpoint(tmp_path)
    assert again.network.config == config
    torch.testing.assert_close(
        again.network(tokens)["lm"], network(tokens)["lm"], rtol=0, atol=1e-5
    )
    rotary = initialise(
        Network(gpt2(vocab=60, width=16, depth=1, heads=2, positions="rotary"), {"lm": 0}), 0
    ).eval()
    write_checkpoint(Checkpoint(rotary), tmp_path)
    torch.testing.assert_close(
        read_checkpoint(tmp_path).network(tokens)["lm"], rotary(tokens)["lm"], rtol=0, atol=1e-5
    )


class PlainPositions(nn.Module):
    """Positions as a newcomer writes them: tensors without a device, in a buffer or not."""

    def __init__(self, context: int, width: int, **_: object) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(0, 1, context)[:, None], persistent=False)
        self.register_buffer("scale", torch.full((1, width), 0.5))
        self.turns = torch.empty(1, width)
        self.turns.copy_(torch.arange(width))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return (self.steps[positions] * self.turns).sin() * self.scale


def test_tensors_that_a_module_computes_are_there_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malmoi.model.positions.Sinusoid", PlainPositions)
    config = gpt2(vocab=60, width=16, depth=2, heads=2, context=24, positions="sinusoidal")
    network = initialise(Network(config, {"lm": 0}), 0).eval()
    write_checkpoint(Checkpoint(network), tmp_path)
    tokens = torch.randint(0, 60, (1, 8))
    again = read_checkpoint(tmp_path).network
    torch.testing.assert_close(again(tokens)["lm"], network(tokens)["lm"], rtol=0, atol=1e-5)
    again.to("cpu")  # nothing is left that has no data


def test_labels_and_generation_settings_come_back(tmp_path: Path) -> None:
    network = initialise(Network(bert(vocab=60, width=16, depth=1, heads=2), {"classify": 3}), 0)
    write_checkpoint(
        Checkpoint(network, labels=("no", "maybe", "yes"), generation={"eos_token_id": 5}), tmp_path
    )
    again = read_checkpoint(tmp_path)
    assert again.labels == ("no", "maybe", "yes")
    assert again.generation == {"eos_token_id": 5}
    assert transformers.AutoConfig.from_pretrained(tmp_path).id2label[2] == "yes"


# ------------------------------------------------------------------ LLaMA's many settings

LLAMA = dict(BERT, num_key_value_heads=1, max_position_embeddings=96)
SCALINGS = {
    "": dict(rope_type="default"),
    "linear:4": dict(rope_type="linear", factor=4.0),
    "llama3:8,1,4,16": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "yarn:4,32,32,1": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("bias", "tied"), [(False, True), (True, False)])
@torch.no_grad()
def test_llama_scalings_biases_and_tied_weights(
    scaling: str, bias: bool, tied: bool, tmp_path: Path
) -> None:
    rope = dict(SCALINGS[scaling], rope_theta=5000.0)
    settings = dict(
        rope_parameters=rope, attention_bias=bias, mlp_bias=bias, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **settings)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(1, VOCAB, (1, 90))
    want, checkpoint = model(tokens).logits, read_checkpoint(tmp_path / "theirs")
    assert checkpoint.network.config.rotary_scaling == scaling
    torch.testing.assert_close(checkpoint.network(tokens)["lm"], want, rtol=0, atol=1e-5)
    write_checkpoint(checkpoint, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(back(tokens).logits, want, rtol=0, atol=1e-5)
    # what transformers 4 looks for
    older = json.loads((tmp_path / "ours" / "config.json").read_text())
    older.pop("rope_parameters")
    (tmp_path / "ours" / "config.json").write_text(json.dumps(older))
    assert read_checkpoint(tmp_path / "ours").network.config == checkpoint.network.config


def test_llama_generates_as_transformers_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    prompts = torch.randint(1, VOCAB, (3, 7))
    theirs = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, eos_token_id=None
    )
    config = GenerationConfig(40, Sampling(temperature=0))
    sequences = new_sequences(prompts.tolist(), config, 96)
    decoding = Decoding(read_checkpoint(tmp_path).network, sequences)
    ours = [decoding.step() for _ in range(40)]
    assert [[token for step in ours for token in step[row]] for row in range(3)] == theirs[
        :, 7:
    ].tolist()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rotary positions 'longrope'; Malmoi supports default, linear",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "gives no number for factor"),
        (
            {"rope_scaling": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5, and Malmoi has llama only with 1",
        ),
        ({"attention_bias": True}, "in both or in neither"),
        ({"hidden_act": "gelu"}, "only with 'silu'"),
    ],
)
def test_unsupported_llamas_give_a_clear_error(
    changes: dict, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, **changes}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(MalmoiError, match=sentence):
        read_checkpoint(tmp_path)


# ------------------------------------------------------------------ damage


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def set_config(**values: object) -> object:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, "truncated or damaged"),
        (lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
        (lambda d: (d / "config.json").unlink(), "not a model folder"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON: .* at line 1"),
        (set_config(model_type="bret"), "model_type 'bret'.*Did you mean 'bert'"),
        (set_config(hidden_size=32, intermediate_size=64), "shape"),
        (set_config(num_hidden_layers=3), "missing"),
        (set_config(position_embedding_type="relative_key"), "position_embedding_type"),
        (
            set_config(hidden_act="silu"),
            "hidden_act = 'silu'.*it supports gelu, gelu_new[a-z0-9_, ]*relu2\\.$",
        ),
        (
            lambda d: (d / "vocab.txt").write_text(
                "\n".join([*SPECIALS, *(f"w{i}" for i in range(90))])
            ),
            "95 tokens",
        ),
    ],
)
def test_damaged_folders_give_a_clear_error(damage: object, sentence: str, tmp_path: Path) -> None:
    damage(saved(tmp_path))
    with pytest.raises(MalmoiError, match=sentence):
        read_checkpoint(tmp_path)


def test_a_pickle_that_runs_code_is_not_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "owned",))

    (saved(tmp_path) / "model.safetensors").unlink()
    torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(MalmoiError, match="not opened"):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_missing_folders_and_hub_ids_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(MalmoiError, match="HF_HUB_OFFLINE"):
        read_checkpoint("bert-base-uncased")


@torch.no_grad()
def test_a_modernbert_of_transformers_4_is_read(tmp_path: Path) -> None:
    """Its config has the two rates and the number of layers between global ones, and no lists."""
    model = make_hf("modernbert", "ModernBertForMaskedLM")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del config[name]
    config |= dict(global_rope_theta=900.0, local_rope_theta=50.0, global_attn_every_n_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = read_checkpoint(tmp_path).network
    assert network.config.attention == ("full", "local:4", "local:4")
    assert_same_logits(network, "ModernBertForMaskedLM", model)
    write_checkpoint(read_checkpoint(tmp_path), tmp_path / "ours")
    again = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: again[name] for name in config.keys() & again.keys()}.items() >= {
        "global_rope_theta": 900.0,
        "local_rope_theta": 50.0,
        "global_attn_every_n_layers": 3,
    }.items()
