"""BLEU of a model that translates, on pairs of files or a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference import Model
from malmoi.inference.translation import BEAMS
from malmoi.messages import joined
from malmoi.metrics.overlap import bleu
from malmoi.text.pairs import read_pairs, split_pair

COLUMNS = ("source", "target")
OWN_SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:malmoi"


@dataclass(frozen=True)
class ReferencePairs:
    """Sources and their translations."""

    sources: list[str]
    targets: list[str]

    @classmethod
    def read(
        cls, files: Sequence[str | Path], columns: tuple[str, str] = COLUMNS
    ) -> "ReferencePairs":
        """Two files aligned by line, or a table; a pair without both sides is an error."""
        reader = read_pairs(files, columns)
        rows = [split_pair(document.text) for document in reader]
        if reader.problems:
            raise MalmoiError(joined(" ", reader.describe()))
        if not rows:
            raise MalmoiError("{files} hold no sentence pairs.", files=" and ".join(reader.files))
        return cls([row[0] for row in rows], [row[1] for row in rows])

    def first(self, count: int | None) -> "ReferencePairs":
        return self if count is None else ReferencePairs(self.sources[:count], self.targets[:count])


def corpus_bleu(targets: Sequence[str], translations: Sequence[str]) -> tuple[float, str]:
    """BLEU of detokenized, cased text and its signature: by sacrebleu, or ours, which equals it."""
    if find_spec("sacrebleu") is None:
        return bleu([[target] for target in targets], translations), OWN_SIGNATURE
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(targets)]).score
    return float(score), str(metric.get_signature())


def evaluate_translation(
    model: Model, data: Any, *, beams: int = BEAMS, limit: int | None = None
) -> dict[str, Any]:
    """{"bleu": 38.1, "beams": 4, "signature": …, "examples": 1000}."""
    if data is None:
        raise UsageError(
            "Evaluation needs reference translations: give two files (source and target) or a "
            "table with both columns."
        )
    files = [data] if isinstance(data, str | Path) else list(data)
    pairs = ReferencePairs.read(files).first(limit)
    translations = model.translate(pairs.sources, beams=beams)
    score, signature = corpus_bleu(pairs.targets, translations)
    return {"bleu": score, "beams": beams, "signature": signature, "examples": len(translations)}
