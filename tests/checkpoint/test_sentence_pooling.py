"""Sentence encoders: the vectors that the folder's own files define, read and written."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers

import malmoi
from malmoi.errors import MalmoiError
from malmoi.tokenizer import train_tokenizer

TEXTS = ["the state of the union is strong", "free people work", "peace " * 20]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT of transformers'."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    words = train_tokenizer(TEXTS, kind="wordpiece", vocab=60)
    config = transformers.BertConfig(
        vocab_size=words.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(folder)
    words.save(folder)
    return folder


def write_encoder(bert: Path, folder: Path, pooling: dict[str, Any], *more: str) -> Path:
    """The BERT with sentence-transformers' files beside it."""
    copytree(bert, folder)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(
            [("Transformer", ""), ("Pooling", "1_Pooling"), *((name, f"2_{name}") for name in more)]
        )
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    return folder


@torch.no_grad()
def by_definition(folder: Path) -> Any:
    """The vectors by the files alone: transformers' model, the pooling's mode, the last module."""
    modules = json.loads((folder / "modules.json").read_text())
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    encode = transformers.AutoTokenizer.from_pretrained(folder)
    given = encode(TEXTS, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    hidden = transformers.AutoModel.from_pretrained(folder)(**given).last_hidden_state
    keep = given["attention_mask"][..., None]
    mean = (hidden * keep).sum(1) / keep.sum(1)
    first = pooling.get("pooling_mode_cls_token") or pooling.get("pooling_mode") == "cls"
    vectors = hidden[:, 0] if first else mean
    scaled = modules[-1]["type"].endswith("Normalize")
    return (torch.nn.functional.normalize(vectors, dim=-1) if scaled else vectors).numpy()


@pytest.mark.parametrize(
    ("pooling", "more"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("Normalize",)),
        ({"pooling_mode_cls_token": True}, ()),
        ({"pooling_mode": "cls"}, ("Normalize",)),
    ],
)
def test_vectors_are_those_of_the_folders_files(
    bert: Path, tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...]
) -> None:
    folder = write_encoder(bert, tmp_path / "theirs", pooling, *more)
    model = malmoi.load(folder, device="cpu")
    vectors = model.embed(TEXTS, truncate=True)
    assert abs(vectors - by_definition(folder)).max() < 1e-5
    model.save(tmp_path / "ours")
    assert abs(vectors - by_definition(tmp_path / "ours")).max() < 1e-5


def test_a_plain_model_has_no_sentence_files(bert: Path, tmp_path: Path) -> None:
    folder = write_encoder(bert, tmp_path / "theirs", {"pooling_mode": "mean"})
    (folder / "modules.json").unlink()
    malmoi.load(folder).save(tmp_path / "ours")
    assert not (tmp_path / "ours" / "modules.json").exists()


@pytest.mark.parametrize(
    ("pooling", "more", "said"),
    [
        ({"pooling_mode": "max"}, (), "pools by 'max'"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "Transformer, Pooling, Dense"),
        ({}, (), "pools by"),
    ],
)
def test_unsupported_modules_are_refused(
    bert: Path, tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], said: str
) -> None:
    folder = write_encoder(bert, tmp_path / "theirs", pooling, *more)
    with pytest.raises(MalmoiError, match=said):
        malmoi.load(folder)


@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.parametrize(("mode", "more"), [("mean", ("Normalize",)), ("cls", ())])
def test_sentence_transformers_itself_has_the_same_vectors(
    bert: Path, tmp_path: Path, mode: str, more: tuple[str, ...]
) -> None:
    package = pytest.importorskip(
        "sentence_transformers", reason="a peer; pip install it to compare"
    )
    theirs = write_encoder(
        bert, tmp_path / "theirs", {"pooling_mode": mode, "word_embedding_dimension": 16}, *more
    )
    wanted = package.SentenceTransformer(str(theirs), device="cpu").encode(TEXTS)
    model = malmoi.load(theirs, device="cpu")
    assert abs(model.embed(TEXTS, truncate=True) - wanted).max() < 1e-5
    model.save(tmp_path / "ours")
    opened = package.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert abs(opened.encode(TEXTS) - wanted).max() < 1e-5
