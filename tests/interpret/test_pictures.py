"""Notebook pictures are whole SVGs of the model's own numbers, and fetch nothing."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from malmoi import UsageError
from malmoi.checkpoint import Checkpoint
from malmoi.inference import Model
from malmoi.interpret.pictures import Picture
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2
from malmoi.tokenizer import train_tokenizer

TEXT = "the <b> state 학"


@pytest.fixture(scope="module")
def gpt() -> Model:
    words = train_tokenizer(["the state of the union"] * 4, kind="byte-bpe", vocab=280)
    shape = {"width": 16, "depth": 2, "heads": 2, "context": 32, "init_std": 0.3}
    network = initialise(Network(gpt2(vocab=words.vocab_size, **shape), {"lm": 0}), seed=0)
    return Model(Checkpoint(network, words))


def parsed(picture: Picture) -> ElementTree.Element:
    html = picture._repr_html_()
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "<script" not in html
    assert "<b>" not in html
    return ElementTree.fromstring(picture.svg)


def rectangles(picture: Picture) -> list[ElementTree.Element]:
    return parsed(picture).findall(".//{*}rect")


def test_every_kind_is_drawn_from_the_models_numbers(gpt: Model, tmp_path: Path) -> None:
    size = len(gpt.tokens(TEXT))
    assert len(rectangles(gpt.show("tokens", TEXT))) == size
    shades = [
        float(one.get("fill-opacity", "0"))
        for one in rectangles(gpt.show("attention", TEXT, layer=1, head=0))
    ]
    assert np.allclose(shades, np.maximum(gpt.attention(TEXT)[1, 0].ravel(), 0.03), atol=0.006)
    mean = gpt.show("attention", TEXT, layer=-1)
    assert len(rectangles(mean)) == size**2
    drawn = int((gpt.attention(TEXT) >= 0.03).sum())
    assert len(rectangles(gpt.show("attention", TEXT))) == drawn + 4  # a frame for each head
    assert len(rectangles(gpt.show("lens", TEXT))) == 3 * size
    wide = [float(one.get("width", "0")) for one in rectangles(gpt.show("next", TEXT, top=3))]
    best = gpt.run(TEXT, top=3).guesses[0]
    assert wide == pytest.approx([300 * one.probability for one in best], abs=0.06)
    assert "⟨ED⟩" in gpt.show("tokens", TEXT).svg  # a part of a syllable
    gpt.show("next", TEXT).save(tmp_path / "next.svg")
    ElementTree.parse(tmp_path / "next.svg")


def test_undrawable_pictures_are_refused(gpt: Model) -> None:
    with pytest.raises(UsageError, match="Did you mean 'lens'"):
        gpt.show("lense", TEXT)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no layer 5"):
        gpt.show("attention", TEXT, layer=5)
