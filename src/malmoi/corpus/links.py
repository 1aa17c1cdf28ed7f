"""Before step 1, select: which documents to read on, by their URLs: a list of scored links, and
domains that are left out, as for WebText (Radford et al. 2019, section 2.1).
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from malmoi.corpus.columns import Shard, StepStats
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import HashArray, is_among, seeded_hash
from malmoi.errors import ensure, require_that
from malmoi.messages import logger, msg, plural
from malmoi.text.records import checked_column, number_of
from malmoi.text.rows import any_rows
from malmoi.text.sources import FileSource

WEBTEXT_BLOCKS = ("wikipedia.org",)
COLUMNS = ("url", "score")  # of a link list


def url_key(url: str) -> str:
    """A URL without what seldom changes the page: scheme, www., fragment, last slash."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:  # not a URL
        return ""
    host = parts.netloc.lower().removeprefix("www.")
    query = f"?{parts.query}" if parts.query else ""
    return f"{host}{parts.path.rstrip('/')}{query}" if host else ""


@dataclass(frozen=True)
class LinkList:
    """Hashes of the URLs of a link list, sorted: those that scored enough, and the others."""

    good: HashArray
    low: HashArray

    @classmethod
    def read(cls, path: Path, min_score: float) -> "LinkList":
        """Reads a table with the columns url and score; a URL counts with its best score."""
        good, low = array("Q"), array("Q")
        bad: list[str] = []
        for place, key, score in _links(path):
            if key and score is not None:
                (good if score >= min_score else low).append(seeded_hash(key, 0))
            else:
                bad.append(place)
        if bad:
            rows = plural(len(bad), "row")
            logger.warning("{rows} without URL or score, first {place}.", rows=rows, place=bad[0])
        ensure(good, "No URL of {path} has a score of {n:g} or more.", path=path, n=min_score)
        return cls(*(np.unique(np.frombuffer(values, np.uint64)) for values in (good, low)))

    def reason_against(self, url: str, min_score: float) -> str:
        if not url:
            return "no URL"
        value = np.array([seeded_hash(url_key(url), 0)], np.uint64)
        if is_among(value, self.good)[0]:
            return ""
        low = is_among(value, self.low)[0]
        return msg("score below {min_score:g}", min_score=min_score) if low else "not in the links"


def _links(path: Path) -> Iterator[tuple[str, str, float | None]]:
    for number, row in enumerate(any_rows(path, COLUMNS)):
        for name in COLUMNS if not number and row.values else ():
            checked_column(path, name, list(row.values))
        url, score = (row.values.get(name, "") for name in COLUMNS)
        yield row.place, url_key(str(url)), number_of(score)


def blocked_domains(config: CorpusConfig) -> frozenset[str]:
    """The domains that are left out: listed, in files with one per line, or WebText's."""
    given = config.block_domains or (WEBTEXT_BLOCKS if config.links else ())
    found: set[str] = set()
    for entry in given:
        lines = Path(entry).read_text("utf-8").split() if Path(entry).is_file() else [entry]
        found.update(line.lower().removeprefix("www.") for line in lines)
    return frozenset(found - {"none"})


def selection_record(config: CorpusConfig) -> dict[str, object]:
    """What determines the selection besides the settings; empty if all documents are kept."""
    path = config.links
    require_that(
        not path or Path(path).is_file(), "The link list {path} does not exist.", path=path
    )
    links = FileSource(Path(path), "").fingerprint() if path else []
    domains = sorted(blocked_domains(config))
    return {"links": [links, seeded_hash("\n".join(domains), 0)]} if links or domains else {}


def is_blocked(domain: str, blocked: frozenset[str]) -> bool:
    parts = domain.split(".")
    return any(".".join(parts[at:]) in blocked for at in range(len(parts)))


def selected(
    shard: Shard,
    links: LinkList | None,
    blocked: frozenset[str],
    min_score: float,
    stats: StepStats,
) -> Shard:
    """The documents whose domain is not blocked and whose URL was linked with enough score."""

    def reason(url: str) -> str:
        domain = (
            url_key(url).partition("/")[0].partition("?")[0].rpartition("@")[2].partition(":")[0]
        )
        if url and is_blocked(domain, blocked):
            return "blocked domain"
        return links.reason_against(url, min_score) if links else ""

    return stats.kept(shard, np.array(list(map(reason, shard.urls)), object))
