"""In-context evaluation of a task: reads rows, draws examples, builds prompts, grades."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from malmoi.errors import require_known, require_that
from malmoi.evaluation.examples import (
    files_in,
    generate_examples,
    label_names,
    load_examples,
    require_labels,
)
from malmoi.evaluation.in_context.graders import EvaluationSession, Graded, Question, scorings
from malmoi.evaluation.kinds import kind_of, task_prompt
from malmoi.evaluation.prompts import TaskPrompt, templated
from malmoi.evaluation.task import Example, Overlaps, Task, contamination_report, metric_names
from malmoi.inference import Model
from malmoi.inference.prompt import encode_prompts
from malmoi.messages import msg, plural
from malmoi.text.rows import RowSource

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


def parse_shots(given: int | str) -> list[int | None]:
    """4 → [4]; "0,1,max" → [0, 1, None]: as many examples as fit."""
    words = [word.strip() for word in str(given).split(",")]
    for word in words:
        known = word == "max" or word.isdigit()
        require_that(known, "The number of examples must be 0, 1, 2… or max, not {n!r}.", n=word)
    return [None if word == "max" else int(word) for word in words]


@dataclass(frozen=True)
class QuestionBuilder:
    """Turns a task's items into questions for one model."""

    task: Task
    model: Model
    pool: Sequence[Example]
    shots: int | None  # None: as many as fit
    seed: int = 0

    def build(self, item: Example, number: int) -> Question:
        """The item with its examples; an error if they do not fit."""
        return self.build_all([item], number)[0]

    def build_all(self, items: Sequence[Example], first: int = 0) -> list[Question]:
        """Builds questions for all items, numbered from `first`."""
        if self.shots is None:
            return [self._fullest(item, number) for number, item in enumerate(items, first)]
        shown = (self._shown(item, number) for number, item in enumerate(items, first))
        found: list[Question] = []
        while some := list(islice(shown, ITEMS_PER_COUNT)):
            found += self._fitted(some)
        return found

    def _shown(self, item: Example, number: int) -> Question:
        prompt = self.prompt(item)
        wanted = self.shots or 0
        some = list(islice(draw_examples(self.pool, item, self.seed, number), wanted))
        require_that(
            len(some) >= wanted,
            "{examples} requested, but there are only {n} to draw from: add --train rows.",
            examples=plural(wanted, "example"),
            n=len(some),
        )
        return self._with(prompt, item, some)

    def _fitted(self, questions: Sequence[Question]) -> list[Question]:
        context = self.model.config.context
        found = []
        for question, need in zip(questions, self._tokens(questions), strict=True):
            require_that(
                need <= context or not question.shots,
                "{examples} cannot be shown: {place} takes {need} tokens with them, and this "
                "model's context is {context}. Use fewer, or as many as fit: --shots max.",
                examples=plural(question.shots, "example"),
                place=question.example.place,
                need=need,
                context=context,
            )
            found.append(question if need <= context else self._cut(question, need - context))
        return found

    def prompt(self, item: Example) -> TaskPrompt:
        """The item's own prompt; raises an error if a choice has no tokens to score."""
        prompt = task_prompt(self.task, item)
        judged = (prompt.ending,) if prompt.partial else prompt.choices
        sentence = "{place}: choice {n} ({choice!r}) has no tokens, so it cannot be scored."
        for n, choice in enumerate(() if prompt.written else judged, start=1):
            scored = choice.strip() and self.model.tokenizer.ids([choice])[0]
            require_that(scored, sentence, place=item.place, n=n, choice=choice.strip())
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
        require_that(
            whole or not question.prompt.written,
            "{place} does not fit into the model's context of {n}: its answer alone fills it.",
            place=question.example.place,
            n=self.model.config.context,
        )
        first = offsets[surplus if whole else -1][0] if offsets else 0
        return replace(question, before=question.before[first:], cut=True, answer_cut=not whole)


READINGS = ("causal", "masked")


@dataclass(frozen=True)
class InContextConfig:
    """How a task is evaluated in context."""

    shots: int | str = 0  # 0, 1, K, max, or several: "0,1,4"
    train: RowSource | None = None  # rows to draw examples from
    seed: int = 0  # for the examples, generated rows and a limited selection
    limit: int | None = None  # maximum number of items
    score: str = "total"  # how the likelihoods of choices are compared
    template: str | None = None  # another prompt template
    reading: str | None = None  # for a model trained both ways: causal (if none) or masked
    skip_bad: bool = False


