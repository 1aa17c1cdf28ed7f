"""Which items of a test set overlap with a corpus (Brown et al. 2020, appendix C)."""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import clean, clean_columns
from malmoi.corpus.decontaminate import overlap_words
from malmoi.corpus.ngrams import HashArray, hash_each, hash_words, is_among
from malmoi.evaluation.contamination import Overlaps
from malmoi.system.progress import Progress, report_progress
from malmoi.text.documents import read_documents

logger = logging.getLogger(__name__)
DOCUMENTS_PER_REPORT = 1000


def find_overlaps(items: Sequence[Sequence[str]], corpus: Sequence[str]) -> Overlaps:
    """Looks for the items' n-grams in a corpus of any size; only theirs are held in memory."""
    hashed = [[hash_words(clean(text)) for text in item] for item in items]
    # an n-gram is within one text, so the longest decides
    length = overlap_words([max(map(len, item)) for item in hashed if item])
    empty = np.zeros(0, np.uint64)
    ngrams = [np.concatenate([empty, *(t.ngrams(length) for t in item)]) for item in hashed]
    known = np.unique(np.concatenate([empty, *ngrams]))
    seen = _seen(known, length, corpus)
    dirty = tuple(bool(seen[np.searchsorted(known, found)].any()) for found in ngrams)
    return Overlaps(length, dirty, tuple(not len(found) for found in ngrams))


def _seen(known: HashArray, length: int, corpus: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the sorted n-grams occur in the corpus."""
    seen = np.zeros(len(known), bool)
    reader = read_documents(corpus)
    number = 0
    for number, words in enumerate(hash_each(clean_columns(one.text for one in reader)), 1):
        found = words.ngrams(length)
        seen[np.searchsorted(known, found[is_among(found, known)])] = True
        if number % DOCUMENTS_PER_REPORT == 0:
            report_progress(Progress("compare", number, None, "documents"))
    report_progress(Progress("compare", number, number, "documents"))
    for sentence in reader.describe()[len(reader.rules) :]:
        logger.warning(sentence)
    return seen
