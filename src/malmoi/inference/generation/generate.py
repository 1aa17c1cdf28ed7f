"""Text generation: tokens by `Decoding`, beam search or prompt lookup, then detokenized."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from malmoi.errors import require_known, require_that
from malmoi.inference.generation.batch import BatchPool
from malmoi.inference.generation.constraints import (
    AllConstraints,
    AllowedTokens,
    BannedWords,
    Constraint,
    MinTokens,
)
from malmoi.inference.generation.detokenize import NoDetokenizer, TextWriter, detokenizer
from malmoi.inference.generation.keywords import GenerationSettings
from malmoi.inference.generation.options import (
    ConstraintOptions,
    GenerationConfig,
    Sampling,
    stop_strings,
)
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.generation.sampling import SequenceState, StepOutput, new_sequences
from malmoi.kernels.fast_argmax import FastArgmax, greedy_tokens
from malmoi.kernels.kv_slots import check_causal, common_prefix_length
from malmoi.model import KVCache, Network
from malmoi.settings import settings_of
from malmoi.system.threads import inference_threads
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import length_batches

MATCH_TOKENS = 3  # longest match that prompt lookup looks for; shorter ones if there is none
DRAFT_TOKENS = 8  # maximum length of a draft


# ------------------------------------------------------------------ the options of `generate`


def generation_config(
    tokenizer: Tokenizer, ends: frozenset[int], vocab: int, options: GenerationSettings
) -> GenerationConfig:
    """The config of these options, for a model whose texts end with one of `ends`."""
    known = settings_of(GenerationConfig, ConstraintOptions)
    values: dict[str, Any] = dict(options)
    for name in values:
        require_known(name, known, "generate has no setting {name!r}.{hint}")
    if values.get("speculate") or values.get("beams", 1) > 1:
        values.setdefault("temperature", 0.0)
    sampling = Sampling(**_take(values, Sampling))
    for token, _ in sampling.logit_bias:
        require_that(token < vocab, "This model has no token {token} of logit_bias.", token=token)
    rules = ConstraintOptions(**_take(values, ConstraintOptions))
    # special tokens decode to no text, so they match by id
    ids = tokenizer.control_tokens
    stops = (ids[text] for text in stop_strings(values.get("stop", ())) if text in ids)
    return GenerationConfig(
        sampling=sampling,
        end_tokens=ends.union(stops),
        constraint=build_constraint(tokenizer, ends, rules),
        **values,
    )


def build_constraint(
    tokenizer: Tokenizer, ends: frozenset[int], options: ConstraintOptions
) -> Constraint | None:
    """Combines the constraining options of `generate` into one constraint."""
    parts: list[Constraint] = []
    if options.allowed is not None:
        parts.append(AllowedTokens(options.allowed))
    if options.banned is not None:
        words = options.banned
        parts.append(BannedWords([words] if isinstance(words, str) else words, tokenizer))
    if options.min_tokens is not None:
        parts.append(MinTokens(options.min_tokens, ends))
    # last, since near the limit they choose among the tokens that the others leave
    for name in ("choices", "regex", "json_schema", "grammar"):
        value = getattr(options, name)
        if value is not None:
            from malmoi.inference.generation.grammar import grammar_constraint

            parts.append(grammar_constraint(name, value, tokenizer, ends))
    return AllConstraints(parts) if len(parts) > 1 else next(iter(parts), None)


def _take(values: dict[str, Any], record: type) -> dict[str, Any]:
    """Removes and returns the values of a record's fields."""
    return {one.name: values.pop(one.name) for one in fields(record) if one.name in values}


# ------------------------------------------------------------------ decoding


class Decoding:
    """A fixed set of requests, decoded together."""

    def __init__(
        self,
        network: Network,
        sequences: Sequence[SequenceState],
        fast_argmax: FastArgmax | None = None,
        pool: BatchPool | None = None,
    ) -> None:
        self.sequences = list(sequences)
        self.number = {sequence: i for i, sequence in enumerate(self.sequences)}
        self.batches = pool or BatchPool()
        # the last token is generated but never read
        capacity = max(len(sequence.prompt) + sequence.limit for sequence in sequences) - 1
        # samples of one prompt share its prefill
        repeated = len({sequence.prompt for sequence in sequences}) < len(sequences)
        prefixes = PrefixCache(network) if repeated else None
        self.batch = self.batches.acquire(network, len(sequences), capacity, fast_argmax, prefixes)
        for sequence in self.sequences:
            self.batch.add(sequence)

    def step(self) -> dict[int, list[int]]:
        """Decodes the next token of every running request; on a GPU, the next few."""
        written: list[StepOutput] = []
        while any(not sequence.decoding for sequence in self.batch.sequences):
            written += self.batch.prefill()
        written = written or self.batch.step()
        for sequence in self.batch.sequences:
            if sequence.error is not None:
                raise sequence.error
        running = (one for one in written if one.sequence in self.batch.sequences)
        return {self.number[one.sequence]: one.tokens for one in running}

    def drop(self, finished: Iterable[int]) -> None:
        """Removes finished requests."""
        for sequence in {self.sequences[i] for i in finished}.intersection(self.batch.sequences):
            self.batch.remove(sequence)

    def close(self) -> None:
        """Returns the batch to the pool."""
        self.batches.release(self.batch)

    @property
    def running(self) -> bool:
        return bool(self.batch.sequences)


