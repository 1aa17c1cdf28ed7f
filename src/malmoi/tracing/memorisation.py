"""How much of a run's text its model has by heart, and how much of what it writes is copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from malmoi.inference.score import ScoredRow, token_logprobs
from malmoi.messages import msg
from malmoi.report.page import heading, html_table, note
from malmoi.system.result import Result
from malmoi.tracing.index import TextIndex
from malmoi.tracing.trace import Match, Table, novelty, trace_text
from malmoi.training.data.store import Store
from malmoi.training.recipe import read_recipe
from malmoi.training.report import write_report

if TYPE_CHECKING:
    from malmoi.inference import Model

SAMPLES = 64  # texts written, and passages of the training text and the held-out text
LENGTH = 64  # tokens of each: half of them are given where the rest is to be completed
COPIES = 5  # of the longest ones that are shown


@dataclass(frozen=True, repr=False)
class Memorisation(Result):
    """Novelty by n of what the model writes and of held-out text, and what it knows by heart.

    A GPT knows a passage if its most likely continuation of one half is the other, token by token
    (Carlini et al. 2023); a BERT knows a hidden word if it is its first guess.
    """

    written: dict[int, float]
    held_out: dict[int, float]
    known: float  # share of passages of the training text
    known_held_out: float
    copies: tuple[Match, ...]  # the longest pieces of the training text in what it wrote
    indexed: int  # tokens of the training text

    def describe(self) -> str:
        """What it knows by heart, in a sentence."""
        return msg(
            "The model knows {known:.1%} of the passages of its training text by heart, and "
            "{held_out:.1%} of held-out ones.",
            known=self.known,
            held_out=self.known_held_out,
        )

    def tables(self) -> list[Table]:
        """New n-grams, and the longest copies."""
        shares = [
            (size, f"{self.written[size]:.1%}" if size in self.written else "–", f"{share:.1%}")
            for size, share in self.held_out.items()
        ]
        copies = [(one.tokens, one.count, one.text) for one in self.copies]
        return [
            (("new n-grams, n", "in what it writes", "in held-out text"), shares),
            (("tokens", "times", "longest copies"), copies),
        ]

    def section(self) -> str:
        """A section of the run's page."""
        tables = [html_table(*table) for table in self.tables()]
        return "".join([heading("Memory and novelty"), note(self.describe()), *tables])


def report_memorisation(model: "Model", index: TextIndex) -> Memorisation:
    """Measures it on texts drawn evenly, and adds it to the page of the run."""
    training = _windows([part.store for part in index.parts], model.config.context)
    stores = [Store.open(part.store.folder.parent / "valid") for part in index.parts]
    held_out = _windows(stores, model.config.context)
    traces = [trace_text(index, text, "", 1, 1) for text in _written(model, held_out)]
    copies = [match for trace in traces for match in trace.matches]
    found = Memorisation(
        _mean([trace.novelty for trace in traces]),
        _mean([novelty(index.longest(index.array(window))) for window in held_out]),
        _known(model, training),
        _known(model, held_out),
        tuple(sorted(copies, key=lambda match: -match.tokens)[:COPIES]),
        index.size,
    )
    run = model.checkpoint.source
    if run is not None and index.parts[0].store.folder.is_relative_to(run):
        write_report(run, read_recipe(run / "recipe.json"), found.section())
    return found


def _windows(stores: Sequence[Store], context: int) -> list[list[int]]:
    """Passages drawn evenly from the text, each of one document."""
    size = min(LENGTH, context // 2)  # there is room for [CLS] and [SEP]
    found = []
    for store in (some for some in stores if len(some)):
        places = np.linspace(0, len(store.tokens) - 1, SAMPLES // len(stores)).astype(int)
        ends = store.documents[np.searchsorted(store.documents, places, "right")]
        ends = ends - (store.end is not None)
        found += [
            store.tokens[place : min(place + size, end)].tolist()
            for place, end in zip(places, ends, strict=True)
            if end - place >= size // 4
        ]
    return found


def _mean(found: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over texts, by n."""
    sizes = sorted({size for one in found for size in one})
    return {size: float(np.mean([one[size] for one in found if size in one])) for size in sizes}


def _written(model: "Model", held_out: list[list[int]]) -> list[str]:
    """Continuations of the beginnings of held-out passages, drawn as the model gives them."""
    if "generate" not in model.abilities:
        return []
    prompts = [model.tokenizer.decode(window[: len(window) // 8]) for window in held_out]
    texts = model.generate(prompts, max_new_tokens=LENGTH, temperature=1.0, seed=0)
    return [text for text in texts if text.strip()]


def _known(model: "Model", windows: list[list[int]]) -> float:
    if not windows:
        return 0.0
    if "generate" in model.abilities:
        rows = [ScoredRow(window, len(window) // 2) for window in windows]
        return float(np.mean([greedy for _, greedy in token_logprobs(model.network, rows)]))
    return float(np.mean([_guessed(model, window) for window in windows]))


def _guessed(model: "Model", window: list[int]) -> bool:
    """Whether the token in the middle is what a BERT fills in for it."""
    words = model.tokenizer
    middle = len(window) // 2
    before, hidden, after = map(
        words.decode, (window[:middle], window[middle : middle + 1], window[middle + 1 :])
    )
    guess = model.fill(f"{before} {words.token(words.specials.mask or 0)} {after}", top=1)[0]
    return guess.token.strip() == hidden.strip()
