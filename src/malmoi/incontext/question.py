"""An item as it is put to a model: an introduction, the examples that it is shown, and its own query; all must fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from malmoi.errors import UsageError
from malmoi.incontext.shots import Shots, drawn
from malmoi.infer import Model
from malmoi.infer.prompt import encode_prompt
from malmoi.tasks import Example, Prompt, Task, as_text

WRITTEN = ("answer", "write", "tagging")  # kinds whose answers are written, not chosen


def counted(number: int) -> str:
    return f"{number} example{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Question:
    """Everything before the answer, the item's own prompt, and how it came to be."""

    before: str
    prompt: Prompt
    example: Example
    shots: int = 0
    cut: bool = False  # whether its beginning was left out to fit


@dataclass(frozen=True)
class Asker:
    """Turns a task's items into questions for one model."""

    task: Task
    model: Model
    pool: Sequence[Example]
    shots: Shots
    seed: int = 0

    def ask(self, item: Example, number: int) -> Question:
        """The item with its examples; refused where they do not fit."""
        prompt = self.prompt(item)
        others = drawn(self.pool, item, self.seed, number)
        if self.shots.most:
            return self._fullest(prompt, item, others)
        some = list(islice(others, self.shots.count))
        if len(some) < self.shots.count:
            raise UsageError(
                f"{counted(self.shots.count)} asked for, but there are only {len(some)} to draw from: name a file "
                "of training rows with --train (train=…), or ask for fewer."
            )
        question = self._with(prompt, item, some)
        need, context = self._tokens(question), self.model.config.context
        if need > context and some:
            raise UsageError(
                f"{counted(len(some))} cannot be shown: {item.place} takes {need} tokens with them, and this model's "
                f"context is {context}. Ask for fewer, or for as many as fit: --shots max."
            )
        return question if need <= context else self._cut(question, need - context)

    def prompt(self, item: Example) -> Prompt:
        """The item's own prompt; a choice without a token has no likelihood."""
        prompt = as_text(self.task, item)
        judged = (prompt.ending,) if prompt.partial else prompt.choices if self.task.kind not in WRITTEN else ()
        for number, choice in enumerate(judged, start=1):
            if not choice.strip() or not self.model.tokenizer.ids([choice])[0]:
                raise UsageError(
                    f"{item.place}: choice {number} ({choice.strip()!r}) has no tokens, so there is nothing to score."
                )
        return prompt

    def _with(self, prompt: Prompt, item: Example, some: Sequence[Example]) -> Question:
        shown = "".join(as_text(self.task, one).shown + self.task.between for one in some)
        return Question(self.task.intro + shown + prompt.query, prompt, item, len(some))

    def _fullest(self, prompt: Prompt, item: Example, others: Iterator[Example]) -> Question:
        """One example more, until the next does not fit."""
        context = self.model.config.context
        best = self._with(prompt, item, [])
        if (need := self._tokens(best)) > context:
            return self._cut(best, need - context)
        some: list[Example] = []
        used = self._tokens(best)
        for one in others:
            used += self._length(as_text(self.task, one).shown + self.task.between)
            next_one = self._with(prompt, item, [*some, one])
            if used > context or self._tokens(next_one) > context:
                break
            some, best = [*some, one], next_one
        return best

    def _tokens(self, question: Question) -> int:
        """How much of the context a question takes with its longest answer."""
        if self.task.kind in WRITTEN:
            return self._length(question.before) + self.task.most
        endings = [choice + question.prompt.ending for choice in question.prompt.choices]
        return max(self._length(question.before + ending) for ending in endings or [""])

    def _length(self, text: str) -> int:
        read = encode_prompt if "lm" in self.model.network.heads else type(self.model.tokenizer).encode
        return len(read(self.model.tokenizer, text).tokens)

    def _cut(self, question: Question, surplus: int) -> Question:
        """Without the oldest tokens: what stands last, the question itself, counts most."""
        offsets = self.model.tokenizer.encode(question.before, specials=False).offsets
        if surplus >= len(offsets):
            raise UsageError(
                f"{question.example.place} does not fit into this model's context of {self.model.config.context}: "
                "its answer alone fills it."
            )
        return replace(question, before=question.before[offsets[surplus][0] :], cut=True)
