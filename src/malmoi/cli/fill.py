"""`malmoi fill`: candidates for the masks of a text."""

from malmoi.cli import shared as cli
from malmoi.pair import BERT


def fill_command(
    model: cli.Bert = None,
    texts: cli.Texts = None,
    top: int = cli.option(5, "Candidates for each mask."),
    device: cli.Device = None,
    dtype: cli.Dtype = None,
    json: cli.Json = False,
) -> None:
    """Fill in the [MASK] of each text with a BERT.

    Prints probability, token and the text with it in place.

    Example: malmoi fill "나는 오늘 [MASK] 갔다."
    """
    given = cli.input_lines(texts)
    bert = cli.open_model(model, device, dtype, BERT)
    for text in given:
        masks = bert.fill_masks(text, top=top)
        if json:
            cli.print_json({"text": text, "fills": [[vars(one) for one in mask] for mask in masks]})
        else:
            for one in (one for mask in masks for one in mask):
                cli.print_result(f"{one.probability:.4f}\t{one.token}\t{cli.one_line(one.text)}")
