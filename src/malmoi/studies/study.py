"""A study: a paper's table or figure as cells, and what papers.toml says about it.

A new study is a function from a plan and a seed to cells, a name in `MODULES`, and an entry in
papers.toml: the paper, its numbers, its findings and the words of the page.
"""

import math
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from malmoi.config import ModelConfig
from malmoi.errors import require_known
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import Example, Task, metric_names, named_task
from malmoi.finetuning.finetune import run_finetuning
from malmoi.inference import Model, Prediction, load
from malmoi.metrics.texts import rouge_l
from malmoi.model import count_parameters, preset
from malmoi.studies.data import SETTINGS, StudyData, StudyTask
from malmoi.system.machine import pick_device
from malmoi.system.packages import read_toml
from malmoi.system.untrusted import read_object
from malmoi.text.rows import DataRow
from malmoi.text.sentences import split_sentences
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from malmoi.training.recipes import MODERN_GPT, named_recipe

WORTH_COMPILING = 3  # minutes of training
RARELY = 10**6  # steps between saves and validations of runs of seconds
# BERT's segments and pooler with the demo's blocks, which learn in few updates
MODERN_TRUNK: dict[str, Any] = MODERN_GPT | dict(
    norm="pre", norm_kind="layer", embed_norm=False, final_norm=True, init="normal", eps=1e-6
)

# what a study trains, by its objective and the recipe of its paper
TRAINED = {
    "bert": ("mlm+nsp", "bert-base"),
    "ltr": ("lm", "bert-base"),  # BERT read from left to right
    "gpt": ("lm", "gpt1"),
    "both": ("both", "gpt1"),
    "electra": ("electra", "electra-base"),
    "lstm": ("lm", "lstm-gpt1"),
    "elmo": ("bilm", "elmo"),
}
READERS = ("bert", "electra", "ltr")


@dataclass(frozen=True)
class Scale:
    """Sizes of models and budgets; `paper` uses the published recipes."""

    name: str
    seeds: int
    width: int = 0
    depth: int = 0
    heads: int = 0
    context: int = 0
    vocab: int = 0
    characters: int = 0  # of text; 0: all
    batch: int = 0
    steps: int = 0  # of pre-training
    minutes: float = 0.0  # of pre-training, where models are compared at equal time
    train_rows: int = 0  # of a task; 0: all
    dev_rows: int = 0
    tune_steps: int = 0  # of fine-tuning; 0: `finetune` chooses, as the paper's at `paper`
    tune_lr: float = 0.0

    @property
    def faithful(self) -> bool:
        return self.name == "paper"

    @property
    def long(self) -> bool:
        """Training of minutes, which is worth compiling."""
        return self.minutes >= WORTH_COMPILING

    def recipe(self, kind: str, seed: int, **settings: Any) -> Recipe:
        """A model of this scale, with settings by their paths: see `TRAINED`.

        At `paper` it is the paper's own (BERT-base, GPT-1…); at other scales all have the same
        layers, but for the LSTMs, which have as many weights.
        """
        base = self._faithful(kind) if self.faithful else self._small(kind)
        return base.override({"train.seed": seed, **settings})

    def _faithful(self, kind: str) -> Recipe:
        objective, recipe = TRAINED[kind]
        changes: dict[str, dict[str, Any]] = {
            "ltr": {"model.attention": ("causal",), "model.pool": "last", "objective": objective},
            "both": {"model.both_ways": True, "objective": objective},
        }
        return named_recipe(recipe).override(changes.get(kind, {}))

    def _model(self, kind: str) -> ModelConfig:
        shape: dict[str, Any] = dict(vocab=self.vocab, context=self.context, width=self.width)
        if kind == "lstm":  # two layers of 8·units² weights, as many as `depth` of 12·width²
            units = 2 * round(self.width * math.sqrt(0.75 * self.depth) / 2)
            return preset(kind, **(shape | dict(width=units, embed_width=self.width, dropout=0.0)))
        if kind == "elmo":  # two layers each way, of 9·units·each weights, units = 4·each
            each = 8 * round(self.width * math.sqrt(self.depth / 12) / 8)
            wide = dict(width=2 * each, embed_width=each, hidden=4 * each, dropout=0.0)
            return preset(kind, **(shape | wide))
        shape |= dict(depth=self.depth, heads=self.heads)
        model = preset("bert-tiny" if kind in READERS else "gpt2-small", **shape, **MODERN_TRUNK)
        if kind == "ltr":  # the first token attends only to itself
            model = replace(model, attention=("causal",), pool="last", pooler="none")
        return replace(model, both_ways=kind == "both")

    def _small(self, kind: str) -> Recipe:
        model = self._model(kind)
        train = self.training()
        if model.mixer != "attention":
            train = replace(train, optimizer="adamw", compile=False)
        if kind == "gpt":  # one study needs snapshots, and others share its model
            train = replace(train, snapshots=True)
        return Recipe(
            name=f"study-{kind}",
            model=model,
            objective=TRAINED[kind][0],
            tokenizer=TokenizerConfig(
                kind="wordpiece" if kind in READERS else "byte-bpe", vocab=self.vocab
            ),
            # packing would have to be compiled
            data=DataConfig(valid=0.02, packed=None if self.long else False),
            train=train,
        )

    def training(self) -> TrainConfig:
        """Muon and a linear decay over a number of steps, without saving midway."""
        return TrainConfig(
            steps=self.steps,
            batch=self.batch,
            optimizer="muon",
            lr=3e-3,
            betas=(0.9, 0.95),
            decay=0.0,
            clip=0.0,
            schedule="linear",
            warmup=0.0,
            warmup_steps=20,
            valid_every=RARELY,
            save_every=RARELY,
            keep=1,
            compile=None if self.long else False,
        )

    def tuning(self, seed: int) -> dict[str, Any]:
        """Options of `run_finetuning`: the paper's, or a number of updates at a higher rate."""
        if not self.tune_steps:
            return {"seed": seed, "max_minutes": 0.0}
        return {
            "seed": seed,
            "steps": self.tune_steps,
            "lr": self.tune_lr,
            "batch": 16 if self.name == "cpu" else 32,
            "length": self.context,
        }

    @property
    def bilstm(self) -> dict[str, Any]:
        """Options for a new BiLSTM on the last layer, all of it fine-tuned (BERT table 5)."""
        paper = {"lr": 5e-5, "batch": 32, "epochs": 3.0}
        own = paper if self.faithful else {"recurrent": max(16, self.width)}
        return {"features": "last", "tune_features": True, **own}

    def feature_tuning(self, seed: int, features: str = "last4") -> dict[str, Any]:
        """Options for a small model on frozen features (BERT §5.3)."""
        if not self.tune_steps:
            return {**self.tuning(seed), "features": features}
        return self.tuning(seed) | {
            "features": features,
            "recurrent": max(16, self.width),
            # a new BiLSTM learns more slowly than a pre-trained model, and its steps are cheap
            "lr": max(2e-3, 3 * self.tune_lr),
            "steps": 3 * self.tune_steps,
        }


