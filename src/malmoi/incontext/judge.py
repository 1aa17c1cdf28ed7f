"""From what a model says to measures with standard errors: one function for each kind of task."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from malmoi.errors import UsageError
from malmoi.incontext.exam import Exam, head_of
from malmoi.incontext.likelihood import SCORINGS, Judged, judged, likelihoods, parts_of
from malmoi.incontext.question import Question
from malmoi.infer import Model
from malmoi.infer.prompt import encode_text, opens, start
from malmoi.infer.score import windows
from malmoi.infer.stems import token_logprobs
from malmoi.metrics import Mean, mean, metric
from malmoi.tasks import Task
from malmoi.tasks.text import NO_ANSWER, tags_of

MEANS = frozenset(
    {"accuracy", "span_exact", "span_f1", "rouge_l", "match"}
)  # measures of a set that are means over its items
RESAMPLES = 200  # of the bootstrap, for measures that are not


@dataclass(frozen=True)
class Verdict:
    """The measures, each with its standard error, and what was said of each item."""

    measures: dict[str, Mean]
    said: list[Any]
    notes: list[str] = field(default_factory=list)


def measure(name: str, gold: Sequence[Any], said: Sequence[Any]) -> Mean:
    """A measure ± its standard error: s/√n of a mean over items, else by drawing the items again and again."""
    judge = metric(name)
    if name in MEANS:
        return mean([judge([g], [s]) for g, s in zip(gold, said, strict=True)])
    value, rng, size = judge(gold, said), Random(0), len(gold)
    draws = [[rng.randrange(size) for _ in range(size)] for _ in range(RESAMPLES)]
    spread = float(np.std([judge([gold[i] for i in some], [said[i] for i in some]) for some in draws], ddof=1))
    return Mean(value, spread, spread * math.sqrt(size))


# ------------------------------------------------------------------ chosen


def ways(model: Model) -> dict[str, bool]:
    """The ways a model's likelihoods are taken; for a BERT also with the whole answer hidden at once."""
    return {"": False} if head_of(model) == "lm" else {"": False, "cloze_": True}


def scorings(model: Model) -> list[str]:
    """Every way to compare choices that this model has."""
    return [way + name for way in ways(model) for name in SCORINGS]


def best(choices: Sequence[Judged], scoring: str) -> int:
    values = [SCORINGS[scoring](one) for one in choices]
    return max(range(len(values)), key=values.__getitem__)


def choose(exam: Exam, questions: Sequence[Question]) -> Verdict:
    """The likeliest of the choices, by every way of comparing them; the task's other measures by the one asked for."""
    gold = [question.prompt.gold for question in questions]
    measures: dict[str, Mean] = {}
    said: dict[str, list[int]] = {}
    for way, together in ways(exam.model).items():
        found = judged(exam, questions, together=together)
        for name in SCORINGS:
            said[way + name] = [best(choices, name) for choices in found]
            measures[f"accuracy_{way}{name}"] = measure("accuracy", gold, said[way + name])
    chosen = said[exam.scoring]
    headline = {"accuracy": measures[f"accuracy_{exam.scoring}"]} | _of_labels(exam.task, gold, chosen)
    return Verdict(headline | measures, chosen)


def _of_labels(task: Task, gold: Sequence[int | None], said: Sequence[int]) -> dict[str, Mean]:
    """The task's own measures, which need the labels' names."""
    if task.kind != "classification":
        return {}
    names = task.labels or tuple(task.answers)
    golds, labels = [names[g] for g in gold if g is not None], [names[s] for s in said]
    return {name: measure(name, golds, labels) for name in task.judged}


def estimate(exam: Exam, questions: Sequence[Question]) -> Verdict:
    """A number: the mean of those that may be said, each weighted by its likelihood."""
    values = np.array([float(value) for value in exam.task.answers])
    together, scoring = exam.scoring.startswith("cloze_"), exam.scoring.removeprefix("cloze_")
    said = []
    for choices in judged(exam, questions, together=together):
        logs = np.array([SCORINGS[scoring](one) for one in choices])
        chances = np.exp(logs - logs.max())
        said.append(float(chances @ values / chances.sum()))
    gold = [question.example.label for question in questions]
    return Verdict({name: measure(name, gold, said) for name in exam.task.judged}, said)


