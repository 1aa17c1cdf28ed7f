"""`malmoi demo`: the whole workflow on built-in text."""

import os
from pathlib import Path

from malmoi.cli import shared as cli
from malmoi.errors import require_known
from malmoi.messages import LANGUAGES, language as user_language, translate


def demo_command(
    out: Path | None = cli.option(
        None, "Output folder.", "--out", "-o", shown="demo, or demo-ko", metavar="DIR"
    ),
    language: str | None = cli.option(
        None, "Text, messages and page: en or ko.", shown="the locale's", metavar="NAME"
    ),
    seed: int | None = cli.option(None, "Random seed.", shown="0"),
    overwrite: cli.Overwrite = False,
    json: cli.Json = False,
) -> None:
    """Train and try a GPT and a BERT on built-in text, in minutes.

    Trains tokenizers, pre-trains, fine-tunes, and writes a page with the results.

    Example: malmoi demo

    Example: malmoi demo --language ko
    """
    if language is not None:
        require_known(language, LANGUAGES, "There is no demo in {name!r}.{hint}")
        os.environ["MALMOI_LANG"] = language
    cli.load_torch()
    from malmoi.demo.demo import run_demo
    from malmoi.demo.texts import BUILT_IN, DemoConfig

    plan = DemoConfig(seed=seed or 0)
    story = run_demo(out, plan, BUILT_IN[user_language()], overwrite=overwrite)
    seconds = round(story.seconds["all"], 1)
    facts = {"report": str(story.out / "report.html"), "seconds": seconds, **story.scores}
    prompt, text = story.samples[0]
    shown = {"sample of the GPT": prompt + text} | {
        name: f"{value:.1%}" if isinstance(value, float) and value <= 1 else str(value)
        for name, value in facts.items()
    }
    rows = [(translate(name), value) for name, value in shown.items()]
    cli.print_rows(json, [facts], (translate("what"), translate("result")), rows)