SCALES = {
    name: Scale(
        name,
        one["seeds"],
        **one.get("model", {}),
        **one.get("training", {}),
        **one.get("tasks", {}),
    )
    for name, one in SETTINGS["scales"].items()
}


def named_scale(name: str) -> Scale:
    require_known(
        name,
        SCALES,
        "There is no scale {name!r}.{hint} Choose cpu, gpu-minutes, gpu-hour or paper.",
    )
    return SCALES[name]


# study → the module with its cells, and its own figure and notes if it has any
MODULES = {
    **dict.fromkeys(("bert-masking", "bert-objectives", "bert-size", "bert-features"), "tables"),
    **dict.fromkeys(("gpt1-transfer", "gpt1-zeroshot", "gpt1-ablation", "gpt2-zeroshot"), "tables"),
    "in-context": "in_context",
    **dict.fromkeys(("gpt3-scaling", "gpt3-contamination", "gpt3-sparse", "bert-vs-gpt"), "tables"),
    **{"korean": "korean", "compression": "compression"},
}


class Words(NamedTuple):
    """A text of a page in both languages."""

    en: str
    ko: str

    def format(self, **values: object) -> "Words":
        return Words(*(text.format(**values) for text in self))


@dataclass(frozen=True)
class JudgedModel:
    """Input of a measure: the folder of the pre-trained model, and a scratch folder."""

    folder: Path
    scratch: Path
    seed: int
    device: str | None = None

    def load(self) -> Model:
        return load(self.folder, device=self.device)

    def facts(self) -> dict[str, Any]:
        """Parameters, tokens, steps, seconds and valid_loss of the pre-training."""
        return dict(read_object(self.folder / "facts.json"))


Measure = Callable[..., dict[str, float]]


