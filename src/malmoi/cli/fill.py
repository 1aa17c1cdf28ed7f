"""`malmoi fill`: candidates for the masks of a text."""

from malmoi.cli import options as opt
from malmoi.cli.inputs import input_lines, open_model
from malmoi.cli.options import option
from malmoi.cli.output import one_line, print_json, print_result
from malmoi.pair import BERT


def fill_command(
    model: opt.Bert = None,
    texts: opt.Texts = None,
    top: int = option(5, "Candidates for each mask."),
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """Fill in the [MASK] of each text with a BERT.

    Prints probability, token and the text with it in place.

    Example: malmoi fill "나는 오늘 [MASK] 갔다."
    """
    given = input_lines(texts)
    bert = open_model(model, device, dtype, BERT)
    for text in given:
        masks = bert.fill_masks(text, top=top)
        if json:
            print_json({"text": text, "fills": [[vars(one) for one in mask] for mask in masks]})
        else:
            for one in (one for mask in masks for one in mask):
                print_result(f"{one.probability:.4f}\t{one.token}\t{one_line(one.text)}")
