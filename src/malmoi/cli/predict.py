"""`malmoi predict`: predictions of a fine-tuned model for texts or for the rows of a file."""

from functools import partial
from pathlib import Path
from typing import Any

from malmoi.api.records import ColumnOptions
from malmoi.cli import shared as cli
from malmoi.cli.prediction_file import prediction_facts, predictions
from malmoi.cli.row_files import WRITERS, note_unknown, write_rows
from malmoi.errors import require_that
from malmoi.pair import BERT
from malmoi.system.paths import names_file
from malmoi.system.result import plain
from malmoi.system.storage import remote_url
from malmoi.text.lines import uncompressed_name


def predict_command(
    model: str | None = cli.option(
        None,
        "Model folder, or a hub id.",
        "--model",
        "-m",
        shown="malmoi-bert with --labels",
        metavar="DIR",
    ),
    texts: cli.Texts = None,
    data: Path | None = cli.option(
        None, "Rows to predict, if not given as a file instead of TEXT; or a folder of tables."
    ),
    out: Path | None = cli.option(
        None,
        "Output file for the rows with their predictions; a folder for those of a folder.",
        "--out",
        "-o",
        shown="next to the file",
    ),
    part: str = cli.option("", cli.PART, metavar="I/N"),
    columns: dict[str, Any] = cli.options_of(ColumnOptions, names="text pair"),
    paired: bool = cli.option(
        False,
        "Read texts in pairs (question, context…); tab-separated on standard input.",
        "--pairs",
    ),
    choices: list[str] | None = cli.option(
        None, "A choice, for a multiple-choice model; repeatable.", "--choice"
    ),
    labels: str | None = cli.option(
        None,
        "Zero-shot classification with these label names: positive,negative. Needs a sentence "
        "encoder, an NLI model, a GPT or a BERT.",
        metavar="A,B…",
    ),
    overwrite: cli.Overwrite = False,
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Predict labels, spans or answers with a fine-tuned model.

    Given a file (csv, tsv, jsonl, parquet, xlsx), predicts every row and writes it to --out
    with all its columns, the prediction, its score and the probability of each label. Given a
    folder, does so for every table in it. The same command resumes.

    Example: malmoi predict --model runs/sst2 "I love this movie!"

    Example: malmoi predict --labels positive,negative "I love this movie!"

    Example: malmoi predict --model runs/sst2 new.csv --text review -o new.labelled.csv

    Example: malmoi predict --model runs/sst2 --data crawl --text review --out labelled --part 3/16
    """
    names = [name.strip() for name in (labels or "").split(",") if name.strip()]
    _check(model, names, paired=paired or "pair" in columns or bool(choices))
    opened = partial(cli.open_model, model, loading, BERT)
    if data is None and texts and len(texts) == 1 and _names_file(texts[0]):
        data = Path(texts[0])
    if data is not None:
        write_rows(
            lambda: predictions(opened(), names, loading.get("dtype")),
            data,
            out or _default_output(data),
            columns,
            part=part,
            overwrite=overwrite,
            json=json,
        )
        return
    inputs = _inputs(texts, choices or [], paired=paired)
    some = [one for one, empty in inputs if not empty]
    found = opened()
    note_unknown(found, some)
    answers = found.classify(some, names) if names else found.predict(some)
    _print_answers(inputs, answers, json=json)


def _default_output(data: Path) -> Path:
    """new.csv → new.predicted.csv; a format that cannot be written becomes CSV.

    What is elsewhere is written here.
    """
    bare = uncompressed_name(data)
    suffix = bare.suffix if bare.suffix in WRITERS or data.is_dir() else ".csv"
    target = bare.with_name(f"{bare.stem}.predicted{suffix}")
    return Path(target.name) if remote_url(data) else target


def _check(model: str | None, names: list[str], *, paired: bool) -> None:
    """Refuses what no model can do, before one is loaded."""
    require_that(
        not names or not paired,
        "--labels classifies single texts: leave --pair, --pairs and --choice out.",
    )
    require_that(
        model is not None or names,
        "Name a fine-tuned model with -m DIR (malmoi finetune rows.csv makes one), or the "
        "labels with --labels A,B.",
    )
    if model is None:
        cli.note(
            "So small a model is near guessing from the labels' names alone; malmoi finetune "
            "learns them from some rows."
        )


def _inputs(texts: list[str] | None, choices: list[str], *, paired: bool) -> list[tuple[Any, bool]]:
    """The model's inputs, and whether each is blank.

    Blank lines get a line of output too, so that the two files can be pasted together.
    """
    read: Any = cli.input_pairs if paired else cli.input_lines
    lines = read(texts, keep_blank=True)
    blank = [not "".join(one).strip() for one in lines]
    if choices:
        lines = [(*([one] if isinstance(one, str) else one), tuple(choices)) for one in lines]
    return list(zip(lines, blank, strict=True))


def _print_answers(inputs: list[tuple[Any, bool]], answers: list[Any], *, json: bool) -> None:
    scored = any("score" in prediction_facts(answer) for answer in answers[:1])
    found = iter(answers)
    for one, empty in inputs:
        answer = None if empty else next(found)
        key = "spans" if isinstance(answer, list) else "prediction"
        cli.print_one(json, {"text": one, key: plain(answer)}, _line(one, answer, scored=scored))


def _line(text: Any, answer: Any, *, scored: bool) -> str:
    parts = [text] if isinstance(text, str) else text
    shown = "\t".join(cli.one_line(p if isinstance(p, str) else " | ".join(p)) for p in parts)
    if answer is None:
        return "\t".join(("-", *(["-"] if scored else []), shown))
    facts = prediction_facts(answer)
    prediction = cli.one_line(str(facts["prediction"])) or "-"
    score = facts.get("score")
    written = f"{score:.4f}" if isinstance(score, float) else score
    return "\t".join((prediction, *([] if written is None else [written]), shown))


def _names_file(text: str) -> bool:
    """Whether a text is a file name: an existing file, or one word with a known suffix."""
    from malmoi.text.rows import has_rows

    return names_file(text) or (len(text.split()) == 1 and has_rows(Path(text)))
