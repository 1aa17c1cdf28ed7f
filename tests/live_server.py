"""A server on a free port in a thread of this process, for tests that talk to it over real
sockets.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import transformers as hf

from malmoi.checkpoint import Checkpoint
from malmoi.inference import Model, load
from malmoi.model import Network, initialise
from malmoi.model.families import bert
from malmoi.server.app import Server, address, listen
from malmoi.server.config import ServeConfig
from malmoi.server.model_registry import ModelRegistry, serve_model
from malmoi.studio.serve import create_studio
from malmoi.tokenizer import Tokenizer, train_tokenizer

TEXTS = [
    "the state of the union is strong",
    "나는 오늘 학교에 갔다. 하늘이 맑다.",
    "a small model, yes or no: 12.5",
] * 4


class Live:
    """Serves models by name until the block ends."""

    def __init__(self, models: dict[str, Model], **settings: Any) -> None:
        self.settings = ServeConfig(port=0, **settings)
        self.registry = ModelRegistry(
            [serve_model(name, model, Path(name), self.settings) for name, model in models.items()]
        )
        self.app = create_studio(self.registry, self.settings)

    def __enter__(self) -> Self:
        self.socket = listen(self.settings)
        self.url = address(self.socket)
        self.server = Server(self.app, self.settings)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: object, ___: TracebackType | None
    ) -> None:
        self.server.stop(now=True)
        self.thread.join()
        self.socket.close()

    def engine(self, name: str | None = None) -> Any:
        return self.registry.get(name).writer


def gpt_folder(folder: Path, **changes: Any) -> Path:
    """A random GPT-2 as transformers writes it, with a tokenizer of ours."""
    tokenizer = train_tokenizer(TEXTS, kind="byte-bpe", vocab=320)
    sizes = dict(
        vocab_size=tokenizer.vocab_size,
        n_positions=96,
        n_embd=48,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
    )
    end = tokenizer.specials.eos
    hf.set_seed(0)
    hf.GPT2LMHeadModel(
        hf.GPT2Config(**{**sizes, "bos_token_id": end, "eos_token_id": end, **changes})
    ).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def slow_gpt(folder: Path, seconds: float = 0.01) -> Model:
    """A random GPT whose steps take a while, so that there is time to do something meanwhile."""
    model = load(folder, device="cpu")
    model.network.trunk.register_forward_hook(lambda *_: time.sleep(seconds))
    return model


def bert_with(
    tokenizer: Tokenizer, labels: tuple[str, ...] = (), problem_type: str = "", **heads: int
) -> Model:
    config = bert(vocab=tokenizer.vocab_size, context=64, width=32, depth=2, heads=2)
    extra = {"problem_type": problem_type} if problem_type else {}
    network = initialise(Network(config, heads), 0)
    return Model(Checkpoint(network, tokenizer, labels=labels, extra=extra))


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> bool:
    """Whether the condition came true, even for a moment."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
