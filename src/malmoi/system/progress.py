"""Progress of long calls, as events passed to a callback.

Every function of `malmoi` that takes a while accepts `progress=`, a function of one `Progress`:

    malmoi.pretrain("gpt-char", data="book.txt", out="runs/book", minutes=3, progress=print)

An event of `pretrain` or `finetune` can end the run: `event.stop()`.

Internally, `report_progress` sends events to the current listener, so that no layer has to pass a
callback on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

VALIDATE = "validate"  # the verb of an event with the metrics of an evaluation during training


@dataclass(frozen=True)
class Progress:
    """How far a call is: `done` of `total` units of the work that `verb` names.

    Training reports its steps, with their loss in `metrics`, and as the verb "validate" the metrics
    of each evaluation (`valid_loss`, `accuracy`…).

    Examples:
        >>> events = []
        >>> vectors = malmoi.embed("runs/tiny-bert", ["one", "two"], progress=events.append)
        >>> events[-1].verb, events[-1].done, events[-1].share
        ('embed', 2, 1.0)
    """

    verb: str  # "pretrain", "encode", "evaluate", …
    done: float
    total: float | None = None  # None: unknown
    unit: str = ""  # "steps", "seconds", "rows", …
    metrics: Mapping[str, float] = field(default_factory=dict)  # loss, tokens_per_second, …
    seconds_left: float | None = None  # if the sender knows better than done / total

    @property
    def share(self) -> float | None:
        """From 0 to 1; None if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    def stop(self) -> None:
        """Ends the training run after this step, evaluated and saved, as if its budget were used.

        A pre-training run resumes where it stopped if it is called again.
        """
        if (listener := _listener.get()) is not None:
            listener.stop = True


ProgressCallback = Callable[[Progress], None]


@dataclass
class _Listener:
    callback: ProgressCallback
    stop: bool = False  # whether the callback asked to end the run


_listener: ContextVar[_Listener | None] = ContextVar("malmoi_progress", default=None)


@contextmanager
def listening(callback: ProgressCallback | None) -> Iterator[None]:
    """Sends the events of everything called inside to `callback`; None changes nothing."""
    token = _listener.set(_listener.get() if callback is None else _Listener(callback))
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def part_of(verb: str, done: int, total: int) -> Iterator[None]:
    """Reports nested events of this verb as a part of a larger task, of which `done` is done."""
    outer = _listener.get()

    def pass_on(event: Progress) -> None:
        if outer is not None and event.verb == verb:
            outer.callback(replace(event, done=done + event.done, total=total))

    with listening(pass_on):
        yield


def tracked(batches: Iterable[list[int]], verb: str, total: int) -> Iterator[list[int]]:
    """The batches, reporting after each how many of `total` texts are done."""
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        report_progress(Progress(verb, done, total, "texts"))


def report_progress(event: Progress) -> None:
    """Sends an event to the listener, if there is one."""
    if (listener := _listener.get()) is not None:
        listener.callback(event)


def stop_requested() -> bool:
    """Whether the callback asked to end the run; asking once ends one run."""
    listener = _listener.get()
    if listener is None or not listener.stop:
        return False
    listener.stop = False
    return True