@dataclass(frozen=True)
class TextGenerator:
    """A network with an lm head, its tokenizer, and a `FastArgmax` if it pays."""

    network: Network
    tokenizer: Tokenizer
    fast_argmax: FastArgmax | None = None
    batches: BatchPool = field(default_factory=BatchPool)

    def continuations(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> list[list[str]]:
        """Returns `n` continuations of every prompt."""
        texts = [""] * (len(prompts) * config.n)
        for i, text in self.stream(prompts, config):
            texts[i] += text
        return [texts[i : i + config.n] for i in range(0, len(texts), config.n)]

    def stream(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> Iterator[tuple[int, str]]:
        """Yields (continuation, chunk of text): sample j of prompt i is continuation i · n + j."""
        wanted = new_sequences(prompts, config, self.network.config.max_length)  # raises right away
        if config.beams > 1 or config.speculate:
            return self._write_alone(wanted, config)
        return self._write_together(wanted, config)

    def _write_together(
        self, wanted: Sequence[SequenceState], config: GenerationConfig
    ) -> Iterator[tuple[int, str]]:
        writers = [writer_for(self.tokenizer, sequence, config) for sequence in wanted]
        for group in length_batches([len(sequence.prompt) + sequence.limit for sequence in wanted]):
            some = [wanted[i] for i in group]
            decoding = Decoding(self.network, some, self.fast_argmax, self.batches)
            try:
                with inference_threads(self.network.device) as threads:
                    while decoding.running:
                        for at, tokens in decoding.step().items():
                            i = group[at]
                            if text := writers[i].push_all(tokens, wanted[i].constraint_state)[0]:
                                yield i, text
                            threads.step(len(tokens))
                        decoding.drop(at for at, i in enumerate(group) if writers[i].done)
            finally:
                decoding.close()

    def _write_alone(
        self, wanted: Sequence[SequenceState], config: GenerationConfig
    ) -> Iterator[tuple[int, str]]:
        """Beam search or prompt lookup, whose requests share no steps."""
        for i, sequence in enumerate(wanted):
            asked = (self.network, sequence.prompt, sequence.limit)
            writer = writer_for(self.tokenizer, sequence, config)
            looked_up = chain.from_iterable(prompt_lookup(*asked, self.fast_argmax))
            tokens = beam_search(*asked, config) if config.beams > 1 else looked_up
            for token in tokens:
                if text := writer.push(token):
                    yield i, text
                if writer.done:
                    break


def writer_for(
    tokenizer: Tokenizer, sequence: SequenceState, config: GenerationConfig, *, text: bool = True
) -> TextWriter:
    """Without `text`, it only says where the continuation ends."""
    decode = detokenizer(tokenizer, sequence.prompt) if text else NoDetokenizer(tokenizer)
    return TextWriter(decode, config.stop, config.end_tokens, sequence.limit)


# ------------------------------------------------------------------ prompt lookup


@torch.inference_mode()
def prompt_lookup(
    network: Network, prompt: Sequence[int], limit: int, fast_argmax: FastArgmax | None = None
) -> Iterator[list[int]]:
    """Greedily continues a prompt and yields the tokens of each pass (Saxena 2023).

    A draft is what followed the same tokens earlier in the text. The network checks the whole of it
    in one pass and keeps the tokens it would have generated itself, so greedy text is unchanged,
    only faster where it repeats: summaries, answers from a context, code.
    """
    check_causal(network)
    require_that(not network.config.recurrent, "A recurrent state cannot go back: omit speculate.")
    text = list(prompt)
    end = min(len(text) + limit, network.config.context)
    cache = KVCache(network.config, 1, end, dtype=network.dtype, device=network.device)
    unread = list(text)
    while len(text) < end:
        draft = find_draft(text, min(DRAFT_TOKENS, end - len(text) - 1))
        shown = torch.tensor([unread + draft], device=network.device)
        hidden = network.trunk(shown, cache=cache)[0, len(unread) - 1 :]
        best = greedy_tokens(network, fast_argmax, hidden)
        # the accepted part of the draft, and the token that the network generates after it
        right = best[: common_prefix_length(draft, best) + 1]
        cache.truncate(len(text) + len(right) - 1)
        text += right
        unread = right[-1:]
        yield right


def find_draft(text: Sequence[int], limit: int) -> list[int]:
    """What followed the latest earlier occurrence of the newest tokens, up to `limit` tokens."""
    for size in range(min(MATCH_TOKENS, len(text) - 1), 0, -1) if limit > 0 else ():
        newest = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == newest:
                return list(text[start + size : start + size + limit])
    return []


# ------------------------------------------------------------------ beam search

# the newest tokens [R · N] and the row of the batch before that each continues -> log P [R · N, V]


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


def search_beams(
    logprobs: Tensor, rules: BeamRules, read: Callable[[Tensor, Tensor], Tensor]
) -> list[list[int]]:
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
    """transformers' continuation: the best log p / length^length_penalty (Wu et al. 2016 §7)."""
    check_causal(network)
    device = network.device
    cache = KVCache(network.config, 1, len(prompt) + limit, dtype=network.dtype, device=device)

    def logprobs(tokens: Tensor) -> Tensor:
        return network.read("lm", network.trunk(tokens, cache=cache)[:, -1]).float().log_softmax(-1)

    def read(newest: Tensor, rows: Tensor) -> Tensor:
        cache.reorder(rows)
        return logprobs(newest[:, None])

    first = logprobs(torch.tensor([prompt], device=device)).expand(config.beams, -1)
    cache.reorder(torch.zeros(config.beams, dtype=torch.long, device=device))
    rules = BeamRules(
        config.beams,
        limit,
        config.end_tokens,
        penalty=lambda length: length**config.length_penalty,
        early_stopping=config.early_stopping,
    )
    return tuple(search_beams(first, rules, read)[0])
