"""Every setting of `malmoi corpus build`, with the paper it is from."""

from dataclasses import dataclass

from malmoi.errors import require_known, require_that
from malmoi.settings import Config, option, require_bounds, setting

# steps enabled by --quality-reference, --decontaminate and --weights: quality, decontaminate, mix
DEFAULT_STEPS = ("clean", "filter", "dedup")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """Settings; the filter's are Gopher's (Rae et al. 2021, table A1) where they suit Korean too.

    A Korean word corresponds to about 1.6 English ones.
    """

    steps: tuple[str, ...] = option(
        DEFAULT_STEPS,
        "A subset of clean,filter,dedup; the options below add their own steps.",
        metavar="STEP,…",
        typed=str,
    )
    documents: str = option(
        "auto", "How plain text is split into documents: blank, blanks, line, file.", metavar="RULE"
    )
    text: str = option("text", "Key or column of the text.", metavar="COLUMN")
    seed: int = option(0, "Random seed.", shown="0")
    shard: int = setting(
        1 << 23, "Characters of raw text that are processed together and become one shard.", ge=1
    )
    # select (GPT-2 §2.1)
    links: str = option(
        "",
        "Keep only pages whose url has a score of 3 or more in this table (WebText).",
        metavar="FILE",
    )
    min_score: float = setting(3.0, "Minimum score of a link.")
    block_domains: tuple[str, ...] = option(
        (),
        "Exclude pages of these domains, or of the domains in a file.",
        shown="wikipedia.org with links; none: no domain",
        metavar="DOMAIN,…",
        typed=str,
    )
    # clean
    menu_length: int = setting(40, "A longer line is not part of a menu.")
    menu_share: float = setting(
        0.05, "A short line in this share of a source's documents is boilerplate."
    )
    menu_documents: int = setting(10, "Documents that must have the line at least.")
    # filter
    language: str = option("", "Keep only documents in this language: en, ko, …", metavar="CODE")
    min_words: int = setting(30, "Minimum words of a document.")
    max_words: int = setting(0, "Maximum words of a document; 0: no limit, for whole books.")
    min_word_length: float = setting(2.0, "Minimum of the mean word length, in characters.")
    max_word_length: float = setting(10.0, "Maximum of the mean word length, in characters.")
    max_symbols: float = setting(0.1, "Maximum number signs and ellipses per word.")
    min_letters: float = setting(
        0.6, "Minimum share of letters in the characters that are not space."
    )
    max_bullets: float = setting(0.9, "Maximum share of the lines that begin with a bullet.")
    max_ellipses: float = setting(0.3, "Maximum share of the lines that end in an ellipsis.")
    max_repeated_lines: float = setting(
        0.3, "Maximum share of the characters in repeated lines; the same for paragraphs."
    )
    max_run: tuple[float, ...] = setting(
        (0.2, 0.18, 0.16),
        "Maximum share of the characters in the most frequent 2-, 3- and 4-grams of words.",
    )
    # quality
    pareto: float = setting(
        9.0, "Shape of the Pareto draw that keeps unlikely documents (GPT-3 appendix A)."
    )
    examples: int = setting(10_000, "Good and raw documents each that train the classifier.", ge=1)
    # dedup
    run: int = setting(5, "Words per n-gram that is compared.", ge=1)
    hashes: int = setting(128, "Hashes of a document.", ge=1)
    rows: int = setting(
        6,
        "Hashes per band; with 21 bands of 6, 998 of 1,000 pairs of similarity 0.8 share a band.",
        ge=1,
    )
    similar: float = setting(
        0.75, "Share of equal hashes from which documents count as duplicates."
    )
    # decontaminate (GPT-3 appendix C)
    margin: int = setting(200, "Characters around an overlap that are removed too.")
    pieces: int = setting(10, "A document cut into more pieces is dropped.")
    piece: int = setting(200, "A piece of fewer characters is dropped.")
    # mix
    weights: str = option("", "Share of each source in the output.", metavar="web=0.6,books=0.4")
    size: int = setting(0, "Characters of the output; 0: as many as before mixing.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            require_known(step, DEFAULT_STEPS, "There is no step {name!r}.{hint}")
        require_bounds(self)
        require_that(
            self.rows <= self.hashes,
            "A band of {rows} rows needs at least that many hashes; there are {hashes}.",
            rows=self.rows,
            hashes=self.hashes,
        )
        n = len(self.max_run)
        require_that(n == 3, "max_run needs 3 shares, for 2, 3 and 4 words; there are {n}.", n=n)
