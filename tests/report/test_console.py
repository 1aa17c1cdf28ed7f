"""The console of the command line: log records as lines, progress events as a bar."""

import io
import logging
import time
from contextlib import redirect_stderr

import pytest

from conftest import environment
from malmoi.report.console import Console, progress_line, waiting
from malmoi.system.progress import Progress, listening, report_progress


def test_a_library_user_sees_nothing_unless_they_listen(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Progress] = []
    logging.getLogger("malmoi.training").info("Learning a vocabulary …")
    report_progress(Progress("encode", 1, 2, "rows"))
    with listening(events.append), listening(None):  # a call inside that was given no callback
        report_progress(Progress("encode", 2, 2, "rows"))
    report_progress(Progress("encode", 3, 2, "rows"))
    assert events == [Progress("encode", 2, 2, "rows")]
    assert capsys.readouterr() == ("", "")


def test_a_narrow_terminal_gets_fewer_parts_and_none_of_them_cut() -> None:
    event = Progress("pretrain", 5, 10, "steps", {"loss": 2.5, "tokens_per_second": 1200.0}, 9.0)
    with environment(MALMOI_LANG="ko"):
        assert progress_line(event, 9.0, 60).endswith("0:09 남음  사전 학습 5/10스텝")
        assert progress_line(event, 9.0, 62 + 10).endswith("스텝  손실 2.500")
        assert progress_line(event, 9.0).endswith("1,200 토큰/s")


def test_records_and_progress_are_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("malmoi.training")
    with Console().attached():
        logger.info("Resuming from step 4.")
        logger.warning("3 rows are empty.")
        for step in (*range(5, 11), 10):
            report_progress(Progress("pretrain", step, 10, "steps", {"loss": 2.5}, seconds_left=0))
    logger.warning("No longer attached.")
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["Resuming from step 4.", "note: 3 rows are empty."]
    # the first event and, once, the last; those between came too soon after it
    assert [line.split("  ")[-2] for line in said[2:]] == [
        "pretrain 5/10 steps",
        "pretrain 10/10 steps",
    ]


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_updated() -> None:
    with redirect_stderr(Terminal()) as shown, environment(NO_COLOR=None), Console().attached():
        report_progress(Progress("encode", 1, 2, "rows"))
        report_progress(Progress("encode", 2, 2, "rows"))
    said = shown.getvalue()
    assert said.count("\r\033[K") == 2
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("event", "left", "line"),
    [
        (Progress("encode", 1200, None, "documents"), None, "Encode 1,200 documents"),
        (
            Progress("encode", 6, None, "documents", {"tokens": 2315671, "megabytes": 9.08}),
            None,
            "Encode 6 documents  2,315,671 tokens  9 MB",
        ),
        (Progress("read and clean", 0, None, "shards"), None, "Read and clean"),
        (Progress("dedup", 1, 1, "shards"), None, f"{'━' * 16} 100%  dedup 1/1 shard"),
        (
            Progress("pretrain", 30, 60, "seconds", {"step": 1200, "loss": 2.5}),
            30,
            "━━━━━━━━────────  50%  0:30 left  pretrain  step 1,200  loss 2.500",
        ),
        (
            Progress("finetune", 3, 4, "steps", {"tokens_per_second": 1e4, "utilization": 0.4}),
            None,
            "━━━━━━━━━━━━────  75%  finetune 3/4 steps  10,000 tokens/s  40% of the machine",
        ),
    ],
)
def test_an_event_reads_well(event: Progress, left: float | None, line: str) -> None:
    assert progress_line(event, left) == line


def test_waiting_shows_a_line_on_a_terminal_and_clears_it() -> None:
    file = io.StringIO()
    with redirect_stderr(file), environment(NO_COLOR=None), waiting("Loading a model"):
        pass
    assert file.getvalue() == ""  # a file gets no such line
    shown = Terminal()
    with redirect_stderr(shown), environment(NO_COLOR=None), waiting("Loading a model"):
        while "Loading a model … " not in shown.getvalue():
            time.sleep(0.01)
    assert shown.getvalue().endswith("\r\033[K")
