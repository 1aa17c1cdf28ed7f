"""Beam search over a batch of rows. R rows, N beams, V vocabulary, C candidates, T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import torch
from torch import Tensor

from malmoi.inference.generation.options import GenerationConfig
from malmoi.kernels.kv_slots import check_causal
from malmoi.model import KVCache, Network

# the newest tokens [R · N] and the row of the batch before that each continues -> log P [R · N, V]
NextLogprobs = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BeamRules:
    """How the texts of a row compete: a finished one scores log p / penalty(length)."""

    beams: int
    limit: int  # of tokens
    end_tokens: frozenset[int]
    penalty: Callable[[int], float]
    # True ends with N finished texts; False once the best beam, scored at its present length, is
    # worse than all of them; "never" once no beam can catch up
    early_stopping: bool | Literal["never"] = False
    # transformers: N finished texts are kept, only the N likeliest candidates can finish, and at
    # the limit all do; tensor2tensor: one is kept, any candidate can finish, and a text without an
    # end is taken only if there is no other
    best_only: bool = False


@dataclass
class FinishedTexts:
    """The best finished texts of a row so far, best first."""

    rules: BeamRules
    best: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return 1 if self.rules.best_only else self.rules.beams

    def add(self, tokens: list[int], logprob: float) -> None:
        self.best.append((logprob / self.rules.penalty(len(tokens)), tokens))
        # stable: among ties, the first to finish stays first
        self.best.sort(key=lambda item: -item[0])
        del self.best[self.kept :]

    def is_decided(self, leader: float, length: int) -> bool:
        """Whether the search can stop, given log p and length of the likeliest running beam."""
        rules = self.rules
        if leader == -inf or len(self.best) < self.kept:
            return leader == -inf
        if rules.early_stopping is True:
            return True
        penalty = rules.penalty(length)
        if rules.early_stopping == "never":
            penalty = max(penalty, rules.penalty(rules.limit))
        return leader / penalty <= self.best[-1][0]


def search_beams(logprobs: Tensor, rules: BeamRules, read: NextLogprobs) -> list[list[int]]:
    """The best text of every row, from log P [R · N, V] of its first token.

    Of the likeliest continuations of a row's beams, enough to keep N if some end, those that end
    are finished texts, and the N best of the others continue. Rows leave when they are decided.
    """
    every = [FinishedTexts(rules) for _ in range(len(logprobs) // rules.beams)]
    rows = every
    tokens = torch.empty((len(rows), rules.beams, 0), dtype=torch.long, device=logprobs.device)
    totals = logprobs.new_full((len(rows), rules.beams), -inf)
    totals[:, 0] = 0.0  # all beams are equal at first, so only one counts
    ends = torch.tensor(sorted(rules.end_tokens), dtype=torch.long, device=logprobs.device)
    for length in range(1, rules.limit + 1):
        values, origins, texts = _candidates(totals, logprobs, tokens, 1 + max(1, len(ends)))
        ended = torch.isin(texts[..., -1], ends)
        _finish(rows, values, texts, ended)
        totals, chosen = values.masked_fill(ended, -inf).topk(rules.beams)
        leaders = enumerate(zip(rows, totals[:, 0].tolist(), strict=True))
        left = [i for i, (row, leader) in leaders if not row.is_decided(leader, length)]
        if not left:
            break
        kept = torch.tensor(left, device=logprobs.device)
        rows, totals, chosen = [rows[i] for i in left], totals[kept], chosen[kept]
        tokens = texts[kept].gather(1, chosen[..., None].expand(-1, -1, length))
        before = kept[:, None] * rules.beams + origins[kept].gather(1, chosen)
        if length < rules.limit:
            logprobs = read(tokens[..., -1].flatten(), before.flatten())
    for row, text in zip(rows, tokens[:, 0].tolist(), strict=True):
        row.best = row.best or [(-inf, text)]
    return [row.best[0][1] for row in every]


def _candidates(
    totals: Tensor, logprobs: Tensor, tokens: Tensor, per_beam: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest continuations: log p [R, C], beam [R, C], tokens [R, C, T]."""
    rows, beams = totals.shape
    vocab = logprobs.size(1)
    total = (totals[..., None] + logprobs.view(rows, beams, vocab)).flatten(1)
    values, places = total.topk(min(per_beam * beams, total.size(1)))
    origins = places // vocab
    before = tokens.gather(1, origins[..., None].expand(-1, -1, tokens.size(2)))
    return values, origins, torch.cat((before, (places % vocab)[..., None]), 2)


def _finish(rows: list[FinishedTexts], values: Tensor, texts: Tensor, ended: Tensor) -> None:
    rules = rows[0].rules
    if not rules.best_only:
        ended = ended | (texts.size(2) == rules.limit)
        ended[:, rules.beams :] = False
    ended = ended & (values > -inf)
    found = (ended.nonzero()[:, 0], texts[ended], values[ended])
    for row, text, logprob in zip(*(each.tolist() for each in found), strict=True):
        rows[row].add(text, logprob)


@torch.inference_mode()
def beam_search(
    network: Network, prompt: Sequence[int], limit: int, config: GenerationConfig
) -> tuple[int, ...]:
    """Returns the continuation that `transformers` finds.

    Its score is log p / length^length_penalty (Wu et al. 2016 §7, without its constant).
    """
    check_causal(network)
    device = network.device
    cache = KVCache(network.config, 1, len(prompt) + limit, dtype=network.dtype, device=device)

    def logprobs(tokens: Tensor) -> Tensor:
        hidden = network.trunk(tokens, cache=cache)[:, -1]
        return network.read("lm", hidden).float().log_softmax(-1)

    def read(newest: Tensor, rows: Tensor) -> Tensor:
        cache.reorder(rows)
        return logprobs(newest[:, None])

    first = logprobs(torch.tensor([prompt], device=device)).expand(config.beams, -1)
    cache.reorder(torch.zeros(config.beams, dtype=torch.long, device=device))
    power = config.length_penalty
    ends = frozenset(config.end_tokens)
    stopping = config.early_stopping
    rules = BeamRules(config.beams, limit, ends, lambda length: length**power, stopping)
    return tuple(search_beams(first, rules, read)[0])
