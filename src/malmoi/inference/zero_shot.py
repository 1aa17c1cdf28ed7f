"""Zero-shot prompts: classification, question answering, summaries, translation.

Prompts are in the language of the text: Korean if it is mostly Hangul, else English.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from malmoi.errors import require_that
from malmoi.inference.base import LoadedModel
from malmoi.inference.embed import sentence_vectors
from malmoi.inference.predict import (
    CONTENT_FREE,
    Prediction,
    content_free_bias,
    prediction,
    score_classes,
    word_logprobs,
)
from malmoi.inference.predictors import entailment_class
from malmoi.inference.prompt import truncate_text
from malmoi.tokenizer import Tokenizer

ZERO_SHOT_PROMPTS = {
    "en": {
        "classify": "{text}\nThis text is",
        "category": "{text}\nCategory:",
        "answer": "{context}\nQuestion: {question}\nAnswer:",
        "summarise": "{text}\nTL;DR:",  # GPT-2 §3.6
        "translate": "Translate to {to}:\n{examples}{text} =",  # GPT-2 §3.7
        "or": " or ",
        "describe": "This text is {label}.",
        "tag": "{text} {phrase} is a",  # the phrase comes from the text
        "outside": "thing",  # what a word without a tag is
    },
    "ko": {
        "classify": "{text}\n이 글의 성격:",
        "category": "{text}\n분류:",
        "answer": "{context}\n질문: {question}\n답:",
        "summarise": "{text}\n요약:",
        "translate": "{to}(으)로 번역:\n{examples}{text} =",
        "or": " 또는 ",
        "describe": "이 글의 성격: {label}",
        "tag": "{text} {phrase}의 종류:",
        "outside": "기타",
    },
}
Shown = Sequence[tuple[str, str]]  # (text, expected output) pairs shown in the prompt
Words = Mapping[str, str]  # of each label
LabelWords = Sequence[str] | Words  # the labels, or their words by label
COSINE_SCALE = 20.0  # cosines are compared as by the loss that trains sentence encoders


def prompt_language(text: str) -> str:
    """Returns "ko" if at least half of the letters are Hangul, else "en"."""
    letters = [c for c in text if c.isalpha()]
    return "ko" if letters and 2 * sum("가" <= c <= "힣" for c in letters) >= len(letters) else "en"


def classify(
    model: LoadedModel, texts: Sequence[str], labels: LabelWords, prompt: str | None, shown: Shown
) -> list[Prediction]:
    """Classifies texts by the names of the labels, in the way that the model can."""
    words = label_words(labels)
    scores = label_scores(model, texts, words, prompt, shown)
    return [prediction(row, [*words]) for row in scores]


def label_scores(
    model: LoadedModel,
    texts: Sequence[str],
    words: Words,
    prompt: str | None = None,
    shown: Shown = (),
) -> Tensor:
    """How well the words of each label fit each text [texts, labels], each label by itself."""
    entailment = entailment_class(model.checkpoint)
    described = entailment is not None or model.checkpoint.sentence is not None
    require_that(
        not described or not shown, "Only a language model or a masked model takes examples."
    )
    if entailment is not None:
        return _entailed(model, texts, words, prompt, entailment)
    if described:
        return _nearest(model, texts, words, prompt)
    if "mlm" not in model.network.heads:
        model._require_head("lm", "classify")
    return _prompted(model, texts, words, prompt, shown)


def _entailed(
    model: LoadedModel, texts: Sequence[str], words: Words, prompt: str | None, place: int
) -> Tensor:
    """How much each text entails the labels' descriptions (Yin et al. 2019)."""
    pairs = [(text, one) for text in texts for one in descriptions(text, words, prompt)]
    scores = score_classes(model.predictor, pairs).log_softmax(-1)[:, place]
    return scores.double().view(len(texts), len(words))


def _nearest(model: LoadedModel, texts: Sequence[str], words: Words, prompt: str | None) -> Tensor:
    """The cosines of each text and the labels' descriptions."""
    names = [name for text in texts for name in descriptions(text, words, prompt)]
    vectors = sentence_vectors(model.predictor, [*texts, *names]).double()
    described = vectors[len(texts) :].view(len(texts), len(words), -1)
    return COSINE_SCALE * (described @ vectors[: len(texts), :, None]).squeeze(-1)


