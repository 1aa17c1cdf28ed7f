"""Builds an item's prompt: introduction, examples and query, within the context.

Examples are drawn for each item with a seed, never the item itself (GPT-3 §2.4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from malmoi.errors import UsageError
from malmoi.evaluation.in_context.graders import Question
from malmoi.evaluation.kinds import task_prompt
from malmoi.evaluation.prompts import TaskPrompt
from malmoi.evaluation.task import Example, Task
from malmoi.inference import Model
from malmoi.inference.prompt import encode_prompts
from malmoi.messages import plural

ITEMS_PER_COUNT = 512  # items whose tokens are counted in one call


def lazy_permutation(size: int, rng: Random) -> Iterator[int]:
    """A lazy random permutation of 0 … size − 1: the pool may hold a million."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = rng.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def is_same_question(one: Example, other: Example) -> bool:
    """Whether two examples ask the same, wherever they come from."""
    return (one.text, one.pair, one.choices) == (other.text, other.pair, other.choices)


def draw_examples(
    pool: Sequence[Example], item: Example, seed: int, number: int
) -> Iterator[Example]:
    """Yields labelled examples for item `number`, without repetition and never the item itself."""
    places = lazy_permutation(len(pool), Random(f"{seed}:{number}"))
    return (
        pool[i] for i in places if pool[i].label is not None and not is_same_question(pool[i], item)
    )


@dataclass(frozen=True)
class Shots:
    """The number of examples: fixed, or as many as fit."""

    count: int
    as_many_as_fit: bool = False

    def __str__(self) -> str:
        return "max" if self.as_many_as_fit else str(self.count)


def parse_shots(given: int | str) -> list[Shots]:
    """4 → [4]; "0,1,max" → all three."""
    found = []
    for word in str(given).split(","):
        word = word.strip()
        if word == "max":
            found.append(Shots(0, as_many_as_fit=True))
        elif word.isdigit():
            found.append(Shots(int(word)))
        else:
            raise UsageError(
                "The number of examples must be 0, 1, 2… or max, not {word!r}.", word=word
            )
    return found


@dataclass(frozen=True)
class QuestionBuilder:
    """Turns a task's items into questions for one model."""

    task: Task
    model: Model
    pool: Sequence[Example]
    shots: Shots
    seed: int = 0

    def build(self, item: Example, number: int) -> Question:
        """The item with its examples; an error if they do not fit."""
        if self.shots.as_many_as_fit:
            return self._fullest(item, number)
        question = self._shown(item, number)
        return self._fitted(question, *self._tokens([question]))

    def build_all(self, items: Sequence[Example]) -> list[Question]:
        """Builds questions for all items, numbered from 0."""
        if self.shots.as_many_as_fit:
            return [self._fullest(item, number) for number, item in enumerate(items)]
        found: list[Question] = []
        for start in range(0, len(items), ITEMS_PER_COUNT):
            some = [
                self._shown(item, start + i)
                for i, item in enumerate(items[start : start + ITEMS_PER_COUNT])
            ]
            found += [
                self._fitted(question, need)
                for question, need in zip(some, self._tokens(some), strict=True)
            ]
        return found

    def _shown(self, item: Example, number: int) -> Question:
        prompt = self.prompt(item)
        some = list(islice(draw_examples(self.pool, item, self.seed, number), self.shots.count))
        if len(some) < self.shots.count:
            raise UsageError(
                "{examples} requested, but there are only {some} to draw from: give a file of "
                "training rows with --train (train=…), or request fewer.",
                examples=plural(self.shots.count, "example"),
                some=len(some),
            )
        return self._with(prompt, item, some)

    def _fitted(self, question: Question, need: int) -> Question:
        context = self.model.config.context
        place = question.example.place
        if need > context and question.shots:
            raise UsageError(
                "{examples} cannot be shown: {place} takes {need} tokens with them, and this "
                "model's context is {context}. Use fewer, or as many as fit: --shots max.",
                examples=plural(question.shots, "example"),
                place=place,
                need=need,
                context=context,
            )
        return question if need <= context else self._cut(question, need - context)

    def prompt(self, item: Example) -> TaskPrompt:
        """The item's own prompt; raises an error if a choice has no tokens to score."""
        prompt = task_prompt(self.task, item)
        judged = (prompt.ending,) if prompt.partial else prompt.choices
        if prompt.written:
            return prompt
        for number, choice in enumerate(judged, start=1):
            if not choice.strip() or not self.model.tokenizer.ids([choice])[0]:
                raise UsageError(
                    "{place}: choice {number} ({choice!r}) has no tokens, so it cannot be scored.",
                    place=item.place,
                    number=number,
                    choice=choice.strip(),
                )
        return prompt

    def _with(self, prompt: TaskPrompt, item: Example, some: Sequence[Example]) -> Question:
        shown = "".join(task_prompt(self.task, one).shown + self.task.separator for one in some)
        return Question(self.task.intro + shown + prompt.query, prompt, item, len(some))

    def _fullest(self, item: Example, number: int) -> Question:
        """Adds examples until the next one does not fit."""
        context = self.model.config.context
        prompt = self.prompt(item)
        best = self._with(prompt, item, [])
        (used,) = self._tokens([best])
        if used > context:
            return self._cut(best, used - context)
        some: list[Example] = []
        for one in draw_examples(self.pool, item, self.seed, number):
            used += sum(self._lengths([task_prompt(self.task, one).shown + self.task.separator]))
            next_one = self._with(prompt, item, [*some, one])
            if used > context or max(self._tokens([next_one])) > context:
                break
            some = [*some, one]
            best = next_one
        return best

    def _tokens(self, questions: Sequence[Question]) -> list[int]:
        """How many tokens each question takes with its longest answer."""
        if questions and questions[0].prompt.written:
            lengths = self._lengths([question.before for question in questions])
            return [length + self.task.max_answer_tokens for length in lengths]
        texts = [
            [one.before + choice + one.prompt.ending for choice in one.prompt.choices]
            or [one.before]
            for one in questions
        ]
        found = iter(self._lengths([text for some in texts for text in some]))
        return [max(islice(found, len(some))) for some in texts]

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        tokenizer = self.model.tokenizer
        if "lm" in self.model.network.heads:
            return [len(tokens) for tokens in encode_prompts(tokenizer, texts)]
        return [len(encoding.tokens) for encoding in tokenizer.encode_batch(texts)]

    def _cut(self, question: Question, surplus: int) -> Question:
        """Drops the oldest tokens, since the question itself comes last, and scoring the rest."""
        offsets = self.model.tokenizer.encode(question.before, specials=False).offsets
        whole = surplus < len(offsets)
        if not whole and question.prompt.written:
            raise UsageError(
                "{place} does not fit into this model's context of {context}: its answer "
                "alone fills it.",
                place=question.example.place,
                context=self.model.config.context,
            )
        first = offsets[surplus if whole else -1][0] if offsets else 0
        before = question.before[first:]
        return replace(question, before=before, cut=True, answer_cut=not whole)
