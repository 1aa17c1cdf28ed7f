"""GPT-3 figure 1.2: accuracy by the number of examples in context, for models of several sizes.

Small GPTs are pre-trained on text and on documents of hidden rules, then asked about words that no
document contained, after 0, 1, 2 … examples. A rule turns one word into another; its parameter is
drawn for each document and never named, so that only the examples show it. Some words, numbers and
parameters are held out for questions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from statistics import fmean
from string import ascii_lowercase
from typing import Any, Literal

from malmoi.errors import ensure
from malmoi.evaluation.in_context.run import InContextConfig, evaluate_in_context
from malmoi.evaluation.tasks import Example, Task
from malmoi.evaluation.tasks.language_modelling import frequent_words, random_insertion
from malmoi.inference import Model
from malmoi.messages import plural
from malmoi.model import preset
from malmoi.report.chart import Line, chart, short_number, standalone_svg
from malmoi.studies.data import SETTINGS, write_rows
from malmoi.studies.report import StudyResults
from malmoi.studies.study import RARELY, Cell, JudgedModel, StudyPlan, Words
from malmoi.text.documents import read_documents
from malmoi.text.rows import DataRow, any_rows
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig
from malmoi.training.recipes import fast_gpt

VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprstvz"
LETTER_PLACES = (0, 1, 2, 3, -1, -2, -3)  # index of a letter, from the beginning or the end
# most words contain one of these, so a few examples show how it changes
FREQUENT = "aeinorst"
PROPERTIES: dict[str, Callable[[str], bool]] = {
    "begins with a vowel": lambda word: word[0] in VOWELS,
    "ends with a vowel": lambda word: word[-1] in VOWELS,
    "has more than five letters": lambda word: len(word) > 5,
    "begins with a to l": lambda word: word[0] < "m",
    **{f"has an {a}": partial(lambda letter, word: letter in word, a) for a in "aeios"},
}
# one word in this many is held out for questions; so are parameters of some rules
HELD_OUT_EVERY = 8
WORD_LETTERS = range(5, 8)  # letters per word: sixteen examples fit into 512 characters
NUMBER_RANGE = range(100, 900)
MIN_WORDS = 100  # fewer are too few for a study
EXAMPLES_PER_DOCUMENT = range(12, 25)
INSTRUCTION_SHARE = 0.5  # share of the documents that have an instruction


@dataclass(frozen=True)
class HiddenRule:
    """A rule that generates lines `x = y`."""

    name: str
    instruction: str  # names the rule, never the parameter
    change: Callable[[str, Any], str]  # (word, parameter) → the right side of =
    # draws a parameter; a rule without one need only be recognised
    draw: Callable[[Random], Any] = lambda rng: None
    items: Literal["words", "numbers"] = "words"
    held: bool = False  # whether questions use parameters that training never had

    def pair(self, word: str, hidden: Any, rng: Random) -> tuple[str, str]:
        """The two sides of =."""
        if self.name == "random-insertion":
            return random_insertion(word, rng), word
        return word, self.change(word, hidden)


# ------------------------------------------------------------------ changes and parameters


def caesar(word: str, by: int) -> str:
    """Shifts every letter: abc → bcd."""
    return "".join(ascii_lowercase[(ascii_lowercase.index(letter) + by) % 26] for letter in word)


def swap_ends(word: str) -> str:
    """Swaps the first and last letter: words → sordw."""
    return word[-1] + word[1:-1] + word[0]


def drop_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter not in VOWELS)


def double(word: str) -> str:
    return "".join(letter * 2 for letter in word)


def _two_letters(rng: Random) -> tuple[str, str]:
    first = rng.choice(FREQUENT)
    return first, rng.choice([other for other in ascii_lowercase if other != first])


def _ending(rng: Random) -> str:
    return rng.choice(ascii_lowercase) + rng.choice(ascii_lowercase)


def _made_up(rng: Random) -> str:
    return rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CONSONANTS)


def _groups(rng: Random) -> tuple[str, str, str]:
    """Draws a property, and made-up names for the words that have it and the others."""
    yes = _made_up(rng)
    no = next(name for name in iter(partial(_made_up, rng), None) if name != yes)
    return rng.choice(list(PROPERTIES)), yes, no


def group_name(word: str, hidden: tuple[str, str, str]) -> str:
    """Names a word's group: apple → the first name, if the property is beginning with a vowel."""
    name, yes, no = hidden
    return yes if PROPERTIES[name](word) else no


