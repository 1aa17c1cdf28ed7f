"""GPT-1's inputs: ⟨s⟩ text ⟨e⟩, ⟨s⟩ text $ pair ⟨e⟩ (Radford et al. 2018, figure 1)."""

from tokenizers import Tokenizer as Rust

from malmoi.errors import UsageError
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.core import Tokenizer

START = "<s>"
BETWEEN = "<$>"
END = "<e>"
PAD = "<pad>"


def add_frame_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with new tokens around a text and between a pair; other ids are unchanged."""
    rust = Rust.from_str(tokenizer._rust.to_str())
    rust.add_special_tokens([pipeline.added(name) for name in (START, BETWEEN, END, PAD)])
    pair = f"{START}:0 $A:0 {BETWEEN}:0 $B:1 {END}:1"
    pipeline.frame(rust, f"{START}:0 $A:0 {END}:0", pair, START, BETWEEN, END)
    roles = {"bos_token": START, "sep_token": BETWEEN, "eos_token": END, "pad_token": PAD}
    # transformers' own GPT classes would replace this pipeline with theirs
    return Tokenizer(
        rust, tokenizer.settings | roles | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def frame_with_end(tokenizer: Tokenizer) -> Tokenizer:
    """Puts end-of-text before a text and between a pair, for a vocabulary that must not grow.

    There is none at the end: transformers pads with that token, and pools the last one before
    padding.
    """
    end = tokenizer.specials.eos
    if end is None:
        raise UsageError("This model's tokenizer has no end-of-text token to put around a text.")
    rust = Rust.from_str(tokenizer._rust.to_str())
    name = tokenizer.token(end)
    pipeline.frame(rust, f"{name}:0 $A:0", f"{name}:0 $A:0 {name}:0 $B:1", name)
    roles = {"pad_token": name, "tokenizer_class": "PreTrainedTokenizerFast"}
    return Tokenizer(rust, tokenizer.settings | roles)


def is_framed(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer already adds special tokens."""
    return bool(tokenizer.encode("").tokens)