@dataclass(frozen=True)
class Cell:
    """One row of the table with one seed: a recipe, its training text, and a measure.

    The measure is `partial(function, **options)` of a function at the top of a module, called with
    a `JudgedModel`; it returns a number for each of its columns. Without a recipe nothing is
    pre-trained, and the model's `folder` is its scratch folder.
    """

    row: str
    seed: int
    measure: "partial[dict[str, float]]"
    recipe: Recipe | None = None
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyPlan:
    """Everything that the cells of a study depend on."""

    scale: Scale
    data: StudyData

    def cut(self, task: StudyTask) -> StudyTask:
        """The task with the rows that the scale uses."""
        return replace(task, train_rows=self.scale.train_rows, dev_rows=self.scale.dev_rows)

    def tasks(self, *roles: str) -> list[StudyTask]:
        """The first available task of each role, cut."""
        return [self.cut(task) for task in self.data.of(*roles)]

    def every_task(self, *roles: str) -> list[StudyTask]:
        """All tasks of these roles, cut."""
        return [self.cut(task) for task in self.data.tasks if task.role in roles]

    def cell(self, row: str, recipe: Recipe, measure: Measure, **options: Any) -> Cell:
        """A cell whose model is trained on the study's text."""
        return Cell(row, recipe.train.seed, partial(measure, **options), recipe, self.data.text)

    def each(
        self, row: str, recipe: Recipe, measure: Measure, tasks: Iterable[StudyTask], **options: Any
    ) -> list[Cell]:
        """A cell for each of the tasks."""
        return [self.cell(row, recipe, measure, task=task, **options) for task in tasks]

    def tuned(
        self, row: str, recipe: Recipe, tasks: Iterable[StudyTask], column: str = "", **options: Any
    ) -> Iterator[Cell]:
        """Cells whose model is fine-tuned, by the scale's settings and these options."""
        settings = self.scale.tuning(recipe.train.seed) | options
        for task in tasks:
            named = column.format(task.name)
            yield self.cell(row, recipe, fine_tuned, task=task, options=settings, column=named)


@dataclass(frozen=True)
class Study:
    """A paper's table or figure: its words and numbers, as papers.toml has them."""

    name: str
    paper: str
    about: Words
    caption: Words
    findings: Sequence[Mapping[str, Any]]
    notes: Sequence[Words] = ()
    theirs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # row → its numbers

    def cells(self, plan: StudyPlan, seeds: Iterable[int]) -> list[Cell]:
        return [cell for seed in seeds for cell in self.part("cells")(plan, seed)]

    def part(self, what: str) -> Any:
        """The study's own cells, figure or notes, such as `bert_size_cells`; None without."""
        module = import_module(f"malmoi.studies.{MODULES[self.name]}")
        return getattr(module, f"{self.name.replace('-', '_')}_{what}", None)


@cache
def _records() -> dict[str, Any]:
    return read_toml("malmoi.studies", "papers.toml")


def named_study(name: str) -> Study:
    require_known(name, MODULES, "There is no study {name!r}.{hint} `malmoi study` lists them.")
    record = _records()[name]
    words = {key: Words(*record[key]) for key in ("about", "caption")}
    notes = [Words(*note) for note in record.get("notes", ())]
    return Study(name, **(record | words | {"notes": notes}))


# ------------------------------------------------------------------ columns of the table

BITS_CHARACTERS = 200_000  # of held-out text that bits per byte are measured on
WRITTEN_TOKENS = 32
MOST_SENTENCES = 8  # of a text, from which a summary is picked


def _tuned(
    judged: JudgedModel, rows: Task, task: StudyTask, options: dict[str, Any]
) -> dict[str, Any]:
    """The metrics on the task's test rows of a model fine-tuned into the scratch folder."""
    assert task.train is not None, f"{task.name} has no rows to learn from"
    return run_finetuning(
        judged.folder, rows, task.train, judged.scratch, task.dev, device=judged.device, **options
    ).metrics


def fine_tuned(
    judged: JudgedModel, task: StudyTask, options: dict[str, Any], column: str = ""
) -> dict[str, float]:
    """The task's first metric on its test rows after fine-tuning, in percent."""
    rows = task.load()
    return {column or task.name: 100 * _tuned(judged, rows, task, options)[metric_names(rows)[0]]}


def picked_summaries(
    judged: JudgedModel, task: StudyTask, options: dict[str, Any]
) -> dict[str, float]:
    """ROUGE-L, in percent, of the picked sentence and of the text's first: any model can pick."""
    asked = task.load()
    picking = replace(asked, kind="choice", metrics=(), example=partial(_best_sentence, asked))
    _tuned(judged, picking, task, options)
    rows = list(asked.rows(task.dev))
    golds = [asked.example(row).label for row in rows]
    texts = [picking.example(row) for row in rows]
    picks = (
        replace(judged, folder=judged.scratch)
        .load()
        .predict([text.input for text in texts], Prediction)
    )
    return {
        f"{task.name}, a sentence picked": 100 * rouge_l(golds, [pick.label for pick in picks]),
        f"{task.name}: first sentence": 100 * rouge_l(golds, [text.choices[0] for text in texts]),
    }


