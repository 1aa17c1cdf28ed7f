"""Sources by name (NAME=SOURCE, or a name taken from the source), and step 6, mix: how often each
document is written, by the sources' shares (GPT-3 table 2.2).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import IndexArray
from malmoi.corpus.config import CorpusConfig
from malmoi.errors import UsageError, ensure, require_known, require_that
from malmoi.messages import msg
from malmoi.system.groups import grouped
from malmoi.text.documents import DocumentReader, read_documents
from malmoi.text.lines import uncompressed_name
from malmoi.text.records import number_of
from malmoi.text.sources import FileSource, format_of, resolve_source

SAME_SIZE_TOLERANCE = 0.02  # sizes that differ by less count as equal


def parse_weights(text: str, sources: Sequence[str]) -> dict[str, float]:
    """Parses "web=0.6,books=0.4" into shares that add up to 1; every source needs one."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().rpartition("=")
        weight = number_of(value)
        if not sign or weight is None or not 0 <= weight < math.inf:
            raise UsageError(
                "The weight {part!r} is not NAME=NUMBER; write for example web=0.6,books=0.4.",
                part=part.strip(),
            )
        require_known(name, sources, "There is no source {name!r} to weight.{hint}")
        found[name] = weight
    if missing := [name for name in sources if name not in found]:
        raise UsageError(
            "The weights do not mention {missing}; give 0 to leave a source out.",
            missing=", ".join(missing),
        )
    require_that(sum(found.values()), "All weights are 0: nothing would be left.")
    return {name: found[name] / sum(found.values()) for name in sources}


@dataclass(frozen=True)
class SourceShare:
    """One source in the mix: sizes before and after, epochs, and its actual and wanted share."""

    source: str
    documents: tuple[int, int]
    characters: tuple[int, int]
    epochs: float
    has: float
    wanted: float

    def missed(self) -> str:
        """A sentence if the documents are too few and too long to reach the share."""
        wanted = self.epochs * self.characters[0]
        if abs(self.characters[1] - wanted) <= SAME_SIZE_TOLERANCE * wanted:
            return ""
        return msg(
            "{source} has {has:.1%} of the characters, not {wanted:.1%}: its documents "
            "are too few and too long to be mixed more exactly.",
            source=self.source,
            has=self.has,
            wanted=self.wanted,
        )


def copy_counts(lengths: IndexArray, draws: NDArray[np.uint64], epochs: float) -> IndexArray:
    """How often each document is written: ⌊epochs⌋ times, plus once for the smallest draws."""
    whole = int(epochs)
    found = np.full(len(lengths), whole, np.int64)
    wanted = (epochs - whole) * int(lengths.sum())
    order = np.argsort(draws, kind="stable")
    reached = np.cumsum(lengths[order])
    found[order[reached - lengths[order] / 2 <= wanted]] += 1  # one more copy if that comes closer
    return found


def source_epochs(
    characters: dict[str, int], shares: dict[str, float], size: int
) -> dict[str, float]:
    """How often each source is read for an output of `size` characters."""
    epochs = {}
    for name, share in shares.items():
        ensure(
            not share or characters.get(name),
            "No document of {name} is left, which should make up {share:.0%} of the mix.",
            name=name,
            share=share,
        )
        epochs[name] = size * share / characters[name] if share else 0.0
    return epochs


# ------------------------------------------------------------------ sources by name


@dataclass(frozen=True)
class NamedSource:
    """All sources under one name."""

    name: str
    given: list[str]
    reader: DocumentReader

    def about(self) -> dict[str, Any]:
        r = self.reader
        return {
            "name": self.name,
            "given": self.given,
            "files": len(r.files),
            "bytes": r.size,
            "is": r.fingerprint(),
        }

    def clash(self, out: Path) -> str | None:
        """The path of this source that is inside the folder or contains it, if any."""
        out = out.resolve()
        for given in self.given:
            if Path(given).is_dir() and out.is_relative_to(Path(given).resolve()):
                return given
        paths = (s.path for s in self.reader.sources if isinstance(s, FileSource))
        return next((str(path) for path in paths if path.resolve().is_relative_to(out)), None)


def named_sources(
    given: str | Path | Sequence[str | Path], config: CorpusConfig
) -> list[NamedSource]:
    """The sources grouped by name, in order of first appearance."""
    listed = [given] if isinstance(given, str | Path) else given
    found = grouped(_name(str(one)) for one in listed)
    require_that(found, "No text was given: pass files, folders, globs, - or builtin:sotu.")
    return [
        NamedSource(n, s, read_documents(s, documents=config.documents, text=config.text))
        for n, s in found.items()
    ]


def _name(given: str) -> tuple[str, str]:
    match = re.fullmatch(r"([\w.-]+)=(.+)", given)
    if match and not Path(given).exists():
        return match[1], match[2]
    if given == "-":
        return "stdin", given
    if given.startswith(("builtin:", "hf:")):
        return given.partition(":")[2], given
    path = Path(given).absolute()
    if re.search(r"[*?\[]", path.name):
        return path.parent.name, given
    bare = uncompressed_name(path)
    return bare.stem if format_of(path) else bare.name, given


def benchmark_files(given: Sequence[str]) -> list[Path]:
    paths = []
    for source in (source for text in given for source in resolve_source(text)):
        if not isinstance(source, FileSource):
            raise UsageError("{name} cannot be used as a test set: give files.", name=source.name)
        paths.append(source.path)
    return paths
