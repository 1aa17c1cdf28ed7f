"""Long texts: what a request makes the tokenizer do is bounded, and nothing of it stops others."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import httpx
import psutil
import pytest

from live_server import TEXTS, Live, bert_with, gpt_folder
from malmoi.inference import load
from malmoi.server.model_registry import ServedModel
from malmoi.tokenizer import Tokenizer, train_tokenizer

WORK: list[tuple[threading.Thread, int]] = []  # thread and characters of each tokenization


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    words = train_tokenizer(TEXTS, kind="wordpiece", vocab=120)
    models = {
        "gpt": load(gpt_folder(tmp_path_factory.mktemp("gpt")), device="cpu"),
        "bert": bert_with(words, mlm=0),
        "moods": bert_with(words, ("good", "bad"), classify=2),
        "names": bert_with(words, ("O", "B-PER"), tag=2),
        "answers": bert_with(words, span=0),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("encode_batch", "ids", "rows", "encode_parts", "encode_masked"):
            _record(patch, name)
        with Live(models, queue=512) as server:
            yield server


def _record(patch: pytest.MonkeyPatch, name: str) -> None:
    original = getattr(Tokenizer, name)

    def recording(self: Tokenizer, texts: Any, *rest: Any, **more: Any) -> Any:
        parts = [texts, *(one for one in rest if isinstance(one, str | list | tuple))]
        size = sum(
            len(text) for part in parts for text in ([part] if isinstance(part, str) else part)
            if isinstance(text, str)
        )  # fmt: skip
        WORK.append((threading.current_thread(), size))
        return original(self, texts, *rest, **more)

    patch.setattr(Tokenizer, name, recording)


# endpoint, model, the field that is long, and the others
ASKED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("/v1/completions", "gpt", "prompt", {}),
    ("/v1/chat/completions", "gpt", "messages", {}),
    ("/v1/score", "gpt", "context", {"continuations": ["a"] * 256}),
    ("/v1/score", "gpt", "continuations", {}),
    ("/v1/classify", "gpt", "text", {"labels": ["yes", "no"]}),
    ("/v1/classify", "gpt", "labels", {"text": "a"}),
    ("/v1/classify", "moods", "text", {}),
    ("/v1/classify", "moods", "pair", {"text": "a"}),
    ("/v1/rerank", "moods", "query", {"documents": ["a"] * 2048}),
    ("/v1/rerank", "moods", "documents", {"query": "a"}),
    ("/v1/answer", "gpt", "context", {"question": "a"}),
    ("/v1/answer", "answers", "context", {"question": "a"}),
    ("/v1/answer", "answers", "question", {"context": "a"}),
    ("/v1/ner", "names", "text", {}),
    ("/v1/fill", "bert", "text", {}),
    ("/v1/embeddings", "bert", "input", {}),
    ("/v1/embeddings", "bert", "input", {"truncate": True}),
    ("/v1/embeddings", "gpt", "input", {"truncate": True}),
]
FORMS: dict[str, Any] = {
    "messages": lambda text: [{"role": "user", "content": text[i::8]} for i in range(8)],
    "documents": lambda text: [text, "a"],
    "labels": lambda text: [text, "a"],
    "continuations": lambda text: [text],
}
TEXT_KINDS = {"words": "the a ", "one word": "a", "spaces": " "}


def body_of(model: str, field: str, others: dict[str, Any], text: str) -> dict[str, Any]:
    return {"model": model, field: FORMS.get(field, str)(text), **others}


@pytest.mark.parametrize("kind", TEXT_KINDS)
@pytest.mark.parametrize(("path", "model", "field", "others"), ASKED)
def test_a_long_text_is_little_work_and_off_the_event_loop(
    live: Live, path: str, model: str, field: str, others: dict[str, Any], kind: str
) -> None:
    text = TEXT_KINDS[kind] * (1_000_000 // len(TEXT_KINDS[kind]))
    WORK.clear()
    answer = httpx.post(f"{live.url}{path}", json=body_of(model, field, others, text), timeout=60)
    assert answer.status_code in (200, 400), answer.text
    served: ServedModel = live.registry.get(model)
    # counted, then encoded, in some forms; a span head reads all of its context
    most = 2_100_000 if path == "/v1/answer" and model == "answers" else 12 * served.max_characters
    assert sum(size for _, size in WORK) < most
    assert live.thread not in {thread for thread, _ in WORK}
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["code"] in ("context_length_exceeded", "too_many_tokens"), error


def test_a_text_up_to_the_limit_is_still_read(live: Live) -> None:
    """A limit of characters refuses nothing that fits."""
    served: ServedModel = live.registry.get("gpt")
    tokenizer = served.model.tokenizer
    longest = max(tokenizer.vocab().keys() - tokenizer.control_tokens.keys(), key=len)
    text = tokenizer.decode([tokenizer.vocab()[longest]] * 80)
    assert len(text) >= 80 * 3
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 80


@pytest.mark.campaign
def test_others_are_answered_beside_the_longest_requests(live: Live) -> None:
    """4 MB to every endpoint, three at a time; prints the slowest /health and the memory."""
    text = "a " * 1_950_000
    process = psutil.Process()
    before = process.memory_info().rss
    slowest = 0.0
    with ThreadPoolExecutor(3) as pool:
        bodies = [(path, body_of(model, field, more, text)) for path, model, field, more in ASKED]
        asked = [
            pool.submit(httpx.post, f"{live.url}{path}", json=body, timeout=600)
            for path, body in bodies
        ]
        while not all(one.done() for one in asked):
            began = perf_counter()
            assert httpx.get(f"{live.url}/health", timeout=600).status_code == 200
            slowest = max(slowest, perf_counter() - began)
    assert {one.result().status_code for one in asked} <= {200, 400}
    grown = process.memory_info().rss - before
    print(f"/health took {slowest:.2f} s at most; the memory grew by {grown / 2**20:.0f} MB")
    assert live.thread not in {thread for thread, _ in WORK}
    assert grown < 400 * 2**20  # this process is the client too


@pytest.mark.parametrize("path", ["/%00", "/a%00.js", "/" + "a" * 5000, "/..%2f..%2fetc%2fpasswd"])
def test_an_address_that_no_file_can_have_is_not_found(
    live: Live, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert httpx.get(f"{live.url}{path}").status_code == 404
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("host", ["LOCALHOST", "LocalHost:8000", "a.LOCALHOST", "[::1]"])
def test_names_of_hosts_are_the_same_in_capitals(live: Live, host: str) -> None:
    assert httpx.get(f"{live.url}/health", headers={"Host": host}).status_code == 200
