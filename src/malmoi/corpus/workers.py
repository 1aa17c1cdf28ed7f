"""Runs jobs in several processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.system.progress import Progress, report_progress

ShardJob = tuple[Callable[..., None], tuple[Any, ...]]


def run_jobs(jobs: Iterable[ShardJob], workers: int, verb: str, total: int | None = None) -> None:
    """Runs every job, in this process if there is one worker; reports progress as `verb`."""
    done = _in_order(jobs) if workers == 1 else _in_processes(jobs, workers)
    report_progress(Progress(verb, 0, total, "shards"))
    for number, _ in enumerate(done, 1):
        report_progress(Progress(verb, number, total, "shards"))


def _in_order(jobs: Iterable[ShardJob]) -> Iterator[None]:
    for do, arguments in jobs:
        yield do(*arguments)


def _in_processes(jobs: Iterable[ShardJob], workers: int) -> Iterator[None]:
    # a fork of this process could inherit a held lock
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["malmoi.corpus.steps"])
    with ProcessPoolExecutor(workers, context, initializer=_begin) as pool:
        try:
            yield from _hand_out(pool, jobs, 2 * workers)
        except BrokenProcessPool as error:
            raise MalmoiError(
                "A worker was killed, perhaps because memory ran out: run the same command again "
                "with fewer --workers."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _hand_out(pool: ProcessPoolExecutor, jobs: Iterable[ShardJob], ahead: int) -> Iterator[None]:
    waiting: set[Future[None]] = set()
    for do, arguments in jobs:
        waiting.add(pool.submit(do, *arguments))
        if len(waiting) >= ahead:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    for future in waiting:
        yield future.result()


def _begin() -> None:
    """Leaves Ctrl-C to the parent; a worker exits with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
