"""`malmoi demo`: the whole workflow on built-in text."""

from pathlib import Path

import typer

from malmoi.cli.options import JsonOption, OutOption
from malmoi.cli.output import print_json, print_table


def demo_command(
    out: OutOption = Path("demo"),
    json: JsonOption = False,
) -> None:
    """Train and try a GPT and a BERT on built-in text, in minutes.

    Vocabularies, pre-training, fine-tuning, and a page that shows what they learnt.

    Example: malmoi demo
    """
    from malmoi.demo.demo import run_demo
    from malmoi.training.signals import Stopped

    try:
        story = run_demo(out)
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from stopped
    facts = {
        "report": str(story.out / "report.html"),
        "seconds": round(story.seconds["all"], 1),
        **story.scores,
    }
    if json:
        print_json(facts)
        return
    prompt, text = story.samples[0]
    print_table(("what", "result"), [("the GPT says", prompt + text), *_lines(facts)])


def _lines(facts: dict[str, object]) -> list[tuple[str, str]]:
    return [(name, f"{value:.1%}" if isinstance(value, float) and value <= 1 else str(value))
            for name, value in facts.items()]  # fmt: skip
