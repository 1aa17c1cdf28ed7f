"""Random models of transformers, and the same ones opened here."""

from pathlib import Path

import torch
import transformers

import malmoi
from malmoi.inference import Model
from malmoi.tokenizer import Tokenizer


def random_gpt2(
    tokenizer: Tokenizer, folder: Path, context: int
) -> tuple[transformers.PreTrainedModel, Model]:
    """A small GPT-2 by transformers and by us; its weights are large, so that logits differ."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_positions=context,
        n_embd=48,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
    )
    config.bos_token_id = config.eos_token_id = tokenizer.specials.eos
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder)
    tokenizer.save(folder)
    return theirs, malmoi.load(folder, device="cpu")
