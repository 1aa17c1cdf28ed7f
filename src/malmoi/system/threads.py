"""CPU threads beside other programs: how busy those keep the machine, and how many threads pay.

A product split over threads ends when its slowest part does, and while another program holds a core
all others wait for that part. OpenMP lets them spin for milliseconds, which takes even more time
from the part they wait for: two threads beside one busy program on two cores trained a BERT of
2 × 96 at 2,600 tokens/s, where one thread made 19,300 and two that sleep soon 15,400. So threads
sleep soon, and their number follows the neighbours. `OMP_NUM_THREADS` overrides both.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from malmoi.messages import msg

if TYPE_CHECKING:
    import torch

# Rounds of waiting before a thread sleeps, some microseconds. Alone as fast as OpenMP's 300,000 or
# its 30,000; 300 and 0 cost a fifth in networks of 6 × 384.
SPINS = 3000
WINDOW = 0.5  # seconds over which a rate is measured, and …
MAX_WINDOW = 4.0  # … after which one step is enough
MIN_STEPS = 2
QUIET = 0.12  # other programs' share of the machine that is not worth a trial
WORTH_SAYING = 0.2  # other programs' share of the machine
LONG_ENOUGH = 10.0  # seconds of work
FEWER_STEPS = 0.9  # of the expected ones
FEWER = 0.9  # more threads must be faster than one by a tenth: they wait for one another
QUIET_WINDOWS = 3  # in a row, before all threads are used again
FIRST_SILENCE = 30.0  # seconds after a sentence without another, doubled with each
FIRST_PAUSE = 8.0  # seconds between trials of a count, doubled while they change nothing, …
LONGEST_PAUSE = 64.0  # … to this


def sleep_soon() -> None:
    """Lets OpenMP's threads sleep soon when they wait; must be called before torch is imported."""
    if not {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & os.environ.keys():
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


# ------------------------------------------------------------------ other programs


class CpuTimes(NamedTuple):
    """Seconds, all since some moment."""

    wall: float
    machine: float  # of the cores this process may use, by all programs
    own: float  # by this process
    cores: int


def read_cpu_times(stat: Path = Path("/proc/stat")) -> CpuTimes | None:
    """How long cores have worked so far; None where the system does not say (only Linux does)."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return None
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in lines if line.partition(" ")[0] in allowed]
    # user, nice, system, (idle, iowait,) irq, softirq, and steal: another machine's programs
    ticks = sum(int(row[column]) for row in rows for column in (1, 2, 3, 6, 7, 8))
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    return CpuTimes(time.monotonic(), seconds, time.process_time(), len(rows)) if ticks else None


class LoadMeter:
    """The share of the machine's cores that other programs use; 0 where the system does not say."""

    def __init__(self, read: Callable[[], CpuTimes | None] = read_cpu_times) -> None:
        self._read = read
        self._first = self._last = read()

    def lap(self) -> float:
        before = self._last
        self._last = self._read()
        return _others(before, self._last)

    @property
    def overall(self) -> float:
        return _others(self._first, self._read())


def _others(before: CpuTimes | None, after: CpuTimes | None) -> float:
    if before is None or after is None or after.wall <= before.wall:
        return 0.0
    used = after.machine - before.machine - (after.own - before.own)
    return min(1.0, max(0.0, used / (after.wall - before.wall) / after.cores))


# ------------------------------------------------------------------ how many threads


class ThreadTuner:
    """Chooses how many threads compute, from the rates of real steps beside other programs.

    On a quiet machine it changes nothing, so that one seed gives one result. Beside other programs
    it tries half as many threads, a quarter… for half a second each, now and then, and uses the
    fastest; alone again, it returns to all of them. `say` is told what changed.
    """

    def __init__(
        self,
        limit: int,
        say: Callable[[str], None] = lambda _: None,
        *,
        fixed: bool = False,
        meter: LoadMeter | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._fixed = fixed
        fixed = fixed or "OMP_NUM_THREADS" in os.environ
        self.count = limit if fixed else _recent_count(limit)
        self.meter = meter or LoadMeter()
        self.others = 0.0  # other programs' share of the machine, in the last window
        self.rate = 0.0  # work a second with the best count; 0: not yet measured
        self._now = now
        self._say = say
        self._best = self.count
        self._counts = [limit]
        while self._counts[-1] > 1 and not fixed:
            self._counts.append(self._counts[-1] // 2)
        self._rates: dict[int, float] = {}  # of counts tried beside these programs, …
        self._tried: dict[int, float] = {}  # … and when
        self._pause = FIRST_PAUSE
        self._quiet = 0  # windows
        self._silence = FIRST_SILENCE
        self._silent_until = now()
        self._begin()

    def step(self, work: float) -> None:
        """Counts a step, of so much work (tokens, rows); may change the number of threads."""
        self._work += work
        self._steps += 1
        elapsed = self._now() - self._since
        if elapsed >= WINDOW and (self._steps >= MIN_STEPS or elapsed >= MAX_WINDOW):
            self.others = self.meter.lap()
            self._look(self._work / elapsed)
            self._begin()

    def measure(self, run: Callable[[], float]) -> float:
        """Repeats a piece of work until every count was tried that may pay; the best rate."""
        self.rate = 0.0
        self._rates = {}
        self._begin()
        self.meter.lap()
        while not self.rate:
            self.step(run())
        return self.rate

    def about_others(self, seconds: float, steps: int, expected: float) -> str:
        """What other programs cost work of so many seconds, where it is worth a sentence."""
        others = self.meter.overall
        if others < WORTH_SAYING or seconds < LONG_ENOUGH or self._fixed:
            return ""
        facts = dict(others=others, steps=steps, expected=expected)
        if steps > FEWER_STEPS * expected:
            return msg("Other programs used {others:.0%} of this machine.", **facts)
        return msg(
            "Other programs used {others:.0%} of this machine: {steps:,} of about "
            "{expected:,.0f} updates were made.",
            **facts,
        )

    def use(self, count: int) -> None:
        import torch

        self.count = count
        torch.set_num_threads(count)

    def _begin(self) -> None:
        self._work = 0.0
        self._steps = 0
        self._since = self._now()

    def _look(self, rate: float) -> None:
        """After a window: tries a count whose rate is not known, or uses the best."""
        if self.others < QUIET or len(self._counts) == 1:
            self._quiet += 1
            if self.count == self.limit or self._quiet >= QUIET_WINDOWS:
                self._rates = {}
                free = "The machine is free again: computing with {limit} threads."
                self._settle(self.limit, rate, msg(free, limit=self.limit))
            else:
                self.rate = rate
            return
        self._quiet = 0
        self._rates[self.count] = (rate + self._rates.get(self.count, rate)) / 2
        self._tried[self.count] = self._now()
        if stale := [count for count in self._counts if self._is_stale(count)]:
            self.use(stale[0])
            return
        # what is to replace the present count must be better by a tenth
        worth = {n: r * FEWER ** ((n > 1) + (n != self._best)) for n, r in self._rates.items()}
        best = max(worth, key=worth.__getitem__)
        sentence = msg(
            "Other programs use {others:.0%} of this machine: computing with {best} of "
            "{limit} threads.",
            others=self.others,
            best=best,
            limit=self.limit,
        )
        self._settle(best, self._rates[best], sentence)

    def _is_stale(self, count: int) -> bool:
        late = self._now() - self._tried.get(count, 0.0) > self._pause
        return count not in self._rates or (late and count != self._best)

    def _settle(self, count: int, rate: float, sentence: str) -> None:
        self.rate = rate
        exploring = self.count != self._best
        if count != self.count:
            self.use(count)
        if count != self._best and self._now() >= self._silent_until:
            self._say(sentence)
            self._silent_until = self._now() + self._silence
            self._silence *= 2
        elif exploring:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._pause = FIRST_PAUSE if count != self._best else self._pause
        self._best = count


_chosen = (0, 0.0)  # threads of the last work beside other programs, and when it ended


def _recent_count(limit: int) -> int:
    """Where work that ended just now left off: much takes less time than a trial."""
    count, ended = _chosen
    return count if 0 < count < limit and time.monotonic() - ended < FIRST_PAUSE else limit


@contextmanager
def tuned_threads(tuner: ThreadTuner) -> Iterator[ThreadTuner]:
    """Computes with the tuner's threads within the context; afterwards with those of before."""
    global _chosen
    import torch

    before = torch.get_num_threads()
    if tuner.count != before:
        tuner.use(tuner.count)
    try:
        yield tuner
    finally:
        if tuner.count < tuner.limit:
            _chosen = (tuner.count, time.monotonic())
        if tuner.count != before:
            torch.set_num_threads(before)


def inference_threads(device: "torch.device") -> AbstractContextManager[ThreadTuner]:
    """Computes with as many threads as pay, within the context; afterwards with those of before."""
    import torch

    return tuned_threads(ThreadTuner(torch.get_num_threads(), fixed=device.type != "cpu"))
