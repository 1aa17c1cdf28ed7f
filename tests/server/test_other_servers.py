"""Endpoints as vLLM and text-embeddings-inference have them say what ours say."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
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


# ------------------------------------------------------------------ vLLM


@pytest.mark.parametrize("model", ["gpt", "bert"])
@pytest.mark.parametrize("specials", [True, False])
def test_tokens_of_a_text(
    client: httpx.Client, models: dict[str, Model], model: str, specials: bool
) -> None:
    words = models[model].tokenizer
    options = {"add_special_tokens": specials, "return_token_strs": True}
    found = post(client, "/tokenize", model=model, prompt=PROMPT, **options)
    tokens = words.encode(PROMPT, specials=specials).tokens
    assert found == {
        "count": len(tokens),
        "max_model_len": models[model].config.context,
        "tokens": tokens,
        "token_strs": [words.token(id) for id in tokens],
    }
    back = post(client, "/detokenize", model=model, tokens=tokens)
    assert back == {"prompt": words.decode(tokens, skip_specials=False)}


def test_tokens_of_a_conversation(client: httpx.Client) -> None:
    found = post(client, "/tokenize", model="chat", messages=USER)
    assert post(client, "/detokenize", model="chat", tokens=found["tokens"])["prompt"] == (
        "user: hello\nassistant:"
    )


def test_wrong_tokens_and_texts_are_refused(client: httpx.Client) -> None:
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": USER}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": []}),
    ):
        assert client.post(path, json=body).status_code == 400


# ------------------------------------------------------------------ text-embeddings-inference


def test_vectors_of_texts(client: httpx.Client) -> None:
    found = post(client, "/embed", model="bert", inputs=[PROMPT, "a"])
    named = post(client, "/v1/embeddings", model="bert", input=[PROMPT, "a"], normalize=True)
    assert found == [one["embedding"] for one in named["data"]]
    assert float(np.linalg.norm(found[0])) == pytest.approx(1)
    (plain,) = post(client, "/embed", model="bert", inputs=PROMPT, normalize=False)
    assert float(np.linalg.norm(plain)) > 1.5
    long = {"model": "bert", "inputs": "the " * 500}
    assert client.post("/embed", json=long).status_code == 400
    assert client.post("/embed", json=long | {"truncate": True}).status_code == 200


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
