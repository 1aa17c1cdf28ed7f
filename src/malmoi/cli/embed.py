"""`malmoi embed`: texts as vectors."""

from base64 import b64decode, b64encode
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from malmoi.api.records import ColumnOptions
from malmoi.cli import shared as cli
from malmoi.cli.predict import table_source
from malmoi.cli.row_files import VECTORS, Addition, Row, write_rows
from malmoi.errors import UsageError, explained, require_that, required
from malmoi.pair import BERT
from malmoi.system.files import atomic_write, require_free

if TYPE_CHECKING:
    from malmoi.inference.embed import Pool


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
    if data:
        out = required(out, "--data needs --out, where the rows are written with their vectors.")
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
