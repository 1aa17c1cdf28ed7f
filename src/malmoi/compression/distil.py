"""Knowledge distillation (Hinton et al. 2015): a student imitates its teacher on rows or text."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.compression.options import DistilOptions
from malmoi.compression.prune import with_layers
from malmoi.compression.result import CompressionResult, open_whole
from malmoi.errors import require_that
from malmoi.evaluation.evaluate import check_task_fits
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.tasks import Task, named_task
from malmoi.finetuning.config import FinetuneConfig, finetune_config
from malmoi.finetuning.finetune import default_budget, run_all
from malmoi.finetuning.results import judge, judge_held_out
from malmoi.finetuning.task_data import FinetuneData, distillation_record, load_data
from malmoi.inference.predict import Predictor
from malmoi.messages import msg
from malmoi.model import Network, count_parameters
from malmoi.system.files import make_folder
from malmoi.system.run_folder import RunFolder
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.extend import add_frame_tokens, is_framed
from malmoi.training.data.encode import open_stores
from malmoi.training.device import choose_execution
from malmoi.training.feed import make_feeds
from malmoi.training.loss_module import LossModule, validate
from malmoi.training.losses import objective
from malmoi.training.losses.distil import Distillation
from malmoi.training.parallel import join_process_group
from malmoi.training.prepare import DISTIL
from malmoi.training.pretrain import discard_run, run_pretraining
from malmoi.training.recipe import DataConfig, Recipe, read_recipe

# DistilBERT's 5 · KL + 2 · MLM + 1 · cosine (Sanh et al. 2019, their code): the share of the
# teacher's scores, and of the hidden states against those
TEXT_SOFT = 5 / 7
COSINE_WEIGHT = 1 / 5
TASK_SOFT = 0.5
MAX_TEXT_TOKENS = 512  # tokens per text, unless the teacher's recipe sets them
TextFiles = str | Path | Sequence[str | Path]
TextObjective = Literal["mlm", "lm", "both"]  # without a task


@dataclass(frozen=True, kw_only=True)
class DistilConfig(DistilOptions):
    """The student, its loss, and where to train it."""

    task: str | Task | None = None
    dev: TextFiles | None = None
    device: str | None = None
    overwrite: bool = False  # discard the run in the folder and start over


@dataclass(frozen=True)
class Lesson:
    """A teacher, its student, and the output folder."""

    teacher: Checkpoint
    student: Checkpoint
    distillation: Distillation
    out: Path
    config: DistilConfig

    def result(self, trained: Checkpoint, *metrics: Mapping[str, float]) -> CompressionResult:
        before = (self.teacher.network, self.teacher.source or self.out)
        return CompressionResult.of(before, (trained.network, self.out), *metrics)


def distil_model(
    model: str | Path, out: str | Path, data: TextFiles, **options: Any
) -> CompressionResult:
    """Trains a smaller student: a given model, or some layers of the teacher.

    `data` is a task's rows, or text. Options are the fields of `DistilConfig`, and settings of
    `finetune` or of a recipe (which needs a budget: minutes=5).
    """
    known = DistilConfig.__dataclass_fields__
    config = DistilConfig(**{name: value for name, value in options.items() if name in known})
    changes = {name: value for name, value in options.items() if name not in known}
    out = Path(out)
    teacher = open_teacher(model, out)
    student = (
        student_of(teacher, config.layers)
        if config.student is None
        else _given(teacher, open_teacher(config.student, out), config.layers)
    )
    usual, cosine = (TEXT_SOFT, COSINE_WEIGHT) if config.task is None else (TASK_SOFT, 0.0)
    soft = usual if config.soft is None else config.soft
    distillation = Distillation(teacher.network, soft, config.temperature, cosine)
    files = data[0] if not isinstance(data, str | Path) and len(data) == 1 else data
    lesson = Lesson(teacher, student, distillation, out, config)
    if config.task is None:
        require_that(config.dev is None, "--dev is for a task's rows: give --task too.")
        return _of_text(lesson, files, changes)
    chosen = named_task(config.task) if isinstance(config.task, str) else config.task
    return _of_task(lesson, chosen, files, changes)


def open_teacher(source: str | Path, out: Path) -> Checkpoint:
    """Opens the teacher, which must be a whole model with trainable weights and a tokenizer."""
    require_that(
        Path(source).suffix != ".gguf",
        "{source} is a GGUF file, which cannot be trained: give the model it was made from.",
        source=source,
    )
    checkpoint = open_whole(source, out)
    require_that(
        checkpoint.network.features is None,
        "{source} is a small model on frozen layers: fine-tune the whole model and use that.",
        source=source,
    )
    _ = checkpoint.required_tokenizer
    checkpoint.network.float()
    return checkpoint


# ------------------------------------------------------------------ the student


def student_of(teacher: Checkpoint, layers: int | Sequence[int] | None = None) -> Checkpoint:
    """A copy of the teacher with only some of its layers, by default half."""
    network = deepcopy(with_layers(teacher.network, _chosen(teacher.network.config.depth, layers)))
    return replace(teacher, network=network, source=None, notes=())


def _chosen(depth: int, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """Layers by number, or evenly spaced: six of twelve are DistilBERT's 0, 2, 4, 7, 9 and 11."""
    if layers is None:
        layers = max(1, depth // 2)
    if isinstance(layers, int):
        require_that(
            1 <= layers <= depth,
            "A student of this teacher has 1 to {depth} layers, not {layers}.",
            depth=depth,
            layers=layers,
        )
        return tuple(round(i * (depth - 1) / max(1, layers - 1)) for i in range(layers))
    return tuple(layers)


def _given(teacher: Checkpoint, found: Checkpoint, layers: object) -> Checkpoint:
    """Loads a given student, whose vocabulary must be the teacher's."""
    require_that(
        layers is None,
        "Give either --layers or --student: a given student has its own number of layers.",
    )
    require_that(
        count_parameters(found.network) <= count_parameters(teacher.network),
        "The student {source} is larger than its teacher; swap the two.",
        source=found.source,
    )
    own = found.required_tokenizer
    wanted = teacher.required_tokenizer
    if is_framed(wanted) and not is_framed(own):  # a GPT that is not fine-tuned yet
        own = add_frame_tokens(own)
    require_that(
        own.fingerprint() == wanted.fingerprint(),
        "The student {source} has a different vocabulary from its teacher; they must share one.",
        source=found.source,
    )
    return replace(found, tokenizer=wanted)


# ------------------------------------------------------------------ a task


def _of_task(
    lesson: Lesson, task: Task, data: TextFiles, changes: Mapping[str, Any]
) -> CompressionResult:
    teacher = lesson.teacher
    reading = Predictor.of(teacher)
    check_task_fits(task, reading)
    kind = head_kind(task)
    require_that(
        reading.words is None and kind.head,
        "This teacher has no head for its task: label words and vectors cannot be distilled.",
    )
    device = join_process_group(lesson.config.device).device
    settings = default_budget(_settings(teacher, changes), changes, kind, device.type)
    settings = replace(settings, frozen_first=False)  # its teacher is the better start
    work = load_data(task, data, lesson.config.dev, settings, lesson.student, device)
    work = replace(work, teaching=lesson.distillation, labels=_labels(work, teacher))
    pairs = any(e.pair is not None or e.choices for e in work.train)
    require_that(
        not pairs or not teacher.network.config.segments or work.start.network.config.segments,
        "The teacher tells two texts apart by segments, which this student lacks: use another.",
    )
    teacher.network.to(work.device)
    with work.computing(settings):
        reading = replace(reading, encode=work.encode)
        before = judge(work, reading, judge_held_out(work, reading).chosen).metrics
    result = run_all(work, settings, lesson.out, overwrite=lesson.config.overwrite)
    return lesson.result(result.model.checkpoint, before, result.metrics)


def _settings(teacher: Checkpoint, changes: Mapping[str, Any]) -> FinetuneConfig:
    """Fine-tuning settings; rows are as long as the teacher's, unless another length is given."""
    settings = finetune_config({"length": teacher.extra.get("length"), **changes})
    require_that(
        not settings.features and not settings.words and settings.adapter.kind == "none",
        "Distillation trains the whole student: leave features, words and adapter out.",
    )
    require_that(
        settings.length <= teacher.network.config.context,
        "length={length} is more than the teacher's {context} tokens.",
        length=settings.length,
        context=teacher.network.config.context,
    )
    return settings


def _labels(work: FinetuneData, teacher: Checkpoint) -> tuple[str, ...]:
    """The teacher's labels in its order; the rows may use fewer of them, but no others."""
    others = [label for label in work.labels if label not in teacher.labels]
    require_that(
        not others,
        "The rows have labels that the teacher does not have: {others} (it has: {known}).",
        others=", ".join(others),
        known=", ".join(teacher.labels) or msg("none"),
    )
    return teacher.labels if work.labels else ()


# ------------------------------------------------------------------ text


def _of_text(lesson: Lesson, data: TextFiles, changes: Mapping[str, Any]) -> CompressionResult:
    teacher = lesson.teacher
    student = lesson.student
    out = lesson.out
    kind = _text_objective(teacher.network, student.network)
    head = "lm" if kind == "both" else kind
    require_that(
        head in student.network.heads
        and student.network.config.vocab == teacher.network.config.vocab,
        "The student needs an {head} head over {vocab:,} tokens, as its teacher has.",
        head=head,
        vocab=teacher.network.config.vocab,
    )
    recipe = _recipe(teacher, student, kind)
    if lesson.config.overwrite:
        discard_run(out)
    make_folder(out)
    # it resumes only with the teacher it started with
    folder = RunFolder(out, DISTIL, "distillation", unreadable={"teacher": "of another teacher"})
    folder.begin(distillation_record(lesson.distillation))
    with TemporaryDirectory() as beside:
        write_checkpoint(student, beside)
        model = run_pretraining(
            recipe,
            data=data,
            out=out,
            start=beside,
            device=lesson.config.device,
            distillation=lesson.distillation,
            **changes,
        )
    metrics = _held_out(teacher.network, model.checkpoint.network, kind, out)
    return lesson.result(model.checkpoint, *metrics)


def _text_objective(teacher: Network, student: Network) -> TextObjective:
    """What is taught on text; two models of both readings teach and learn both."""
    require_that(
        "mlm" in teacher.heads or "lm" in teacher.heads,
        "This teacher is not a language model (no mlm or lm head): give its task with --task.",
    )
    if teacher.config.both_ways and student.config.both_ways and "lm" in teacher.heads:
        return "both"
    return "mlm" if "mlm" in teacher.heads else "lm"


def _held_out(
    teacher: Network, student: Network, kind: TextObjective, out: Path
) -> list[dict[str, float]]:
    """Metrics of teacher and student on the held-out text; empty if it is too short."""
    recipe = read_recipe(out / "recipe.json")
    _, valid = make_feeds(recipe, [open_stores(out / "data")], Tokenizer.load(out), packed=False)
    if not valid:
        return []
    machine = choose_execution(teacher.device, recipe.train)
    shares = [recipe.data.causal_share] if kind == "both" else []
    return [
        validate(LossModule(one, objective(kind, *shares)), valid[-1], recipe.train, machine)
        for one in (teacher.eval(), student.to(teacher.device).eval())
    ]


def _recipe(teacher: Checkpoint, student: Checkpoint, kind: TextObjective) -> Recipe:
    """The teacher's recipe, if known, without next-sentence prediction (Sanh et al. 2019 §3)."""
    assert teacher.source is not None
    path = teacher.source / "recipe.json"
    model = student.network.config
    length = min(model.context, teacher.network.config.context, MAX_TEXT_TOKENS)
    known = read_recipe(path) if path.is_file() else None
    data = replace(known.data, weights=()) if known else DataConfig(lengths=(length,))
    parts: dict[str, Any] = dict(name="distil", model=model, objective=kind, data=data)
    return replace(known, **parts) if known else Recipe(**parts)
