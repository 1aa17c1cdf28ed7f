"""The verb of the first five minutes: demo."""

from pathlib import Path
from typing import Annotated

import typer

from malmoi.cli.inputs import JsonOption
from malmoi.cli.show import print_json, print_table


def add(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    out: Annotated[Path, typer.Option(help="The folder everything goes to.", metavar="DIR")] = Path("demo"),
    json: JsonOption = False,
) -> None:
    """Do the main job on built-in text in four to six minutes: train a GPT and a BERT, fine-tune, generate, report.

    Example: malmoi demo
    """
    from malmoi.demo.run import demo as run
    from malmoi.train import Stopped

    try:
        story = run(out)
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from stopped
    facts = {"report": str(story.out / "report.html"), "seconds": round(story.seconds["all"], 1), **story.scores}
    if json:
        print_json(facts)
        return
    prompt, text = story.samples[0]
    print_table(("what", "result"), [("the GPT says", prompt + text), *_lines(facts)])


def _lines(facts: dict[str, object]) -> list[tuple[str, str]]:
    return [(name, f"{value:.1%}" if isinstance(value, float) and value <= 1 else str(value))
            for name, value in facts.items()]  # fmt: skip
