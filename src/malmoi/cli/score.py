"""`malmoi score`: log-probabilities of continuations."""

from malmoi.cli import shared as cli
from malmoi.errors import require_that
from malmoi.pair import GPT


def score_command(
    model: cli.Gpt = None,
    texts: cli.Texts = None,
    device: cli.Device = None,
    dtype: cli.Dtype = None,
    json: cli.Json = False,
) -> None:
    """Score continuations of a context with a GPT.

    The first text is the context, the others are continuations; on standard input every line is a
    context, a tab and a continuation. Prints the log-probability of each.

    Example: malmoi score --model runs/tiny-gpt "The capital of France is" " Paris" " Rome"
    """
    rows = (
        cli.input_pairs(None)
        if not texts or texts == ["-"]
        else [(texts[0], text) for text in texts[1:]]
    )
    require_that(
        rows, "There is nothing to score: after the context, give at least one continuation."
    )
    contexts, continuations = (list(column) for column in zip(*rows, strict=True))
    found = cli.open_model(model, device, dtype, GPT).score(contexts, continuations)
    for (context, continuation), one in zip(rows, found, strict=True):
        if json:
            cli.print_json({"context": context, "continuation": continuation, **vars(one)})
        else:
            cli.print_result(f"{one.logprob:.4f}\t{cli.one_line(continuation)}")
