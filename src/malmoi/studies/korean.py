"""Korean tokenizers compared at equal training time."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from malmoi.errors import UsageError
from malmoi.evaluation.tasks import named_task
from malmoi.inference import load
from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import BITS_CHARACTERS, tuned_cell, zero_shot
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.system.files import write_text

BYTES = "byte-level BPE"
MORPHEMES = "morphemes (byte-level BPE)"
VOCABULARIES: dict[str, dict[str, str]] = {
    "WordPiece": {"kind": "wordpiece"},
    "BPE": {"kind": "bpe"},
    BYTES: {"kind": "byte-bpe"},
    "characters": {"kind": "char"},
    MORPHEMES: {"kind": "byte-bpe", "morphemes": "kiwi"},
}
# (column, role, task, pattern of the training file or "", pattern of the judged file)
DATA_SETS = (
    ("NSMC", "sentence", "nsmc", "*nsmc*train*", "*nsmc*test*"),
    ("NSMC", "sentence", "nsmc", "ratings_train*", "ratings_test*"),
    ("KorSTS", "similarity", "korsts", "*sts-train*", "*sts-dev*"),
    ("KLP-2016", "tokens", "klp2016", "*klp2016*train*", "*klp2016*dev*"),
    ("Kontrast", "minimal pairs", "kontrast", "", "*kontrast*.csv*"),
)
HELD_OUT_EACH = 20  # reviews
UNKNOWN = "unknown, %"


def korean_tasks(plan: StudyPlan) -> list[StudyTask]:
    """The data sets that the folders have; each once."""
    found: dict[str, StudyTask] = {}
    for name, role, task, train, dev in DATA_SETS:
        paths = (plan.data.file(train) if train else None, plan.data.file(dev))
        if paths[1] is not None and (paths[0] is not None or not train):
            rows = (plan.scale.train_rows, plan.scale.dev_rows)
            found.setdefault(name, StudyTask(name, role, task, paths[1], paths[0], *rows))
    return list(found.values())


def write_reviews(plan: StudyPlan, task: StudyTask) -> tuple[Path, Path]:
    """Writes NSMC's training reviews without labels, one per line, and a held-out part."""
    assert task.train is not None
    rows = (row.text("document").strip() for row in named_task(task.task).rows(task.train))
    texts = [" ".join(text.split()) for text in rows if text]
    limit = plan.scale.characters or sum(map(len, texts))
    kept: list[str] = []
    for text in texts:
        kept.append(text)
        limit -= len(text)
        if limit <= 0:
            break
    held = kept[::HELD_OUT_EACH]
    train = [text for i, text in enumerate(kept) if i % HELD_OUT_EACH]
    paths = [plan.data.held_out.parent / f"reviews.{part}.txt" for part in ("train", "dev")]
    for path, some in zip(paths, (train, held), strict=True):
        write_text(path, "\n".join(some) + "\n")
    return paths[0], paths[1]


def vocabulary(judged: JudgedModel, text: Path) -> dict[str, float]:
    """Bits per byte, tokens per character and unknown tokens of held-out reviews.

    Unknown tokens cost few bits and hide text, so bits per byte are comparable only without them.
    """
    model = load(judged.folder, device=judged.device)
    # each line was a document in training, so that no model has seen a line break
    held_out = " ".join(text.read_text("utf-8").split())[:BITS_CHARACTERS]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids = tokenizer.ids([held_out])[0]
    # a byte-level BPE uses its end-of-text token as the unknown token, which text never produces
    unknown = sum(id == tokenizer.specials.unk for id in ids)
    return {
        "bits per byte": model.bits_per_byte(held_out),
        "tokens per character": len(ids) / len(held_out),
        UNKNOWN: 100 * unknown / len(ids),
    }


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    tasks = korean_tasks(plan)
    if not tasks or tasks[0].name != "NSMC":
        raise UsageError(
            "The study korean needs the Naver movie reviews: give --data a folder with "
            "ratings_train.txt and ratings_test.txt."
        )
    text, held_out = write_reviews(plan, tasks[0])
    chosen = [row for row in VOCABULARIES if row != MORPHEMES or find_spec("kiwipiepy")]
    minutes = {"train.steps": 0, "train.minutes": plan.scale.minutes}
    for seed in plan.seeds:
        base = plan.scale.recipe("gpt", seed)
        for row in chosen:
            settings = {f"tokenizer.{name}": value for name, value in VOCABULARIES[row].items()}
            same_time = {} if plan.scale.faithful else minutes
            recipe = base.override({**settings, **same_time, "data.documents": "line"})
            yield Cell(row, seed, partial(vocabulary, text=held_out), recipe, (str(text),))
            for task in tasks:
                if task.train is None:
                    # a likelihood needs a token to start from, which only these have
                    if VOCABULARIES[row]["kind"] == "byte-bpe":
                        yield Cell(row, seed, partial(zero_shot, task=task), recipe, (str(text),))
                else:
                    cell = tuned_cell(plan, row, recipe, task)
                    yield Cell(row, seed, cell.judge, recipe, (str(text),))


def _claims(results: StudyResults) -> list[Claim]:
    return [
        Claim(
            Words("Morphemes help to classify reviews", "형태소 단위가 리뷰 분류에 도움이 된다"),
            MORPHEMES,
            BYTES,
            "NSMC",
        ),
        Claim(
            Words(
                "Morphemes predict text better than bytes alone",
                "형태소 단위가 바이트 단위보다 텍스트를 잘 예측한다",
            ),
            MORPHEMES,
            BYTES,
            "bits per byte",
        ),
    ]


def _notes(results: StudyResults) -> list[Words]:
    notes = []
    unknown = {row: results.at(row, UNKNOWN) for row in results.rows}
    lossy = [row for row, share in unknown.items() if share is not None and share.mean > 0.1]
    if lossy:
        names = ", ".join(lossy)
        notes.append(
            Words(
                f"{names}: unknown tokens hide text and cost few bits, so its bits per byte "
                "cannot be compared with those of a vocabulary without them.",
                f"{names}: 모르는 토큰은 텍스트를 가리고 비트도 적게 들어, 바이트당 비트를 "
                "모르는 토큰이 없는 어휘와 비교할 수 없다.",
            )
        )
    if MORPHEMES not in results.rows:
        notes.append(
            Words(
                "Morphemes are left out: they need kiwipiepy (pip install kiwipiepy).",
                "형태소는 kiwipiepy가 없어 빠졌다(pip install kiwipiepy).",
            )
        )
    return notes


STUDY = Study(
    "korean",
    Words(
        "tokenizers for Korean at equal training time",
        "같은 시간 동안 학습한 한국어 토크나이저 비교",
    ),
    "Park et al. 2020 (An Empirical Study of Tokenization Strategies for Korean NLP tasks)",
    _cells,
    _claims,
    caption=Words(
        "GPTs on the same reviews for the same minutes: bits per byte and tokens per character of "
        "held-out reviews, tasks after fine-tuning; bars are one standard deviation over seeds.",
        "같은 리뷰로 같은 시간 학습한 GPT: 따로 둔 리뷰의 바이트당 비트와 글자당 토큰 수, "
        "미세 조정한 과제 점수. 막대는 시드에 따른 표준편차 하나.",
    ),
    notes=_notes,
)
