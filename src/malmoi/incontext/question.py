"""An item as it is put to a model: an introduction, the examples that it is shown, and its own query; all must fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from malmoi.errors import UsageError
from malmoi.incontext.shots import Shots, drawn
from malmoi.infer import Model
from malmoi.infer.prompt import prompts_tokens
from malmoi.tasks import Example, Prompt, Task, as_text

AT_ONCE = 512  # items whose tokens are counted together
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
        if self.shots.most:
            return self._fullest(item, number)
        question = self._shown(item, number)
        return self._fitted(question, *self._tokens([question]))

    def ask_all(self, items: Sequence[Example]) -> list[Question]:
        """Every item, the first being number 0."""
        if self.shots.most:
            return [self._fullest(item, number) for number, item in enumerate(items)]
        found: list[Question] = []
        for start in range(0, len(items), AT_ONCE):
            some = [self._shown(item, start + i) for i, item in enumerate(items[start : start + AT_ONCE])]
            found += [self._fitted(question, need) for question, need in zip(some, self._tokens(some), strict=True)]
        return found

    def _shown(self, item: Example, number: int) -> Question:
        prompt = self.prompt(item)
        some = list(islice(drawn(self.pool, item, self.seed, number), self.shots.count))
        if len(some) < self.shots.count:
            raise UsageError(
                f"{counted(self.shots.count)} asked for, but there are only {len(some)} to draw from: name a file "
                "of training rows with --train (train=…), or ask for fewer."
            )
        return self._with(prompt, item, some)

    def _fitted(self, question: Question, need: int) -> Question:
        context, place = self.model.config.context, question.example.place
        if need > context and question.shots:
            raise UsageError(
                f"{counted(question.shots)} cannot be shown: {place} takes {need} tokens with them, and this model's "
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

    def _fullest(self, item: Example, number: int) -> Question:
        """One example more, until the next does not fit."""
        context, prompt = self.model.config.context, self.prompt(item)
        best = self._with(prompt, item, [])
        (used,) = self._tokens([best])
        if used > context:
            return self._cut(best, used - context)
        some: list[Example] = []
        for one in drawn(self.pool, item, self.seed, number):
            used += sum(self._lengths([as_text(self.task, one).shown + self.task.between]))
            next_one = self._with(prompt, item, [*some, one])
            if used > context or max(self._tokens([next_one])) > context:
                break
            some, best = [*some, one], next_one
        return best

    def _tokens(self, questions: Sequence[Question]) -> list[int]:
        """How much of the context each question takes with its longest answer."""
        if self.task.kind in WRITTEN:
            return [length + self.task.most for length in self._lengths([question.before for question in questions])]
        endings = [[choice + one.prompt.ending for choice in one.prompt.choices] or [""] for one in questions]
        texts = [[one.before + end for end in some] for one, some in zip(questions, endings, strict=True)]
        lengths = iter(self._lengths([text for some in texts for text in some]))
        return [max(islice(lengths, len(some))) for some in texts]

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        tokenizer = self.model.tokenizer
        if "lm" in self.model.network.heads:
            return [len(tokens) for tokens in prompts_tokens(tokenizer, texts)]
        return [len(encoding.tokens) for encoding in tokenizer.encode_batch(texts)]

    def _cut(self, question: Question, surplus: int) -> Question:
        """Without the oldest tokens: what stands last, the question itself, counts most."""
        offsets = self.model.tokenizer.encode(question.before, specials=False).offsets
        if surplus >= len(offsets):
            raise UsageError(
                f"{question.example.place} does not fit into this model's context of {self.model.config.context}: "
                "its answer alone fills it."
            )
        return replace(question, before=question.before[offsets[surplus][0] :], cut=True)
