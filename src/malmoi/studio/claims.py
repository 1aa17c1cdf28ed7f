"""What each lesson claims, computed from the model on the screen. N items, T tokens, V vocabulary.

A claim is a function of a model (and of a second one, where two are compared) that returns the
option of the lesson's question which is right here, and the numbers of its sentence.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import Request
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.errors import require_known, require_that
from malmoi.evaluation.evaluate import word_baseline
from malmoi.evaluation.task import Example
from malmoi.inference import Model
from malmoi.inference.batches import model_inputs
from malmoi.inference.prompt import mask_token
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores, sentence_logprobs
from malmoi.interpret.forward_pass import attention, encode_for_model
from malmoi.interpret.probe import linear_accuracy, read_examples
from malmoi.metrics import mean_with_error
from malmoi.model import Layout, Network, count_parameters, initialise, parse_pattern
from malmoi.server.api.requests import ApiRequest, NameField
from malmoi.server.executor import run_on_model
from malmoi.studio.attention_view import Language, order_rows
from malmoi.studio.endpoint import Registry, router
from malmoi.studio.routes import pattern_cost
from malmoi.studio.sentence_path import kv_bytes, parameter_parts
from malmoi.tokenizer import Encoding

Floats = np.ndarray[Any, np.dtype[np.float64]]

TEXTS = Path(__file__).with_name("lesson_texts.json")  # unknown to the pair that is shipped
SURE = 2  # standard errors that make a difference
SPLITS = 5  # of rows into training and test rows
MAX_COPIED = 200_000_000  # weights of a model that is copied to be rounded
LONG_CONTEXT = 131_072  # tokens
GPT3 = (96, 12_288)  # layers and width (Brown et al. 2020 table 2.1)


class ClaimRequest(ApiRequest):
    """A lesson's claim, the language of its items, and the second model if it compares two."""

    claim: NameField
    language: Language = "en"
    other: NameField | None = None


@dataclass(frozen=True)
class Claim:
    """The right option for this model, and the numbers of the sentence about it."""

    answer: str
    values: dict[str, float]
    bars: dict[str, float] = field(default_factory=dict)  # shares to draw


@dataclass(frozen=True)
class Subject:
    """The models that a claim is about, and the language of its items."""

    model: Model
    language: Language
    other: Model | None = None

    @property
    def second(self) -> Model:
        return (self.other or self.model).masked


CLAIMS: dict[str, Callable[[Subject], Claim]] = {}


def claim(compute: Callable[[Subject], Claim]) -> Callable[[Subject], Claim]:
    CLAIMS[compute.__name__] = compute
    return compute


@router.post("/claims")
async def show_claim(request: Request, registry: Registry, body: ClaimRequest) -> Claim:
    """A lesson's claim, computed from the loaded models."""
    served = registry.get(body.model)
    other = None if body.other is None else registry.get(body.other).model
    work = partial(computed_claim, body.claim, Subject(served.model, body.language, other))
    return await run_on_model(request, served, work)


@lru_cache(maxsize=256)
def computed_claim(name: str, subject: Subject) -> Claim:
    require_known(name, CLAIMS, "There is no claim {name!r}.{hint}")
    return CLAIMS[name](subject)


# ------------------------------------------------------------------ items


@lru_cache(maxsize=1)
def lesson_texts() -> dict[str, Any]:
    return dict(json.loads(TEXTS.read_text("utf-8")))


def sentences(language: str) -> list[str]:
    return [first for first, _ in lesson_texts()[language]["pairs"]]


def reviews(language: str) -> list[tuple[str, int]]:
    """Reviews and whether they are bad, good and bad in turn."""
    both = zip(*lesson_texts()[language]["reviews"].values(), strict=True)
    return [(text, label) for pair in both for label, text in enumerate(pair)]


def mean(values: Any) -> float:
    """Of numbers, or the share of what is true."""
    return float(np.asarray(values, np.float64).mean())


