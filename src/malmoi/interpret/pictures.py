"""Pictures for notebooks: tokens, attention, the logit lens, the next token.

Each is one SVG in the notebook's text colour, without external resources. L layers, H heads, T
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np

from malmoi.errors import require_known, require_that
from malmoi.inference.base import LoadedModel
from malmoi.inference.embed import Float32Array
from malmoi.inference.generation.token_bytes import token_bytes
from malmoi.inference.prompt import check_length
from malmoi.interpret.forward_pass import Subject, attention_probabilities, lens
from malmoi.interpret.intervention import require_index
from malmoi.messages import msg
from malmoi.system.files import write_text
from malmoi.tokenizer import Encoding, Tokenizer

PictureKind = Literal["tokens", "attention", "lens", "next"]
ACCENT = "#4c78a8"
CELL = 24  # pixels
LETTER = 8.0  # approximate pixels of a letter; a Hangul syllable is twice as wide
SMALL = 60  # pixels of a head's thumbnail, and at least 2 per token
FAINT = 0.03  # weights below this are not drawn
WORDED = 0.6  # maximum opacity behind a word, which must stay readable
MAX_CELLS = 60_000
MAX_NAME = 14  # characters


@dataclass(frozen=True)
class Picture:
    """An SVG that notebooks display; `save` writes it to a file."""

    svg: str

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg}</div>'

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({len(self.svg):,} characters of SVG)"

    def save(self, path: str | Path) -> None:
        """Writes the picture as an SVG file."""
        write_text(Path(path), self.svg)


def show(
    model: LoadedModel,
    kind: PictureKind,
    text: str,
    layer: int | None = None,
    head: int | None = None,
    top: int = 8,
) -> Picture:
    """Draws what the model makes of a text.

    Of attention, a `layer` (from 0, negative from the end) and one of its heads, or their mean;
    of the next token, the `top` candidates.
    """
    pictures: dict[str, Callable[[], Picture]] = {
        "tokens": lambda: token_picture(model, text),
        "attention": lambda: attention_picture(model, text, layer, head),
        "lens": lambda: lens_picture(model, text),
        "next": lambda: next_picture(model, text, top),
    }
    require_known(kind, pictures, "There is no picture {name!r}.{hint}")
    return pictures[kind]()


# ------------------------------------------------------------------ the kinds


def token_picture(model: LoadedModel, text: str) -> Picture:
    """A box for each token, with its number."""
    encoding = model.tokenizer.encode(text)
    parts = []
    x = 0.0
    for i, token in enumerate(encoding.tokens):
        name = token_label(model.tokenizer, token)
        wide = max(_width(name), LETTER * len(str(token))) + 14
        parts += [
            _rect(x, 4, wide, 30, 0.12 + 0.1 * (i % 3)),
            _text(x + wide / 2, 24, name, "middle"),
            _text(x + wide / 2, 48, str(token), "middle", size=10),
        ]
        x += wide + 4
    return _picture(parts, x, 56, msg("{tokens} tokens", tokens=len(encoding.tokens)))


def attention_picture(
    model: LoadedModel, text: str, layer: int | None, head: int | None
) -> Picture:
    """One head as a matrix; without a layer, every head small: layers down, heads across."""
    weights = attention_probabilities(model, text)
    names = _labels(model, model.masked._encoded(text, truncate=False))
    if layer is None:
        return _all_heads(weights)
    layer = _index(layer, len(weights), "layer")
    if head is None:
        return _matrix(names, names, weights[layer].mean(0), f"layer {layer}, mean of the heads")
    head = _index(head, weights.shape[1], "head")
    return _matrix(names, names, weights[layer, head], f"layer {layer}, head {head}")


def lens_picture(model: LoadedModel, text: str) -> Picture:
    """The most likely token of every layer at every position, as if it were the last layer."""
    names = _names(model, text)
    layers = [[guesses[0] for guesses in layer] for layer in lens(model, text, 1).guesses[::-1]]
    chances = np.array([[one.probability for one in layer] for layer in layers], np.float32)
    ids = [[model.tokenizer.id(one.token) for one in layer] for layer in layers]
    words = [[token_label(model.tokenizer, id or 0) for id in layer] for layer in ids]
    titles = [msg("layer {number}", number=i) for i in range(len(layers) - 2, -1, -1)]
    return _matrix([*titles, "embedding"], names, chances, "logit lens", words)


def next_picture(model: LoadedModel, text: str, top: int) -> Picture:
    """Bars of the most likely next tokens; for a BERT, of each mask."""
    found = Subject(model.checkpoint).run(text, top=top)
    parts: list[str] = []
    y = 0.0
    for place, guesses in zip(found.positions or (0,), found.guesses, strict=False):
        if len(found.guesses) > 1:
            parts.append(_text(0, y + 16, found.tokens[place]))
            y += CELL
        for one in guesses:
            known = model.tokenizer.id(one.name)
            label = one.name if known is None else token_label(model.tokenizer, known)
            parts += [
                _text(130, y + 16, label, "end"),
                _rect(140, y + 4, 300 * one.probability, 15, 0.85),
                _text(448 + 300 * (one.probability - 1), y + 16, f"{one.probability:.1%}"),
            ]
            y += CELL
        y += CELL / 2
    return _picture(parts, 520, y, "next token")


# ------------------------------------------------------------------ drawing


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """A visible form of a token: a leading space as ·, parts of a character as bytes."""
    written = token_bytes(tokenizer)(token)
    if not written or tokenizer.kind == "wordpiece":
        return tokenizer.token(token)
    try:
        name = written.decode()
    except UnicodeDecodeError:
        return "⟨" + written.hex(" ").upper() + "⟩"
    shown = name.replace("\n", "↵").replace("\t", "⇥")
    return "·" * (len(shown) - len(shown.lstrip(" "))) + shown.lstrip(" ") if shown else "∅"


def _names(model: LoadedModel, text: str) -> list[str]:
    return _labels(model, Subject(model.checkpoint).encode(text))


def _labels(model: LoadedModel, encoding: Encoding) -> list[str]:
    tokens = encoding.tokens
    check_length(len(tokens), int(MAX_CELLS**0.5), "a picture's limit")
    return [token_label(model.tokenizer, token) for token in tokens]


def _index(given: int, count: int, what: str) -> int:
    """An index from 0; negative ones are given from the end."""
    require_index(what, given, count, least=-count)
    return given % count


def _matrix(
    rows: Sequence[str],
    columns: Sequence[str],
    weights: Float32Array,
    title: str,
    words: Sequence[Sequence[str]] | None = None,
) -> Picture:
    """Cells shaded by weights between 0 and 1, with words in them if given."""
    left = max(map(_width, rows)) + 10
    top = 20 + max(map(_width, columns)) * 0.75
    each = CELL if words is None else max(CELL, *(_width(w) + 10 for row in words for w in row))
    parts = []
    for q, name in enumerate(rows):
        y = top + q * CELL
        parts.append(_text(left - 8, y + 16, name, "end"))
        for k in range(len(columns)):
            weight = float(weights[q, k])
            shade = max(FAINT, weight if words is None else WORDED * weight)
            parts.append(_rect(left + k * each, y, each - 1, CELL - 1, shade))
            if words is not None:
                parts.append(_text(left + (k + 0.5) * each, y + 16, words[q][k], "middle"))
    for k, name in enumerate(columns):
        place = f"translate({left + (k + 0.5) * each + 4:.1f},{top - 6:.1f}) rotate(-50)"
        parts.append(f'<text transform="{place}">{escape(_short(name))}</text>')
    return _picture(parts, left + len(columns) * each + 50, top + len(rows) * CELL, title)


def _all_heads(weights: Float32Array) -> Picture:
    layers, heads, size, _ = weights.shape
    require_that(
        int((weights >= FAINT).sum()) <= MAX_CELLS,
        "There are too many cells to draw: choose layer= (and head=).",
    )
    cell = max(2, SMALL // size)
    side = size * cell + 8
    parts = [_text(30 + h * side + side / 2, 12, str(h), "middle") for h in range(heads)]
    for layer in range(layers):
        y = 20 + layer * side
        parts.append(_text(20, y + side / 2, str(layer), "end"))
        for head in range(heads):
            x = 30 + head * side
            parts.append(_rect(x, y, side - 8, side - 8, FAINT))
            parts += _cells(weights[layer, head], x, y, cell)
    return _picture(parts, 30 + heads * side, 20 + layers * side, "attention of every head")


def _cells(weights: Float32Array, x: float, y: float, size: float) -> list[str]:
    """A square for each weight that is not faint."""
    return [
        _rect(x + k * size, y + q * size, size, size, float(weights[q, k]))
        for q, k in np.argwhere(weights >= FAINT).tolist()
    ]


def _picture(parts: Sequence[str], width: float, height: float, title: str) -> Picture:
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" fill="currentColor" '
        f'font-family="system-ui, sans-serif" font-size="13"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _rect(x: float, y: float, width: float, height: float, weight: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        f'fill="{ACCENT}" fill-opacity="{min(1.0, weight):.2f}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(_short(text))}</text>"
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"


def _width(text: str) -> float:
    return sum(LETTER * (2 if letter > "⺀" else 1) for letter in _short(text))
