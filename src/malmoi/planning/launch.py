"""Starts a run on several GPUs or machines: a template for each engine, filled in."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal

from malmoi.errors import ensure, require_that
from malmoi.settings import Config, option, require_bounds, setting
from malmoi.system.machine import this_machine

# what takes the filled template on its standard input; torchrun takes the place of this process
ENGINES = {
    "torchrun": ["bash", "-c"],
    "slurm": ["sbatch"],
    "kubernetes": ["kubectl", "apply", "-f", "-"],
    "ray": [sys.executable, "-"],
}
Engine = Literal["torchrun", "slurm", "kubernetes", "ray"]


class _Filled(Template):
    delimiter = "@"  # a dollar is the shell's


@dataclass(frozen=True, kw_only=True)
class Launch(Config):
    """A command to be run by so many processes on each of so many machines."""

    command: Sequence[str]
    nodes: int = option(1, "Number of machines.", ge=1)
    processes: int = setting(1, "GPUs of each machine, or processes without any.", ge=1)
    engine: Engine = "torchrun"
    host: str = option("", "With torchrun: the machine where all meet.")
    image: str = option("", "With kubernetes: the image of the containers.")
    name: str = option("malmoi", "Name of the job.")
    restarts: int = option(3, "Times a run is started again after a failure.", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bounds(self)
        require_that(
            self.engine != "torchrun" or self.nodes == 1 or self.host,
            "{nodes} machines need one where they meet: --host NAME, the same on all of them.",
            nodes=self.nodes,
        )
        require_that(
            self.engine != "kubernetes" or self.image,
            "Kubernetes needs an image that has Malmoi: --image NAME.",
        )

    def script(self) -> str:
        """What the engine is given."""
        template = files("malmoi.planning") / "templates" / f"{self.engine}.txt"
        command = shlex.join(self.command)
        host = self.host or "localhost:0"
        return _Filled(template.read_text("utf-8")).substitute(
            vars(self),
            command=command,
            quoted=repr(command),
            folder=repr(str(Path.cwd())),
            cuda=this_machine().has("cuda"),
            python=shlex.quote(sys.executable),
            host=host if ":" in host else f"{host}:29400",
            workers=self.nodes * self.processes,
        )

    def run(self) -> int:
        """Gives it to the engine; returns the exit code, and not at all from torchrun."""
        start = ENGINES[self.engine]
        ensure(
            shutil.which(start[0]),
            "There is no {program} here: --dry-run prints the script, to be taken where it is.",
            program=start[0],
        )
        if self.engine == "torchrun":
            os.execvp(start[0], [*start, self.script()])  # noqa: S606  # what the user asked for
        return subprocess.run(start, input=self.script(), text=True).returncode
