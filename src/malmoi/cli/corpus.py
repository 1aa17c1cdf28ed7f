"""Build a training corpus from raw text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.api.records import CorpusInputs
from malmoi.api.tools import build_corpus
from malmoi.cli import shared as cli
from malmoi.corpus.config import CorpusConfig
from malmoi.messages import plural, translate
from malmoi.system.machine import this_machine
from malmoi.system.run_folder import FINISHED


def build_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC…", help="Files, folders, globs, builtin:sotu, -; or NAME=SRC."),
    ],
    out: cli.Out,
    changes: dict[str, Any] = cli.options_of(CorpusInputs, CorpusConfig),
    settings: cli.Set = None,
    json: cli.Json = False,
) -> None:
    """Clean, filter, deduplicate, decontaminate and mix raw text.

    The result is a folder that pretrain reads. The same command resumes; DIR/corpus.json
    records what each step dropped, with examples.

    Example: malmoi corpus build web=crawl/ books=books/ --out corpus --language ko --weights
    web=0.6,books=0.4
    """
    changes = {"workers": this_machine().cores, **changes, "settings": cli.changes_of(settings)}
    finished: Any = build_corpus(sources, out, **changes).record.get(FINISHED)
    if finished:  # not so after a part
        facts = {"folder": str(out), **finished}
        cli.print_json(facts) if json else _print_report(finished, out)


def _print_report(finished: dict[str, Any], out: Path) -> None:
    from malmoi.corpus.columns import control_sentence, describe_rules

    if sentence := control_sentence(finished.get("control", {})):
        cli.say(sentence)
    steps = (
        (step, *(f"{n:,}" for n in (*one["documents"], one["characters"][1])),
         describe_rules(one["rules"]))
        for step, one in finished["steps"].items()
    )  # fmt: skip
    cli.print_facts(
        ("stage", "documents in", "documents kept", "characters kept", "reasons"), steps
    )
    shares = [
        (s["source"], f"{s['documents'][0]:,}", f"{s['epochs']:.2f}", f"{s['documents'][1]:,}",
         f"{s['characters'][1]:,}", f"{s['has']:.1%}")
        for s in finished["mix"]["shares"]
    ]  # fmt: skip
    columns = ("source", "documents read", "times", "documents written", "characters", "share")
    cli.print_table(list(map(translate, columns)), shares)
    cli.print_result(f"{out}: " + plural(finished["mix"]["shards"], "shard"))