# ------------------------------------------------------------------ the rules

# fmt: off
HIDDEN_RULES = (
    HiddenRule("random-insertion", "Take the marks out:", lambda word, _: word),
    HiddenRule("reverse", "Write it backwards:", lambda word, _: word[::-1]),
    HiddenRule("double", "Double the letters:", lambda word, _: double(word)),
    HiddenRule("swap-ends", "Swap the ends:", lambda word, _: swap_ends(word)),
    HiddenRule("drop-vowels", "Drop the vowels:", lambda word, _: drop_vowels(word)),
    HiddenRule("sort", "Sort the letters:", lambda word, _: "".join(sorted(word))),
    HiddenRule("cycle", "Cycle the letters:", lambda word, by: word[by:] + word[:by],
               lambda rng: rng.randrange(1, 5)),
    HiddenRule("caesar", "Move on in the alphabet:", caesar, lambda rng: rng.randrange(1, 26)),
    HiddenRule("letter", "Pick a letter:", lambda word, at: word[at],
               lambda rng: rng.choice(LETTER_PLACES)),
    HiddenRule("ending", "Add an ending:", lambda word, end: word + end, _ending, held=True),
    HiddenRule("replace", "Replace a letter:", lambda word, two: word.replace(*two), _two_letters,
               held=True),
    # a permutation of the vowels: it takes several examples to see all five
    HiddenRule("vowels", "Change the vowels:",
               lambda word, others: word.translate(str.maketrans(VOWELS, others)),
               lambda rng: "".join(rng.sample(VOWELS, len(VOWELS))), held=True),
    HiddenRule("group", "Name the group:", group_name, _groups),
    HiddenRule("add", "Add a number:", lambda x, n: str(int(x) + n),
               lambda rng: rng.randrange(1, 100), "numbers", held=True),
)

UNSEEN_RULES = (  # compositions of two rules: never in training
    HiddenRule("reverse+double", "Write it backwards: Double the letters:",
               lambda word, _: double(word[::-1])),
    HiddenRule("swap-ends+drop-vowels", "Swap the ends: Drop the vowels:",
               lambda word, _: drop_vowels(swap_ends(word))),
    HiddenRule("reverse+ending", "Write it backwards: Add an ending:",
               lambda word, end: word[::-1] + end, _ending),
)
# fmt: on


# ------------------------------------------------------------------ words and documents


