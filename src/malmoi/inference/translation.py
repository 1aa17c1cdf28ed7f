"""Translation with an encoder and a decoder: greedy, and by beams as in Vaswani et al. 2017.

The encoder reads each source once; the decoder's own keys and values are cached. R rows,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from malmoi.errors import require_that
from malmoi.inference.batches import in_order
from malmoi.inference.generation.generate import BeamRules, search_beams
from malmoi.inference.prompt import check_length
from malmoi.model import KVCache, Network
from malmoi.model.trunks import CrossActivations, EncoderDecoder, Memory
from malmoi.system.machine import per_device
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import BatchLimits, keep_mask, length_batches, pad_to_width

EXTRA_TOKENS = 50  # a translation has at most this many tokens more than its source (§6.1)
BEAMS = 4
LENGTH_PENALTY = 0.6  # α
BATCH_TOKENS = {"cpu": 4_096, "cuda": 65_536}  # source tokens together, all beams counted


class TranslationOptions(TypedDict, total=False):
    """Options of `translate`."""

    beams: int  # 4; 1 is greedy
    length_penalty: float  # 0.6: beams are scored by log p / ((5 + length) / 6)^penalty
    examples: Sequence[tuple[str, str]]  # of a GPT: (text, translation) pairs shown first
    max_new_tokens: int  # of a GPT: 64


@dataclass(frozen=True)
class Translator:
    """A network that translates, and the tokens that begin and end a translation."""

    network: Network
    start: int
    end: int
    pad: int
    banned: tuple[int, ...] = ()  # tokens that are never written: Marian's padding has a score of 0

    @property
    def trunk(self) -> EncoderDecoder:
        return cast(EncoderDecoder, self.network.trunk)

    @torch.inference_mode()
    def translate(
        self, sources: Sequence[Sequence[int]], beams: int = BEAMS, alpha: float = LENGTH_PENALTY
    ) -> list[list[int]]:
        """Translates sources, which end with the end token, each into tokens without one."""
        context = self.network.config.context
        check_length(max(map(len, sources), default=0), context)
        room = per_device(BATCH_TOKENS, self.network.device.type)

        def translated(some: list[int]) -> list[list[int]]:
            memory = self._read([sources[i] for i in some])
            limit = min(len(sources[some[0]]) + EXTRA_TOKENS, context - 1)
            return self._search(memory, limit, beams, alpha)

        batches = length_batches(list(map(len, sources)), BatchLimits(room, room // beams, room))
        return in_order((some, translated(some)) for some in batches)

    def _read(self, sources: Sequence[Sequence[int]]) -> Memory:
        device = self.network.device
        tokens = torch.from_numpy(pad_to_width(sources, max(map(len, sources)), self.pad))
        return self.trunk.encode(tokens.to(device), keep_mask(sources, device=device))

    def _logprobs(self, newest: Tensor, memory: Memory, cache: KVCache) -> Tensor:
        """log P of every next token [R, V], after the newest tokens [R]."""
        hidden = self.trunk(newest[:, None], memory=memory, cache=cache)[:, 0]
        scores = self.network.read("lm", hidden).float()
        scores[:, list(self.banned)] = -torch.inf
        return scores.log_softmax(-1)

    def _search(self, memory: Memory, limit: int, beams: int, alpha: float) -> list[list[int]]:
        """Beams of all rows, as in tensor2tensor: log P / ((5 + n) / 6)^α (Wu et al. 2016)."""
        network = self.network
        several = beams > 1
        total = len(memory.layers[0][0])
        memory = memory.rows(torch.arange(total, device=network.device).repeat_interleave(beams))
        size = total * beams
        cache = KVCache(network.config, size, limit, dtype=network.dtype, device=network.device)

        def read(newest: Tensor, rows: Tensor) -> Tensor:
            nonlocal memory
            fewer = len(rows) < len(memory.layers[0][0])
            if fewer:  # the beams of a row share its source
                memory = memory.rows(rows)
            if fewer or several:
                cache.reorder(rows)
            return self._logprobs(newest, memory, cache)

        start = torch.full((size,), self.start, device=network.device)
        rules = BeamRules(
            beams,
            limit,
            frozenset({self.end}),
            penalty=lambda length: ((5 + length) / 6) ** alpha,
            early_stopping="never" if several else True,
            best_only=several,
        )
        found = search_beams(self._logprobs(start, memory, cache), rules, read)
        return [text[:-1] if text[-1] == self.end else text for text in found]


def banned_tokens(words: Sequence[Sequence[int]], vocab: int) -> tuple[int, ...]:
    """The tokens that a folder's `bad_words_ids` ban."""
    single = all(len(word) == 1 for word in words)
    require_that(single, "generation_config.json: translate takes single tokens as bad_words_ids.")
    return tuple(word[0] for word in words if 0 <= word[0] < vocab)


def translate_texts(
    translator: Translator, tokenizer: Tokenizer, texts: Sequence[str], options: TranslationOptions
) -> list[str]:
    """Translates texts of one line each."""
    beams = options.get("beams", BEAMS)
    require_that(beams >= 1, "beams must be at least 1, not {beams}.", beams=beams)
    lines = [" ".join(text.split()) for text in texts]  # as pairs are read in training
    sources = [[*tokens, translator.end] for tokens in tokenizer.ids(lines)]
    found = translator.translate(sources, beams, options.get("length_penalty", LENGTH_PENALTY))
    return [tokenizer.decode(tokens).strip() for tokens in found]


@dataclass(frozen=True, eq=False)
class CrossAttentionMap:
    """What each target token attended to in the source: [T, S], the mean of a layer's heads."""

    source: list[str]
    target: list[str]
    weights: NDArray[np.float32]


@torch.inference_mode()
def cross_attention(
    translator: Translator, tokenizer: Tokenizer, source: str, target: str, layer: int = -1
) -> CrossAttentionMap:
    """The attention from a target, token by token, to its source; rows add up to 1."""
    read = [*tokenizer.encode(source, specials=False).tokens, translator.end]
    written = tokenizer.target.encode(target, specials=False).tokens
    check_length(len(read), translator.network.config.context)
    device = translator.network.device
    seen = CrossActivations()
    tokens = torch.tensor([[translator.start, *written]], device=device)
    translator.trunk(tokens, source=torch.tensor([read], device=device), activations=seen)
    layers = range(-len(seen.cross), len(seen.cross))
    require_that(layer in layers, "This model has the decoder layers 0 to {last}.", last=layers[-1])
    weights = seen.cross[layer][0].mean(0).float().cpu().numpy()
    # row t predicts target token t
    names = [tokenizer.token(token) for token in (*written, translator.end)]
    return CrossAttentionMap([tokenizer.token(token) for token in read], names, weights)