@dataclass(frozen=True)
class InContextResult:
    """A model's metrics on a task with a given number of examples."""

    task: str
    shots: int | None
    verdict: Graded
    questions: list[Question] = field(repr=False)
    session: EvaluationSession = field(repr=False)
    notes: tuple[str, ...] = ()
    contamination: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """{"accuracy": 0.61, "accuracy_error": 0.02, …, "shots": 4, "examples": 500}."""
        measured: dict[str, float] = {}
        for name, value in self.verdict.measures.items():
            measured |= {name: value.mean, f"{name}_error": value.standard_error}
        count = sum(question.shots for question in self.questions) / len(self.questions)
        return {
            **measured,
            "shots": count if self.shots is None else self.shots,
            "examples": len(self.questions),
            **({"truncated": cut} if (cut := sum(q.cut for q in self.questions)) else {}),
            **({"contamination": self.contamination} if self.contamination else {}),
        }

    def with_contamination(self, overlaps: Overlaps) -> "InContextResult":
        """Grades the clean and the dirty items again, each on their own."""

        def means(graded: Graded) -> dict[str, float]:
            return {name: value.mean for name, value in graded.measures.items()}

        def score(chosen: Sequence[int]) -> dict[str, float]:
            some = [self.questions[i] for i in chosen]
            return means(kind_of(self.session.task).grade(self.session, some))

        examples = [question.example for question in self.questions]
        report = contamination_report(examples, overlaps, means(self.verdict), score)
        return replace(self, contamination=report)


def evaluate_in_context(
    model: Model, task: Task, data: RowSource | None, asking: InContextConfig
) -> Iterator[InContextResult]:
    """Yields a result for each number of examples as it is computed."""
    wanted = parse_shots(asking.shots)
    model = _in_reading(model, asking.reading)
    require_known(
        asking.score, scorings(model), "There is no method {name!r} to compare choices.{hint}"
    )
    prompted = templated(task, asking.template)
    items, pool, notes = split_rows(prompted, data, asking)
    prompted = replace(prompted, metrics=metric_names(prompted))
    if kind_of(prompted).text_labels and not prompted.labels:
        prompted = replace(prompted, labels=label_names(prompted, [*items, *pool]))
    for shots in wanted:
        yield _result(
            EvaluationSession(prompted, model, asking.score),
            items,
            QuestionBuilder(prompted, model, pool, shots, asking.seed),
            notes,
        )


def _in_reading(model: Model, reading: str | None) -> Model:
    """The model in the reading that was asked for; refuses one that it was not trained for."""
    if reading is None:
        return model
    require_known(reading, READINGS, "There is no reading mode {name!r}.{hint}")
    if not model.network.trunk.is_causal:
        require_that(
            reading == "masked", "This model does not read left to right: leave `reading` out."
        )
        return model
    if reading == "masked":
        model.network.masked()  # refuses a model that reads left to right only
    return model.masked if reading == "masked" else model


def _result(
    exam: EvaluationSession, items: Sequence[Example], asker: QuestionBuilder, notes: Sequence[str]
) -> InContextResult:
    task = asker.task
    shots = asker.shots
    kind = kind_of(task)
    if kind.only_read:
        require_that(
            shots == 0,
            "The task {task} reads whole texts and takes no examples: omit --shots.",
            task=task.name,
        )
        questions = [Question(item.text, asker.prompt(item), item) for item in items]
    else:
        questions = asker.build_all(items)
    graded = kind.grade(exam, questions)
    notes = (*notes, *_truncated(questions), *graded.notes)
    return InContextResult(task.name, shots, graded, questions, exam, notes)


def _truncated(questions: Sequence[Question]) -> Iterator[str]:
    items = len(questions)
    if n := sum(question.cut for question in questions):
        yield msg("{n:,} of {items:,} items were truncated at the beginning.", n=n, items=items)
    if n := sum(question.answer_cut for question in questions):
        yield msg(
            "{n:,} of {items:,} items have an answer that is longer than the context: only its end "
            "is scored.",
            n=n,
            items=items,
        )


def split_rows(
    task: Task, data: RowSource | None, asking: InContextConfig
) -> tuple[Sequence[Example], Sequence[Example], list[str]]:
    """The items to evaluate, the examples that may be shown, and notes about them."""
    train, dev = _files(task, data)
    found = (
        generate_examples(task, asking.seed)
        if dev is None
        else load_examples(task, dev, skip_bad=asking.skip_bad)
    )
    if not kind_of(task).only_read:
        require_labels(found.rows)
    source = train if asking.train is None else asking.train
    pool = found if source is None else load_examples(task, source, skip_bad=asking.skip_bad)
    notes = list(found.notes)
    if source is None and any(shots != 0 for shots in parse_shots(asking.shots)):
        notes.append(msg("Examples are drawn from the other rows: there is no file --train."))
    return limited_rows(found.rows, asking.limit, asking.seed), pool.rows, notes


def _files(task: Task, data: RowSource | None) -> tuple[Path | None, RowSource | None]:
    """The training file, if a folder has one, and the files to evaluate."""
    if not isinstance(data, str | Path) or not Path(data).is_dir():
        return None, data
    train, dev = files_in(task, data)
    return train, dev or train


def limited_rows(rows: Sequence[Example], limit: int | None, seed: int) -> Sequence[Example]:
    """A random sample up to the limit: files are often sorted by label."""
    if limit is None or limit >= len(rows):
        return rows
    require_that(limit >= 1, "limit must be 1 or more, not {limit}.", limit=limit)
    return [rows[i] for i in sorted(Random(f"limit:{seed}").sample(range(len(rows)), limit))]
