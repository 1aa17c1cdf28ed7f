"""What runs on a road, in a process of its own: python tools/roads.py pretrain|finetune|load.

Prints JSON: the files and functions of ours that ran before the first loss (or, for `load`, up to
the logits), the modules loaded, the frames of ours on the stack there, and the rooms (files) that
the recipe is handed through, with the returns to a room that it had left.
"""

import json
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import malmoi

SOURCE = str(Path(malmoi.__file__).parent)
TINY = {"model.width": 16, "model.depth": 1, "model.heads": 2}
WORDS = ["the", "state", "of", "our", "union", "is", "strong", "and", "free", "for", "every", "one"]


class Arrived(BaseException):
    """The first loss."""


class Road:
    """Notes every function of ours that is called."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.stays: list[str] = []  # files whose functions get the recipe, in order
        self.frames = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE) or code.co_name[0] == "<":
            return
        self.codes.add(code)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        kinds = {type(frame.f_locals.get(name)).__name__ for name in given}
        if "Recipe" in kinds and self.stays[-1:] != [code.co_filename]:
            self.stays.append(code.co_filename)
        if code.co_qualname == "LossModule.forward":
            self.frames = sum(file.startswith(SOURCE) for file in _files(frame))
            raise Arrived

    def facts(self) -> dict[str, int]:
        rooms = len(set(self.stays))
        return {
            "files": len({code.co_filename for code in self.codes}),
            "functions": len(self.codes),
            "modules": sum(name.split(".")[0] == "malmoi" for name in sys.modules),
            "frames": self.frames,
            "rooms": rooms,
            "returns": len(self.stays) - rooms,
        }


def _files(frame: FrameType | None) -> list[str]:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files


def sentences(count: int) -> list[str]:
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=12)) + "." for _ in range(count)]


def pretraining(recipe: str, folder: Path) -> Any:
    text = folder / "text.txt"
    text.write_text("\n\n".join(sentences(400)), "utf-8")
    settings: dict[str, Any] = {**TINY, "train.steps": 1, "train.batch": 2}
    out = folder / "run"
    return lambda: malmoi.pretrain(recipe, data=text, out=out, device="cpu", settings=settings)


def finetuning(folder: Path) -> Any:
    rows = [{"text": text, "label": str(i % 2)} for i, text in enumerate(sentences(64))]
    out = folder / "tuned"
    run = folder / "run"
    return lambda: malmoi.finetune(run, "classification", rows, out, device="cpu", steps=2)


def opening(folder: Path) -> Any:
    return lambda: malmoi.load(folder / "run", device="cpu").logits("the state of our union")


def walk(name: str, folder: Path) -> None:
    roads = {"pretrain": partial(pretraining, "gpt-char"), "finetune": finetuning, "load": opening}
    work = roads[name](folder)
    road = Road()
    sys.setprofile(road)
    try:
        work()
    except Arrived:
        pass
    finally:
        sys.setprofile(None)
    print(json.dumps(road.facts()))


def main() -> None:
    name, *places = sys.argv[1:]
    if places:
        pretraining(name, Path(places[0]))()
        return
    with tempfile.TemporaryDirectory() as folder:
        recipes = {"finetune": "bert-small", "load": "gpt-char"}
        if name in recipes:  # in another process, which loads what this one must not
            command = [sys.executable, __file__, recipes[name], folder]
            subprocess.run(command, check=True, capture_output=True)
        walk(name, Path(folder))


if __name__ == "__main__":
    main()
