"""Splits a corpus into training and validation, and long documents into pieces."""

from collections.abc import Iterable, Iterator

from malmoi.training.data.permute import permutation_key

MIN_CUT_CHARACTERS = 1 << 14  # a shorter last document of several validates as a whole
MIN_STRETCH_CHARACTERS = 1 << 14  # a document of which a fraction is shorter is drawn as a whole
DRAW = 14  # the purpose of a permutation's key
MAX_PIECE_CHARACTERS = 1 << 17  # a longer document is encoded in pieces, on all cores


def assign(texts: Iterable[str], share: float, seed: int) -> Iterator[tuple[str, bool]]:
    """Pairs every document's text with whether it is for validation, by a hash of its number.

    At least one of several validates, and the first always trains. If only the last could validate
    and it is long, or if it is the only one, it is cut, and its last part validates.
    """
    held: str | None = None
    number = 0
    characters = 0
    validated = share == 0
    for text in texts:
        if held is not None:
            chosen = number > 0 and permutation_key(seed, number) < share * 2.0**64
            validated |= chosen
            yield held, chosen
            number += 1
        held = text
        characters += len(text)
    if held is None:
        return
    wanted = share * characters
    if not validated and (number == 0 or len(held) > max(2 * wanted, MIN_CUT_CHARACTERS)):
        at = _before_space(held, int(len(held) - wanted), len(held) // 2)
        parts = ((held[:at], False), (held[at:], True))
        yield from (part for part in parts if part[0])
    else:
        chosen = permutation_key(seed, number) < share * 2.0**64
        yield held, number > 0 and (chosen or not validated)


def draw(
    documents: Iterable[tuple[str, bool]], fraction: float, seed: int
) -> Iterator[tuple[str, bool]]:
    """An even part of the training text: some short documents, and a stretch of each long one.

    What validates is kept whole; a larger fraction keeps all short documents of a smaller one.
    """
    for number, (text, valid) in enumerate(documents):
        key = permutation_key(seed, number, DRAW)
        if valid or fraction >= 1:
            yield text, valid
        elif len(text) * fraction >= MIN_STRETCH_CHARACTERS:
            size = int(len(text) * fraction)
            start = _before_space(text, (key * (len(text) - size)) >> 64, 0)
            yield text[start : _before_space(text, start + size, start)].lstrip(), valid
        elif key < fraction * 2.0**64:
            yield text, valid


def cut(text: str, most: int = MAX_PIECE_CHARACTERS) -> list[str]:
    """Cuts a long text before spaces, so that the pieces' ids join to those of the whole."""
    pieces = []
    start = 0
    while len(text) - start > most:
        stop = _before_space(text, start + most, start)
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _before_space(text: str, at: int, lowest: int) -> int:
    """The last position ≤ `at` and > `lowest` after a word; `at` itself if there is none."""
    place = max(text.rfind("\n", lowest + 1, at + 1), text.rfind(" ", lowest + 1, at + 1))
    while place > lowest and text[place - 1].isspace():
        place -= 1
    return place if place > lowest else at