def _prompted(
    model: LoadedModel, texts: Sequence[str], words: Words, prompt: str | None, shown: Shown
) -> Tensor:
    """How likely the labels' words are after each text, by the mean of the prompts.

    What the words get after content-free texts in the same prompt is divided out: a language model
    prefers frequent words and those of the last example (Zhao et al. 2021).
    """
    said = [f" {word}" for word in words.values()]

    def read(forms: Iterable[str], filled: Iterable[str]) -> Tensor:
        """log P of each label's words after each text in its prompt [texts, labels]."""
        queries = []
        for form, text in zip(forms, filled, strict=False):
            before = (f"{_put(form, text=one)} {words.get(name, name)}\n\n" for one, name in shown)
            queries.append("".join(before) + _put(form, text=text))
        return word_logprobs(model.network, model.tokenizer, queries, said)

    bias: dict[str, Tensor] = {}
    found = []
    for text in texts:  # one at a time: its prompts share its tokens
        forms = label_prompts(text, list(words.values()), prompt)
        for form in forms:
            if form not in bias:
                bias[form] = content_free_bias(read(repeat(form), CONTENT_FREE))
        logs = read(forms, repeat(text)) + torch.stack([bias[f] for f in forms])
        found.append(logs.double().mean(0))
    return torch.stack(found)


def phrase_scores(
    model: LoadedModel, phrases: Sequence[tuple[str, str]], words: Mapping[str, str]
) -> Tensor:
    """How likely the words of each tag say what a phrase of a text is [phrases, tags]."""
    queries = [
        _put(ZERO_SHOT_PROMPTS[prompt_language(text)]["tag"], text=text, phrase=phrase)
        for text, phrase in phrases
    ]
    said = [f" {word}" for word in words.values()]
    return word_logprobs(model.network, model.tokenizer, queries, said).double()


def label_words(labels: LabelWords) -> dict[str, str]:
    """The words for each label: its name, what follows it in LABEL=WORDS, or a mapping's entry."""
    words = dict(labels if isinstance(labels, Mapping) else map(_with_words, labels))
    require_that(
        len(words) >= 2 and all(word.strip() for word in words.values()),
        "Give at least two different labels, each of them a non-empty text.",
    )
    return words


def _with_words(label: str) -> tuple[str, str]:
    name, given, words = label.partition("=")
    return (name.strip(), words.strip()) if given else (label, label)


def descriptions(text: str, words: Mapping[str, str], prompt: str | None) -> list[str]:
    """A sentence for each label in the language of the text; `prompt` contains {label}."""
    form = prompt or ZERO_SHOT_PROMPTS[prompt_language(text)]["describe"]
    return [_put(form, label=word) for word in words.values()]


def label_prompts(text: str, words: Sequence[str], prompt: str | None = None) -> list[str]:
    """Prompts with {text} to fill in: two, whose mean is better (docs/lab.md), or the given one."""
    prompts = ZERO_SHOT_PROMPTS[prompt_language(text)]
    listed = ", ".join(words[:-1]) + prompts["or"] + words[-1]
    forms = [prompts["classify"], prompts["category"]] if prompt is None else [prompt]
    return [form.replace("{labels}", listed) for form in forms]


def question_prompt(question: str, context: str) -> str:
    """The prompt for a question, with a context if one is given."""
    return _put(
        ZERO_SHOT_PROMPTS[prompt_language(question)]["answer"], question=question, context=context
    ).lstrip("\n")


def summary_prompt(text: str, tokenizer: Tokenizer, room: int) -> str:
    """The prompt for a summary; a text that is too long is truncated."""
    form = ZERO_SHOT_PROMPTS[prompt_language(text)]["summarise"]
    room -= len(tokenizer.encode(_put(form, text=""), specials=False).tokens) + 2
    require_that(room >= 1, "This model's context is too short to summarise anything.")
    return _put(form, text=truncate_text(tokenizer, text, room))


def translation_prompt(text: str, to: str, shown: Shown) -> str:
    """The prompt for a translation, after the examples."""
    examples = "".join(f"{one} = {other}\n" for one, other in shown)
    return _put(
        ZERO_SHOT_PROMPTS[prompt_language(to)]["translate"], text=text, to=to, examples=examples
    )


def first_sentences(text: str, count: int) -> str:
    """The first complete sentences of a generated text (GPT-2 §3.6 takes three)."""
    ends = [
        i + 1
        for i, c in enumerate(text)
        if c in ".!?。" and text[i + 1 : i + 2] in ("", " ", "\n", '"', "”")
    ]
    return (text[: ends[min(count, len(ends)) - 1]] if ends else text).strip()


def _put(form: str, **values: str) -> str:
    """Replaces only known names, so that other braces in a text are left alone."""
    for name, value in values.items():
        form = form.replace(f"{{{name}}}", value)
    return form
