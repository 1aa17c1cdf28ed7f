"""Folders with small random models, which several tests fine-tune or serve."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer


def tiny_bert(folder: Path, texts: Iterable[str], vocab: int, **options: Any) -> Path:
    """A BERT with a WordPiece tokenizer trained on the texts; options as of `tiny_gpt`."""
    return _write(folder, "bert-tiny", texts, vocab, **{"heads_of": {"mlm": 0}, **options})


def tiny_gpt(folder: Path, texts: Iterable[str], vocab: int, **options: Any) -> Path:
    """A GPT-2 with a byte-level BPE trained on the texts; options are `heads_of`, `labels`, `seed`,
    and fields of the model.
    """
    return _write(folder, "gpt2-small", texts, vocab, **{"heads_of": {"lm": 0}, **options})


def _write(
    folder: Path,
    name: str,
    texts: Iterable[str],
    vocab: int,
    *,
    heads_of: Mapping[str, int],
    labels: tuple[str, ...] = (),
    seed: int = 0,
    **sizes: Any,
) -> Path:
    kind: Any = "wordpiece" if name.startswith("bert") else "byte-bpe"
    words = train_tokenizer(texts, kind=kind, vocab=vocab)
    network = initialise(Network(preset(name, vocab=words.vocab_size, **sizes), heads_of), seed)
    write_checkpoint(Checkpoint(network, words, labels), folder)
    return folder
