"""Threads beside other programs: what they use is measured, and the count follows them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from malmoi.system.threads import CpuTimes, LoadMeter, ThreadTuner, read_cpu_times, sleep_soon


class Machine:
    """A machine of two cores whose clock and other programs a test moves."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.machine = 0.0
        self.own = 0.0
        self.others = 0.0  # share that other programs use
        self.said: list[str] = []
        self.tuner = ThreadTuner(
            2, self.said.append, meter=LoadMeter(self.times), now=lambda: self.clock
        )

    def times(self) -> CpuTimes:
        return CpuTimes(self.clock, self.machine, self.own, 2)

    def work(self, seconds: float, rates: dict[int, float]) -> float:
        """Works for so long at the rate of the tuner's count; returns the work."""
        total = 0.0
        until = self.clock + seconds
        while self.clock < until:
            rate = rates[self.tuner.count]
            self.clock += 0.1
            self.own += 0.1 * self.tuner.count
            self.machine += 0.1 * self.tuner.count + 0.2 * self.others
            total += 0.1 * rate
            self.tuner.step(0.1 * rate)
        return total


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield Machine()
    torch.set_num_threads(before)


ALONE = {2: 20.0, 1: 12.0}
FEWER = "computing with 1 of 2 threads"
BESIDE = {2: 3.0, 1: 9.5}


def test_alone_nothing_changes(machine: Machine) -> None:
    machine.work(60, {2: 20.0, 1: 30.0})
    assert machine.tuner.count == 2
    assert machine.said == []


def test_beside_busy_programs_nine_tenths_of_the_best_count_remain(machine: Machine) -> None:
    machine.work(10, ALONE)
    machine.others = 0.9
    assert machine.work(50, BESIDE) > 0.9 * 50 * BESIDE[1]  # and no trial is under way
    assert torch.get_num_threads() == machine.tuner.count == 1
    assert machine.said == [
        "Other programs use 90% of this machine: computing with 1 of 2 threads."
    ]
    machine.others = 0.0
    assert machine.work(60, ALONE) > 0.95 * 60 * ALONE[2]
    assert machine.said[1:] == ["The machine is free again: computing with 2 threads."]


def test_more_threads_stay_where_they_are_faster(machine: Machine) -> None:
    machine.others = 0.3
    assert machine.work(120, {2: 15.0, 1: 12.0}) > 0.95 * 120 * 15
    assert machine.tuner.count == 2
    assert machine.said == []


def test_a_measurement_is_the_rate_of_the_best_count(machine: Machine) -> None:
    def run() -> float:
        machine.clock += 0.2
        machine.machine += 0.2 * (machine.tuner.count + 2 * machine.others)
        machine.own += 0.2 * machine.tuner.count
        return 0.2 * (BESIDE if machine.others else ALONE)[machine.tuner.count]

    assert machine.tuner.measure(run) == pytest.approx(20)
    machine.others = 1.0
    assert machine.tuner.measure(run) == pytest.approx(9.5)


def test_what_others_cost_is_said_of_long_work_alone(machine: Machine) -> None:
    machine.others = 0.6
    machine.work(20, BESIDE)
    tuner = machine.tuner
    assert tuner.about_others(20, 355, 720) == (
        "Other programs used 60% of this machine: 355 of about 720 updates were made."
    )
    assert tuner.about_others(20, 700, 720) == "Other programs used 60% of this machine."
    assert tuner.about_others(5, 355, 720) == ""
    machine.others = 0.0
    machine.work(100, ALONE)
    assert tuner.about_others(120, 355, 720) == ""


def test_a_number_of_threads_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    machine = Machine()
    machine.others = 0.9
    machine.work(60, BESIDE)
    assert machine.tuner.count == 2


def test_cores_of_other_processes_are_not_counted(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    stat.write_text(f"cpu 9 9 9\ncpu{core} 100 20 30 999 999 4 5 6 0 0\ncpu9999 1 1 1 1 1 1 1 1\n")
    found = read_cpu_times(stat)
    assert found is not None
    assert found.cores == 1
    assert found.machine == pytest.approx(165 / os.sysconf("SC_CLK_TCK"))
    assert read_cpu_times(tmp_path / "none") is None


def test_a_meter_without_a_source_reads_zero() -> None:
    assert LoadMeter(lambda: None).lap() == LoadMeter(lambda: None).overall == 0.0


def test_threads_sleep_soon_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    sleep_soon()  # OMP_NUM_THREADS is set in tests
    assert "GOMP_SPINCOUNT" not in os.environ
    code = "import os, malmoi; malmoi.Progress; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.split() == [b"3000"]
