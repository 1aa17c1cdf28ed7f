"""What the benchmarks share: works timed in turn, command lines, and how results are printed."""

import argparse
import json
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Work = Callable[[], object]
Clock = Callable[[], float]
Result = TypeVar("Result")


def processor_time() -> float:
    """Seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed(work: Callable[[], Result], now: Clock = time.perf_counter) -> tuple[float, Result]:
    """Seconds of a work, and what it returned."""
    began = now()
    found = work()
    return now() - began, found


def in_turn(
    works: Mapping[str, Work], rounds: int, now: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each work in each round; in turn, so that other load affects all alike."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(timed(work, now)[0])
    return found


def fewest(
    works: Mapping[str, Work], rounds: int, now: Clock = time.perf_counter
) -> dict[str, float]:
    """The fewest seconds of each work."""
    return {name: min(seconds) for name, seconds in in_turn(works, rounds, now).items()}


def benchmark_parser(about: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark, whose docstring is the help."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_found(found: Mapping[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a line for each value."""
    lines = (f"{k}: {v:,}" if isinstance(v, float) else f"{k}: {v}" for k, v in found.items())
    print(json.dumps(found) if as_json else "\n".join(lines))
