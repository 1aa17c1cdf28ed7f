"""Runs programs that come with a model (chat templates, adapters' regexes) in a limited process.

A template can loop, recurse and multiply texts; a regex can backtrack forever. They run in a child
process with little memory, which is killed on timeout. The child is started for the first such
program and serves all later ones, one at a time.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from malmoi.errors import MalmoiError
from malmoi.messages import msg
from malmoi.system.untrusted import (
    MAX_CONFINED_BYTES,
    MAX_CONFINED_SECONDS,
    MAX_RENDERED_CHARACTERS,
)

MAX_ANSWER_BYTES = 16 * MAX_RENDERED_CHARACTERS
START_SECONDS = 60.0  # for the child to start on a busy machine


class Refused(MalmoiError):
    """The program rejected its input; `line` is where it fails to parse."""

    def __init__(self, sentence: str, line: int | None = None) -> None:
        super().__init__(sentence)
        self.line = line


def render_template(template: str, values: dict[str, Any]) -> str:
    """Renders a Jinja template with plain values."""
    question = {"do": "render", "template": template, "values": values}
    return str(_WORKER.ask(question | {"limit": MAX_RENDERED_CHARACTERS}, "chat template"))


def match_patterns(patterns: list[str], names: list[str]) -> list[int | None]:
    """For each name, the index of the first regular expression that matches all of it."""
    return list(_WORKER.ask({"do": "match", "patterns": patterns, "names": names}, "patterns"))


class _Worker:
    """The child process and its pipe; a forked copy of this process starts its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0
        self.said: SimpleQueue[bytes] = SimpleQueue()  # the child's lines; an empty one is the end

    def ask(self, question: dict[str, Any], what: str) -> Any:
        """Sends a request, returns the reply; exceeding the limits kills the child and raises."""
        line = json.dumps(question).encode() + b"\n"
        with self.lock:
            process = self._running()
            try:
                answer = json.loads(self._exchange(process, line, what))
            # also on Ctrl-C: a late reply must not answer the next request
            except BaseException:
                self.stop()
                raise
        if "refused" in answer:
            raise Refused(answer["refused"], answer.get("line"))
        return answer["found"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None or self.owner != os.getpid():
            self.stop()
            command = [sys.executable, "-P", str(Path(__file__).with_name("confined_worker.py"))]
            command += [str(MAX_CONFINED_BYTES), str(int(2 * MAX_CONFINED_SECONDS))]
            # in a new session, so that Ctrl-C in a terminal does not reach it
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.owner = os.getpid()
            self.said = SimpleQueue()
            heard = (self.process.stdout, self.said)
            threading.Thread(target=_listen, args=heard, daemon=True).start()
            self._read(START_SECONDS)
        return self.process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, what: str) -> bytes:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return self._read(MAX_CONFINED_SECONDS)
        except TimeoutError:
            raise MalmoiError(
                "The model's {what} ran for more than {most:g} seconds and was stopped: it is "
                "broken or hostile.",
                what=msg(what),
                most=MAX_CONFINED_SECONDS,
            ) from None
        except (EOFError, BrokenPipeError):
            raise MalmoiError(
                "The model's {what} killed the process it ran in: it is hostile.", what=msg(what)
            ) from None

    def _read(self, seconds: float) -> bytes:
        try:
            line = self.said.get(timeout=seconds)
        except Empty:
            raise TimeoutError from None
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def stop(self) -> None:
        """Kills the child, if this process started it."""
        process = self.process
        self.process = None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if self.owner == os.getpid():
            process.kill()
            process.wait()


def _listen(pipe: IO[bytes], said: "SimpleQueue[bytes]") -> None:
    """Hands the child's lines on, in a thread, since Windows cannot wait for a pipe."""
    with pipe:
        while line := pipe.readline(MAX_ANSWER_BYTES):
            said.put(line)
    said.put(b"")


_WORKER = _Worker()
atexit.register(_WORKER.stop)
