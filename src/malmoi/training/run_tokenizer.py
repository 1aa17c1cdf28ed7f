"""The tokenizer of a run: an existing one, a given one, or one trained on its text."""

import logging
from dataclasses import dataclass
from pathlib import Path

from malmoi.errors import UsageError
from malmoi.messages import msg
from malmoi.text.documents import DocumentReader, read_documents, require_documents
from malmoi.text.pairs import read_pairs
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.tokenizer.training import Special, first_texts
from malmoi.training.data.captions import TextPerRow, open_features
from malmoi.training.data.split import draw
from malmoi.training.recipe import DataConfig, Recipe, pretraining_folder

logger = logging.getLogger(__name__)

SPECIAL: dict[str, Special] = {"both": "mask", "translation": "pad", "span": "pad"}  # by objective
TOKENIZER_CHARACTERS = 200_000_000  # characters a vocabulary is trained on


@dataclass
class RunSources:
    """Where a run's text, vocabulary and initial weights come from."""

    sources: tuple[str, ...]
    tokenizer: Path | None = None
    start: str | Path | None = None
    _opened: list[DocumentReader] | None = None  # standard input can be opened only once

    def readers(self, data: DataConfig) -> list[DocumentReader]:
        """One reader for all sources, or one each if they are mixed by weight."""
        if self._opened is None:
            self._opened = self._open(data)
        return self._opened

    def _open(self, data: DataConfig) -> list[DocumentReader]:
        if data.features:
            return [self._text_per_row(data.features)]
        if data.pairs:
            return [read_pairs(self.sources, (data.source, data.target))]
        kinds = dict(documents=data.documents, text=data.text)
        if not data.weights:
            return [read_documents(self.sources, **kinds)]
        if len(data.weights) != len(self.sources):
            raise UsageError(
                "data.weights has {weights} numbers for {sources} sources; give one for each.",
                weights=len(data.weights),
                sources=len(self.sources),
            )
        return [read_documents([source], **kinds) for source in self.sources]

    def _text_per_row(self, features: str) -> DocumentReader:
        if len(self.sources) != 1 or not Path(self.sources[0]).is_file():
            raise UsageError(
                "Features need one text file with a line for each row, not {sources}.",
                sources=", ".join(self.sources),
            )
        rows = len(open_features(features))
        return DocumentReader([TextPerRow(Path(self.sources[0]), ".txt", rows)], "line", "")


def prepare_tokenizer(
    recipe: Recipe, readers: list[DocumentReader], out: Path, origin: RunSources
) -> None:
    """The run's tokenizer: the existing one, a given one, the start model's, or a trained one."""
    given = origin.tokenizer or origin.start
    wanted = Tokenizer.load(given) if given else None
    if (out / "tokenizer.json").is_file():
        _check_same(Tokenizer.load(out), wanted, recipe, out)
    elif wanted is not None:
        wanted.save(out)
    else:
        _learn(recipe, readers).save(out)


def _check_same(existing: Tokenizer, wanted: Tokenizer | None, recipe: Recipe, out: Path) -> None:
    if wanted is not None and wanted.fingerprint() != existing.fingerprint():
        raise pretraining_folder(out).refusal(
            ["with another tokenizer than --tokenizer or --start"]
        )
    fresh = not (out / "recipe.json").is_file() and wanted is None
    if fresh and existing.kind != recipe.tokenizer.kind:
        raise UsageError(
            "{out} holds a {kind} tokenizer but this recipe trains a {kind2} one: choose "
            "another folder, or use it with --tokenizer.",
            out=out,
            kind=existing.kind,
            kind2=recipe.tokenizer.kind,
        )


def _learn(recipe: Recipe, readers: list[DocumentReader]) -> Tokenizer:
    c = recipe.tokenizer
    logger.info(
        msg("Training a {kind} tokenizer of up to {vocab:,} tokens …", kind=c.kind, vocab=c.vocab)
    )
    whole = ((document.text, False) for document in require_documents(readers))
    texts = (text for text, _ in draw(whole, recipe.data.fraction, 0))
    special = SPECIAL.get(recipe.samples, "none")
    return train_tokenizer(first_texts(texts, TOKENIZER_CHARACTERS), **vars(c), special=special)
