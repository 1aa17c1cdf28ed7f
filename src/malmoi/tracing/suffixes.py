"""Suffix arrays: every place of a text of tokens, in the order of what follows it there."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError
from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions

PlaceArray = NDArray[np.int32]
TokenArray = NDArray[Any]  # uint16 or uint32, as a token store has them


def suffix_array(text: PlaceArray) -> PlaceArray:
    """The places of a text in the order of their suffixes; only its last number is 0."""
    calls = (("malmoi_suffix_array", 4),)
    native = native_functions("malmoi.tracing", "suffixes.c", calls, this_machine())
    if native is None:
        return doubled_prefixes(text)
    found = np.empty(len(text), np.int32)
    if native[0](text.ctypes.data, found.ctypes.data, len(text), int(text.max()) + 1):
        raise MalmoiError("There is not enough memory to index the training text.")
    return found


def doubled_prefixes(text: PlaceArray) -> PlaceArray:
    """The same without a compiler: sorted by 1, 2, 4, 8… numbers (Manber & Myers 1990)."""
    ranks = text.astype(np.int64)
    length = 1
    while True:
        keys = ranks << 32
        keys[:-length] |= ranks[length:]
        places = np.argsort(keys, kind="stable")
        ordered = keys[places]
        ranks[places] = np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))
        if ranks[places[-1]] == len(text) - 1:
            return places.astype(np.int32)
        length *= 2


def sort_places(tokens: TokenArray, ends: NDArray[np.int64], vocab: int) -> PlaceArray:
    """The suffix array of some documents; one that ends precedes one that goes on.

    Tokens are ordered as their bytes are, so that pieces of a store are compared by their bytes.
    `ends` are the places where documents end without a token that says so.
    """
    if len(tokens) + len(ends) >= np.iinfo(np.int32).max:
        raise MalmoiError("A text of {tokens:,} tokens is too long to index.", tokens=len(tokens))
    order = np.argsort(np.arange(vocab, dtype=tokens.dtype).view(tokens.dtype.newbyteorder(">")))
    numbers = np.empty(vocab, np.int32)
    numbers[order] = np.arange(2, vocab + 2)
    # a 1 between documents, a 0 after them
    text = np.append(np.insert(numbers[tokens], ends, 1), np.int32(0))
    places = suffix_array(text)
    if not len(ends):
        return places[1:]
    places = places[text[places] > 1]
    return places - np.cumsum(text == 1, dtype=np.int32)[places]
