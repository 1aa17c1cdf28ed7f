"""Labels of pairs and tags of words from their names alone: they become the rows to train on.

D width of a phrase's vector, N labels.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import require_that
from malmoi.evaluation.kinds import TAGGING, HeadKind, head_kind
from malmoi.finetuning import few_labels
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.unlabelled import fit_guessed, has_clouds
from malmoi.inference import Model
from malmoi.inference.batches import in_order, model_batches
from malmoi.inference.embed import pair_cosines, sentence_vectors
from malmoi.inference.spans import OUTSIDE_TAG
from malmoi.inference.zero_shot import phrase_scores
from malmoi.messages import logger
from malmoi.tokenizer.windows import WordPieces, word_pieces


def rows_by_names(
    work: FinetuneData, settings: FinetuneConfig
) -> tuple[FinetuneData, FinetuneConfig]:
    """Pairs or tagged words to train on, labelled by what the labels' names mean, and how."""
    if not settings.labels or has_clouds(work, settings):
        return work, settings
    with work.computing(settings):
        tagged = head_kind(work.task) is TAGGING
        labels = _tags(work, settings) if tagged else _alike(work)
    rows = tuple(replace(row, label=one) for row, one in zip(work.unlabelled, labels, strict=True))
    # a frozen model is no better a start: it knows nothing of how alike the texts of a pair are,
    # and tags have been fitted to its vectors already
    return replace(work, train=rows, unlabelled=()), replace(settings, frozen_first=False)


def say_first_guess(settings: FinetuneConfig, kind: HeadKind) -> None:
    """Says what tags from names alone are worth."""
    if settings.labels and kind is TAGGING:
        logger.warning(
            "Tags from their names alone are a first guess: a few tagged sentences teach far more."
        )


# ------------------------------------------------------------------ pairs of a sentence encoder

LIKE = ("the same", "different")


def _alike(work: FinetuneData) -> list[str]:
    """The pairs' labels by how alike a sentence encoder finds two texts.

    The pairs' cosines are as many clouds as there are labels. What the labels' words mean to the
    encoder decides nothing but their order.
    """
    reading = work.predictor(work.start)
    vectors = sentence_vectors(reading, [*work.task.answers.values(), *LIKE])
    cosines = pair_cosines(reading, [row.input for row in work.unlabelled])
    order = (vectors[:-2] @ (vectors[-2] - vectors[-1])).argsort()
    logger.info(
        "From different to alike the labels are {labels}, by their names; how alike its two texts "
        "are decides the label of each row.",
        labels=", ".join(work.labels[i] for i in order),
    )
    x = torch.tensor(cosines).double()[:, None]
    weight, bias = fit_guessed(x, x * order.argsort())
    return [work.labels[i] for i in (x @ weight + bias).argmax(1)]


# ------------------------------------------------------------------ tags of words

Phrase = tuple[int, int, int]  # a row, and its first word and the end of those with one tag
MIN_CAPITALS = 0.02  # share of the words: fewer are foreign ones, as LG in Korean
ASKED_PHRASES = 800  # which the model says a tag's words of
FITTED_PHRASES = 10_000
OUTSIDE_SHARE = {"names": 0.1, "words": 0.8}  # of the phrases have no tag


def _tags(work: FinetuneData, settings: FinetuneConfig) -> list[tuple[str, ...]]:
    """The tags of the rows' words: those of a phrase by its cloud, O outside of phrases.

    Phrases are names by their capital letters, where there are such; otherwise single words, and
    O has a cloud, too.
    """
    require_that(
        {"lm", "mlm"} & {*work.start.network.heads},
        "Tags are learnt from their names by a GPT, or by a BERT with its masked-language head, "
        "which says what a phrase is; this model has neither.",
    )
    sentences = [row.words for row in work.unlabelled]
    phrases = capitalised_phrases(sentences)
    outside = OUTSIDE_SHARE["names"] if phrases else OUTSIDE_SHARE["words"]
    every = [(i, at, at + 1) for i, row in enumerate(sentences) for at in range(len(row))]
    phrases = phrases or every
    others = len(work.labels) - 1
    prior = torch.tensor([outside] + others * [(1 - outside) / others]).double()
    phrases = random.Random(0).sample(phrases, len(phrases))
    vectors = F.normalize(_phrase_vectors(work, settings, phrases), dim=1).double()
    said = _said(work, phrases[:ASKED_PHRASES])
    weight, bias = fit_guessed(vectors[:FITTED_PHRASES], said, prior)
    tags = [[OUTSIDE_TAG] * len(row) for row in sentences]
    for (i, first, end), best in zip(phrases, (vectors @ weight + bias).argmax(1), strict=True):
        tags[i][first:end] = [work.labels[best]] * (end - first)
    return [tuple(some) for some in tags]


def _said(work: FinetuneData, phrases: Sequence[Phrase]) -> Tensor:
    """How well the words of each tag fit each phrase in its text [phrases, tags]."""
    rows = work.unlabelled
    asked = [(rows[i].text, " ".join(rows[i].words[first:end])) for i, first, end in phrases]
    return phrase_scores(Model(work.start), asked, work.task.answers)


def capitalised_phrases(sentences: Sequence[Sequence[str]]) -> list[Phrase]:
    """The runs of words with a capital letter, if the writing has such.

    A sentence's first word, or a headline's, counts unless it mostly is in lower case elsewhere.
    """
    inside = [_bare(word) for row in sentences for word in row[1:]]
    balance = Counter[str]()  # of each word's spellings, with a capital and without
    for word in inside:
        balance[word.lower()] += 1 if word[:1].isupper() else -1
    if sum(word[:1].isupper() for word in inside) < MIN_CAPITALS * len(inside):
        return []
    return [(i, *run) for i, row in enumerate(sentences) for run in _names(row, balance)]


def _names(row: Sequence[str], balance: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Where the names of a row begin and end; punctuation ends one."""
    parts = accumulate((not word[-1:].isalnum() for word in row), initial=0)
    bare = map(_bare, row)
    named = (word[:1].isupper() and balance.get(word.lower(), 0) >= 0 for word in bare)
    keys = [*zip(named, parts, strict=False)]
    for (is_name, _), run in groupby(range(len(row)), keys.__getitem__):
        places = [*run]
        if is_name:
            yield places[0], places[-1] + 1


def _bare(word: str) -> str:
    """A word without the punctuation around it."""
    return re.sub(r"^\W+|\W+$", "", word)


@torch.inference_mode()
def _phrase_vectors(
    work: FinetuneData, settings: FinetuneConfig, phrases: Sequence[Phrase]
) -> Tensor:
    """The mean vector of each phrase's words in their text [phrases, D]."""
    checkpoint = few_labels.frozen_model(work, replace(settings, recurrent=0))
    network = checkpoint.network.eval()
    view = work.view(checkpoint)
    sentences = word_pieces(view.tokenizer, [row.words for row in work.unlabelled], view.length)
    rows = [piece.row for some in sentences for piece in some]
    batches: Any = model_batches(network, rows, "predict")
    states = iter(
        in_order((group, network.hidden(**given).float().cpu()) for group, given in batches)
    )
    words = [
        torch.cat([_word_vectors(*one) for one in zip(some, states, strict=False)])
        for some in sentences
    ]
    return torch.stack([words[i][first:end].mean(0) for i, first, end in phrases])


def _word_vectors(piece: WordPieces, states: Tensor) -> Tensor:
    """The states of each word's first token [words, D]; 0 for a word that has none."""
    found = [torch.zeros_like(states[0]) if at is None else states[at] for at in piece.firsts]
    return torch.stack(found)
