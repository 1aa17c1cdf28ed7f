"""What holds for all endpoints: models say what they can do, and each path needs the key."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from live_server import TEXTS, Live, bert_with, gpt_folder
from malmoi.inference import Model, load
from malmoi.tokenizer import Tokenizer, train_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
USER = [{"role": "user", "content": "hello"}]
PROMPT = "the state of"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    gpt = load(gpt_folder(tmp_path_factory.mktemp("gpt") / "gpt"), device="cpu")
    known = gpt.tokenizer
    words = Tokenizer(known._rust, known.settings | {"chat_template": TEMPLATE})
    return {
        "gpt": gpt,
        "chat": Model(replace(gpt.checkpoint, tokenizer=words)),
        "bert": bert_with(train_tokenizer(TEXTS, kind="wordpiece", vocab=120), mlm=0),
    }


@pytest.fixture(scope="module")
def live(models: dict[str, Model]) -> Iterator[Live]:
    with Live(models, slots=4, timeout=60) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as one:
        yield one


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ------------------------------------------------------------------ all of them


def test_a_model_is_listed_with_chat_if_it_has_a_template(client: httpx.Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert {one["id"]: "chat" in one["abilities"] for one in cards} == {
        "gpt": False,
        "chat": True,
        "bert": False,
    }


PUBLIC = {"/", "/docs", "/openapi.json", "/health", "/ping", "/version", "/{path:path}"}


def test_every_endpoint_needs_the_key(models: dict[str, Model]) -> None:
    with Live({"bert": models["bert"]}, api_key="secret") as server:
        for route in server.app.routes:
            path = getattr(route, "path", "")
            for method in getattr(route, "methods", None) or ():
                if path not in PUBLIC:
                    answer = httpx.request(method, server.url + path)
                    assert answer.status_code == 401, (method, path)
