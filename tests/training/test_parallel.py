"""Several processes: the same losses as one, states that any number of them can resume from, one
voice.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import malmoi
from malmoi.errors import UsageError
from malmoi.system.run_folder import read_metrics
from malmoi.training import loop
from malmoi.training.parallel import ProcessGroup, check_parallel, gradient_sync
from malmoi.training.prepare import check_request
from malmoi.training.recipes import named_recipe
from tiny_runs import KINDS, STILL, losses, steps_of, train, weights, write_corpus

SCRIPT = Path(__file__).parents[1] / "tiny_runs.py"
STEPS = 6
HALVES = ("gpt-fsdp half", "bert-ddp half", "bert-tensor half")
SETTINGS = {**STILL, "steps": STEPS, "train.save_every": 100, "train.ema": 0.5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What one process does."""
    folders = {kind: tmp_path_factory.mktemp("alone") / kind for kind in KINDS}
    for kind, out in folders.items():
        train(kind, corpus, out, **SETTINGS)
    return folders


def job(name: str, corpus: Path, folder: Path, **more: Any) -> dict[str, Any]:
    kind, _, way = name.split()[0].partition("-")
    shared = {"train.parallel": "fsdp", "train.tensor": 2}
    ways = shared if way == "tensor" else {"train.parallel": way}
    # two passes, of three sequences and of one
    settings = {**SETTINGS, **ways, "train.micro": 3}
    return (
        dict(name=name, kind=kind, data=str(corpus), out=str(folder / name), settings=settings)
        | more
    )


