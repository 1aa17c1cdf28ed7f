"""Options that commands share, and reading texts from arguments or standard input."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from malmoi.errors import UsageError

if TYPE_CHECKING:
    from malmoi.inference import Model

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="The model's folder, or a hub id.", metavar="DIR")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1… or mps; default: a GPU if there is one.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="fp32, bf16, fp16, or int8 on a CPU; default: as stored.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT…", help="Texts; omit them, or pass -, to read standard input."),
]


def open_model(path: str, device: str | None, dtype: str | None) -> "Model":
    """Loads a model and says on stderr what did not fit."""
    from malmoi.inference import load

    model = load(path, device=device, dtype=dtype)
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    return model


def changes_of(given: list[str] | None) -> dict[str, str]:
    """What --set says: `train.lr=3e-4` changes the setting of that name."""
    changes = {}
    for text in given or []:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise UsageError(
                f"--set {text} is not NAME=VALUE; write for example --set train.lr=3e-4."
            )
        changes[name.strip()] = value.strip()
    return changes


def whole_texts(given: list[str] | None) -> list[str]:
    """The texts of the command line; else all of standard input as one text."""
    return given if given and given != ["-"] else [_standard_input().rstrip("\r\n")]


def input_lines(given: list[str] | None) -> list[str]:
    """The texts of the command line; else every line of standard input that is not blank."""
    if given and given != ["-"]:
        return given
    return [line for line in _standard_input().splitlines() if line.strip()]


def input_pairs(given: list[str] | None) -> list[tuple[str, str]]:
    """Arguments two by two; else lines of two texts with a tab between."""
    if given and given != ["-"]:
        if len(given) % 2:
            raise UsageError(f"Pairs need an even number of texts; there are {len(given)}.")
        return list(zip(given[::2], given[1::2], strict=True))
    return [
        _pair(number, line)
        for number, line in enumerate(_standard_input().splitlines(), 1)
        if line.strip()
    ]


def _pair(number: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise UsageError(
            f"Line {number} of standard input has no tab; write two texts with a tab between them."
        )
    return first, second


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("There is no text: write one after the options, or pipe one in.")
    content = sys.stdin.buffer.read()
    if not content.strip():
        raise UsageError("There is no text: standard input is empty.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(
            f"Standard input is not UTF-8: byte 0x{content[error.start]:02x} in line {line}; "
            "convert it first, for example with: iconv -f EUC-KR -t UTF-8"
        ) from error
