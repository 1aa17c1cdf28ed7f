"""Every setting of `malmoi corpus build`, with the paper it is from."""

from dataclasses import dataclass

from malmoi.config import Config
from malmoi.errors import UsageError, nearest

# what --quality-reference, --decontaminate and --weights add: quality, decontaminate, mix
DEFAULT_STEPS = ("clean", "filter", "dedup")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """Settings; the filter's are Gopher's (Rae et al. 2021, table A1) where they suit Korean too.

    A Korean word is worth about 1.6 English ones.
    """

    steps: tuple[str, ...] = DEFAULT_STEPS
    documents: str = "auto"  # what a document is in plain text: blank, blanks, line, file, auto
    text: str = "text"  # the key or column of JSON lines and tables
    seed: int = 0
    shard: int = 1 << 23  # characters of raw text that are worked on at once and become one shard
    # clean
    menu_length: int = 40  # a longer line is no menu's
    menu_share: float = 0.05  # a short line in this share of a source's documents is boilerplate …
    menu_documents: int = 10  # … if it is in at least this many
    # filter
    language: str = ""  # en, ko, …; empty: any
    min_words: int = 30
    max_words: int = 0  # 0: no limit, for whole books
    min_word_length: float = 2.0  # the mean, in characters
    max_word_length: float = 10.0
    max_symbols: float = 0.1  # number signs and ellipses for a word
    min_letters: float = 0.6  # share of the characters that are not space
    max_bullets: float = 0.9  # share of the lines that begin with one
    max_ellipses: float = 0.3  # share of the lines that end in one
    # share of the characters in lines that were there before; of paragraphs too
    max_repeated_lines: float = 0.3
    # share of the characters in the most frequent 2, 3, 4 words
    max_run: tuple[float, ...] = (0.2, 0.18, 0.16)
    # quality
    pareto: float = 9.0  # GPT-3 appendix A
    examples: int = 10_000  # good and raw documents each that the classifier learns from
    # dedup
    run: int = 5  # words in a row that are compared
    hashes: int = 128
    # hashes in a band; 21 bands of 6 meet at a similarity of 0.8 in 998 of 1,000 pairs
    rows: int = 6
    similar: float = 0.75  # share of equal hashes from which documents count as the same
    # decontaminate (GPT-3 appendix C)
    margin: int = 200  # characters around an overlap that go too
    pieces: int = 10  # a document in more pieces goes
    piece: int = 200  # characters; a shorter piece goes
    # mix
    weights: str = ""  # web=0.6,books=0.4: shares of the output's characters
    size: int = 0  # characters of the output; 0: as many as there are before mixing

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            if step not in DEFAULT_STEPS:
                raise UsageError(f"There is no step {step!r}.{nearest(step, DEFAULT_STEPS)}")
        for name in ("shard", "hashes", "rows", "run", "examples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.rows > self.hashes:
            raise UsageError(
                f"A band of {self.rows} rows needs as many hashes; there are {self.hashes}."
            )
        if len(self.max_run) != 3:
            raise UsageError(
                f"max_run needs 3 shares, for 2, 3 and 4 words; there are {len(self.max_run)}."
            )