class Two:
    """What two processes did, one job after another, and said."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.folder = folder
        third = {"step": 3, "rank": 1}  # the second process is asked to stop
        half = [
            job("gpt-fsdp half", corpus, folder, signal=third),
            job("bert-ddp half", corpus, folder, signal=third),
            job("bert-tensor half", corpus, folder, signal=third),
        ]
        on = []
        for name in ("gpt-fsdp on", "bert-ddp on"):  # begun by one process, here
            self._begin_alone(name, corpus)
            on.append(job(name, corpus, folder))
        ways = [job(name, corpus, folder) for name in ("gpt-ddp", "bert-fsdp")]
        done = self._run([*ways, *half, *on])
        self.said, self.ended = done.stderr, sorted(done.stdout.splitlines())

    def _begin_alone(self, name: str, corpus: Path) -> None:
        kind = name.partition("-")[0]
        train(
            kind, corpus, self.folder / name, **{**SETTINGS, "steps": STEPS, "train.save_every": 3}
        )
        newest = self.folder / name / "train_state" / f"step-{STEPS}"
        newest.rename(newest.with_name("later"))  # as if it had been killed after step 3

    def _run(self, jobs: list[dict[str, Any]]) -> "subprocess.CompletedProcess[str]":
        file = self.folder / "jobs.json"
        file.write_text(json.dumps(jobs), "utf-8")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, str(SCRIPT), str(file)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )


@pytest.fixture(scope="module")
def two(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Two:
    return Two(corpus, tmp_path_factory.mktemp("two"))


def near(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "way"), [("gpt", "ddp"), ("bert", "fsdp")])
def test_two_processes_learn_as_one(kind: str, way: str, two: Two, alone: dict[str, Path]) -> None:
    """The other two ways are those of the runs that are stopped and resumed below."""
    out = two.folder / f"{kind}-{way}"
    assert losses(out) == pytest.approx(losses(alone[kind]), abs=1e-4)
    valid = [
        read_metrics(folder / "metrics.jsonl")[-1]["valid_loss"] for folder in (out, alone[kind])
    ]
    assert valid[0] == pytest.approx(valid[1], abs=1e-4)
    near(out, alone[kind])
    assert f"{kind}-{way} rank 1 done" in two.ended
    assert malmoi.load(out).network.config.tied


@pytest.fixture
def lone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def passes(call: torch.nn.Module) -> Iterator[int]:
    """Three passes of which only the third is the last, again and again."""
    for number in (1, 2, 3, 1, 2, 3):
        with gradient_sync(call, last=number == 3):
            call(torch.ones(1, 2)).sum().backward()
        yield number


def test_ddp_exchanges_gradients_once_a_step(lone: None) -> None:
    call, exchanged = (
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False)),
        [],
    )

    def exchange(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchanged.append(bucket.buffer().tolist())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    call.register_comm_hook(None, exchange)
    assert [(number, len(exchanged)) for number in passes(call)] == [
        (1, 0),
        (2, 0),
        (3, 1),
        (1, 1),
        (2, 1),
        (3, 2),
    ]
    assert exchanged == [[3.0, 3.0], [6.0, 6.0]]


def test_fsdp_keeps_its_own_part_of_the_gradients_after_every_pass(lone: None) -> None:
    linear = torch.nn.Linear(2, 1, bias=False)
    cut = fully_shard(linear)
    assert [linear.weight.grad.sum().item() for _ in passes(cut)] == [2, 4, 6, 8, 10, 12]


def test_a_step_has_one_last_pass(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def listening(call: torch.nn.Module, *, last: bool) -> Any:
        told.append(last)
        return gradient_sync(call, last=last)

    monkeypatch.setattr(loop, "gradient_sync", listening)
    train("gpt", corpus, tmp_path, **{**SETTINGS, "steps": 2, "train.micro": 3})
    assert told == [False, False, True] * 2


def test_only_the_first_process_prints(two: Two) -> None:
    """Only the first process says and writes; every step is there once."""
    assert two.said.count("Training a wordpiece tokenizer") == 3  # a whole run, and half ones
    assert steps_of(two.folder / "bert-fsdp") == list(range(1, STEPS + 1))
    assert "Traceback" not in two.said


def test_a_signal_to_one_process_stops_all_after_saving(two: Two) -> None:
    for name in HALVES:
        assert [line for line in two.ended if line.startswith(name)] == [
            f"{name} rank 0 stopped 143",
            f"{name} rank 1 stopped 143",
        ]
        assert (two.folder / name / "train_state" / "step-3").is_dir()
        assert (two.folder / name / "model.safetensors").is_file()
    assert two.said.count("Stopped at step 3 and saved") == len(HALVES)


@pytest.mark.parametrize("name", HALVES)
def test_one_process_resumes_a_state_of_two(
    name: str, two: Two, alone: dict[str, Path], corpus: Path
) -> None:
    kind = name.partition("-")[0]
    files = sorted((two.folder / name / "train_state" / "step-3").glob("rank-*"))
    sizes = [file.stat().st_size for file in files]
    if "ddp" not in name:
        assert 0.4 < sizes[0] / sizes[1] < 2.5  # each wrote its half
    else:
        assert sizes[1] < 1000 < sizes[0]  # what both hold is written once
    train(kind, corpus, two.folder / name, **SETTINGS)
    assert steps_of(two.folder / name) == list(range(1, STEPS + 1))
    assert losses(two.folder / name) == pytest.approx(losses(alone[kind]), abs=1e-4)
    near(two.folder / name, alone[kind])


@pytest.mark.parametrize("name", ["gpt-fsdp on", "bert-ddp on"])
def test_two_processes_resume_a_state_of_one(name: str, two: Two, alone: dict[str, Path]) -> None:
    kind = name.partition("-")[0]
    assert two.said.count("Resuming from step 3.") == 2
    assert losses(two.folder / name) == pytest.approx(losses(alone[kind]), abs=1e-4)
    near(two.folder / name, alone[kind])


COMMAND = (
    "from tiny_runs import starved; from malmoi.cli import main\nwith starved(step=3, "
    "rank=1): main()"
)


def command(rank: int, corpus: Path, out: Path, port: int) -> "subprocess.Popen[str]":
    """`malmoi pretrain` as one of two processes that find one another by a store; the second
    runs out of memory.
    """
    recipe, settings = KINDS["gpt"]
    sets = [
        part
        for name, value in {**settings, **SETTINGS}.items()
        for part in ("--set", f"{name}={value}")
    ]
    given = ["pretrain", recipe, "--data", str(corpus), "--out", str(out), "--device", "cpu", *sets]
    world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *given],
        env={**os.environ, **world, **meeting},
        cwd=SCRIPT.parent,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.heavy
def test_a_process_that_fails_ends_the_others(corpus: Path, tmp_path: Path) -> None:
    # where the two find one another
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both = [command(rank, corpus, tmp_path, store.port) for rank in (0, 1)]
    try:
        first, second = (process.communicate(timeout=120)[1].splitlines()[-1] for process in both)
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [1, 1]
    assert second == (
        "malmoi: 4 sequences in one pass do not fit into the memory of process 1's GPU: set "
        "train.micro=2 or "
        "train.gradient_checkpointing=true."
    )
    assert first == (
        "malmoi: Process 0 stopped because another process of this run ended; see its message, "
        "or torchrun's."
    )


MACHINES = """
import os, runpy, sys
os.environ["LOCAL_WORLD_SIZE"] = "2"  # as on two machines
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.heavy
def test_four_processes_share_layers_shards_and_copies_and_two_go_on(
    corpus: Path, tmp_path: Path
) -> None:
    """Heads that share keys, a gate in the MLP; the state of four is read by two, and by one."""
    odd = {**SETTINGS, "model.heads": 4, "model.kv_heads": 2, "model.activation": "swiglu"}
    train("gpt", corpus, tmp_path / "alone", **odd)
    fsdp = {"train.parallel": "fsdp"}
    ways = {"tensor": fsdp | {"train.tensor": 2}, "hybrid": {"train.parallel": "hybrid"}}
    jobs = [
        job(f"gpt-{way}", corpus, tmp_path, settings={**odd, **sets})
        | ({"signal": {"step": 3, "rank": 1}, "name": f"{way} half"} if half else {})
        | {"out": str(tmp_path / (f"{way} half" if half else way))}
        for way, sets in ways.items()
        for half in (False, True)
    ]
    (tmp_path / "machines.py").write_text(MACHINES)

    def run(count: int, jobs: list[dict[str, Any]]) -> None:
        file = tmp_path / f"jobs-{count}.json"
        file.write_text(json.dumps(jobs), "utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [str(tmp_path / "machines.py"), str(SCRIPT), str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
        command = [*torchrun, "--nproc-per-node", str(count), *script]
        subprocess.run(command, check=True, capture_output=True, env=environment)

    run(4, jobs)
    parts = sorted((tmp_path / "hybrid half" / "train_state" / "step-3").glob("rank-*"))
    assert [file.stat().st_size > 1000 for file in parts] == [True, True, False, False]
    run(2, [jobs[1] | {"signal": None, "settings": {**odd, **fsdp}}])
    train("gpt", corpus, tmp_path / "hybrid half", **odd)
    for name in ("tensor", "tensor half", "hybrid", "hybrid half"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
        near(tmp_path / name, tmp_path / "alone")


@pytest.mark.parametrize(
    ("recipe", "settings", "sentence"),
    [
        ("gpt2-small", {}, "needs train.parallel=fsdp or hybrid, and a multiple of 2 processes"),
        ("gpt2-small", {"model.heads": 3, "train.parallel": "fsdp"}, "does not divide the 3 heads"),
        (
            "gpt2-small",
            {"train.parallel": "hybrid"},
            "does not divide the 1 processes of a machine",
        ),
        ("lstm", {"train.parallel": "fsdp"}, "for layers whose heads are alike"),
        ("transformer-small", {"train.parallel": "fsdp"}, "for layers whose heads are alike"),
    ],
)
def test_what_processes_cannot_share_is_refused(
    recipe: str, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = named_recipe(recipe).override(settings)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UsageError, match=sentence):
        check_parallel(chosen.model, ProcessGroup(world=2, tensor=2), chosen.train.parallel)


FAULTS = """
import os, signal
from contextlib import nullcontext
from tiny_runs import signalled
from malmoi.cli import main
faults = [(5, signal.SIGKILL, 1), (6, signal.SIGSTOP, 0)] if os.environ["WORLD_SIZE"] == "2" else []
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with signalled(*faults[start]) if faults else nullcontext():
    main()
"""


@pytest.mark.heavy
def test_a_run_goes_on_after_a_process_was_killed_or_hung_and_with_more_of_them(
    corpus: Path, alone: dict[str, Path], tmp_path: Path
) -> None:
    """One is killed in step 5, when the save of step 2 is whole and that of step 4 may be; started
    again, another hangs in step 6; then there are four.
    """
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    recipe, settings = KINDS["gpt"]
    values = {**settings, **SETTINGS, "train.save_every": 2}
    sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    given = ["pretrain", recipe, str(corpus), "--out", str(tmp_path / "run"), "--device", "cpu"]
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])
    more = {"OMP_NUM_THREADS": "1", "MALMOI_TIMEOUT": "10", "PYTHONPATH": paths}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--max-restarts", "1"]
    done = [
        subprocess.run(
            [*torchrun, "--nproc-per-node", str(count), str(script), *given, *sets],
            capture_output=True,
            text=True,
            env={**os.environ, **more},
        )
        for count in (2, 4)
    ]
    assert [one.returncode for one in done] == [1, 0], done[1].stderr
    assert "another process of this run ended" in done[0].stderr
    assert "Process 1 stopped because another process of this run does not answer" in done[0].stderr
    assert all("Resuming from step " in one.stderr for one in done)
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert losses(tmp_path / "run") == pytest.approx(losses(alone["gpt"]), abs=1e-4)
    near(tmp_path / "run", alone["gpt"])


def test_settings_that_cannot_be_sharded_are_refused() -> None:
    chosen = named_recipe("gpt-char").override({"train.parallel": "fsdp"})
    with pytest.raises(UsageError, match=r"Muon needs whole matrices"):
        check_request(chosen, ProcessGroup(0, 2))
    with pytest.raises(UsageError, match="does not divide over 3 processes"):
        check_request(named_recipe("gpt-char"), ProcessGroup(0, 3))
    check_request(chosen, ProcessGroup())
