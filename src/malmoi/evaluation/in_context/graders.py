"""Graders: turn a model's answers into metrics with standard errors, one function per task kind."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from malmoi.errors import require_that, required
from malmoi.evaluation.prompts import TaskPrompt, answer_cue
from malmoi.evaluation.task import Example, Task
from malmoi.inference import Model, Score
from malmoi.inference.prompt import encode_text, has_opening_token, start_token
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores, sentence_logprobs
from malmoi.inference.score import score_windows, token_logprobs
from malmoi.messages import msg
from malmoi.metrics import METRICS, MeanWithError, mean_with_error
from malmoi.system.groups import grouped
from malmoi.system.progress import Progress, report_progress

RESAMPLES = 200  # bootstrap samples, for metrics that are no means over the items
PAIRS_PER_UPDATE = 8192  # large, so that sentences of equal length fill a pass
ROWS_PER_UPDATE = 512  # rows between progress updates
ExamRow = TypeVar("ExamRow")
RowResult = TypeVar("RowResult")


@dataclass(frozen=True)
class Question:
    """The full prompt, the item's own prompt, and how it was built."""

    before: str
    prompt: TaskPrompt
    example: Example
    shots: int = 0
    cut: bool = False  # whether its beginning was truncated to fit …
    answer_cut: bool = False  # … and even that of its longest answer


@dataclass(frozen=True)
class EvaluationSession:
    """A model, the task it is evaluated on, and how its choices are compared."""

    task: Task
    model: Model
    scoring: str

    def in_steps(
        self,
        doing: str,
        rows: Sequence[ExamRow],
        do: Callable[[Sequence[ExamRow]], list[RowResult]],
        chunk: int = ROWS_PER_UPDATE,
    ) -> list[RowResult]:
        """Processes rows in chunks, reporting progress between them."""
        found: list[RowResult] = []
        for start in range(0, len(rows), chunk):
            found += do(rows[start : start + chunk])
            report_progress(Progress(f"{self.task.name}: {doing}", len(found), len(rows), "rows"))
        return found


def language_head(model: Model) -> str:
    """The model's language head: lm for a GPT, mlm for a BERT."""
    return required(
        model.network.language_head or None,
        "This model has no lm or mlm head to answer prompts with. It can: {abilities}.",
        abilities=", ".join(model.abilities),
    )


@dataclass(frozen=True)
class Graded:
    """Metrics with standard errors, and the prediction for each item."""

    measures: dict[str, MeanWithError]
    predictions: list[Any]
    notes: list[str] = field(default_factory=list)


Grader = Callable[[EvaluationSession, Sequence[Question]], Graded]


def measure_with_error(name: str, gold: Sequence[Any], guesses: Sequence[Any]) -> MeanWithError:
    """A metric with its standard error: s/√n for a mean over items, else by bootstrap."""
    metric = METRICS.find(name)
    measure = metric.function
    if metric.is_mean:
        return mean_with_error([measure([g], [s]) for g, s in zip(gold, guesses, strict=True)])
    return _bootstrapped(
        lambda some: measure([gold[i] for i in some], [guesses[i] for i in some]), len(gold)
    )


def _bootstrapped(measure: Callable[[Any], float], size: int) -> MeanWithError:
    """A metric of so many items, given their numbers, with its error; 0 for a single item."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(size, size=size) for _ in range(RESAMPLES if size > 1 else 0)]
    error = float(np.std([measure(some) for some in draws], ddof=1)) if draws else 0.0
    return MeanWithError(measure(np.arange(size)), error, error * math.sqrt(size))


# ------------------------------------------------------------------ choices


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer's score after its question, its score alone, and its text."""

    score: Score
    alone: Score
    text: str


# GPT-3 §2.4, and lm-evaluation-harness's acc_norm (byte)
SCORINGS: dict[str, Callable[[ScoredAnswer], float]] = {
    "total": lambda one: one.score.logprob,
    "token": lambda one: one.score.logprob / len(one.score.tokens),
    "byte": lambda one: one.score.logprob / len(one.text.strip().encode()),
    "unconditional": lambda one: one.score.logprob - one.alone.logprob,
}


def answer_parts(question: Question) -> list[SplitText]:
    """Each choice as the part to score between what precedes and follows it."""
    before = question.before
    prompt = question.prompt
    if prompt.partial:
        return [SplitText(before + choice, prompt.ending) for choice in prompt.choices]
    return [SplitText(before, choice, prompt.ending) for choice in prompt.choices]


def part_likelihoods(
    exam: EvaluationSession, parts: Sequence[SplitText], *, together: bool = False
) -> list[Score]:
    """log p of every part's middle, given what precedes it (GPT) or surrounds it (BERT)."""
    model = exam.model

    def read_on(some: Sequence[SplitText]) -> list[Score]:
        return model.score([one.before for one in some], [one.middle for one in some], cut=True)

    fill_in = partial(pseudo_scores, model.network, model.tokenizer, together=together, cut=True)
    return exam.in_steps("answer", parts, read_on if language_head(model) == "lm" else fill_in)


