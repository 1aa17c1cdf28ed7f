"""`malmoi score`: log-probabilities of continuations."""

from malmoi.cli import options as opt
from malmoi.cli.inputs import input_pairs, open_model
from malmoi.cli.output import one_line, print_json, print_result
from malmoi.errors import UsageError
from malmoi.pair import GPT


def score_command(
    model: opt.Gpt = None,
    texts: opt.Texts = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """Score continuations of a context with a GPT.

    The first text is the context, the others are continuations; on standard input every line is a
    context, a tab and a continuation. Prints the log-probability of each.

    Example: malmoi score --model runs/tiny-gpt "The capital of France is" " Paris" " Rome"
    """
    rows = (
        input_pairs(None)
        if not texts or texts == ["-"]
        else [(texts[0], text) for text in texts[1:]]
    )
    if not rows:
        raise UsageError(
            "There is nothing to score: after the context, give at least one continuation."
        )
    contexts, continuations = (list(column) for column in zip(*rows, strict=True))
    found = open_model(model, device, dtype, GPT).score(contexts, continuations)
    for (context, continuation), one in zip(rows, found, strict=True):
        if json:
            print_json({"context": context, "continuation": continuation, **vars(one)})
        else:
            print_result(f"{one.logprob:.4f}\t{one_line(continuation)}")
