"""`malmoi probe`: a linear probe on each layer."""

from pathlib import Path

from malmoi.cli import options as opt
from malmoi.cli.inputs import open_model
from malmoi.cli.options import count, option
from malmoi.cli.output import print_json, print_table, say
from malmoi.messages import msg
from malmoi.report.console import progress_bar


def probe_command(
    model: opt.Model,
    data: Path = option(..., "Labelled words (.conllu) or texts (csv, jsonl…)."),
    test: Path | None = option(None, "Rows to test on.", shown="a fifth of the data"),
    label: str | None = option(
        None, "Column of the labels; for CoNLL-U, upos, xpos or deprel.", shown="detected; upos"
    ),
    limit: int = count(4000, "Read at most this many words or texts."),
    seed: int = option(0, "Random seed."),
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """Probe every layer for parts of speech or your own labels.

    A control task with a random label for each word shows how much the probe itself memorises.

    Example: malmoi probe --model runs/tiny-bert --data en_ewt.dev.conllu
    """
    from malmoi.interpret.probe import probe_model, read_probe_rows

    rows = read_probe_rows(data, label)
    held = None if test is None else read_probe_rows(test, label)
    opened = open_model(model, device, dtype)
    found = probe_model(opened, rows, test=held, max_examples=limit, seed=seed)
    if json:
        print_json(found.to_dict())
        return
    say(
        msg(
            "{labels} labels; trained on {train:,} examples, tested on {test:,}. Most "
            "frequent label: {majority:.1%}.",
            labels=len(found.labels),
            train=found.train,
            test=found.test,
            majority=found.majority,
        )
    )
    cells = (
        (one.layer, f"{one.accuracy:.1%}", f"{one.control:.1%}", progress_bar(one.accuracy))
        for one in found.layers
    )
    print_table(("layer", "accuracy", "control", ""), cells)
