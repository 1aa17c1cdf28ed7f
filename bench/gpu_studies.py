"""Several studies at `--scale gpu-minutes` on one GPU, whose cells share the card.

    PYTHONPATH=src python bench/gpu_studies.py --data DIR --out DIR [--seconds 480] [--workers 6]
        [--studies bert-masking,gpt1-transfer] [--limit tiny]

DIR has these files of public data sets, 12 MB in all (folders may differ, names may not):

    lm/books.en.txt.xz                              text
    lm/reviews.en.txt.xz                            text, if it is there (18 MB more)
    glue/{SST-2,CoLA,RTE,STS-B}/{train,dev}.tsv.xz  sentences and pairs
    nli/SICK_{train,test_annotated}.txt             pairs
    ner/conll2003.{train,testa}.txt.xz              tokens
    squad/{train-part,dev}-v1.1.json.xz             spans
    incontext/{blimp,lambada_openai}.jsonl.xz       minimal pairs, last words

All studies have their first seed before any has a second one; no cell starts after the seconds are
over, and pages show the cells that are done. Models and encoded text stay in a temporary folder:
OUT gets results.json, report.md, report.html and figure.svg of each study. `--limit tiny` is a dry
run on a CPU. Only malmoi, torch, numpy, tokenizers and safetensors are imported.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from malmoi.errors import MalmoiError
from malmoi.studies.registry import named_study
from malmoi.studies.run import StudyRunConfig, run_studies
from malmoi.system.progress import Progress, listening

STUDIES = (
    *("bert-vs-gpt", "gpt1-ablation", "gpt1-transfer", "gpt1-zeroshot"),
    *("bert-objectives", "bert-masking"),
)
TEXTS = ("books.en.txt.xz", "reviews.en.txt.xz")
LAST_CELLS_SECONDS = 60  # cells that have started are finished


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--studies", default=",".join(STUDIES))
    parser.add_argument("--limit", choices=("tiny",))
    parser.add_argument("--cache", type=Path, help="kept between runs; default: a temporary folder")
    return parser.parse_args()


def texts(data: Path) -> list[str]:
    found = [path for name in TEXTS for path in sorted(data.rglob(name))]
    if not found:
        sys.exit(f"There is no {TEXTS[0]} in {data}.")
    return [str(path) for path in found]


def say(event: Progress) -> None:
    if event.verb == "study":
        print(
            f"{time.monotonic() - BEGAN:5.0f} s  {event.done:.0f} of {event.total:.0f} cells",
            flush=True,
        )


BEGAN = time.monotonic()


def main() -> None:
    asked = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    tiny = asked.limit == "tiny"
    studies = [named_study(name) for name in asked.studies.split(",")]
    outs = {study.name: asked.out / study.name for study in studies}
    with tempfile.TemporaryDirectory(dir=None) as scratch, listening(say):
        options = StudyRunConfig(
            scale="tiny" if tiny else "gpu-minutes",
            data=[*texts(asked.data), str(asked.data)],
            seeds=asked.seeds,
            workers=min(2, asked.workers) if tiny else asked.workers,
            device="cpu" if tiny else "cuda",
            cache=asked.cache or Path(scratch),
            seconds=max(1.0, asked.seconds - LAST_CELLS_SECONDS),
        )
        failure = ""
        try:
            run_studies(studies, outs, options)
        except MalmoiError as error:
            failure = str(error)
    for study in studies:
        report = outs[study.name] / "report.md"
        if report.is_file():
            print(report.read_text("utf-8").split("![")[0])
            facts = json.loads((report.parent / "results.json").read_text("utf-8"))
            for one in facts["claims"]:
                print(f"  {one['claim']}: {one['verdict']}")
    print(f"{time.monotonic() - BEGAN:.0f} s. {failure}")


if __name__ == "__main__":
    main()
