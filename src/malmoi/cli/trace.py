"""`malmoi trace`: where a model learnt a text, and what it knows by heart."""

from functools import partial
from typing import TYPE_CHECKING, Any

from malmoi.cli import shared as cli
from malmoi.pair import GPT
from malmoi.system.paths import names_file

if TYPE_CHECKING:
    from malmoi.tracing.trace import Memorisation, Trace


def trace_command(
    model: cli.Gpt = None,
    texts: list[str] | None = cli.argument(
        None,
        "The run's folder, unless --model is given, and texts; - reads them from standard input.",
        metavar="[DIR] TEXT…",
    ),
    words: str = cli.option("", "Only matches with some of these words of the text."),
    top: int = cli.option(5, "Longest matches for each text."),
    sentences: int = cli.option(3, "Sentences of the training text for each match."),
    nearest: int = cli.option(0, "Also this many sentences with similar hidden states."),
    data: list[str] | None = cli.option(
        None, "Text to search.", shown="what the run was trained on", metavar="SOURCE"
    ),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Find the words of a text in the text a model was trained on.

    Prints the longest matches, how often the training text has them, and some of its sentences. A
    run's folder may come first instead of --model; without a text, measures how much of its
    training text the model knows by heart and copies, and adds that to report.html.

    Example: malmoi trace runs/tiny-gpt "the state of the union"
    """
    given = list(texts or [])
    if model is None and given and names_file(f"{given[0]}/config.json"):
        model = given.pop(0)
    opened = cli.open_model(model, loading, GPT)
    if not given and not data:
        _show(opened.memorisation(), json)
        return
    trace = partial(
        opened.trace, words=words, top=top, sentences=sentences, nearest=nearest, data=data or ()
    )
    for text in cli.input_lines(given):
        _show(trace(text), json)


def _show(found: "Trace | Memorisation", json: bool) -> None:
    if json:
        cli.print_json(found.to_dict())
        return
    cli.say(found.describe())
    for columns, rows in found.tables():
        if rows:
            cli.print_table(columns, rows)