def held_out(value: Any) -> bool:
    """Whether an item is reserved for questions, by a hash, so the same in every process."""
    digest = blake2b(str(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HELD_OUT_EVERY == 0


@dataclass(frozen=True)
class RuleItems:
    """Words and numbers that rules are applied to: the half for training or for questions."""

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    held: bool

    def of(self, rule: HiddenRule) -> tuple[str, ...]:
        return self.numbers if rule.items == "numbers" else self.words

    def hidden(self, rule: HiddenRule, rng: Random) -> Any:
        """Draws a parameter of the rule; if the rule holds some out, one of this half."""
        while True:
            hidden = rule.draw(rng)
            if not rule.held or held_out(f"{rule.name}:{hidden}") == self.held:
                return hidden


def halves(sources: Sequence[str]) -> tuple[RuleItems, RuleItems]:
    """Frequent words of some texts, and numbers, split into training and question halves."""
    every = dict.fromkeys(word for source in sources for word in frequent_words(source))
    words = [word for word in every if word.isascii() and len(word) in WORD_LETTERS]
    ensure(
        len(words) >= MIN_WORDS,
        "There are only {n} words of {low} to {high} Latin letters in {sources}: give more text.",
        n=len(words), low=WORD_LETTERS[0], high=WORD_LETTERS[-1], sources=", ".join(sources),
    )  # fmt: skip
    numbers = [str(number) for number in NUMBER_RANGE]

    def half(*, held: bool) -> RuleItems:
        kept = [tuple(one for one in some if held_out(one) == held) for some in (words, numbers)]
        return RuleItems(kept[0], kept[1], held)

    return half(held=False), half(held=True)


def rule_document(rule: HiddenRule, items: RuleItems, rng: Random) -> str:
    """One rule with one parameter: perhaps an instruction, then examples, then a blank line."""
    hidden = items.hidden(rule, rng)
    chosen = rng.sample(items.of(rule), rng.choice(EXAMPLES_PER_DOCUMENT))
    pairs = [rule.pair(one, hidden, rng) for one in chosen]
    intro = [rule.instruction] if rng.random() < INSTRUCTION_SHARE else []
    return "\n".join([*intro, *(f"{x} = {y}" for x, y in pairs)]) + "\n\n"


def write_rule_documents(
    path: Path, items: RuleItems, count: int, rules: Sequence[str] = ()
) -> None:
    """Writes `count` documents of some rules [all] as JSON lines."""
    known = [rule for rule in HIDDEN_RULES if not rules or rule.name in rules]
    rng = Random(0)
    write_rows(path, ({"text": rule_document(rng.choice(known), items, rng)} for _ in range(count)))


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
    shots: Sequence[int] = (0, 1, 2, 4, 8, 16)
    rules: Sequence[str] = tuple(rule.name for rule in HIDDEN_RULES)


SCALES = {
    name: InContextScale(**one | {"sizes": {size: GptSize(*n) for size, n in one["sizes"].items()}})
    for name, one in SETTINGS["in-context"].items()
}


# ------------------------------------------------------------------ questions


def rule_task(rule: HiddenRule, items: RuleItems, number: int, *, instructed: bool) -> Task:
    """A rule with the parameter drawn from this number, with or without the instruction."""
    return Task(
        f"{rule.name}/{number}",
        "writing",
        any_rows,
        lambda row: Example(row.text("x"), label=(row.text("y"),)),
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


def asked_rules(names: Sequence[str]) -> list[HiddenRule]:
    """The rules of these names, and their compositions, which no document has."""
    known = [rule for rule in HIDDEN_RULES if rule.name in names]
    return [*known, *(rule for rule in UNSEEN_RULES if {*names}.issuperset(rule.name.split("+")))]


def accuracy_by_examples(
    judged: JudgedModel, items: RuleItems, scale: InContextScale
) -> dict[str, float]:
    """Percentage of exact answers by the number of examples, over all rules and for each."""
    model = judged.load()
    rules = {rule.name: rule for rule in asked_rules(scale.rules)}
    measure = partial(_accuracy, model, scale, items, judged.seed)
    plain = {name: measure(rule) for name, rule in rules.items()}
    told = {name: measure(rules[name], instructed=True) for name in scale.rules}
    unseen = {name: plain[name] for name in rules if name not in scale.rules}
    seen = {name: plain[name] for name in scale.rules}
    scores: dict[str, float] = {}
    for shots in scale.shots:
        column = plural(shots, "example")
        groups = {column: seen, f"{INSTRUCTED}: {column}": told, f"{UNSEEN}: {column}": unseen}
        scores |= {
            name: fmean(one[shots] for one in some.values())
            for name, some in groups.items()
            if some
        }
        scores |= {f"after {column}: {name}": one[shots] for name, one in plain.items()}
    first, last = (scores[plural(shots, "example")] for shots in (scale.shots[0], scale.shots[-1]))
    return {**scores, GAIN: last - first}


def _accuracy(
    model: Model,
    scale: InContextScale,
    items: RuleItems,
    seed: int,
    rule: HiddenRule,
    *,
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
    return replace(
        base,
        tokenizer=TokenizerConfig(kind="char", vocab=256),
        data=DataConfig(valid=0.02),
        train=replace(
            base.train,
            lr=size.lr,
            muon_lr=size.muon_lr,
            seed=seed,
            batch=scale.batch,
            steps=scale.steps,
            valid_every=RARELY,
            save_every=RARELY,
        ),
    )


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
    rows = []
    for document in read_documents(sources):
        if characters <= 0:
            break
        rows.append({"text": document.text[: int(characters)]})
        characters -= len(rows[-1]["text"])
    write_rows(path, rows)


def in_context_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    scale = SCALES[plan.scale.name]
    for_training, for_questions = halves(plan.data.text)
    n, shots = len(for_questions.words), max(scale.shots)
    ensure(
        n > shots,
        "The text leaves {n} words for questions, too few for {shots} examples: give more.",
        n=n,
        shots=shots,
    )
    documents = replace(plan.data, text=study_text(plan, for_training, scale))
    cell = partial(replace(plan, data=documents).cell, items=for_questions, scale=scale)
    for name, size in scale.sizes.items():
        yield cell(name, _size_recipe(name, size, scale, seed), accuracy_by_examples)


# ------------------------------------------------------------------ the page


def in_context_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    gains = ", ".join(
        f"{row} {gain.mean:+.1f}" for row in results.rows if (gain := results.at(row, GAIN))
    )
    return [note.format(gains=gains) for note in notes]


def in_context_figure(results: StudyResults) -> str:
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
