"""`malmoi predict`, `malmoi embed`: what a model says of texts or of the rows of a file."""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from malmoi.api.records import ColumnOptions
from malmoi.cli import shared as cli
from malmoi.cli.row_files import (
    ROWS_AT_ONCE,
    VECTORS,
    WRITERS,
    Addition,
    Row,
    RowSource,
    note_unknown,
    write_rows,
)
from malmoi.errors import UsageError, ensure, explained, require_known, require_that, required
from malmoi.pair import BERT
from malmoi.system.files import atomic_write, require_free
from malmoi.system.paths import names_file
from malmoi.system.result import plain
from malmoi.system.storage import remote_url
from malmoi.text.lines import uncompressed_name
from malmoi.text.rows import DataRow, any_rows, has_rows

if TYPE_CHECKING:
    from malmoi.inference.embed import Pool


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
    data = _rows_file(texts, data)
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


def _rows_file(texts: list[str] | None, data: Path | None) -> Path | None:
    """--data, or the only text where it is a file, or one word with a known suffix."""
    (text,) = texts if texts and len(texts) == 1 and data is None else ("",)
    named = names_file(text) or (len(text.split()) == 1 and has_rows(Path(text)))
    return Path(text) if named else data


# ------------------------------------------------------------------ rows of a file

ADDED = ("prediction", "score", "probabilities")


def prediction_facts(answer: Any) -> dict[str, Any]:
    """A prediction of any kind as values of a row: prediction, score and any probabilities."""
    if isinstance(answer, list):  # spans
        return {
            "prediction": " ".join(
                f"[{cli.one_line(span.text)} {span.label} {span.score:.3f}]" for span in answer
            )
        }
    if hasattr(answer, "text"):  # an answer found in a text has a score, a written one has none
        scored = {"score": round(answer.score, 4)} if hasattr(answer, "candidates") else {}
        return {"prediction": answer.text} | scored
    probabilities = {name: round(value, 5) for name, value in answer.scores.items()}
    if hasattr(answer, "labels"):  # one score for each label that holds
        scores = ", ".join(f"{answer.scores[label]:.4f}" for label in answer.labels)
        facts = {"prediction": ", ".join(answer.labels), "score": scores or "-"}
    else:
        facts = {"prediction": answer.label, "score": round(answer.scores[answer.label], 4)}
    return facts | ({"probabilities": probabilities} if len(probabilities) > 1 else {})


def predictions(
    model: "cli.inference.Model", labels: Sequence[str] = (), dtype: str | None = None
) -> Addition:
    """Predictions by a fine-tuned model; with `labels`, by the labels' names alone."""

    def compute(inputs: list[Any]) -> list[Row]:
        answers: Any = model.classify(inputs, labels) if labels else model.predict(inputs)
        return list(map(_row_facts, inputs, answers))

    return Addition(
        "predict",
        model,
        lambda data, given: (
            table_source(data, {}, given, ADDED) if labels else _source(model, data, given)
        ),
        compute,
        {"prediction": ""},
        {"labels": list(labels), "dtype": dtype},
    )


def _source(model: "cli.inference.Model", data: Path, given: Mapping[str, str]) -> RowSource:
    """The rows in the format of the model's own task, or of a table with the columns it reads."""
    from malmoi.evaluation.guess import prediction_format

    task = None if given else prediction_format(model, data)
    if task is None:
        known = model.input_columns if "text" in given else _known_columns(model, data)
        return table_source(data, known, given, ADDED)
    cli.say("{data} has the format of {task}.", data=data, task=task.name)
    read, example = task.rows, task.example
    return RowSource(
        lambda: _checked(read(data)), lambda row: example(row).input, {"task": task.name}
    )


def _checked(rows: Iterable[DataRow]) -> Iterator[DataRow]:
    """The rows; a malformed one raises its error."""
    return (row for row in rows if row.checked is not None)


def table_source(
    data: Path, known: Mapping[str, str], given: Mapping[str, str], added: Sequence[str]
) -> RowSource:
    """The rows of a table, by the columns that are given, known, or likely."""
    named = (*known.values(), *given.values())

    def rows() -> Iterator[DataRow]:
        return _checked(any_rows(data, named))

    first = [row.values for row in islice(rows(), ROWS_AT_ONCE)]
    ensure(first, "There are no rows in {data}.", data=data)
    require_that(
        ".txt" not in data.suffixes or len(first[0]) != 1,
        "{data} has lines, not columns; lines are read from standard input: … < {data}",
        data=data,
    )
    for name in added:
        require_that(
            name not in first[0],
            "{data} already has a column {taken!r}; rename it first.",
            data=data,
            taken=name,
        )
    columns = _columns(first, data, known, given)
    return RowSource(rows, lambda row: _asked(row.values, columns), columns)


