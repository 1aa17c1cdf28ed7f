"""What a fine-tuned model says of a text: a label, or a label for each word. N classes, T tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.infer.batch import batches, inputs
from malmoi.model import Network
from malmoi.tokenizer import Encoding, Tokenizer

Text = str | tuple[str, str]
OUTSIDE = "O"  # the label of a word that is part of nothing (CoNLL)


@dataclass(frozen=True)
class Prediction:
    """The label of a text, and every label's probability; a regression has one score, the value itself."""

    label: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Span:
    """A stretch of the text that has a label; `start` and `end` count its characters."""

    text: str
    label: str
    start: int
    end: int
    score: float


def predictions(
    network: Network, tokenizer: Tokenizer, labels: Sequence[str], texts: Sequence[Text]
) -> list[Prediction] | list[list[Span]]:
    """Reads the head that the model was fine-tuned with."""
    head = next(name for name in READERS if name in network.heads)
    return READERS[head](network, tokenizer, labels, texts)


def classify(network: Network, tokenizer: Tokenizer, labels: Sequence[str], texts: Sequence[Text]) -> list[Prediction]:
    """One label a text; long ones are cut as they were in fine-tuning: from the end of the longer of a pair."""
    encodings = _encode(tokenizer, texts, network.config.context)
    return [_prediction(scores, labels) for scores in _scores(network, encodings, "classify")]


def tag(network: Network, tokenizer: Tokenizer, labels: Sequence[str], texts: Sequence[Text]) -> list[list[Span]]:
    """Labelled spans of each text."""
    encodings = _encode(tokenizer, texts, None)
    for encoding in encodings:
        if len(encoding.tokens) > network.config.context:
            raise UsageError(
                f"The text has {len(encoding.tokens)} tokens, more than this model's context of "
                f"{network.config.context}; give it sentence by sentence."
            )
    scores = _scores(network, encodings, "tag")
    tagged = zip(texts, encodings, scores, strict=True)
    return [list(spans(text if isinstance(text, str) else text[0], e, s, labels)) for text, e, s in tagged]


READERS: dict[str, Callable[..., list[Prediction] | list[list[Span]]]] = {"classify": classify, "tag": tag}


def _encode(tokenizer: Tokenizer, texts: Sequence[Text], longest: int | None) -> list[Encoding]:
    pairs = [text for text in texts if not isinstance(text, str)]
    if not pairs:
        return tokenizer.encode_batch(texts, max_tokens=longest)  # type: ignore[arg-type]
    if len(pairs) < len(texts) or any(len(pair) != 2 for pair in pairs):
        raise UsageError("Give either texts or pairs of texts, (first, second), not some of each.")
    firsts, seconds = zip(*pairs, strict=True)
    return tokenizer.encode_batch(firsts, seconds, max_tokens=longest)


@torch.inference_mode()
def _scores(network: Network, texts: Sequence[Encoding], head: str) -> list[Tensor]:
    """The head's scores of each text: [N], or [T, N] for a head that reads every token."""
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    device = network.trunk.embed.token.weight.device
    for group in batches([len(text.tokens) for text in texts]):
        scores = network(**inputs([texts[i] for i in group], network.config, device), heads=(head,))[head]
        for i, row in zip(group, scores.float().cpu(), strict=True):
            found[i] = row[: len(texts[i].tokens)] if row.dim() == 2 else row
    return found


def name_of(labels: Sequence[str], i: int) -> str:
    return labels[i] if i < len(labels) else f"LABEL_{i}"


def _prediction(scores: Tensor, labels: Sequence[str]) -> Prediction:
    values = scores if len(scores) == 1 else scores.softmax(-1)
    named = {name_of(labels, i): value for i, value in enumerate(values.tolist())}
    return Prediction(max(named, key=named.__getitem__), named)


@dataclass(frozen=True)
class Word:
    start: int
    end: int
    label: str
    score: float


def spans(text: str, encoding: Encoding, scores: Tensor, labels: Sequence[str]) -> Iterator[Span]:
    """Neighbouring words of one entity joined: B-X opens, I-X goes on; labels without such marks stand alone."""
    entity: list[Word] = []
    for word in _words(encoding, scores.softmax(-1), labels):
        if entity and not _continues(entity[-1], word):
            yield _span(text, entity)
            entity = []
        entity += [word] if word.label != OUTSIDE else []
    if entity:
        yield _span(text, entity)


def _words(encoding: Encoding, chances: Tensor, labels: Sequence[str]) -> Iterator[Word]:
    """Each word with the label of its first token, which is the one that was trained (Devlin 2019 §5.3)."""
    places = [at for at, word in enumerate(encoding.words) if word is not None and not encoding.specials[at]]
    for _, pieces in groupby(places, key=lambda at: encoding.words[at]):
        some = list(pieces)
        score, best = chances[some[0]].max(-1)
        yield Word(
            encoding.offsets[some[0]][0], encoding.offsets[some[-1]][1], name_of(labels, int(best)), float(score)
        )


def _continues(before: Word, word: Word) -> bool:
    return word.label.startswith("I-") and before.label[1:] == word.label[1:]


def _span(text: str, words: Sequence[Word]) -> Span:
    start, end = words[0].start, words[-1].end
    label = words[0].label
    name = label[2:] if label[:2] in ("B-", "I-") else label
    return Span(text[start:end], name, start, end, sum(word.score for word in words) / len(words))
