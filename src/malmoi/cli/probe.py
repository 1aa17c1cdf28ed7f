"""`malmoi probe`: a linear probe on each layer."""

from pathlib import Path
from typing import Any

from malmoi.api.models import probe
from malmoi.cli import shared as cli
from malmoi.report.console import progress_bar


def probe_command(
    model: cli.Model,
    data: Path = cli.option(..., "Labelled words (.conllu) or texts (csv, jsonl…)."),
    test: Path | None = cli.option(None, "Rows to test on.", shown="a fifth of the data"),
    label: str | None = cli.option(
        None, "Column of the labels; for CoNLL-U, upos, xpos or deprel.", shown="detected; upos"
    ),
    limit: int = cli.count(4000, "Read at most this many words or texts."),
    seed: int = cli.option(0, "Random seed."),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Probe every layer for parts of speech or your own labels.

    A control task with a random label for each word shows how much the probe itself memorises.

    Example: malmoi probe --model runs/tiny-bert --data en_ewt.dev.conllu
    """
    opened = cli.open_model(model, loading)
    found = probe(opened, data, test=test, label=label, max_examples=limit, seed=seed)
    if json:
        cli.print_json(found.to_dict())
        return
    cli.say(
        "{labels} labels; trained on {found.train:,} examples, tested on {found.test:,}. Most "
        "frequent label: {found.majority:.1%}.",
        labels=len(found.labels),
        found=found,
    )
    cells = (
        (one.layer, f"{one.accuracy:.1%}", f"{one.control:.1%}", progress_bar(one.accuracy))
        for one in found.layers
    )
    cli.print_table(("layer", "accuracy", "control", ""), cells)