def _columns(
    first: list[Row], data: Path, known: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """The columns that are read: those given, those that the model learnt from, or a guess."""
    missing = [n for column in known.values() for n in column.split(",") if n not in first[0]]
    require_that(
        not missing or len(known) < 2 or given,
        "{data} has no column {missing!r}, which this model reads; its columns are "
        "{first}. Name them: --text COLUMN --pair COLUMN.",
        data=data,
        missing="".join(missing[:1]),
        first=", ".join(first[0])[:200],
    )
    found = {**{name: one for name, one in known.items() if one not in missing}, **given}
    if "text" not in found:
        from malmoi.text.columns import text_column

        others = [name for name in first[0] if name not in given.values()]
        found = {"text": text_column(first, others, str(data))} | found
    for column in (found["text"], found.get("pair", found["text"])):
        require_known(column, first[0], "{data} has no column {name!r}.{hint}", data=data)
    if "text" not in given:
        cli.say(", ".join(f"{name} = {column}" for name, column in found.items()))
    return found


def _known_columns(model: "cli.inference.Model", data: Path) -> dict[str, str]:
    """The columns that the model learnt from, also of a public task in another format."""
    from malmoi.evaluation.guess import public_task, similarity_columns_of
    from malmoi.evaluation.task import read_columns
    from malmoi.inference.embed import pairs_needed
    from malmoi.inference.predictors import SENTENCE

    if model.task_head is SENTENCE and not model.input_columns:
        try:
            pair = similarity_columns_of(data, ranked=True)
        except UsageError as error:
            raise pairs_needed() from error
        return {"text": pair.text} | ({"pair": pair.pair} if pair.pair else {})
    task = public_task(model)
    known = read_columns(task) if task is not None else {}
    return model.input_columns or {k: v for k, v in known.items() if k in ("text", "pair")}


def _asked(row: Row, columns: Mapping[str, str]) -> Any:
    """The model input of a row; None if it has no text."""
    from malmoi.inference.predict import row_choices

    first = row.get(columns["text"])
    if first is None or not str(first).strip():
        return None
    if isinstance(first, list):  # a conversation
        return first
    names = [columns[name] for name in ("text", "pair") if name in columns]
    texts = ["" if row.get(name) is None else str(row[name]) for name in names]
    choices = row_choices(row, columns)
    return texts[0] if len(texts) == 1 and not choices else (*texts, *choices)


def _row_facts(asked: Any, answer: Any) -> dict[str, Any]:
    """The values that a row gets; the probabilities of its own choices are numbered from 1."""
    facts = prediction_facts(answer)
    if isinstance(asked, tuple) and isinstance(asked[-1], tuple):
        chances = facts["probabilities"].values()
        facts["probabilities"] = {str(i): one for i, one in enumerate(chances, start=1)}
    return facts


# ------------------------------------------------------------------ vectors


def embed_command(
    model: cli.Bert = None,
    texts: cli.Texts = None,
    data: Path | None = cli.option(None, "Rows to embed, instead of TEXT; or a folder of tables."),
    columns: dict[str, Any] = cli.options_of(ColumnOptions, names="text"),
    layers: str = cli.option(
        "-1", "Layers to average, such as -4,-3,-2,-1: 0 is the embedding, -1 the last."
    ),
    pool: str = cli.option(
        "auto",
        "mean over the tokens, cls (the first token) or none; auto uses the folder's setting.",
    ),
    truncate: bool = cli.option(False, "Truncate texts longer than the context.", "--truncate"),
    out: Path | None = cli.option(
        None,
        "Write the vectors to this .npy file; rows of --data with their vectors to a .parquet or "
        ".jsonl file, those of a folder to a folder.",
        "--out",
        "-o",
    ),
    part: str = cli.option("", cli.PART, metavar="I/N"),
    overwrite: cli.Overwrite = False,
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Turn each text into a vector.

    Given a file of rows (parquet or jsonl), writes it to --out with all its columns and the vector
    of each text. Given a folder, does so for every table in it. The same command resumes.

    Example: malmoi embed --layers=-4,-3,-2,-1 "a text" "another"

    Example: malmoi embed --data crawl --text body --out vectors --part 3/16
    """
    chosen = _layers(layers)
    require_that(
        not out or pool != "none",
        "--out stores one vector per text, but --pool none gives one per token: use --json.",
    )
    opened = partial(cli.open_model, model, loading, BERT)
    data = _rows_file(texts, data)
    if data is not None:
        out = required(
            out, "{data} holds rows: --out names the file for them and their vectors.", data=data
        )
        options = {"layers": list(chosen), "pool": pool, "dtype": loading.get("dtype")}
        write_rows(
            lambda: _vectors(opened(), options, truncate=truncate),
            data,
            out,
            columns,
            part=part,
            overwrite=overwrite,
            json=json,
        )
        return
    given = cli.input_lines(texts)
    if out:
        require_free(out, overwrite=overwrite)
    vectors = opened().embed(given, chosen, cast("Pool", pool), truncate=truncate)
    if out:
        import numpy as np

        with atomic_write(out) as file:
            np.save(file, vectors, allow_pickle=False)
        cli.print_result(f"{out}: {len(vectors):,} × {len(vectors[0]):,}")
        return
    for text, vector in zip(given, vectors, strict=True):
        cli.print_one(json, {"text": text, "vector": vector.tolist()}, _numbers(vector))


def _layers(text: str) -> tuple[int, ...]:
    with explained(
        ValueError,
        "--layers takes comma-separated whole numbers, such as -2,-1, not {text!r}.",
        raises=UsageError,
        text=text,
    ):
        return tuple(int(part) for part in text.split(","))


def _vectors(model: "cli.inference.Model", options: dict[str, Any], *, truncate: bool) -> Addition:
    """A column of vectors; until the output is written they are kept as text of their bytes."""
    import numpy as np

    def compute(texts: list[str]) -> list[Row]:
        found = model.embed(texts, options["layers"], options["pool"], truncate=truncate)
        return [{VECTORS: b64encode(vector.tobytes()).decode()} for vector in found]

    return Addition(
        "embed",
        model,
        lambda data, given: table_source(data, {}, given, [VECTORS]),
        compute,
        {VECTORS: None},
        options,
        lambda row: {n: text and np.frombuffer(b64decode(text), "<f4") for n, text in row.items()},
    )


def _numbers(vector: Any) -> str:
    """One vector per line; the vectors of a text's tokens are followed by a blank line."""
    if vector.ndim == 2:
        return "\n".join(map(_numbers, vector)) + "\n"
    return " ".join(f"{number:.6g}" for number in vector.tolist())
