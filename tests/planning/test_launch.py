"""`malmoi launch`: what each engine is given, and runs by those that are here."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.planning.launch import ENGINES, Launch
from tiny_runs import KINDS, losses, train, write_corpus

COMMAND = ("pretrain", "gpt2-small", "my texts/", "-o", "runs/it's", "--set", "train.lr=1e-3")


def launch(engine: str, **more: Any) -> str:
    settings: dict[str, Any] = dict(command=COMMAND, nodes=4, processes=8, host="node0", image="me")
    return Launch(engine=engine, **settings | more).script()  # type: ignore[arg-type]


def words_after(script: str, start: str) -> list[str]:
    return shlex.split(script.replace("\\\n", " ").partition(start)[2], comments=True)


def test_torchrun_and_slurm_start_every_process_with_the_same_command() -> None:
    for engine, meeting in (("torchrun", "node0:29400"), ("slurm", "$head:29400")):
        script = launch(engine)
        assert not subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode
        words = words_after(script, "torch.distributed.run")
        options = dict(zip(words[::2], words[1::2], strict=False))
        wanted = {"--nnodes": "4", "--nproc-per-node": "8", "--max-restarts": "3"}
        assert wanted.items() <= options.items()
        assert options["--rdzv-endpoint"] == meeting
        assert tuple(words[-len(COMMAND) :]) == COMMAND
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --signal=TERM@180\n" in script  # the run saves before its time ends


def test_kubernetes_runs_a_pod_on_each_machine_that_finds_the_first() -> None:
    service, job = yaml.safe_load_all(launch("kubernetes", name="bert"))
    spec = job["spec"]
    assert (service["metadata"]["name"], spec["template"]["spec"]["subdomain"]) == ("bert", "bert")
    assert service["spec"]["selector"] == {"job-name": "bert"}
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    [container] = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    [line] = container["args"]
    words = shlex.split(line)
    assert words[words.index("--rdzv-endpoint") + 1] == "bert-0.bert:29400"
    assert tuple(words[-len(COMMAND) :]) == COMMAND


def test_ray_trains_with_a_worker_for_each_gpu() -> None:
    tree = ast.parse(launch("ray"))
    values = {node.arg: node.value for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    numbers = {name: ast.literal_eval(values[name]) for name in ("num_workers", "max_failures")}
    assert numbers == {"num_workers": 32, "max_failures": 3}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert shlex.join(COMMAND) in texts


def test_what_an_engine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="4 machines need one where they meet: --host"):
        launch("torchrun", host="")
    with pytest.raises(UsageError, match="Kubernetes needs an image"):
        launch("kubernetes", image="")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MalmoiError, match="There is no sbatch here: --dry-run prints the script"):
        Launch(command=COMMAND, engine="slurm").run()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--on", "srun"], "Invalid value for '--on'"),
        (["--gpus", "0"], "processes must be at least 1, not 0."),
        (["--nodes", "0"], "nodes must be at least 1, not 0."),
    ],
)
def test_a_wrong_option_is_said_by_its_name(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["launch", *given, "--dry-run", "--", *COMMAND]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["torchrun", "ray"])
def test_two_processes_started_by_an_engine_learn_as_one(engine: str, tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray", reason="optional: pip install malmoi[cluster]")
    assert engine in ENGINES
    corpus = write_corpus(tmp_path / "text.txt")
    still = {"model.dropout": 0, "model.attention_dropout": 0, "steps": 4}
    recipe, settings = KINDS["gpt"]
    sets = [w for n, v in {**settings, **still}.items() for w in ("--set", f"{n}={v}")]
    given = ["pretrain", recipe, str(corpus), "--out", str(tmp_path / engine), "--device", "cpu"]
    command = [sys.executable, "-m", "malmoi", "launch", "--on", engine, "--gpus", "2", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *given, *sets], check=True, env=environment)
    train("gpt", corpus, tmp_path / "alone", **still)
    assert losses(tmp_path / engine) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
