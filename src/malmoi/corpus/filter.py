"""Step 2, filter: rules that ordinary prose passes (Rae et al. 2021, appendix A), in any script."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

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
    """A text and what the rules count in it."""

    text: str
    words: int
    word_characters: int
    letters: int
    pair_count: int  # of its most frequent pair of words
    longest: list[int]  # characters of its longest runs of 2, 3 and 4 words
    hashed: Callable[[], HashedWords]

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.split("\n") if line]


def text_stats(texts: Iterable[str]) -> Iterator[TextStats]:
    """Counts in each text; short texts are counted together."""
    for group in ngrams.text_groups(texts):
        found = ngrams.HashedTexts.of(group)
        words = found.words
        sizes = np.concatenate([[0], np.cumsum(words.ends - words.starts)])
        is_letter = ngrams.letter_table()[ngrams.code_points("\n".join(group))]
        letters = np.concatenate([[0], np.cumsum(is_letter), [0]])
        letters[-1] = letters[-2]  # the last text has no line break
        counts = [np.diff(array) for array in (found.firsts, sizes[found.firsts])]
        columns = (*counts, np.diff(letters[found.begins]), *found.run_stats().T)
        rows = zip(group, *(column.tolist() for column in columns), strict=True)
        for number, (text, count, characters, letter_count, pairs, *longest) in enumerate(rows):
            part = partial(found.part, number)
            yield TextStats(text, count, characters, letter_count, pairs, longest, part)


def word_length(look: TextStats, c: CorpusConfig) -> bool:
    mean = look.word_characters / look.words if look.words else 0.0
    return not c.min_word_length <= mean <= c.max_word_length


def too_few_letters(look: TextStats, c: CorpusConfig) -> bool:
    space = look.text.count(" ") + look.text.count("\n")
    return look.letters < c.min_letters * (len(look.text) - space)


def _share(
    lines: list[str], marks: tuple[str, ...], test: Callable[[str, tuple[str, ...]], bool]
) -> float:
    return sum(test(line, marks) for line in lines) / len(lines) if len(lines) >= MIN_LINES else 0.0


def _repeated(parts: list[str]) -> int:
    """Characters in repeated parts."""
    return sum(map(len, parts)) - sum(map(len, set(parts)))


def repeated_run(look: TextStats, c: CorpusConfig) -> bool:
    """Whether one n-gram of 2, 3 or 4 words makes up too much of the text."""
    most = look.pair_count  # no longer n-gram can be more frequent
    for length, share in enumerate(c.max_run, 2):
        limit = share * len(look.text)
        could = most > 1 and most * look.longest[length - 2] > limit
        if could and _covered(look.hashed(), length) > limit:
            return True
    return False


def _covered(words: HashedWords, length: int) -> int:
    """Characters covered by the most frequent n-gram of this length; 0 if none repeats."""
    found, first, counts = np.unique(words.ngrams(length), return_index=True, return_counts=True)
    if not len(found) or counts.max() == 1:
        return 0
    begin = first[counts.argmax()]
    return int(counts.max() * (words.ends[begin + length - 1] - words.starts[begin]))


# in this order; the first rule that applies is counted
FILTER_RULES: dict[str, Callable[[TextStats, CorpusConfig], bool]] = {
    "too short": lambda look, c: look.words < c.min_words,
    "too long": lambda look, c: 0 < c.max_words < look.words,
    "another language": lambda look, c: (
        c.language != "" and not is_in_language(look.text, c.language)
    ),
    "length of words": word_length,
    "symbols": lambda look, c: (
        sum(map(look.text.count, ("#", *ELLIPSES))) > c.max_symbols * look.words
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
    for document, look in zip(documents, text_stats(d.text for d in documents), strict=True):
        stats.count_in(document)
        if rule := broken_rule(look, config):
            stats.count_rule(rule, document)
        else:
            yield stats.count_out(document)
