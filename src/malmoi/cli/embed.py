"""`malmoi embed`: texts as vectors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from malmoi.cli import shared as cli
from malmoi.errors import UsageError, require_that
from malmoi.pair import BERT
from malmoi.system.files import atomic_write, require_free

if TYPE_CHECKING:
    from malmoi.inference.embed import Pool


def embed_command(
    model: cli.Bert = None,
    texts: cli.Texts = None,
    layers: str = cli.option(
        "-1", "Layers to average, such as -4,-3,-2,-1: 0 is the embedding, -1 the last."
    ),
    pool: str = cli.option(
        "auto",
        "mean over the tokens, cls (the first token) or none; auto uses the folder's setting.",
    ),
    truncate: bool = cli.option(False, "Truncate texts longer than the context.", "--truncate"),
    out: Path | None = cli.option(None, "Write the vectors to this .npy file.", "--out", "-o"),
    overwrite: cli.Overwrite = False,
    device: cli.Device = None,
    dtype: cli.Dtype = None,
    json: cli.Json = False,
) -> None:
    """Turn each text into a vector.

    Example: malmoi embed --layers=-4,-3,-2,-1 "a text" "another"
    """
    given = cli.input_lines(texts)
    chosen = _layers(layers)
    require_that(
        not out or pool != "none",
        "--out stores one vector per text, but --pool none gives one per token: use --json.",
    )
    if out:
        require_free(out, overwrite=overwrite)
    vectors = cli.open_model(model, device, dtype, BERT).embed(
        given, chosen, cast("Pool", pool), truncate=truncate
    )
    if out:
        _save(out, vectors)
        cli.print_result(f"{out}: {len(vectors):,} × {len(vectors[0]):,}")
        return
    for text, vector in zip(given, vectors, strict=True):
        cli.print_json({"text": text, "vector": vector.tolist()}) if json else cli.print_result(
            _numbers(vector)
        )


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            "--layers takes comma-separated whole numbers, such as -2,-1, not {text!r}.", text=text
        ) from None


def _save(path: Path, vectors: Any) -> None:
    import numpy as np

    with atomic_write(path) as file:
        np.save(file, vectors, allow_pickle=False)


def _numbers(vector: Any) -> str:
    """One vector per line; the vectors of a text's tokens are followed by a blank line."""
    if vector.ndim == 2:
        return "\n".join(map(_numbers, vector)) + "\n"
    return " ".join(f"{number:.6g}" for number in vector.tolist())
