"""What busy neighbours cost training, fine-tuning, decoding and prediction.

    malmoi bench neighbour [--cores 2] [--first 0] [--seconds 12] [--jobs train decode …] [--json]

Each job runs in a process of its own on the same cores: alone; beside as many busy programs as
cores, which start after it; then, beside them too, with one thread, with a thread for each core,
and as torch does it by itself (a thread for each core that spins while it waits). The last columns
are the share of the quiet rate that remains, and that of the best number of threads.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from _shared import benchmark_parser

WORDS = "the state of our union is strong and we will keep it so for every child of this land"
WARM_UP = 0.4  # share of the seconds that is not counted: neighbours come, threads are chosen
THREADS = {"1 thread": "1", "all threads": "", "as torch": ""}
SPIN = {"GOMP_SPINCOUNT": "300000"}  # OpenMP's default, without our shorter one


# ------------------------------------------------------------------ the jobs, in a child


def train(folder: Path, seconds: float) -> float:
    """Tokens a second of `malmoi pretrain bert`."""
    import malmoi

    text = folder / "text.txt"
    text.write_text("\n\n".join(_sentences(i, 40) for i in range(3000)))
    small = {"model.width": 128, "model.depth": 3, "model.heads": 4}
    run = folder / "run"
    malmoi.pretrain("bert", data=text, out=run, minutes=seconds / 60, settings=small, batch=16)
    return _late_rate(run, seconds)


def finetune(folder: Path, seconds: float) -> float:
    """Tokens a second of `malmoi finetune`."""
    import malmoi

    rows = [{"text": _sentences(i, 3), "label": i % 2} for i in range(400)]
    run = folder / "tuned"
    malmoi.finetune(_bert(folder), "classification", rows, run, minutes=seconds / 60)
    return _late_rate(run, seconds)


def decode(folder: Path, seconds: float) -> float:
    """Tokens a second of `Model.generate`, one request at a time."""
    import malmoi

    gpt = _tiny(folder, "gpt2-small", {"model.width": 256, "model.depth": 4, "model.heads": 4})
    model = malmoi.load(gpt)
    return _repeated(lambda: len(model.generate("the state", max_new_tokens=64)) and 64, seconds)


def predict(folder: Path, seconds: float) -> float:
    """Rows a second of `Model.predict`."""
    import malmoi

    rows = [{"text": _sentences(i, 3), "label": i % 2} for i in range(40)]
    model = malmoi.finetune(_bert(folder), "classification", rows, folder / "tuned", steps=2).model
    texts = [_sentences(i, 3) for i in range(64)]
    return _repeated(lambda: len(model.predict(texts)), seconds)


JOBS = {"train": train, "finetune": finetune, "decode": decode, "predict": predict}


def _sentences(seed: int, count: int) -> str:
    words = WORDS.split()
    return " ".join(words[(seed * 7 + i * i) % len(words)] for i in range(8 * count)) + "."


def _tiny(folder: Path, recipe: str, settings: dict[str, Any]) -> Path:
    import malmoi

    text = folder / "text.txt"
    text.write_text("\n\n".join(_sentences(i, 40) for i in range(100)))
    out = folder / recipe
    settings = {"model.context": 128, "data.lengths": [], "data.shares": [], **settings}
    malmoi.pretrain(recipe, data=text, out=out, steps=1, vocab=300, batch=2, settings=settings)
    return out


def _bert(folder: Path) -> Path:
    return _tiny(folder, "bert-tiny", {"model.width": 256, "model.depth": 4, "model.heads": 4})


def _late_rate(run: Path, seconds: float) -> float:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return fmean(
        row["tokens_per_second"]
        for row in rows
        if row.get("tokens_per_second") and row["seconds"] > WARM_UP * seconds
    )


def _repeated(work: Any, seconds: float) -> float:
    print("ready", flush=True)
    began = time.monotonic()
    counted = 0
    since = None
    while time.monotonic() - began < seconds:
        number = work()
        if since is not None:
            counted += number
        elif time.monotonic() - began > WARM_UP * seconds:
            since = time.monotonic()
    return counted / (time.monotonic() - (since or began))


# ------------------------------------------------------------------ the parent


@contextmanager
def busy_programs(cores: list[int], count: int) -> Iterator[None]:
    """So many programs that never rest, on these cores."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in range(count)]
    for program in programs:
        os.sched_setaffinity(program.pid, cores)
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def rate_of(job: str, cores: list[int], seconds: float, neighbours: int, how: str = "") -> float:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    if how:
        environment["OMP_NUM_THREADS"] = THREADS[how] or str(len(cores))
    environment |= SPIN if how == "as torch" else {}
    command = [sys.executable, __file__, "--child", job, "--seconds", str(seconds)]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    assert child.stdout is not None
    with busy_programs(cores, neighbours if how else 0):
        if job in ("decode", "predict"):
            child.stdout.readline()  # ready
        else:
            time.sleep(min(4.0, seconds / 3))
        with busy_programs(cores, 0 if how else neighbours):
            return float(child.stdout.read().split()[-1])


def measure(job: str, cores: list[int], seconds: float) -> dict[str, Any]:
    quiet = rate_of(job, cores, seconds, 0)
    busy = rate_of(job, cores, seconds, len(cores))
    fixed = {how: rate_of(job, cores, seconds, len(cores), how) for how in THREADS}
    best = max(fixed["1 thread"], fixed["all threads"], busy)
    return {
        "job": job,
        "quiet": quiet,
        "busy": busy,
        **fixed,
        "of quiet": busy / quiet,
        "of best": busy / best,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first core")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=JOBS, help="what this process measures")
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            print(JOBS[options.child](Path(folder), options.seconds))
        return
    cores = sorted(os.sched_getaffinity(0))[options.first :][: options.cores]
    found = [measure(job, cores, options.seconds) for job in options.jobs]
    if options.json:
        print(json.dumps(found))
        return
    names = list(found[0])
    print(" ".join(f"{name:>12}" for name in names))
    for row in found:
        cells = [f"{v:12.0%}" if "of " in k else f"{v:12,.0f}" for k, v in list(row.items())[1:]]
        print(f"{row['job']:>12} " + " ".join(cells))


if __name__ == "__main__":
    main()
