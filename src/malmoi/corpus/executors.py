"""Runs the jobs of a build: in processes here, as tasks of Ray, or one part of them per machine."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from malmoi.errors import MalmoiError, UsageError, require_known
from malmoi.system.packages import optional_package
from malmoi.system.progress import Progress, report_progress
from malmoi.text.documents import run_now

ShardJob = tuple[Callable[..., None], tuple[Any, ...]]


class Pool(NamedTuple):
    """Runs functions somewhere else, and how many to hand out before waiting for one."""

    submit: Callable[..., Future[Any]]
    ahead: int


_PART = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,8})")


@dataclass(frozen=True)
class Execution:
    """Where the jobs of a build run, and which of them: all, or one part of several."""

    workers: int = 1
    executor: str = "processes"
    part: str = ""  # "3/16": every 16th shard from the third on, for an array of 16 cluster jobs

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError("{workers} workers: give at least 1.", workers=self.workers)
        require_known(self.executor, EXECUTORS, "There is no executor {name!r}.{hint}")
        if self.part and self._numbers is None:
            raise UsageError(
                "{part!r} is not a part of a build; write for example 3/16, the third of 16.",
                part=self.part,
            )

    @property
    def _numbers(self) -> tuple[int, int] | None:
        found = _PART.fullmatch(self.part)
        numbers = (int(found[1]), int(found[2])) if found else (1, 0)
        return numbers if numbers[0] <= numbers[1] else None

    def owns(self, shard: int) -> bool:
        """Whether this part of the build, if it is one, works on the shard."""
        return self._numbers is None or shard % self._numbers[1] == self._numbers[0] - 1

    def session(self) -> AbstractContextManager[None]:
        """Context manager that is open while jobs run."""
        return _ray_cluster(self.workers) if self.executor == "ray" else nullcontext()

    def run(
        self, jobs: Callable[[Pool], Iterable[ShardJob]], verb: str, total: int | None = None
    ) -> None:
        """Runs every job; reports progress as `verb`. Finding the jobs may use the same pool."""
        workers = self.workers if total is None else min(self.workers, total)
        report_progress(Progress(verb, 0, total, "shards"))
        with EXECUTORS[self.executor](workers) as pool:
            for number, _ in enumerate(_finished(pool, jobs(pool)), 1):
                report_progress(Progress(verb, number, total, "shards"))


def _finished(pool: Pool, jobs: Iterable[ShardJob]) -> Iterator[None]:
    waiting: set[Future[None]] = set()
    for do, arguments in jobs:
        waiting.add(pool.submit(do, *arguments))
        if len(waiting) >= pool.ahead:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    for future in waiting:
        yield future.result()


@contextmanager
def _processes(workers: int) -> Iterator[Pool]:
    """This process itself if there is one worker."""
    if workers == 1:
        yield Pool(run_now, 1)
        return
    with ProcessPoolExecutor(workers, _start_method(), initializer=_begin) as pool:
        try:
            yield Pool(pool.submit, 2 * workers)
        except BrokenProcessPool as error:
            raise MalmoiError(
                "A worker was killed, perhaps because memory ran out: run the same command again "
                "with fewer --workers."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_method() -> BaseContext:
    """Not a fork of this process, which could inherit a held lock; Windows has only spawn."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["malmoi.corpus.steps"])
    return context


def _begin() -> None:
    """Leaves Ctrl-C to the parent; a worker exits with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


@contextmanager
def _ray_cluster(workers: int) -> Iterator[None]:
    """Connects to a running Ray cluster, or starts one of `workers` CPUs on this machine."""
    ray = optional_package("ray", "The executor ray")
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:  # no cluster is running
        ray.init(num_cpus=workers, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _ray_tasks(workers: int) -> Iterator[Pool]:
    """Tasks of the cluster; the folder of the build must be at the same path on every machine."""
    import ray

    def submit(do: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = ray.remote(do).remote(*arguments).future()
        return future

    try:
        yield Pool(submit, 2 * int(ray.cluster_resources().get("CPU", workers)))
    except ray.exceptions.RayTaskError as error:
        # the job's own exception, without Ray's traceback
        raise error.cause from error


EXECUTORS: dict[str, Callable[[int], AbstractContextManager[Pool]]] = {
    "processes": _processes,
    "ray": _ray_tasks,
}