def compared(difference: Sequence[float] | Floats, names: tuple[str, str, str]) -> str:
    """Which of three names: clearly below zero, not clearly different, clearly above."""
    change = mean_with_error(difference)
    same = abs(change.mean) <= SURE * change.standard_error
    return names[1 if same else 2 if change.mean > 0 else 0]


def binned(value: float, bounds: dict[str, float], last: str) -> str:
    """The first name whose bound is above the value."""
    return next((name for name, bound in bounds.items() if value < bound), last)


# ------------------------------------------------------------------ what a model computes


@torch.inference_mode()
def logprobs_at(model: Model, head: str, rows: Sequence[Encoding], at: Sequence[int]) -> Tensor:
    """log p over the vocabulary [N, V] at one position of each row."""
    inputs = model_inputs(model.network, rows)
    width = max(len(row.tokens) for row in rows)
    slots = torch.tensor([i * width + place for i, place in enumerate(at)])
    scores = model.network(**inputs, heads=(head,), slots=slots.to(model.network.device))
    found: Tensor = scores[head]
    return found.float().log_softmax(-1).cpu()


def entropies(logprobs: Tensor) -> Floats:
    """In nats, of each row."""
    return -(logprobs.exp() * logprobs).sum(-1).double().numpy()


def with_tokens(row: Encoding, changes: dict[int, int]) -> Encoding:
    return replace(row, tokens=[changes.get(i, token) for i, token in enumerate(row.tokens)])


