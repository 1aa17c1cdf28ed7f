"""Families with tokenizers of their own, as people have them on the hub: opened, used, changed and
given back to transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, processors

import malmoi
from malmoi.checkpoint import read_checkpoint, write_checkpoint
from malmoi.compression.prune import prune_model
from malmoi.compression.quantize import quantize_model
from malmoi.compression.share import share_layers
from malmoi.errors import MalmoiError
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.task_network import build_task_network
from malmoi.tokenizer import train_tokenizer

TEXTS = ["the cat sat on the mat", "너와 나의 말모이, 다시 쓴다", "a good film, not a bad one"]
PAIRS = ["it was fine", "말을 모은다", "is it?"]
SIZES: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=40,
    initializer_range=0.2,
)


# on the hub a byte-level mask takes the space before it
LSTRIP = AddedToken("<mask>", lstrip=True, special=True)


def byte_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary and its merges, with RoBERTa's specials first."""
    state = json.loads(train_tokenizer(TEXTS * 20, kind="byte-bpe", vocab=330)._rust.to_str())
    pieces = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "<mask>"]
    merges = [tuple(pair) for pair in state["model"]["merges"]]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}, merges


def roberta() -> Any:
    vocab, merges = byte_bpe()
    return transformers.RobertaTokenizer(vocab=vocab, merges=merges, mask_token=LSTRIP)


def xlm_roberta() -> Any:
    letters = sorted(set("".join(TEXTS + PAIRS)) - {" "})
    words = {f"▁{word}" for text in TEXTS for word in text.split()}
    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", *letters, *sorted(words - set(letters))]
    scores = [0.0] * 4 + [-float(len(name) == 1) * 5 - 2 for name in names[4:]]
    return transformers.XLMRobertaTokenizer(vocab=list(zip(names, scores, strict=True)))


def klue() -> Any:
    """klue/roberta: RoBERTa's weights behind a BERT tokenizer, whose padding is not the first."""
    words = sorted({word for text in TEXTS + PAIRS for word in text.replace(",", " ,").split()})
    names = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *words, "?", "##모이", "##다"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return transformers.BertTokenizer(vocab=vocab, do_lower_case=False)


def modernbert() -> Any:
    rust = train_tokenizer(TEXTS * 20, kind="byte-bpe", vocab=330)._rust
    names = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]"]
    rust.add_special_tokens([AddedToken(name, lstrip=name == "[MASK]") for name in names])
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, rust.token_to_id(name)) for name in names[:2]],
    )
    roles = {f"{name[1:-1].lower()}_token": name for name in names}
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, model_input_names=inputs, **roles
    )