def complete(exam: Exam, questions: Sequence[Question]) -> Verdict:
    """The missing word: whether it is what the model would write, and how likely it was (GPT-2 §3.3)."""
    scores = likelihoods(exam, [part for question in questions for part in parts_of(question)])
    likely = mean([score.logprob for score in scores])
    perplexity = math.exp(-likely.mean)
    measures = {
        "accuracy": mean([float(score.greedy) for score in scores]),
        "perplexity": Mean(perplexity, perplexity * likely.error, perplexity * likely.deviation),  # d eˣ = eˣ dx
    }
    return Verdict(measures, [score.greedy for score in scores])


# ------------------------------------------------------------------ written


def write(exam: Exam, questions: Sequence[Question]) -> Verdict:
    """Answers written greedily up to the end of their line, judged by the task's measures."""
    task, model = exam.task, exam.model
    if head_of(model) != "lm":
        raise UsageError(f"The task {task.name} is answered by writing, which needs a language model (an lm head).")

    def go_on(prompts: Sequence[str]) -> list[str]:
        return list(model.generate(list(prompts), temperature=0, max_new_tokens=task.most, stop="\n"))

    texts = exam.in_steps("prompt", [question.before for question in questions], go_on)
    reading = READ.get(task.kind, _plain)
    said = [reading(text.strip(), question) for text, question in zip(texts, questions, strict=True)]
    gold = [_gold(task, question) for question in questions]
    endless = sum(len(ids) >= task.most for ids in model.tokenizer.ids(texts))
    notes = [f"{endless:,} of {len(texts):,} answers had not ended after {task.most} tokens and were cut there"]
    return Verdict({n: measure(n, gold, said) for n in task.judged}, said, notes if endless else [])


def _gold(task: Task, question: Question) -> Any:
    label = question.example.label
    return [text for text, _ in label] if task.kind == "answer" else list(label)


def _plain(text: str, question: Question) -> Any:
    return text


READ: dict[str, Callable[[str, Question], Any]] = {
    "answer": lambda text, question: "" if text == NO_ANSWER else text,
    "tagging": lambda text, question: list(tags_of(text, question.example.words)),
}


# ------------------------------------------------------------------ read


def read(exam: Exam, questions: Sequence[Question]) -> Verdict:
    """How likely whole texts are: per word as the file has them (a line's end is one too), and per byte."""
    if head_of(exam.model) != "lm":
        name = exam.task.name
        raise UsageError(f"The task {name} asks how likely a text is, which needs a language model (an lm head).")
    rows = np.array(exam.in_steps("text", questions, lambda some: [_totals(exam.model, one) for one in some]))
    measures = {
        "perplexity": _ratio(rows[:, 0], rows[:, 1], math.exp),
        "bits_per_byte": _ratio(rows[:, 0], rows[:, 2], lambda nats: nats / math.log(2)),
        "token_perplexity": _ratio(rows[:, 0], rows[:, 3], math.exp),
    }
    return Verdict(measures, rows[:, 0].tolist())


def _totals(model: Model, question: Question) -> tuple[float, int, int, int]:
    """A text's loss in nats, its words, bytes and tokens; every token is predicted, the first from an opening one."""
    text, cut = question.example.text, question.example.pair or question.example.text
    context = model.config.context
    tokens = encode_text(model.tokenizer, text).tokens
    tokens = tokens if opens(model.tokenizer) else [start(model.tokenizer), *tokens]
    found = token_logprobs(model.network, windows(tokens, context, context // 2 or 1))
    loss = -sum(logprob for logprobs, _ in found for logprob in logprobs)
    return loss, len(cut.split()) + cut.count("\n"), len(text.encode()), len(tokens) - 1


def _ratio(loss: Any, units: Any, as_measure: Callable[[float], float]) -> Mean:
    """A measure of Σ loss / Σ units; its error by drawing the texts again, none where there is only one."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(loss), size=len(loss)) for _ in range(RESAMPLES if len(loss) > 1 else 0)]
    spread = [as_measure(loss[some].sum() / units[some].sum()) for some in draws]
    error = float(np.std(spread, ddof=1)) if spread else 0.0
    return Mean(as_measure(float(loss.sum() / units.sum())), error, error * math.sqrt(len(loss)))


JUDGES: dict[str, Callable[[Exam, Sequence[Question]], Verdict]] = {
    "classification": choose,
    "choice": choose,
    "regression": estimate,
    "cloze": complete,
    "answer": write,
    "write": write,
    "tagging": write,
    "text": read,
}
