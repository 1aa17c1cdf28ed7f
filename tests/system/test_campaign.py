"""Damaged and hostile files of every kind: each is right or told in a sentence; none crashes, hangs
or fills memory.

A few mutations of each kind run with all tests, in this process. `pytest -m campaign` tries a
thousand of each, in child processes, and writes the tally to campaign.md and campaign.json in the
folder that MALMOI_CAMPAIGN names.
"""

import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import campaign
from campaign_data import BOMBS, use_bomb
from malmoi.errors import MalmoiError
from malmoi.system.confined import match_patterns, render_template

FEW = dict.fromkeys(campaign.KINDS, 24) | {"state": 6, "odd folders": 12, "table": 40}
LARGE_BOMB_BYTES = 600 << 20
BOMB_COUNT = 30  # each is one of a few, and takes seconds
COUNT = int(os.environ.get("MALMOI_CAMPAIGN_COUNT", "1000"))
BATCH = 500  # mutations of one child
HANG_SECONDS = 90  # in which a child says nothing; its own seconds are reported, not judged
TEMPLATE_BOMBS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a tower": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a long text": "{{ 'a' * 10 ** 12 }}",
    "a text doubled": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ "
        "n.x %}{% endfor %}"
    ),
    "lists of lists": "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"  # noqa: E501
    "{{ n.x }}",
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "a wide field": "{{ '{:9999999999}'.format(1) }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "all that is said": "{{ 'abcdefgh' * 1000000 }}",
}


@pytest.mark.parametrize("kind", sorted(campaign.KINDS.keys() - {"bomb"}))
def test_damaged_files_load_correctly_or_are_refused(kind: str, tmp_path: Path) -> None:
    tried = [campaign.attempt(kind, seed, tmp_path / "it") for seed in range(FEW[kind])]
    assert [one for one in tried if one["outcome"] not in ("right", "told")] == []
    # the mutations are neither harmless nor all fatal
    assert {"right", "told"} <= {one["outcome"] for one in tried}


@contextmanager
def impatience() -> Iterator[None]:
    """A second for a program, of those that never end alone: others may take their time."""
    with pytest.MonkeyPatch.context() as hurried:
        hurried.setattr("malmoi.system.confined.MAX_CONFINED_SECONDS", 1.0)
        yield


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_would_fill_the_memory_is_refused(bomb: str, tmp_path: Path) -> None:
    BOMBS[bomb](tmp_path / "it")
    with pytest.raises(MalmoiError, match=r"longer than|field limit|no text of its size|--label"):
        use_bomb(tmp_path / "it")


@pytest.mark.parametrize("bomb", TEMPLATE_BOMBS)
def test_a_template_that_would_not_end_is_stopped(bomb: str) -> None:
    with impatience(), pytest.raises(MalmoiError):
        render_template(TEMPLATE_BOMBS[bomb], {})
    assert render_template("{{ x }}!", {"x": "한글"}) == "한글!"  # the next one runs as ever


def test_patterns_of_an_adapter_that_backtrack_are_stopped() -> None:
    assert match_patterns([r".*\.q", "k"], ["layer.q", "k", "v"]) == [0, 1, None]
    with impatience(), pytest.raises(MalmoiError, match="seconds"):
        match_patterns(["(a|aa)+$"], ["a" * 80 + "b"])


# ------------------------------------------------------------------ all of it


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_the_whole_campaign() -> None:
    counts = dict.fromkeys(campaign.KINDS, COUNT) | {"bomb": min(COUNT, BOMB_COUNT)}
    results = [one for kind, count in counts.items() for one in run(kind, count)]
    tally = tallied(results)
    folder = Path(os.environ.get("MALMOI_CAMPAIGN", "."))
    (folder / "campaign.json").write_text(
        json.dumps(results, indent=1, ensure_ascii=False), "utf-8", "replace"
    )
    (folder / "campaign.md").write_text(tally, "utf-8")
    print(tally)
    assert [one for one in results if one["outcome"] not in ("right", "told")] == []


def run(kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Every mutation of a kind, in children; one that does not come back is a fault of its own."""
    seed = 0
    while seed < count:
        for one in child(kind, seed, min(BATCH, count - seed)):
            seed = one["seed"] + 1
            yield one


def child(kind: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    """One child's mutations, up to the one that ends it."""
    script = Path(campaign.__file__)
    command = [sys.executable, str(script), kind, str(first), str(count)]
    large = os.environ | {"MALMOI_BOMB_BYTES": str(LARGE_BOMB_BYTES)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=large
    )
    begun, done = first, 0
    with process:
        for answer in answers(process):
            if "begun" in answer:
                begun = answer["begun"]
            elif "ended" in answer:
                process.kill()
                if done < count:
                    fault = f"fault: {answer['ended']}"
                    yield {
                        "kind": kind,
                        "seed": begun,
                        "did": "",
                        "outcome": fault,
                        "said": "",
                        "seconds": 0.0,
                    }
            else:
                done += 1
                yield answer


def answers(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What a child says, line by line, and at last how it ended: by itself, or by saying nothing
    for too long.
    """
    assert process.stdout is not None
    pipe, rest = process.stdout.fileno(), b""
    while select.select([pipe], [], [], HANG_SECONDS)[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            yield {"ended": "crash"}
            return
        *lines, rest = (rest + part).split(b"\n")
        yield from map(json.loads, lines)
    yield {"ended": "hang"}


def tallied(results: list[dict[str, Any]]) -> str:
    """The tally as a table."""
    lines = [
        "| file | mutations | right | one sentence | faults | longest |",
        "|---|---|---|---|---|---|",
    ]
    for kind in campaign.KINDS:
        some = [one for one in results if one["kind"] == kind]
        found = Counter(
            one["outcome"] if one["outcome"] in ("right", "told") else "fault" for one in some
        )
        longest = max((one["seconds"] for one in some), default=0.0)
        counts = (
            f"{len(some):,} | {found['right']:,} | {found['told']:,} | {found['fault']:,} | "
            f"{longest:.1f} s |"
        )
        lines.append(f"| {kind} | {counts}")
    return "\n".join(lines) + "\n"
