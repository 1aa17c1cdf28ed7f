"""The loaded models and settings: the page's first request."""

from collections.abc import Iterable

from pydantic import BaseModel

from malmoi import __version__
from malmoi.inference import Model
from malmoi.inference.predictors import LABEL_SET, ONE_LABEL
from malmoi.model import count_parameters
from malmoi.studio.tokens import covers
from malmoi.tokenizer import Tokenizer
from malmoi.tracing.index import find_stores

SAMPLES = {"en": "The state of the union is strong", "ko": "어제 카페 갔었어 거기 사람 많더라"}


class ModelFacts(BaseModel):
    """A model's abilities and shape."""

    name: str
    can: list[str]
    width: int
    depth: int
    heads: int
    context: int
    vocab: int
    parameters: int
    causal: bool
    attention: list[str]
    tokenizer: str | None
    template: bool  # whether it has a chat template
    mask: str | None  # the mask token, if there is one
    next_sentence: bool  # whether it was trained to tell the next sentence
    labels: list[str]
    knows: list[str]  # languages of SAMPLES that its tokenizer covers, the best covered first
    head: str  # of its fine-tuning: classify, tag, span…; empty without one
    classifies: bool  # whether it classifies whole texts
    several: bool  # whether a text may have several labels
    trained: bool  # whether the text that it was trained on is in its folder


class Overview(BaseModel):
    version: str
    samples: dict[str, str]  # a sample sentence by language
    models: list[ModelFacts]
    runs: bool  # whether a folder of runs was given
    tasks: list[str]  # of the few-shot lab


def model_facts(name: str, model: Model) -> ModelFacts:
    c = model.config
    words = model.checkpoint.tokenizer
    mask = None if words is None else words.specials.mask
    return ModelFacts(
        name=name,
        can=list(model.abilities),
        width=c.width,
        depth=c.depth,
        heads=c.heads,
        context=c.context,
        vocab=c.vocab,
        parameters=count_parameters(model.network),
        causal=model.network.trunk.is_causal,
        attention=list(c.attention),
        tokenizer=None if words is None else words.kind,
        template=words is not None and bool(words.chat_template),
        mask=None if words is None or mask is None else words.token(mask),
        next_sentence="nsp" in model.network.heads,
        labels=list(model.labels),
        knows=[] if words is None else known_languages(words),
        head="" if model.task_head is None else model.task_head.head,
        classifies=model.task_head in (ONE_LABEL, LABEL_SET),
        several=model.task_head is LABEL_SET,
        trained=bool(find_stores(model.checkpoint.source)),
    )


def known_languages(words: Tokenizer) -> list[str]:
    """The languages whose sample the tokenizer covers, or the one of which it covers most."""
    found = {language: covers(words, text) for language, text in SAMPLES.items()}
    ordered = sorted(found, key=lambda language: (found[language].unknown, found[language].ratio))
    return [language for language in ordered if found[language].known] or ordered[:1]


def overview(models: Iterable[tuple[str, Model]], tasks: Iterable[str], *, runs: bool) -> Overview:
    return Overview(
        version=__version__,
        samples=SAMPLES,
        models=[model_facts(*one) for one in models],
        runs=runs,
        tasks=list(tasks),
    )