def middle(row: Encoding) -> int:
    """The position nearest to the middle that, like the next one, is part of the text."""
    inside = [i for i, special in enumerate(row.specials[:-1]) if not special]
    inside = [i for i in inside if not row.specials[i + 1]] or inside
    return inside[len(inside) // 2]


def masked_rows(model: Model, language: str) -> tuple[list[Encoding], list[int], Tensor]:
    """Sentences, the place of a token in each, and the tokens that are there."""
    rows = [encode_for_model(model, text) for text in sentences(language)]
    places = [middle(row) for row in rows]
    return rows, places, torch.tensor([r.tokens[at] for r, at in zip(rows, places, strict=True)])


def splits(size: int, known: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The places of `known` training rows and of the test rows, for some random splits."""
    for seed in range(SPLITS):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        yield order[:known], order[known:]


def held_out_accuracy(vectors: Tensor, labels: Sequence[int], known: int) -> list[float]:
    """The accuracy of a linear layer trained on `known` vectors [N, D], for some random splits."""
    y = torch.tensor(labels)
    return [
        linear_accuracy((vectors[train], y[train]), (vectors[test], y[test]), 2)
        for train, test in splits(len(y), known)
    ]


# ------------------------------------------------------------------ inside a model


@claim
def parameters(subject: Subject) -> Claim:
    """Which part of the network has most parameters."""
    counts = parameter_parts(subject.model.network)
    total = sum(counts.values())
    shares = {name: count / total for name, count in counts.items() if name != "other"}
    return Claim(max(shares, key=shares.__getitem__), shares, shares)


@claim
def tokens(subject: Subject) -> Claim:
    """How many tokens a word of each language takes."""
    words = subject.model.tokenizer
    found = {}
    for language in lesson_texts():
        texts = sentences(language)
        ids = words.ids(texts)
        unknown = sum(token == words.specials.unk for row in ids for token in row)
        found[language] = sum(map(len, ids)) / sum(len(text.split()) for text in texts)
        found[f"{language}unknown"] = unknown / sum(map(len, ids))
    ratio = found["ko"] / found["en"]
    return Claim(binned(ratio, {"fewer": 0.9, "same": 1.1}, "more"), found)


@claim
def future(subject: Subject) -> Claim:
    """How much the first word's last vector moves when the last word of a sentence changes."""
    texts = sentences(subject.language)
    lasts = [text.split()[-1] for text in texts]
    changed = [
        " ".join([*text.split()[:-1], last])
        for text, last in zip(texts, lasts[1:] + lasts[:1], strict=True)
    ]
    models = {"gpt": subject.model, "bert": subject.second}
    moved = {name: _moved(model, texts, changed) for name, model in models.items()}
    sees = [name for name, change in moved.items() if change > 1e-3]
    return Claim("both" if len(sees) == 2 else "".join(sees) or "none", moved)


@torch.inference_mode()
def _moved(model: Model, texts: Sequence[str], changed: Sequence[str]) -> float:
    """The mean change of the first token's vector, as a share of its length."""
    states = []
    for some in (texts, changed):
        rows = [encode_for_model(model, text) for text in some]
        inputs: Any = model_inputs(model.network, rows)
        hidden = model.network.hidden(**inputs)
        firsts = torch.tensor([row.specials.index(False) for row in rows])
        states.append(hidden.float().cpu()[torch.arange(len(rows)), firsts])
    before, after = states
    return float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())


@claim
def sink(subject: Subject) -> Claim:
    """How much attention goes to the first token, and to later ones."""
    causal = subject.model.network.trunk.is_causal
    first = []  # by head
    later = []
    even = []
    for text in sentences(subject.language):
        heads = attention(subject.model, text).weights
        size = heads.shape[-1]
        first.append(heads[:, :, 2:, 0].mean(-1))
        later.append(np.triu(heads.mean((0, 1)), 1).sum() / size)
        even += [1 / (query + 1 if causal else size) for query in range(2, size)]
    values = {"first": mean(first), "later": mean(later), "even": mean(even)}
    values["heads"] = mean(np.mean(first, 0) > 0.5)
    return Claim(binned(values["first"], {"little": 0.2, "some": 0.5}, "most"), values)


@claim
def temperature(subject: Subject) -> Claim:
    """What temperature changes in the distribution of the next token."""
    texts = [" ".join(text.split()[:4]) for text in sentences(subject.language)]
    rows = [encode_for_model(subject.model, text) for text in texts]
    logprobs = logprobs_at(subject.model, "lm", rows, [len(row.tokens) - 1 for row in rows])
    values = {}
    same = True
    for name, heat in (("cold", 0.3), ("plain", 1.0), ("hot", 2.0)):
        shaped = (logprobs / heat).log_softmax(-1)
        same &= bool((shaped.argmax(-1) == logprobs.argmax(-1)).all())
        values[name] = float(shaped.max(-1).values.exp().mean())
        values[f"{name}entropy"] = float(entropies(shaped).mean()) / math.log(2)
    return Claim("distances" if same else "order", values)


@claim
def neighbour(subject: Subject) -> Claim:
    """Whether a BERT is less sure of a hidden token when the next one is hidden too."""
    model = subject.model.masked
    mask = mask_token(model.tokenizer)
    rows, places, wanted = masked_rows(model, subject.language)
    variants = zip(
        *(_hidden(row, at, mask) for row, at in zip(rows, places, strict=True)), strict=True
    )
    before, after, nothing = (logprobs_at(model, "mlm", some, places) for some in variants)
    more = entropies(after) - entropies(before)
    values = {
        "before": mean(entropies(before)),
        "after": mean(entropies(after)),
        "nothing": mean(entropies(nothing)),
        "share": mean(more > 0),
        "right": mean(before.argmax(-1) == wanted),
        "rightafter": mean(after.argmax(-1) == wanted),
        "items": len(rows),
    }
    return Claim(compared(more, ("more", "same", "less")), values)


def _hidden(row: Encoding, at: int, mask: int) -> tuple[Encoding, Encoding, Encoding]:
    """A text with one token masked, with the next one too, and with all of them."""
    inside = [i for i, special in enumerate(row.specials) if not special]
    return (
        with_tokens(row, {at: mask}),
        with_tokens(row, {at: mask, at + 1: mask}),
        with_tokens(row, dict.fromkeys(inside, mask)),
    )


@claim
def kept(subject: Subject) -> Claim:
    """What a BERT predicts at a masked, a replaced and an untouched token (BERT appendix A.1)."""
    model = subject.model.masked
    mask = mask_token(model.tokenizer)
    rows, places, wanted = masked_rows(model, subject.language)
    intruders = wanted.roll(-1)
    guesses = {}
    for name, put in (
        ("masked", torch.full_like(wanted, mask)),
        ("swapped", intruders),
        ("kept", wanted),
    ):
        changes = zip(rows, places, put.tolist(), strict=True)
        given = [with_tokens(row, {at: token}) for row, at, token in changes]
        guesses[name] = logprobs_at(model, "mlm", given, places).argmax(-1)
    right = {name: mean(some == wanted) for name, some in guesses.items()}
    return Claim(
        binned(right["kept"], {"rarely": 0.5, "mostly": 0.95}, "always"),
        right | {"copied": mean(guesses["swapped"] == intruders), "items": len(rows)},
        right,
    )


@claim
def nsp(subject: Subject) -> Claim:
    """How often a BERT tells the next sentence from another one, with and without segments."""
    model = subject.model
    pairs = lesson_texts()[subject.language]["passages"]
    firsts, nexts = map(list, zip(*pairs, strict=True))
    rows = model.tokenizer.encode_batch(firsts * 2, [*nexts, *nexts[1:], nexts[0]])
    follows = torch.arange(len(rows)) < len(pairs)
    right = _next_sentences(model, rows) == follows
    blind = [replace(row, segments=[0] * len(row.tokens)) for row in rows]
    values = {
        "right": mean(right),
        "next": mean(right[: len(pairs)]),
        "other": mean(right[len(pairs) :]),
        "blind": mean(_next_sentences(model, blind) == follows),
        "items": len(rows),
    }
    better = compared(right.double().numpy() - 0.5, ("guess", "guess", "often"))
    return Claim("almost" if values["right"] > 0.9 else better, values)


@torch.inference_mode()
def _next_sentences(model: Model, rows: Sequence[Encoding]) -> Tensor:
    """Whether each pair's second sentence is taken for the next one: class 0 (BERT §3.1)."""
    scores: Tensor = model.network(**model_inputs(model.network, rows), heads=("nsp",))["nsp"]
    return scores.argmax(-1).cpu() == 0


# ------------------------------------------------------------------ learning


@claim
def loss(subject: Subject) -> Claim:
    """The perplexity of sentences, beside that of a uniform guess."""
    model = subject.model
    texts = sentences(subject.language)
    count = sum(map(len, model.tokenizer.ids(texts)))
    nats = -sum(sentence_logprobs(model.network, model.tokenizer, texts)) / count
    vocab = model.tokenizer.vocab_size
    values = {"loss": nats, "perplexity": math.exp(nats), "vocab": vocab, "start": math.log(vocab)}
    return Claim(
        binned(values["perplexity"], {"tens": 100, "hundreds": vocab / 2}, "uniform"), values
    )


@claim
def transfer(subject: Subject) -> Claim:
    """A linear layer on the pre-trained network's vectors, and on those of random weights."""
    model = subject.second
    rows = order_rows(subject.language)
    names = sorted({label for _, label in rows})
    labels = [names.index(label) for _, label in rows]
    fresh = initialise(Network(model.config, {}), seed=0).eval().to(model.network.device)
    untrained = Model(Checkpoint(fresh, model.tokenizer))
    layer = model.config.depth // 2
    known = 3 * len(rows) // 4
    scores = [
        held_out_accuracy(read_examples(one, rows, len(rows)).vectors[layer], labels, known)
        for one in (model, untrained)
    ]
    examples = [Example(text, label=label) for text, label in rows]
    counted = []
    for split in splits(len(rows), known):
        train, test = ([examples[i] for i in some] for some in split)
        counted.append(word_baseline(train, test, names, model.tokenizer))
    bars = {
        "majority": max(labels.count(0), labels.count(1)) / len(labels),
        "words": mean(counted),
        "untrained": mean(scores[1]),
        "trained": mean(scores[0]),
    }
    gains = np.subtract(scores[0], scores[1])
    worst = {"low": min(scores[0]), "high": max(scores[0]), "rawhigh": max(scores[1])}
    facts = {"known": known, "layer": layer, "splits": SPLITS, "gain": mean(gains)}
    return Claim(compared(gains, ("hurts", "same", "helps")), bars | worst | facts, bars)


# ------------------------------------------------------------------ prompts

NO_TEXT = "N/A"  # in place of a review: what the model says without one (Zhao et al. 2021 §4)
SHOWN = 4  # the first reviews are examples, never questions


@dataclass(frozen=True)
class Judged:
    """log p of both answers for each review [N, 2], and without a review [2]."""

    scores: Floats
    prior: Floats
    labels: Floats

    def right(self, *, calibrated: bool) -> Floats:
        """Whether each answer is right; calibrated ones are measured against the prior."""
        scores = self.scores - self.prior if calibrated else self.scores
        return np.asarray(scores.argmax(1) == self.labels, np.float64)


def judge_reviews(subject: Subject, wording: int, shots: int) -> Judged:
    """Both answers to each review, after some examples with their answers."""
    # a prompt, and the answers for a good and a bad review
    prompt, answers = lesson_texts()[subject.language]["wordings"][wording]
    items = reviews(subject.language)
    before = "".join(
        f"{prompt.format(text=text)}{answers[label]}\n\n" for text, label in items[:shots]
    )
    asked = [*(text for text, _ in items[SHOWN:]), NO_TEXT]
    contexts = [before + prompt.format(text=text) for text in asked for _ in answers]
    found = subject.model.score(contexts, answers * len(asked))
    scores = np.array([one.logprob for one in found]).reshape(-1, 2)
    return Judged(scores[:-1], scores[-1], np.array([label for _, label in items[SHOWN:]]))


@claim
def shots(subject: Subject) -> Claim:
    """What four examples change, with and without the answers' own frequency."""
    none = judge_reviews(subject, 0, 0)
    four = judge_reviews(subject, 0, SHOWN)
    chances = np.exp(none.prior - none.prior.max())
    bars = {
        "zero": mean(none.right(calibrated=False)),
        "four": mean(four.right(calibrated=False)),
        "zerofair": mean(none.right(calibrated=True)),
        "fourfair": mean(four.right(calibrated=True)),
    }
    facts = {
        "prior": float(chances.max() / chances.sum()),
        "favourite": mean(none.scores.argmax(1) == none.prior.argmax()),
        "items": len(none.labels),
    }
    gains = four.right(calibrated=True) - none.right(calibrated=True)
    return Claim(compared(gains, ("down", "same", "up")), bars | facts, bars)


@claim
def prompts(subject: Subject) -> Claim:
    """How much the wording of the same question matters."""
    found = {
        name: mean(judge_reviews(subject, i, 0).right(calibrated=True))
        for i, name in enumerate(("first", "second", "third"))
    }
    spread = max(found.values()) - min(found.values())
    return Claim(
        binned(spread, {"little": 0.05, "some": 0.15}, "much"),
        found | {"points": 100 * spread, "items": len(reviews(subject.language)) - SHOWN},
        found,
    )


@claim
def labels(subject: Subject) -> Claim:
    """Examples in a prompt against a layer trained on examples."""
    prompted = judge_reviews(subject, 0, SHOWN).right(calibrated=True)
    items = reviews(subject.language)
    model = subject.second
    vectors = torch.tensor(model.embed([text for text, _ in items], (model.config.depth // 2,)))
    many = len(items) // 2
    marks = [label for _, label in items]
    few, trained = (held_out_accuracy(vectors, marks, known) for known in (SHOWN, many))
    bars = {"prompt": mean(prompted), "few": mean(few), "many": mean(trained)}
    answer = compared(bars["many"] - prompted, ("prompt", "same", "trained"))
    return Claim(answer, bars | {"shown": SHOWN, "known": many}, bars)


# ------------------------------------------------------------------ sizes


@claim
def sizes(subject: Subject) -> Claim:
    """The weights of L layers of width D are about 12·L·D²: here, and in the papers' models."""
    counts = parameter_parts(subject.model.network)
    c = subject.model.config
    large = 12 * GPT3[0] * GPT3[1] ** 2
    return Claim(
        binned(large, {"small": 5e9, "middle": 50e9}, "large"),
        {
            "depth": c.depth,
            "width": c.width,
            "formula": 12 * c.depth * c.width**2,
            "counted": counts["attention"] + counts["mlp"],
            "large": large,
        },
    )


@claim
def source(subject: Subject) -> Claim:
    """How much of its source a decoder's first token may see: an encoder–decoder in one mask."""
    length = 8
    seen = parse_pattern(f"causal | prefix:{length}", 1).mask(Layout(1, 2 * length, 2 * length))
    first = seen.reshape(2 * length, 2 * length)[length]
    count = int(first[:length].sum())
    answer = "all" if count == length else "none" if not count else "left"
    return Claim(answer, {"seen": count, "source": length, "own": int(first.sum())})


@claim
def cost(subject: Subject) -> Claim:
    """What twice the length costs, with full attention and in a band."""
    full, band = (
        [pattern_cost(text, at, 1)[0] for at in (2048, 4096)]
        for text in ("causal", "causal & local:256")
    )
    values = {"full": full[1] / full[0], "band": band[1] / band[0], "share": band[0] / full[0]}
    return Claim({1: "same", 2: "two", 4: "four"}[round(values["band"])], values)


@claim
def bits(subject: Subject) -> Claim:
    """The perplexity with every matrix rounded to fewer bits, with a scale a row."""
    model = subject.model
    size = count_parameters(model.network)
    require_that(
        size <= MAX_COPIED, "This model is too large to be rounded here: choose a smaller one."
    )
    texts = sentences(subject.language)[:20]
    count = sum(map(len, model.tokenizer.ids(texts)))
    found = {}
    for name, width in (("whole", 0), ("eight", 8), ("four", 4), ("two", 2)):
        network = rounded(model.network, width) if width else model.network
        found[name] = math.exp(-sum(sentence_logprobs(network, model.tokenizer, texts)) / count)
    worse = found["four"] / found["whole"] - 1
    facts = {"worse": worse, "bytes": 4 * size, "small": size / 2}
    return Claim(binned(worse, {"little": 0.05, "some": 1.0}, "much"), found | facts)


@torch.no_grad()
def rounded(network: Network, width: int) -> Network:
    """A copy whose matrices have 2^width levels a row."""
    small = copy.deepcopy(network)
    largest = 2 ** (width - 1) - 1
    for weight in small.parameters():
        if weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / largest
            weight.copy_((weight / scale).round() * scale)
    return small


@claim
def sides(subject: Subject) -> Claim:
    """Who finds the right word likelier: a GPT from the left, or a BERT from both sides."""
    shares = {}
    for name, place in (("middle", None), ("last", -1)):
        parts = [_split(text, place) for text in sentences(subject.language)]
        bert = subject.second
        both = pseudo_scores(bert.network, bert.tokenizer, parts, together=True)
        spaced = [f" {one.middle}" for one in parts]
        left = subject.model.score([one.before.rstrip() for one in parts], spaced)
        shares[name] = mean([b.logprob > g.logprob for b, g in zip(both, left, strict=True)])
    answer = binned(shares["middle"], {"gpt": 0.4, "even": 0.6}, "bert")
    return Claim(answer, shares | {"items": len(parts)})


def _split(text: str, place: int | None) -> SplitText:
    """A word of a text (the middle one unless named), what precedes it and what follows it."""
    words = text.rstrip(".?!").split()
    at = len(words) // 2 if place is None else len(words) + place
    after = " ".join(["", *words[at + 1 :]]) + text[len(text.rstrip(".?!")) :]
    return SplitText(" ".join([*words[:at], ""]), words[at], after)


@claim
def cache(subject: Subject) -> Claim:
    """The memory of keys and values as a text grows, beside that of the weights."""
    network = subject.model.network
    context = network.config.context
    token = kv_bytes(network)
    long = token * LONG_CONTEXT
    weights = network.dtype.itemsize * count_parameters(network)
    return Claim(
        "larger" if long > weights else "smaller",
        {
            "token": token,
            "context": token * context,
            "tokens": context,
            "long": long,
            "weights": weights,
        },
    )
