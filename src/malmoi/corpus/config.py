"""Every setting of `malmoi corpus build`, with the paper it is from."""

from dataclasses import dataclass

from malmoi.config import Config
from malmoi.errors import UsageError, nearest

# steps enabled by --quality-reference, --decontaminate and --weights: quality, decontaminate, mix
DEFAULT_STEPS = ("clean", "filter", "dedup")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """Settings; the filter's are Gopher's (Rae et al. 2021, table A1) where they suit Korean too.

    A Korean word corresponds to about 1.6 English ones.
    """

    steps: tuple[str, ...] = DEFAULT_STEPS
    documents: str = "auto"  # how plain text is split: blank, blanks, line, file, auto
    text: str = "text"  # the key or column of JSON lines and tables
    seed: int = 0
    shard: int = 1 << 23  # characters of raw text that are processed together and become one shard
    # select (GPT-2 §2.1)
    links: str = ""  # .csv, .tsv, .jsonl with url and score: keep only these pages …
    min_score: float = 3.0  # … from this score on
    block_domains: tuple[str, ...] = ()  # or files; by default wikipedia.org with links; none
    # clean
    menu_length: int = 40  # a longer line is not part of a menu
    menu_share: float = 0.05  # a short line in this share of a source's documents is boilerplate …
    menu_documents: int = 10  # … if it is in at least this many
    # filter
    language: str = ""  # en, ko, …; empty: any
    min_words: int = 30
    max_words: int = 0  # 0: no limit, for whole books
    min_word_length: float = 2.0  # the mean, in characters
    max_word_length: float = 10.0
    max_symbols: float = 0.1  # number signs and ellipses per word
    min_letters: float = 0.6  # share of the characters that are not space
    max_bullets: float = 0.9  # share of the lines that begin with a bullet
    max_ellipses: float = 0.3  # share of the lines that end in an ellipsis
    # share of the characters in repeated lines; the same for paragraphs
    max_repeated_lines: float = 0.3
    # share of the characters in the most frequent 2-, 3- and 4-grams of words
    max_run: tuple[float, ...] = (0.2, 0.18, 0.16)
    # quality
    pareto: float = 9.0  # GPT-3 appendix A
    examples: int = 10_000  # good and raw documents each that train the classifier
    # dedup
    run: int = 5  # words per n-gram that is compared
    hashes: int = 128
    # hashes per band; with 21 bands of 6, 998 of 1,000 pairs of similarity 0.8 share a band
    rows: int = 6
    similar: float = 0.75  # share of equal hashes from which documents count as duplicates
    # decontaminate (GPT-3 appendix C)
    margin: int = 200  # characters around an overlap that are removed too
    pieces: int = 10  # a document cut into more pieces is dropped
    piece: int = 200  # characters; a shorter piece is dropped
    # mix
    weights: str = ""  # web=0.6,books=0.4: shares of the output's characters
    size: int = 0  # characters of the output; 0: as many as before mixing

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            if step not in DEFAULT_STEPS:
                raise UsageError(
                    "There is no step {step!r}.{hint}", step=step, hint=nearest(step, DEFAULT_STEPS)
                )
        for name in ("shard", "hashes", "rows", "run", "examples"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "{name} must be at least 1, not {value}.", name=name, value=getattr(self, name)
                )
        if self.rows > self.hashes:
            raise UsageError(
                "A band of {rows} rows needs at least that many hashes; there are {hashes}.",
                rows=self.rows,
                hashes=self.hashes,
            )
        if len(self.max_run) != 3:
            raise UsageError(
                "max_run needs 3 shares, for 2, 3 and 4 words; there are {max_run}.",
                max_run=len(self.max_run),
            )