def _best_sentence(asked: Task, row: DataRow) -> Example:
    """The text's first sentences, and which of them has the most in common with the summary."""
    example = asked.example(row)
    sentences = tuple(split_sentences(example.text)[:MOST_SENTENCES]) or (example.text,)
    scores = [rouge_l([example.label], [sentence]) for sentence in sentences]
    return Example(example.text, label=scores.index(max(scores)), choices=sentences)


def zero_shot(
    judged: JudgedModel, task: StudyTask, column: str = "", **asking: Any
) -> dict[str, float]:
    """The task's first metric without fine-tuning (minimal pairs, last words), in percent."""
    rows = task.load()
    facts = evaluate_model(judged.load(), rows, task.dev, **asking)
    return {column or task.name: 100 * facts[metric_names(rows)[0]]}


def minimal_pairs(judged: JudgedModel, task: StudyTask) -> dict[str, float]:
    """Accuracy on minimal pairs, and on each phenomenon."""
    facts = evaluate_model(judged.load(), task.load(), task.dev)
    scores = {name: 100 * facts[name] for name in facts if f"{name}_error" in facts}
    whole = {task.name: scores.pop("accuracy")}
    return whole | {f"{task.name}: {name}": score for name, score in scores.items()}


def held_out_bits(judged: JudgedModel, text: Path) -> dict[str, float]:
    """Bits per byte of held-out text, of which half of each window is context."""
    return {"bits per byte": judged.load().bits_per_byte(text.read_text("utf-8")[:BITS_CHARACTERS])}


def snapshot_scores(
    judged: JudgedModel, step: int, tasks: Sequence[StudyTask], text: Path
) -> dict[str, float]:
    """Bits per byte and task scores of the model after a step (0: the final model)."""
    folder = judged.folder / "snapshots" / f"{step:06d}" if step else judged.folder
    then = replace(judged, folder=folder)
    scores = held_out_bits(then, text)
    for task in tasks:
        scores |= zero_shot(then, task)
    return scores


def mlm_perplexity(judged: JudgedModel) -> dict[str, float]:
    """Perplexity of masked words in the validation text."""
    return {"perplexity": math.exp(judged.facts()["mlm_loss"])}


def text_perplexity(judged: JudgedModel, task: str, path: Path, column: str) -> dict[str, float]:
    """Perplexity per word, with the data set's markup removed as in GPT-2 §3.1."""
    return {column: evaluate_model(judged.load(), task, path)[metric_names(named_task(task))[0]]}


def millions(judged: JudgedModel) -> dict[str, float]:
    return {"millions of weights": judged.facts()["parameters"] / 1e6}


def clean_and_dirty(judged: JudgedModel, task: StudyTask, leaked: Path) -> dict[str, float]:
    """The task's first metric on all items, clean ones, and those that the leaked text has."""
    from malmoi.corpus.decontaminate import find_overlaps

    rows = task.load()
    overlaps = partial(find_overlaps, corpus=[str(leaked)])
    facts = evaluate_model(judged.load(), rows, task.dev, contamination=overlaps)
    scores = facts["contamination"]["scores"][metric_names(rows)[0]]
    return {part: 100 * scores[part] for part in ("all", "clean", "dirty") if part in scores}


def speed(judged: JudgedModel, text: Path, *, writes: bool) -> dict[str, float]:
    """Milliseconds to encode a few sentences and to generate a token; memory in use."""
    device = pick_device(judged.device)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0  # of cells that ran here earlier
    model = judged.load()
    words = " ".join(text.read_text("utf-8").split())
    each = model.config.context // 4 - 1  # in characters, each at most four tokens of bytes
    texts = [words[i * each : (i + 1) * each] for i in range(64)]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = {"reading ms": 1000 * _seconds(lambda: model.embed(texts)) / len(texts)}
    if writes:
        spent = _seconds(lambda: model.generate(texts[0], max_new_tokens=WRITTEN_TOKENS, seed=0))
        times["writing ms"] = 1000 * spent / WRITTEN_TOKENS
    weights = 4 * count_parameters(model.network)
    used = torch.cuda.max_memory_allocated(device) - before if cuda else weights
    return {**times, "memory MB": used / 1e6}


def _seconds(call: Callable[[], object]) -> float:
    """The fastest of three calls, because other processes may slow one down."""
    return min(timeit.repeat(call, number=1, repeat=3))
