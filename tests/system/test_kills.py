"""Runs that are killed at random moments end bit-equal; tables that are damaged at random are read,
or refused in a
sentence. `pytest -m campaign -s` prints the tally that docs/reliability.md has.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from malmoi.errors import MalmoiError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.kinds import custom_task
from malmoi.text.documents import read_documents

pytestmark = pytest.mark.campaign

KILLS = int(os.environ.get("MALMOI_KILLS", "8"))  # of each kind of run
SEED = int(os.environ.get("MALMOI_SEED", "0"))
TABLES = 1000  # of each kind of file
GOOD = "".join(f'"a good, fine film {i}",긍정\na bad film {i},부정\n' for i in range(6))
ROWS = [{"text": f"a film {i}", "label": "pos" if i % 2 else "neg"} for i in range(8)]
FILES = {
    ".csv": f"text,label\n{GOOD}".encode(),
    ".tsv": "".join(
        "\t".join(row) + "\n" for row in [("text", "label"), *(row.values() for row in ROWS)]
    ).encode("utf-16"),
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    ".json": json.dumps(ROWS, indent=1).encode(),
}
PIECES = (
    b'"',
    b"\0",
    b"\n",
    b"\r",
    b"\t",
    b",",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"{",
    b"]",
    b"NaN",
    b"1e999",
    b"\\ud800",
)


@pytest.mark.timeout(5400)
def test_killed_runs_end_like_uninterrupted_ones(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "kills.py"),
        str(tmp_path / "runs"),
        str(SEED),
        str(KILLS),
    ]
    tally = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            tally.append(json.loads(line))
    assert child.returncode == 0
    kills = sum(one["kills"] + one["inside"] for one in tally)
    print(f"{kills} kills of {len(tally)} kinds of runs, seed {SEED}")
    good = ("resumed", "equal", "repeated", "inside_equal")
    bad = ("left", "private", "inside_left", "inside_private")
    wrong = [one for one in tally if not all(one[n] for n in good) or any(one[n] for n in bad)]
    assert wrong == []


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few of them changed, cut, doubled or put in."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.choices(range(len(found) + 1), k=2))
        how = draw.randrange(5)
        if how == 0 and found:
            found[min(at, len(found) - 1)] = draw.randrange(256)
        elif how == 1:
            del found[at : min(end, at + 40)]
        elif how == 2:
            del found[at:]
        elif how == 3:
            found[at:at] = found[at : min(end, at + 200)]
        else:
            found[at:at] = draw.choice(PIECES) * draw.randint(1, 3)
    return bytes(found)


@pytest.mark.parametrize("suffix", FILES)
def test_a_damaged_table_is_read_or_refused_in_a_sentence(suffix: str, tmp_path: Path) -> None:
    task, tally = custom_task("classification"), Counter[str]()
    for number in range(TABLES):
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(damaged(FILES[suffix], random.Random(f"{SEED} {suffix} {number}")))
        for what, use in (
            ("rows", lambda path=path: load_examples(task, path)),
            ("text", lambda path=path: list(read_documents(path))),
        ):
            try:
                use()
                tally[f"{what} read"] += 1
            except MalmoiError:
                tally[f"{what} refused in a sentence"] += 1
    print(f"{suffix}: {dict(tally)}")
    assert sum(tally.values()) == 2 * TABLES