MODELS = {
    "roberta": (roberta, transformers.RobertaConfig, {"type_vocab_size": 1}),
    "xlm-roberta": (xlm_roberta, transformers.XLMRobertaConfig, {"type_vocab_size": 1}),
    "klue": (klue, transformers.RobertaConfig, {"type_vocab_size": 1}),
    "modernbert": (modernbert, transformers.ModernBertConfig, {"local_attention": 6}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model and its tokenizer, written by transformers."""
    make, kind, changes = MODELS[request.param]
    words = make()
    ids = {f"{role}_token_id": getattr(words, f"{role}_token_id") for role in ("pad", "cls", "sep")}
    torch.manual_seed(0)
    config = kind(vocab_size=len(words), **SIZES, **changes, **ids)
    path = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(path)
    words.save_pretrained(path)
    return path


@torch.no_grad()
def scores(folder: Path, kind: Any, pairs: list[str] | None = None) -> torch.Tensor:
    """What transformers makes of a folder, by its own tokenizer, padding included."""
    words = transformers.AutoTokenizer.from_pretrained(folder)
    given = words(TEXTS, pairs, padding=True, return_tensors="pt")
    if "klue" in str(folder):  # as its users must
        given.pop("token_type_ids", None)
    return kind.from_pretrained(folder).eval()(**given).logits


def _shown(words: Any, token: int) -> str:
    """Byte-level tokens as the text they are, others by their names."""
    name = words.convert_ids_to_tokens(token)
    return words.decode([token]).strip() or name if "Ġ" in words.get_vocab() else name


def test_tokens_candidates_and_vectors_equal_transformers(folder: Path) -> None:
    model = malmoi.load(folder, device="cpu")
    words = transformers.AutoTokenizer.from_pretrained(folder)
    for text, pair in zip(TEXTS, PAIRS, strict=True):
        assert model.tokenizer.encode(text).tokens == words(text)["input_ids"]
        assert model.tokenizer.encode(text, pair).tokens == words(text, pair)["input_ids"]
    pipe = transformers.pipeline("fill-mask", model=str(folder), tokenizer=words)
    masked = f"the cat {words.mask_token} on the mat"
    found = model.fill(masked, top=3)
    expected = pipe(masked, top_k=3)
    assert [one.token for one in found] == [_shown(words, e["token"]) for e in expected]
    assert [one.probability for one in found] == pytest.approx(
        [e["score"] for e in expected], rel=1e-4
    )
    given = words(TEXTS[0], return_tensors="pt")
    base = transformers.AutoModel.from_pretrained(folder).eval()
    given.pop("token_type_ids", None)
    with torch.no_grad():
        states = base(**given).last_hidden_state[0]
    torch.testing.assert_close(
        torch.tensor(model.embed(TEXTS[0])), states.mean(0), rtol=0, atol=1e-5
    )


def test_a_folder_that_is_written_again_is_the_same(folder: Path, tmp_path: Path) -> None:
    malmoi.load(folder, device="cpu").save(tmp_path)
    kind = transformers.AutoModelForMaskedLM
    torch.testing.assert_close(
        scores(tmp_path / ".", kind, PAIRS), scores(folder, kind, PAIRS), rtol=0, atol=1e-5
    )
    then, now = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path))
    names = ("model_type", "pad_token_id", "max_position_embeddings", "architectures")
    names += ("cls_token_id", "sep_token_id") if then["model_type"] == "modernbert" else ()
    assert {name: now[name] for name in names} == {name: then[name] for name in names}


@pytest.fixture(scope="module")
def classifier(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fine-tuned on pairs, of which RoBERTa and ModernBERT know no segments."""
    rows = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [
        f'"{text}","{pair}",{"yes" if i % 2 else "no"}'
        for i, (text, pair) in enumerate(zip(TEXTS * 4, PAIRS * 4, strict=True))
    ]
    rows.write_text("text,pair,label\n" + "\n".join(lines) + "\n")
    task = malmoi.custom_task("classification", text="text", pair="pair", label="label")
    out = tmp_path_factory.mktemp(folder.name)
    malmoi.finetune(folder, task, rows, out, rows, epochs=1, batch=4, device="cpu")
    return out


def test_a_new_head_of_a_modernbert_begins_with_what_its_masked_one_learnt(tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(vocab_size=60, pad_token_id=0, **SIZES)
    transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path)
    klue().save_pretrained(tmp_path)
    kind = transformers.AutoModelForSequenceClassification
    learnt = kind.from_pretrained(tmp_path).state_dict()["head.dense.weight"]
    task = malmoi.custom_task("classification")
    start = build_task_network(read_checkpoint(tmp_path), task, ("no", "yes"), FinetuneConfig())
    assert torch.equal(start.network.pooler.dense.weight, learnt)


def test_a_fine_tuned_classifier_opens_in_transformers(classifier: Path) -> None:
    model = malmoi.load(classifier, device="cpu")
    logits = scores(classifier, transformers.AutoModelForSequenceClassification, PAIRS)
    found = model.predict(list(zip(TEXTS, PAIRS, strict=True)))
    expected = logits.softmax(-1).max(-1)
    assert [p.scores[p.label] for p in found] == pytest.approx(expected.values.tolist(), abs=1e-5)
    labels = read_checkpoint(classifier).labels
    assert [p.label for p in found] == [labels[i] for i in expected.indices]


def test_every_family_can_be_pruned_quantised_and_shared(classifier: Path, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    ways: dict[str, Any] = {"sparsity": 0.5, "neurons": 0.5, "layers": "0,2"}
    for way, how in ways.items():
        prune_model(classifier, tmp_path / way, **{way: how})
        checkpoint = read_checkpoint(tmp_path / way)
        tokens = torch.arange(5, 12)[None]
        with torch.no_grad():
            theirs = kind.from_pretrained(tmp_path / way)(tokens).logits
            ours = checkpoint.network(tokens)["classify"]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    quantize_model(classifier, tmp_path / "int8", bits=8)
    share_layers(classifier, tmp_path / "shared")
    for name in ("int8", "shared"):
        assert malmoi.load(tmp_path / name, device="cpu").predict((TEXTS[0], PAIRS[0])).label


def test_positions_that_begin_after_another_padding_are_ours(tmp_path: Path) -> None:
    """transformers would count them from its tokenizer's padding."""
    checkpoint = read_checkpoint(_other_padding(tmp_path / "theirs"))
    write_checkpoint(checkpoint, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "malmoi"
    assert read_checkpoint(tmp_path / "ours").network.config == checkpoint.network.config


def _other_padding(folder: Path) -> Path:
    config = transformers.RobertaConfig(vocab_size=60, pad_token_id=7, **SIZES)
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    klue().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ["full_attention"]}, "for each of the 3 layers"),
        ({"layer_types": ["full_attention", "linear", "full_attention"]}, "layer_types"),
        ({"mlp_bias": True}, "in both or in neither"),
        ({"classifier_bias": True}, "only with False"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'.*it supports gelu, silu"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type = 'yarn'.*only with 'default'",
        ),
    ],
)
def test_unsupported_modernberts_give_a_clear_error(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = transformers.ModernBertConfig(vocab_size=60, pad_token_id=0, **SIZES)
    transformers.ModernBertModel(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(MalmoiError, match=sentence):
        read_checkpoint(tmp_path)
