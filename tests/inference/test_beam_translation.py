"""Translation: beams against every possible text, greedy against its definition, attention."""

from itertools import product

import pytest
import torch

from malmoi.inference.translation import Translator
from malmoi.model import Network, initialise
from malmoi.model.families import transformer

VOCAB, END, START, LIMIT = 4, 0, 3, 3


def translator(seed: int) -> Translator:
    config = transformer(
        vocab=VOCAB, context=LIMIT + 1, width=8, heads=2, depth=1, encoder_depth=1, hidden=16
    )
    network = initialise(Network(config, {"lm": 0}), seed=seed).eval()
    torch.manual_seed(seed)
    for parameter in network.parameters():  # far from uniform, so that choices differ
        torch.nn.init.normal_(parameter, std=0.7)
    return Translator(network, START, END, 0)


@torch.no_grad()
def logprob(one: Translator, source: list[int], text: tuple[int, ...]) -> float:
    tokens = torch.tensor([[START, *text[:-1]]])
    scores = one.network(tokens, source=torch.tensor([source]))["lm"][0].log_softmax(-1)
    return float(scores.gather(1, torch.tensor(text)[:, None]).sum())


SOURCES = [[1, 2, END], [2, END], [1, 1, 2, END]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_wide_beams_find_the_best_of_all_texts(seed: int, alpha: float) -> None:
    one = translator(seed)
    others = [token for token in range(VOCAB) if token != END]
    texts = [(*some, END) for length in range(LIMIT) for some in product(others, repeat=length)]

    def score(source: list[int], text: tuple[int, ...]) -> float:
        return logprob(one, source, text) / ((5 + len(text)) / 6) ** alpha

    found = one.translate(SOURCES, beams=VOCAB**LIMIT, alpha=alpha)
    for source, text in zip(SOURCES, found, strict=True):
        best = max(texts, key=lambda text: score(source, text))
        assert (*text, END) == best


def test_greedy_takes_the_likeliest_token_and_rows_do_not_depend_on_one_another() -> None:
    one = translator(1)
    together = one.translate(SOURCES, beams=1)
    assert together == [one.translate([source], beams=1)[0] for source in SOURCES]
    for source, text in zip(SOURCES, together, strict=True):
        written = [START]
        while len(written) <= LIMIT:
            scores = one.network(torch.tensor([written]), source=torch.tensor([source]))["lm"]
            token = int(scores[0, -1].argmax())
            if token == END:
                break
            written.append(token)
        assert written[1:] == text
