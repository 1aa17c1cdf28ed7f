"""`malmoi perplexity`: how well a language model predicts a text."""

from pathlib import Path

from malmoi.cli import shared as cli
from malmoi.pair import GPT
from malmoi.system.paths import names_file


def perplexity_command(
    model: cli.Gpt = None,
    texts: cli.Texts = None,
    bits: bool = cli.option(
        False, "Print bits per byte, which are comparable between tokenizers.", "--bits-per-byte"
    ),
    stride: int | None = cli.option(
        None, "Stride of the sliding window.", shown="half the context"
    ),
    memory: int | None = cli.option(
        None,
        "Tokens of earlier segments that a Transformer-XL attends to; 0: none.",
        shown="as in training",
    ),
    counts: bool = cli.option(
        False, "Mix in what followed the same words in the run's training text.", "--counts"
    ),
    device: cli.Device = None,
    dtype: cli.Dtype = None,
    json: cli.Json = False,
) -> None:
    """Compute a GPT's perplexity on a text or a file of any length.

    Example: malmoi perplexity --model runs/tiny-gpt book.txt
    """
    named = bool(texts) and texts != ["-"]
    whole = [_of_file(text) if named else text for text in cli.whole_texts(texts)]
    lm = cli.open_model(model, device, dtype, GPT)
    for text in whole:
        measure = lm.bits_per_byte if bits else lm.perplexity
        value = measure(text, stride=stride, memory=memory, counts=counts)
        cli.print_json(
            {"bits_per_byte" if bits else "perplexity": value}
        ) if json else cli.print_result(f"{value:.4f}")


def _of_file(text: str) -> str:
    """The text of a file that is named, else the text itself."""
    from malmoi.text.lines import refuse_bad_lines, whole_text

    if not names_file(text):
        return text
    path = Path(text)
    return whole_text(path, refuse_bad_lines(path)).rstrip("\r\n")
