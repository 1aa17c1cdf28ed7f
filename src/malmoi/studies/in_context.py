"""GPT-3 figure 1.2: accuracy by the number of examples in context, for models of several sizes.

Small GPTs are pre-trained on text and on documents of hidden rules, then asked about words that no
document contained, after 0, 1, 2 … examples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

from malmoi.errors import MalmoiError
from malmoi.evaluation.in_context.run import InContextConfig, evaluate_in_context
from malmoi.evaluation.tasks import Example, Task
from malmoi.inference import Model, load
from malmoi.messages import plural
from malmoi.model import preset
from malmoi.report.chart import Line, chart, short_number, standalone_svg
from malmoi.studies.hidden_rules import (
    HIDDEN_RULES,
    UNSEEN_RULES,
    HiddenRule,
    RuleItems,
    halves,
    write_rule_documents,
)
from malmoi.studies.report import StudyResults
from malmoi.studies.scale import RARELY
from malmoi.studies.study import Cell, JudgedModel, StudyPlan, Words
from malmoi.system.files import write_text
from malmoi.text.documents import read_documents
from malmoi.text.rows import DataRow, any_rows
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig
from malmoi.training.recipes import fast_gpt

CONTEXT_CHARACTERS = 512  # sixteen examples and a question
CHARACTERS_PER_DOCUMENT = 350  # about
TEXT_SHARE = 0.1  # natural text in addition to the documents of hidden rules
ROWS_PER_TASK = 64  # questions of a task, and the pool of their examples
MAX_ANSWER_CHARACTERS = 16  # a space, seven letters doubled, the end of the line

GAIN = "gain from examples"
INSTRUCTED = "with the instruction"
UNSEEN = "rules in no document"


@dataclass(frozen=True)
class GptSize:
    """Width, depth and learning rate, which falls as models grow (GPT-3 table 2.1)."""

    depth: int
    width: int
    heads: int
    lr: float
    muon_lr: float


@dataclass(frozen=True)
class InContextScale:
    """The models, their text and the questions at one scale."""

    sizes: Mapping[str, GptSize]  # in order
    documents: int
    batch: int
    steps: int
    draws: int = 3  # parameters asked about per rule
    questions: int = 32  # per parameter
    shots: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    rules: tuple[str, ...] = tuple(rule.name for rule in HIDDEN_RULES)


SIZES = {
    "small": GptSize(2, 64, 2, 5e-3, 0.03),
    "medium": GptSize(4, 192, 6, 3e-3, 0.025),
    "large": GptSize(8, 512, 8, 2e-3, 0.02),
}
# fmt: off
SCALES = {
    # a smoke test: its numbers are meaningless
    "tiny": InContextScale(
        {"small": GptSize(1, 16, 2, 5e-3, 0.03), "medium": GptSize(1, 32, 2, 3e-3, 0.025)},
        documents=60, batch=2, steps=2, draws=1, questions=3, shots=(0, 2),
        rules=("reverse", "ending"),
    ),
    "cpu": InContextScale(
        {"small": GptSize(1, 32, 2, 5e-3, 0.03), "medium": GptSize(2, 64, 2, 5e-3, 0.03)},
        documents=6000, batch=8, steps=300, draws=2, questions=16, shots=(0, 1, 4, 8),
        rules=("reverse", "ending", "letter", "double"),
    ),
    "gpu-minutes": InContextScale(SIZES, documents=150_000, batch=64, steps=2400),
    "paper": InContextScale(SIZES, documents=600_000, batch=64, steps=10_000),
}
# fmt: on


# ------------------------------------------------------------------ questions


def rule_task(rule: HiddenRule, items: RuleItems, number: int, *, instructed: bool) -> Task:
    """A rule with the parameter drawn from this number, with or without the instruction."""
    return Task(
        f"{rule.name}/{number}",
        "writing",
        any_rows,
        _example,
        prompt="{text} =",
        separator="\n",
        metrics=("match",),
        max_answer_tokens=MAX_ANSWER_CHARACTERS,
        intro=f"{rule.instruction}\n" if instructed else "",
        generated=partial(_rows, rule, items),
    )


def _rows(rule: HiddenRule, items: RuleItems, rng: Random) -> Iterator[DataRow]:
    hidden = items.hidden(rule, rng)
    some = items.of(rule)
    for number, one in enumerate(rng.sample(some, min(ROWS_PER_TASK, len(some))), start=1):
        x, y = rule.pair(one, hidden, rng)
        yield DataRow({"x": x, "y": y}, f"{rule.name}:{number}")


def _example(row: DataRow) -> Example:
    return Example(row.text("x"), label=(row.text("y"),))


def asked_rules(names: Sequence[str]) -> list[HiddenRule]:
    """The rules of these names, and their compositions, which no document has."""
    known = [rule for rule in HIDDEN_RULES if rule.name in names]
    return [*known, *(rule for rule in UNSEEN_RULES if {*names}.issuperset(rule.name.split("+")))]


def accuracy_by_examples(
    judged: JudgedModel, items: RuleItems, scale: InContextScale
) -> dict[str, float]:
    """Percentage of exact answers by the number of examples, over all rules and for each."""
    model = load(judged.folder, device=judged.device)
    rules = {rule.name: rule for rule in asked_rules(scale.rules)}
    measure = partial(_accuracy, model, items=items, scale=scale, seed=judged.seed)
    plain = {name: measure(rule) for name, rule in rules.items()}
    told = {name: measure(rules[name], instructed=True) for name in scale.rules}
    unseen = {name: plain[name] for name in rules if name not in scale.rules}
    seen = {name: plain[name] for name in scale.rules}
    scores: dict[str, float] = {}
    for shots in scale.shots:
        column = plural(shots, "example")
        groups = {column: seen, f"{INSTRUCTED}: {column}": told, f"{UNSEEN}: {column}": unseen}
        for name, some in groups.items():
            if some:
                scores[name] = fmean(one[shots] for one in some.values())
        scores |= {f"after {column}: {name}": one[shots] for name, one in plain.items()}
    first, last = (scores[plural(shots, "example")] for shots in (scale.shots[0], scale.shots[-1]))
    return {**scores, GAIN: last - first}


def _accuracy(
    model: Model,
    rule: HiddenRule,
    *,
    items: RuleItems,
    scale: InContextScale,
    seed: int,
    instructed: bool = False,
) -> dict[int, float]:
    """shots → exact answers in percent, over the parameters drawn."""
    config = InContextConfig(",".join(map(str, scale.shots)), seed=seed, limit=scale.questions)
    tasks = (rule_task(rule, items, n, instructed=instructed) for n in range(scale.draws))
    results = [evaluate_in_context(model, task, None, config) for task in tasks]
    return {
        shots: 100 * fmean(result.verdict.measures["match"].mean for result in same)
        for shots, same in zip(scale.shots, zip(*results, strict=True), strict=True)
    }


# ------------------------------------------------------------------ models


def _size_recipe(name: str, size: GptSize, scale: InContextScale, seed: int) -> Recipe:
    """The recipe of one size: a fast GPT of characters."""
    shape = dict(width=size.width, depth=size.depth, heads=size.heads)
    model = preset("gpt2-small", vocab=256, context=CONTEXT_CHARACTERS, **shape)
    base = fast_gpt(Recipe(name=f"in-context-{name}", model=model))
    train = replace(
        base.train,
        lr=size.lr,
        muon_lr=size.muon_lr,
        seed=seed,
        batch=scale.batch,
        steps=scale.steps,
        valid_every=RARELY,
        save_every=RARELY,
    )
    tokenizer = TokenizerConfig(kind="char", vocab=256)
    return replace(base, tokenizer=tokenizer, data=DataConfig(valid=0.02), train=train)


def study_text(plan: StudyPlan, items: RuleItems, scale: InContextScale) -> tuple[str, ...]:
    """Writes documents of hidden rules and natural text, once per study folder."""
    folder = plan.data.held_out.parent
    documents, natural = folder / "rules.jsonl", folder / "natural.jsonl"
    if not documents.is_file():
        write_rule_documents(documents, items, scale.documents, scale.rules)
    if not natural.is_file():
        wanted = TEXT_SHARE / (1 - TEXT_SHARE) * CHARACTERS_PER_DOCUMENT * scale.documents
        _write_beginning(natural, plan.data.text, wanted)
    return str(documents), str(natural)


def _write_beginning(path: Path, sources: Sequence[str], characters: float) -> None:
    lines: list[str] = []
    for document in read_documents(sources):
        if characters <= 0:
            break
        text = document.text[: int(characters)]
        characters -= len(text)
        lines.append(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines))


def in_context_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    scale = SCALES[plan.scale.name]
    for_training, for_questions = halves(plan.data.text)
    if (count := len(for_questions.words)) <= max(scale.shots):
        raise MalmoiError(
            "The text leaves {count} words for questions, too few to show {shots} examples: "
            "give more text.",
            count=count,
            shots=max(scale.shots),
        )
    documents = replace(plan.data, text=study_text(plan, for_training, scale))
    on_documents = StudyPlan(plan.scale, documents)
    for name, size in scale.sizes.items():
        recipe = _size_recipe(name, size, scale, seed)
        options = dict(items=for_questions, scale=scale)
        yield on_documents.cell(name, recipe, accuracy_by_examples, **options)


# ------------------------------------------------------------------ the page


def _notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    gains = ", ".join(
        f"{row} {gain.mean:+.1f}" for row in results.rows if (gain := results.at(row, GAIN))
    )
    return [note.format(gains=gains) for note in notes]


def _figure(results: StudyResults) -> str:
    """A line per size over the number of examples; dashed with the instruction."""
    columns = [column for column in results.columns if column != GAIN]
    lines: dict[str, Line] = {}
    for row in results.rows:
        weights = results.facts(row)["parameters"]
        name = f"{row}, {short_number(float(f'{weights:.2g}'))}"
        told = _line(results, row, columns, f"{INSTRUCTED}: ")
        lines[f"{name}, {INSTRUCTED}"] = Line(told.points, beside=name, dashed=True)
        lines[name] = _line(results, row, columns)
    up = "exact answers in % (dashed: with the instruction)"
    return standalone_svg(chart(lines, "examples in context", up, size=(820, 380), even=True))


def _line(results: StudyResults, row: str, columns: Sequence[str], before: str = "") -> Line:
    found = {column: results.at(row, before + column) for column in columns}
    values = {float(column.split()[0]): value for column, value in found.items() if value}
    points = [(shots, value.mean) for shots, value in values.items()]
    return Line(points, [value.deviation for value in values.values()])


SHOWN = {("in-context", "figure"): _figure, ("in-context", "notes"): _notes}