def score_answers(
    exam: EvaluationSession, questions: Sequence[Question], *, together: bool = False
) -> list[list[ScoredAnswer]]:
    """Scores every choice of every question, ordered so that shared prefixes are read once."""
    parts = [part for question in questions for part in answer_parts(question)]
    scores = part_likelihoods(exam, parts, together=together)
    middles = list(dict.fromkeys(part.middle for part in parts))
    alone = part_likelihoods(
        exam, [SplitText(answer_cue(exam.task), middle) for middle in middles], together=together
    )
    by_itself = dict(zip(middles, alone, strict=True))
    pairs = zip(parts, scores, strict=True)
    found = (ScoredAnswer(score, by_itself[part.middle], part.middle) for part, score in pairs)
    return [[next(found) for _ in question.prompt.choices] for question in questions]


def likelihood_modes(model: Model) -> dict[str, bool]:
    """The ways to compute a model's likelihoods; a BERT can also mask the whole answer at once."""
    return {"": False} if language_head(model) == "lm" else {"": False, "cloze_": True}


def scorings(model: Model) -> list[str]:
    """All ways this model can compare choices."""
    return [way + name for way in likelihood_modes(model) for name in SCORINGS]


def grade_choices(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """Picks the likeliest choice by every scoring; other metrics use the selected one."""
    gold = [question.prompt.gold for question in questions]
    measures: dict[str, MeanWithError] = {}
    picks: dict[str, list[int]] = {}
    for way, together in likelihood_modes(exam.model).items():
        found = score_answers(exam, questions, together=together)
        for name, scoring in SCORINGS.items():
            values = [list(map(scoring, choices)) for choices in found]
            chosen = picks[way + name] = [scores.index(max(scores)) for scores in values]
            measures[f"accuracy_{way}{name}"] = measure_with_error("accuracy", gold, chosen)
    accuracy = measures[f"accuracy_{exam.scoring}"]
    return Graded({"accuracy": accuracy, **measures}, picks[exam.scoring])


def grade_labels(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """Like `grade_choices`, with the task's own metrics, which need label names."""
    found = grade_choices(exam, questions)
    names = exam.task.labels or tuple(exam.task.answers)
    gold = [question.example.label for question in questions]
    picks = [names[choice] for choice in found.predictions]
    own = {name: measure_with_error(name, gold, picks) for name in exam.task.metrics}
    measures = {"accuracy": found.measures["accuracy"], **own, **found.measures}
    return Graded(measures, found.predictions)


def grade_numbers(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """Predicts a number: the mean of the possible values, weighted by likelihood."""
    values = np.array([float(value) for value in exam.task.answers])
    together = exam.scoring.startswith("cloze_")
    scoring = SCORINGS[exam.scoring.removeprefix("cloze_")]
    pred = []
    for choices in score_answers(exam, questions, together=together):
        logs = np.array([scoring(one) for one in choices])
        chances = np.exp(logs - logs.max())
        pred.append(float(chances @ values / chances.sum()))
    gold = [question.example.label for question in questions]
    return Graded({name: measure_with_error(name, gold, pred) for name in exam.task.metrics}, pred)


def grade_cloze(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """The missing word: whether greedy decoding generates it, and its likelihood (GPT-2 §3.3)."""
    parts = [part for question in questions for part in answer_parts(question)]
    scores = part_likelihoods(exam, parts)
    likely = mean_with_error([score.logprob for score in scores])
    perplexity = math.exp(-likely.mean)
    spread = (perplexity * likely.standard_error, perplexity * likely.deviation)  # of eˣ: eˣ dx
    greedy = [score.greedy for score in scores]
    right = mean_with_error([float(one) for one in greedy])
    return Graded({"accuracy": right, "perplexity": MeanWithError(perplexity, *spread)}, greedy)


# ------------------------------------------------------------------ generated texts


def written_grader(
    parse: Callable[[str, Task, Example], Any] = lambda text, task, example: text,
    gold: Callable[[Any], Any] = list,
) -> Grader:
    """Grades greedy answers up to the end of the line; `parse` reads a text, `gold` a label."""

    def grade(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
        task = exam.task
        texts = _written(exam, questions)
        answers = [
            parse(text.strip(), task, q.example) for text, q in zip(texts, questions, strict=True)
        ]
        golds = [gold(question.example.label) for question in questions]
        endless = sum(len(ids) >= task.max_answer_tokens for ids in exam.model.tokenizer.ids(texts))
        note = msg(
            "{endless:,} of {texts:,} answers had not ended after {most} tokens and were cut there",
            endless=endless,
            texts=len(texts),
            most=task.max_answer_tokens,
        )
        # the loss on the answer is measured where it is learnt
        names = [name for name in task.metrics if name in METRICS]
        measures = {name: measure_with_error(name, golds, answers) for name in names}
        return Graded(measures, answers, [note] if endless else [])

    return grade


def _written(exam: EvaluationSession, questions: Sequence[Question]) -> list[str]:
    task = exam.task
    require_that(
        language_head(exam.model) == "lm",
        "The task {task} is answered by generating text, which needs a language model.",
        task=task.name,
    )

    def go_on(prompts: Sequence[str]) -> list[str]:
        return exam.model.generate(
            list(prompts), temperature=0, max_new_tokens=task.max_answer_tokens, stop="\n"
        )

    return exam.in_steps("prompt", [question.before for question in questions], go_on)


# ------------------------------------------------------------------ likelihood


def grade_likelihood(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """Perplexity of whole texts per word (as in the file, counting line ends) and per byte."""
    rows = _all_totals(exam, questions)
    measures = {
        "perplexity": _ratio(rows[:, 0], rows[:, 1], math.exp),
        "bits_per_byte": _ratio(rows[:, 0], rows[:, 2], lambda nats: nats / math.log(2)),
        "token_perplexity": _ratio(rows[:, 0], rows[:, 3], math.exp),
    }
    return Graded(measures, rows[:, 0].tolist())


def grade_acceptability(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """Whether a sentence's mean log-probability per token lies above a threshold (GPT-1 §5).

    The threshold of each half of the items is the best one of the other half.
    """
    totals = _all_totals(exam, questions)
    means = -totals[:, 0] / totals[:, 3]
    bad, good = exam.task.labels
    gold = [question.example.label for question in questions]
    above = cross_thresholded(means, np.array([label == good for label in gold]))
    pred = [good if high else bad for high in above]
    return Graded({name: measure_with_error(name, gold, pred) for name in exam.task.metrics}, pred)


def cross_thresholded(scores: Any, gold: Any) -> Any:
    """Which scores lie above the threshold that best divides the other half of the items."""
    halves = np.random.default_rng(0).permutation(len(scores)) % 2  # files may be sorted by label
    above = np.zeros(len(scores), dtype=bool)
    for half in (0, 1):
        others = halves != half
        values = np.unique(scores[others])
        cuts = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
        tried = [(gold[others] == (scores[others] > cut)).sum() for cut in cuts]
        above[~others] = scores[~others] > cuts[int(np.argmax(tried))]
    return above


def _all_totals(exam: EvaluationSession, questions: Sequence[Question]) -> Any:
    require_that(
        language_head(exam.model) == "lm",
        "The task {task} scores the likelihood of text, which needs a language model.",
        task=exam.task.name,
    )
    return np.array(
        exam.in_steps("text", questions, lambda some: [_totals(exam.model, one) for one in some])
    )


def _totals(model: Model, question: Question) -> tuple[float, int, int, int]:
    """A text's loss in nats, and its words, bytes and tokens; the first token is predicted too."""
    text = question.example.text
    cut = question.example.pair or question.example.text
    context = model.config.context
    tokens = encode_text(model.tokenizer, text).tokens
    if not has_opening_token(model.tokenizer):
        tokens = [start_token(model.tokenizer), *tokens]
    found = token_logprobs(model.network, score_windows(tokens, context, context // 2 or 1))
    loss = -sum(logprob for logprobs, _ in found for logprob in logprobs)
    return loss, len(cut.split()) + cut.count("\n"), len(text.encode()), len(tokens) - 1


def _ratio(loss: Any, units: Any, as_measure: Callable[[float], float]) -> MeanWithError:
    """A metric of Σ loss / Σ units over texts."""
    return _bootstrapped(
        lambda some: as_measure(float(loss[some].sum() / units[some].sum())), len(loss)
    )


# ------------------------------------------------------------------ minimal pairs


def grade_pairs(exam: EvaluationSession, questions: Sequence[Question]) -> Graded:
    """How often the right sentence is likelier (Warstadt et al. 2020 §4); a tie counts as wrong."""
    language_head(exam.model)  # raises an error if the model has none
    picks = exam.in_steps("pairs", questions, partial(_likelier, exam), PAIRS_PER_UPDATE)
    right = grouped(
        (name, float(chosen == question.example.label))
        for question, chosen in zip(questions, picks, strict=True)
        for name in filter(None, ("accuracy", question.example.group))
    )
    return Graded({name: mean_with_error(values) for name, values in right.items()}, picks)


def _likelier(exam: EvaluationSession, questions: Sequence[Question]) -> list[int]:
    """The index of the more likely sentence of each pair; for ties, the wrong one."""
    texts = [text for question in questions for text in question.example.choices]
    scores = sentence_logprobs(exam.model.network, exam.model.tokenizer, texts)
    return [
        int(second > first or (second == first and question.example.label == 0))
        for question, first, second in zip(questions, scores[::2], scores[1::2], strict=True)
    ]
