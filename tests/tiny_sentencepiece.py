"""Folders with only SentencePiece's files, as on the hub; their models are trained here."""

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers

TEXTS = [
    "the cat sat on the mat and the dog sat on the log",
    "나는 오늘 학교에 갔다. 말모이는 처음으로 낱말을 모은 사전이다!",
    "Café naïve résumé — ÀÉÎ 漢字 1,234.5 😀",
    "a good film, not a bad one; don't you think so?",
    "hello world hello there ``quoted'' text 12,345 99,",
]
GERMAN = ["Ein kleiner Hund läuft über die Straße.", "der Hund und die Katze", "너와 나의 말모이"]
BYTES: dict[str, Any] = dict(
    model_type="bpe",
    vocab_size=460,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    split_digits=True,
)
ALBERT: dict[str, Any] = dict(
    pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, user_defined_symbols="[CLS],[SEP],[MASK],(,)"
)


@cache
def trained(kind: str) -> bytes:
    """The model of a family; some characters of its text are unknown to it."""
    settings = {"llama": BYTES, "albert": ALBERT}.get(kind, {})
    texts = GERMAN if kind == "target" else TEXTS
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 8),
        model_writer=model,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        **{"vocab_size": 160, **settings},
    )
    return model.getvalue()


def write_tokenizer(folder: Path, kind: str, settings: Mapping[str, Any] | None = None) -> Path:
    """The tokenizer's files alone, and a config.json that names the family."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind != "marian":
        name = {"xlm-roberta": "sentencepiece.bpe", "albert": "spiece", "llama": "tokenizer"}[kind]
        (folder / f"{name}.model").write_bytes(trained(kind))
        return folder
    pieces = ["</s>", "<unk>"]
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(trained(side))
        model = sentencepiece.SentencePieceProcessor(model_proto=trained(side))
        pieces += [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    names = [*dict.fromkeys(pieces), ">>de<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    return folder


def write_model(folder: Path, kind: str, settings: Mapping[str, Any] | None = None) -> Path:
    """A random model of transformers beside its tokenizer."""
    write_tokenizer(folder, kind, settings)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    common = {"vocab_size": len(words), "max_position_embeddings": 64, "initializer_range": 0.4}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, **common}
    torch.manual_seed(0)
    if kind == "marian":
        parts = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}
        both = ("encoder", "decoder")
        sides = {f"{side}_{part}": size for side in both for part, size in parts.items()}
        pad = words.pad_token_id
        config = transformers.MarianConfig(
            d_model=32, init_std=0.4, pad_token_id=pad, eos_token_id=0, forced_eos_token_id=None,
            decoder_start_token_id=pad, scale_embedding=True, activation_function="swish",
            **common, **sides,
        )  # fmt: skip
        model = transformers.MarianMTModel(config)
        model.generation_config.bad_words_ids = [[pad]]
    elif kind == "llama":
        config = transformers.LlamaConfig(eos_token_id=2, bos_token_id=1, **sizes)
        model = transformers.LlamaForCausalLM(config)
    else:
        kinds = {"xlm-roberta": "XLMRoberta", "albert": "Albert"}
        config = transformers.CONFIG_MAPPING[kind](
            pad_token_id=words.pad_token_id, embedding_size=16, **sizes
        )
        model = getattr(transformers, f"{kinds[kind]}ForMaskedLM")(config)
    model.eval().save_pretrained(folder)
    return folder
