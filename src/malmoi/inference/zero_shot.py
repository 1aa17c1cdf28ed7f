"""Zero-shot prompts: classification, question answering, summaries, translation.

Prompts are in the language of the text: Korean if it is mostly Hangul, else English.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from malmoi.errors import UsageError
from malmoi.inference.predict import Prediction
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores
from malmoi.inference.score import Score
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer

ZERO_SHOT_PROMPTS = {
    "en": {
        "classify": "{text}\nQuestion: Which is it: {labels}?\nAnswer:",
        "answer": "{context}\nQuestion: {question}\nAnswer:",
        "summarise": "{text}\nTL;DR:",  # GPT-2 §3.6
        "translate": "Translate to {to}:\n{examples}{text} =",  # GPT-2 §3.7
        "or": " or ",
    },
    "ko": {
        "classify": "{text}\n질문: 다음 중 무엇인가: {labels}?\n답:",
        "answer": "{context}\n질문: {question}\n답:",
        "summarise": "{text}\n요약:",
        "translate": "{to}(으)로 번역:\n{examples}{text} =",
        "or": " 또는 ",
    },
}
ShownExamples = Sequence[tuple[str, str]]  # (text, expected output) pairs shown in the prompt
ScoreParts = Callable[[Sequence[SplitText]], list[Score]]


def prompt_language(text: str) -> str:
    """Returns "ko" if at least half of the letters are Hangul, else "en"."""
    letters = [c for c in text if c.isalpha()]
    return "ko" if letters and 2 * sum("가" <= c <= "힣" for c in letters) >= len(letters) else "en"


def classify_zero_shot(
    read: ScoreParts,
    text: str,
    labels: Sequence[str] | Mapping[str, str],
    prompt: str | None,
    shown: ShownExamples,
) -> Prediction:
    """Returns the most likely label and all probabilities; a mapping gives each label's words."""
    words = dict(labels) if isinstance(labels, Mapping) else {label: label for label in labels}
    if len(words) < 2 or not all(word.strip() for word in words.values()):
        raise UsageError("Give at least two labels, each of them a non-empty text.")
    form = label_prompt(text, list(words.values()), prompt)
    examples = "".join(
        f"{_put(form, text=one)} {words.get(label, label)}\n\n" for one, label in shown
    )
    before = examples + _put(form, text=text)
    logs = [
        score.logprob for score in read([SplitText(before, f" {word}") for word in words.values()])
    ]
    top = max(logs)
    chances = [math.exp(log - top) for log in logs]
    scores = {label: chance / sum(chances) for label, chance in zip(words, chances, strict=True)}
    return Prediction(max(scores, key=scores.__getitem__), scores)


def label_prompt(text: str, words: Sequence[str], prompt: str | None = None) -> str:
    """The classification prompt in the language of the text, with {text} still to fill in."""
    said = ZERO_SHOT_PROMPTS[prompt_language(text)]
    listed = ", ".join(words[:-1]) + said["or"] + words[-1]
    return (prompt or said["classify"]).replace("{labels}", listed)


def question_prompt(asked: str, context: str) -> str:
    """The prompt for a question, with a context if one is given."""
    return _put(
        ZERO_SHOT_PROMPTS[prompt_language(asked)]["answer"], question=asked, context=context
    ).lstrip("\n")


def summary_prompt(text: str, tokenizer: Tokenizer, room: int) -> str:
    """The prompt for a summary; a text that is too long is truncated."""
    form = ZERO_SHOT_PROMPTS[prompt_language(text)]["summarise"]
    room -= len(tokenizer.encode(_put(form, text=""), specials=False).tokens) + 2
    if room < 1:
        raise UsageError("This model's context is too short to summarise anything.")
    offsets = tokenizer.encode(text, specials=False).offsets
    return _put(form, text=text if len(offsets) <= room else text[: offsets[room - 1][1]])


def translation_prompt(text: str, to: str, shown: ShownExamples) -> str:
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


class ZeroShot:
    """Zero-shot methods of `Model`, which provides score and generate."""

    network: Network
    tokenizer: Any
    score: Any
    generate: Any

    def classify(
        self,
        text: str,
        labels: Sequence[str] | Mapping[str, str],
        *,
        prompt: str | None = None,
        examples: ShownExamples = (),
    ) -> Prediction:
        """Classifies with a GPT's likelihoods or a BERT's masks, without training or a head.

        `prompt` has {text} and optionally {labels}; `examples` are (text, label) pairs shown first.
        """
        return classify_zero_shot(self._likelihoods, text, labels, prompt, examples)

    def answer(self, question: str, context: str = "", *, max_new_tokens: int = 32) -> str:
        """Answers a question, about a context if one is given."""
        return self._line(question_prompt(question, context), max_new_tokens)

    def summarise(self, text: str, *, sentences: int = 3, max_new_tokens: int = 100) -> str:
        """Summarises in at most this many sentences; a text that is too long is truncated."""
        prompt = summary_prompt(text, self.tokenizer, self.network.config.context - max_new_tokens)
        written = self.generate(prompt, temperature=0, max_new_tokens=max_new_tokens, stop="\n\n")
        return first_sentences(written, sentences)

    def _prompt_translation(
        self, text: str, to: str, examples: ShownExamples, max_new_tokens: int
    ) -> str:
        return self._line(translation_prompt(text, to, examples), max_new_tokens)

    def _line(self, prompt: str, most: int) -> str:
        return str(self.generate(prompt, temperature=0, max_new_tokens=most, stop="\n")).strip()

    def _likelihoods(self, parts: Sequence[SplitText]) -> list[Score]:
        if "mlm" in self.network.heads:
            return pseudo_scores(self.network, self.tokenizer, parts)
        return list(self.score([part.before for part in parts], [part.middle for part in parts]))
