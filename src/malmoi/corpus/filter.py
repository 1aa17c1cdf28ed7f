"""Step 2, filter: rules that ordinary prose passes (Rae et al. 2021, appendix A), in any script."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from malmoi.corpus import ngrams
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.language import is_in_language
from malmoi.corpus.ngrams import HashedWords
from malmoi.corpus.stats import StepStats
from malmoi.text.documents import Document

MIN_LINES = 4  # with fewer lines, shares of lines mean nothing
BULLETS = ("- ", "* ", "•", "·", "●", "○", "■", "▪", "◦", "‣", "※", "▶", "►")
ELLIPSES = ("…", "...", "‥")


@dataclass
class TextStats:
    """A text and its words."""

    text: str
    words: HashedWords

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.split("\n") if line]


def word_length(look: TextStats, c: CorpusConfig) -> bool:
    mean = float((look.words.ends - look.words.starts).mean()) if len(look.words) else 0.0
    return not c.min_word_length <= mean <= c.max_word_length


def too_few_letters(look: TextStats, c: CorpusConfig) -> bool:
    found = ngrams.code_points(look.text)
    space = look.text.count(" ") + look.text.count("\n")
    return int(ngrams.letter_table()[found].sum()) < c.min_letters * (len(found) - space)


def _share(
    lines: list[str], marks: tuple[str, ...], test: Callable[[str, tuple[str, ...]], bool]
) -> float:
    return sum(test(line, marks) for line in lines) / len(lines) if len(lines) >= MIN_LINES else 0.0


def _repeated(parts: list[str]) -> int:
    """Characters in repeated parts."""
    return sum(map(len, parts)) - sum(map(len, set(parts)))


def repeated_run(look: TextStats, c: CorpusConfig) -> bool:
    """Whether one n-gram of 2, 3 or 4 words makes up too much of the text."""
    most = ngrams.most_frequent(look.words.ngrams(2))  # no longer n-gram can be more frequent
    for length, share in enumerate(c.max_run, 2):
        limit = share * len(look.text)
        could = most > 1 and most * _longest(look.words, length) > limit
        if could and _covered(look.words, length) > limit:
            return True
    return False


def _longest(words: HashedWords, length: int) -> int:
    """Characters of the longest n-gram of this length."""
    return int((words.ends[length - 1 :] - words.starts[: len(words) - length + 1]).max(initial=0))


def _covered(words: HashedWords, length: int) -> int:
    """Characters covered by the most frequent n-gram of this length; 0 if none repeats."""
    found, first, counts = np.unique(words.ngrams(length), return_index=True, return_counts=True)
    if not len(found) or counts.max() == 1:
        return 0
    begin = first[counts.argmax()]
    return int(counts.max() * (words.ends[begin + length - 1] - words.starts[begin]))


# in this order; the first rule that applies is counted
FILTER_RULES: dict[str, Callable[[TextStats, CorpusConfig], bool]] = {
    "too short": lambda look, c: len(look.words) < c.min_words,
    "too long": lambda look, c: 0 < c.max_words < len(look.words),
    "another language": lambda look, c: (
        c.language != "" and not is_in_language(look.text, c.language)
    ),
    "length of words": word_length,
    "symbols": lambda look, c: (
        sum(map(look.text.count, ("#", *ELLIPSES))) > c.max_symbols * len(look.words)
    ),
    "few letters": too_few_letters,
    "bullets": lambda look, c: _share(look.lines, BULLETS, str.startswith) > c.max_bullets,
    "ellipses": lambda look, c: _share(look.lines, ELLIPSES, str.endswith) > c.max_ellipses,
    "repeated lines": lambda look, c: _repeated(look.lines) > c.max_repeated_lines * len(look.text),
    "repeated paragraphs": lambda look, c: (
        _repeated(look.text.split("\n\n")) > c.max_repeated_lines * len(look.text)
    ),
    "repeated words": repeated_run,
}


def broken_rule(look: TextStats, config: CorpusConfig) -> str | None:
    """The first rule that a text breaks, if any."""
    return next((name for name, rule in FILTER_RULES.items() if rule(look, config)), None)


def filtered(
    documents: Iterable[Document], config: CorpusConfig, stats: StepStats
) -> Iterator[Document]:
    """Yields documents that break no rule."""
    documents = list(documents)
    for document, words in zip(documents, ngrams.hash_each(d.text for d in documents), strict=True):
        stats.count_in(document)
        if rule := broken_rule(TextStats(document.text, words), config):
            stats.count_rule(rule, document)
        else:
            yield stats.count_out(document)
