"""Calling a tokenizer as transformers' are called: padded rows for a model, in one dict."""

from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import require_that, required

if TYPE_CHECKING:
    from torch import Tensor

Rows = dict[str, list[list[int]]]
ArrayRows = dict[str, NDArray[np.int64]]
TensorRows = dict[str, "Tensor"]
TENSORS = (None, "np", "pt")


class CallOptions(TypedDict, total=False):
    """The options of a tokenizer that is called, named as transformers names them."""

    padding: bool | Literal["longest", "max_length"]  # False; True: to the longest
    truncation: bool  # False; True: to max_length, or else the model's
    max_length: int | None
    add_special_tokens: bool  # True: [CLS] and [SEP], or the tokenizer's own


def pad_rows(
    rows: Rows, padding: object, limit: int | None, pad: int | None, *, left: bool
) -> Rows:
    """The rows, each padded to the longest or to the limit."""
    known = (True, "longest", "max_length")
    require_that(padding in known, "padding is one of {known}, not {x!r}.", known=known, x=padding)
    width = required(
        limit if padding == "max_length" else max(map(len, rows["input_ids"]), default=0),
        "padding='max_length' needs max_length=N: the tokenizer has no limit.",
    )
    fill = required(
        pad,
        "This tokenizer has no padding token, as GPT-2's has none: encode the texts one by one.",
    )
    found: Rows = {}
    for name, some in rows.items():
        more = [[fill if name == "input_ids" else 0] * (width - len(row)) for row in some]
        found[name] = [b + a if left else a + b for a, b in zip(some, more, strict=True)]
    return found


def as_arrays(rows: Rows, *, torch: bool) -> ArrayRows | TensorRows:
    """The rows as arrays, of numpy or torch; they must be of one length."""
    require_that(
        len(set(map(len, rows["input_ids"]))) <= 1,
        "Texts of different lengths cannot form an array: pass padding=True, and "
        "truncation=True for long texts.",
    )
    arrays = {name: np.array(some, np.int64) for name, some in rows.items()}
    if not torch:
        return arrays
    from torch import from_numpy

    return {name: from_numpy(array) for name, array in arrays.items()}
